# SPDX-License-Identifier: Apache-2.0
"""Objects of the authors' own code, and what is known to go wrong with them under transformers 5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError

__all__ = ["refuse_broken_rope", "refuse_hub_code"]

_EXPERTS = "keeps its experts apart, where the stock class has one tensor, so its weights cannot be used in place"
_NO_IMPORT = "does not import under transformers 5: transformers.modeling_attn_mask_utils is gone"

# What stands between a live object and decoding, by class.
TROUBLE = {
    "LLaDAModelLM": "takes no position_ids, and under transformers 5 it does not load: it never calls post_init()",
    "DreamModel": "does not use transformers' attention interface, and under transformers 5 its RoPE table is "
    "uninitialised memory: its logits would be wrong",
    "LLaDAMoEModelLM": f"{_NO_IMPORT}; and it {_EXPERTS}",
    "LLaDA2MoeModelLM": f"{_NO_IMPORT}; and it {_EXPERTS}",
    "SDARForCausalLM": _NO_IMPORT,
    "SDARMoeForCausalLM": f"{_NO_IMPORT}; and it {_EXPERTS}",
    "Fast_dLLM_QwenForCausalLM": "puts a mask of its own in the place of the one it is given",
}


def refuse_hub_code(model: Any) -> None:
    """ModelError for an object of the authors' code, with the failure it would have met and the way out."""
    name = type(model).__name__
    if name in TROUBLE and not type(model).__module__.startswith("transformers."):
        raise ModelError(f"{name} (hub code) {TROUBLE[name]}. Use leap_kernels.load(path).")


def refuse_broken_rope(model: Any) -> None:
    """ModelError when the rotary frequencies of a model are not those of its config.

    Code written for transformers 4 leaves them uninitialised under 5, without a word.
    """
    for module in model.modules():
        table, config = getattr(module, "inv_freq", None), getattr(module, "config", None)
        if not isinstance(table, Tensor) or table.dim() != 1 or config is None or not table.numel():
            continue
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or getattr(config, "rope_theta", None)
        kind = rope.get("rope_type") or getattr(module, "rope_type", "default")
        if theta is None or kind != "default":
            continue
        exponents = torch.arange(len(table), dtype=torch.float64) / len(table)
        formula = float(theta) ** -exponents
        # A table in bfloat16 has 8 bits; what is not initialised is off by orders of magnitude.
        if not torch.allclose(table.double().cpu(), formula, rtol=0.02):
            raise ModelError(
                f"{type(model).__name__}'s RoPE table does not match rope_theta (known under transformers 5): its "
                "logits would be wrong. Use leap_kernels.load(path), or call model.reset_rope_parameters() first."
            )
