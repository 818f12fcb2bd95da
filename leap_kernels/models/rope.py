# SPDX-License-Identifier: Apache-2.0
"""Rotary tables in float32: LLaDA rotates in it whatever its dtype, and no model may lose its frequencies."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError

__all__ = ["keep_float32", "repair_frequencies"]


def _modules(model: nn.Module) -> list[Any]:
    """Every module once. `model.modules()` spells out names too, which takes ten times as long; each `decode` asks."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [model]
    for module in waiting:  # grows as it goes
        if module is not None and module not in found:
            found[module] = None
            waiting.extend(module._modules.values())
    return list(found)


def _rotary_modules(model: nn.Module) -> list[Any]:
    # Not getattr: a module's takes long to say no.
    return [m for m in _modules(model) if isinstance(m._buffers.get("inv_freq", vars(m).get("inv_freq")), Tensor)]


def keep_float32(model: nn.Module) -> list[Any]:
    """Make the model's rotary modules return float32; the attention backend casts queries and keys back.

    Returns the modules that were changed; deleting their `forward` attribute undoes it.
    """
    changed = [module for module in _rotary_modules(model) if "forward" not in vars(module)]
    for module in changed:
        if getattr(module, "rope_type", "default") in ("dynamic", "longrope"):
            raise ModelError(f"rope_fp32 does not go with rope_type {module.rope_type!r}, whose table changes.")
        module.forward = functools.partial(_float32_tables, module)  # not a method, which could not be pickled
    return changed


def _float32_tables(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].float() * self.inv_freq.float()
    angles = torch.cat((angles, angles), dim=-1)
    scaling = getattr(self, "attention_scaling", 1.0)
    return angles.cos() * scaling, angles.sin() * scaling


def repair_frequencies(model: nn.Module) -> None:
    """`model.to(bfloat16)` rounds the rotary frequencies too: recompute them from the config, with one warning."""
    for module in _modules(model):
        rounded = [  # one table, or one for each kind of layer (ModernBERT)
            (name, value)
            for name, value in module._buffers.items()
            if value is not None and name.endswith("inv_freq") and value.dtype in (torch.float16, torch.bfloat16)
        ]
        if rounded and hasattr(module, "config"):
            warnings.warn(
                f"{type(module).__name__}.{rounded[0][0]} is {rounded[0][1].dtype}; recomputed in float32 from the "
                "config. Load with dtype=... instead of converting the model.",
                stacklevel=2,
            )
            exact = type(module)(module.config)
            for name, value in rounded:
                setattr(module, name, getattr(exact, name).to(value.device))


def refuse_broken_rope(model: nn.Module) -> None:
    """ModelError when the rotary frequencies of a model are not those of its config.

    Code written for transformers 4 leaves them uninitialised under 5, without a word.
    """
    for module in _rotary_modules(model):
        table, config = module.inv_freq, getattr(module, "config", getattr(model, "config", None))
        if table.dim() != 1 or config is None or not table.numel() or table.is_meta:
            continue
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or getattr(config, "rope_theta", None)
        kind = rope.get("rope_type") or getattr(module, "rope_type", "default")
        if theta is None or kind != "default":
            continue
        # A table in bfloat16 has 8 bits; what is not initialised is off by orders of magnitude. In plain Python: a
        # hundred numbers, of which every `decode` asks.
        values = table.tolist()
        formula = [float(theta) ** -(i / len(values)) for i in range(len(values))]
        if not all(abs(value - wanted) <= 0.02 * wanted for value, wanted in zip(values, formula, strict=True)):
            raise ModelError(
                f"{type(model).__name__}'s RoPE table does not match rope_theta (known under transformers 5): its "
                "logits would be wrong. Use leap_kernels.load(path), or call model.reset_rope_parameters() first."
            )
