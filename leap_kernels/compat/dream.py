# SPDX-License-Identifier: Apache-2.0
"""`diffusion_generate` with the arguments and returns of the method that ships with Dream's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, InputError, ModelError, expected
from ..models.load import spec_of
from ..output import DecodeOutput
from ..strategies import Dream
from ..strategies.base import check_count
from .shared import run

__all__ = ["DreamModelOutput", "diffusion_generate"]

_DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": None,
    "top_k": None,
    "max_length": 20,
    "max_new_tokens": None,
    "eps": 1e-3,
    "steps": 512,
    "alg": "origin",
    "alg_temp": None,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "output_history": False,
    "mask_token_id": None,
}
_WITHOUT_EFFECT = {"pad_token_id", "bos_token_id", "eos_token_id"}  # in the public method as well
_HOOKS = {"generation_tokens_hook_func", "generation_logits_hook_func"}


@dataclass
class DreamModelOutput:
    """What comes back with `return_dict_in_generate=True`."""

    sequences: Tensor
    """(B, P + new tokens) int64."""
    history: tuple[Tensor, ...] | None = None
    """With `output_history=True`: the sequences as they were after each step, masks included."""


@torch.no_grad()
def diffusion_generate(
    model: Any, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any
) -> Tensor | DreamModelOutput:
    """Dream's decoder: `steps` forwards over the whole canvas.

    Args:
        model: anything that `decode` takes.
        inputs: (B, P) int64; padding is marked in `attention_mask` (B, P) with 0.
        generation_config: an object with the fields below; None takes the model's own where that is Dream's.
        **kwargs: `attention_mask`, and fields that win over the config's: `temperature` 0.0, `top_p`, `top_k`,
            `max_length` 20 (prompt included), `max_new_tokens`, `eps` 1e-3, `steps` 512, `alg` "origin"
            ("maskgit_plus", "topk_margin", "entropy"), `alg_temp`, `num_return_sequences` 1,
            `return_dict_in_generate` False, `output_history` False, `mask_token_id` (the model's). Draws follow
            torch.manual_seed, but are not those of the public code.

    Returns:
        (B, P + new tokens) int64, or a DreamModelOutput. Nothing stops at an EOS.

    Raises:
        ConfigError, InputError, ModelError: before the first forward; also for hooks and unknown arguments.

    >>> import leap_kernels, torch
    >>> model = leap_kernels.load("tiny")
    >>> x = diffusion_generate(model, torch.tensor([[7, 8, 9]]), max_new_tokens=8, steps=4, alg="entropy")
    >>> tuple(x.shape), bool((x == 1).any())
    ((1, 11), False)
    """
    attention_mask = kwargs.pop("attention_mask", None)
    given = _settings(model, generation_config, kwargs)
    if not isinstance(inputs, Tensor) or inputs.dim() != 2:
        got = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise InputError(expected("inputs", "a (B, P) int64 tensor", got))
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise InputError(expected("attention_mask", "a (B, P) tensor or None", type(attention_mask).__name__))
    new = given["max_new_tokens"]
    check_count("max_new_tokens", new, none=True)
    if new is None:
        check_count("max_length", given["max_length"])
        new = given["max_length"] - inputs.shape[1]
        if new < 1:
            what = f"more than the {inputs.shape[1]} tokens of the prompt, which it counts"
            raise ConfigError(expected("max_length", what, given["max_length"], "Or pass max_new_tokens."))
    mask_id = given["mask_token_id"]
    if mask_id is None:
        spec = spec_of(model)
        if spec is None:
            raise ModelError("the model declares no mask token. Pass mask_token_id, or use leap_kernels.load.")
        mask_id = spec.mask_token_id
    copies = given["num_return_sequences"]
    check_count("num_return_sequences", copies)
    if copies > 1:
        inputs = inputs.repeat_interleave(copies, 0)
        attention_mask = None if attention_mask is None else attention_mask.repeat_interleave(copies, 0)
    strategy = Dream(**{name: given[name] for name in ("alg", "steps", "eps", "alg_temp")}, parity="dream")
    out = run(
        model, inputs, strategy,
        steps=given["steps"], gen_length=new, block_length=new, temperature=given["temperature"], mask_id=mask_id,
        attention_mask=attention_mask, top_p=given["top_p"], top_k=given["top_k"],
    )  # fmt: skip
    if not given["return_dict_in_generate"]:
        return out.sequences
    return DreamModelOutput(out.sequences, _history(out, mask_id, given["steps"]) if given["output_history"] else None)


def _settings(model: Any, config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Defaults, then the config, then keywords; ConfigError for what there is nothing for."""
    hooks = sorted(name for name in _HOOKS & kwargs.keys() if kwargs[name] is not None)
    if hooks:
        raise ConfigError(f"{', '.join(hooks)} cannot be called: no forward has the logits of all rows here. To watch "
                          "the steps use leap_kernels.decode(..., observers=[...]).")  # fmt: skip
    if isinstance(config, Mapping):
        raise ConfigError(expected("generation_config", "an object with Dream's fields", "a dict", "Pass **it."))
    unknown = sorted(kwargs.keys() - _DEFAULTS.keys() - _WITHOUT_EFFECT - _HOOKS)
    if unknown:
        raise ConfigError(f"unknown argument {', '.join(unknown)}; diffusion_generate knows: {', '.join(_DEFAULTS)}.")
    if config is None and hasattr(getattr(model, "generation_config", None), "alg"):
        config = model.generation_config
    own = {name: getattr(config, name) for name in _DEFAULTS if getattr(config, name, None) is not None}
    return {**_DEFAULTS, **own, **{name: value for name, value in kwargs.items() if name in _DEFAULTS}}


def _history(out: DecodeOutput, mask_id: int, steps: int) -> tuple[Tensor, ...]:
    """The canvas after each of `steps` forwards."""
    canvas = []
    for step in range(1, steps + 1):
        x = out.sequences.clone()
        x[:, out.prompt_length :].masked_fill_(out.history.step > step, mask_id)
        canvas.append(x)
    return tuple(canvas)
