# SPDX-License-Identifier: Apache-2.0
"""`generate` with the arguments and return of LLaDA's own `generate.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, ModelError
from ..models.load import spec_of
from ..strategies import Full
from .shared import check_lengths, check_remasking, run

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: Any,
    prompt: Tensor,
    attention_mask: Tensor | None = None,
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 128,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    remasking: str = "low_confidence",
    mask_id: int = 126336,
    logits_eos_inf: bool = False,
    confidence_eos_eot_inf: bool = False,
) -> Tensor:
    """LLaDA's decoder: `steps` forwards that commit fixed shares of a block's masks.

    Args:
        model: anything that `decode` takes.
        prompt: (B, P) int64; padding is marked in `attention_mask` (B, P) with 0.
        steps: forwards in all, a multiple of gen_length / block_length; all of them are run.
        gen_length, block_length: new tokens, a multiple of the block.
        temperature: 0 is greedy. Draws follow torch.manual_seed, but are not those of the public code.
        cfg_scale: 0 only; classifier-free guidance is refused.
        remasking: "low_confidence" or "random".
        mask_id: id of the mask token, which is never predicted here.
        logits_eos_inf: never predict the model's first EOS id.
        confidence_eos_eot_inf: commit its EOS and end-of-turn predictions last.

    Returns:
        (B, P + gen_length) int64. Nothing stops at an EOS.

    Raises:
        ConfigError, InputError, ModelError: before the first forward.

    >>> import leap_kernels, torch
    >>> model = leap_kernels.load("tiny")
    >>> x = generate(model, torch.tensor([[7, 8, 9]]), steps=4, gen_length=8, block_length=4, mask_id=1)
    >>> tuple(x.shape), bool((x == 1).any())
    ((1, 11), False)
    """
    if cfg_scale != 0:
        raise ConfigError(f"cfg_scale {cfg_scale} is not supported: guidance needs a second canvas. Use cfg_scale=0.")
    check_remasking(remasking)
    check_lengths(steps, gen_length, block_length)
    spec = spec_of(model)
    eos = spec.eos_token_ids if spec else ()
    if (logits_eos_inf or confidence_eos_eot_inf) and not eos:
        name = "logits_eos_inf" if logits_eos_inf else "confidence_eos_eot_inf"
        raise ModelError(f"{name} needs the EOS ids of the model, which declares none. Load it with leap_kernels.load.")
    strategy = Full(
        steps=steps, remasking=remasking, defer_tokens=eos if confidence_eos_eot_inf else (), parity="llada"
    )
    return run(
        model, prompt, strategy,
        steps=steps, gen_length=gen_length, block_length=block_length, temperature=temperature, mask_id=mask_id,
        attention_mask=attention_mask, suppress_tokens=eos[:1] if logits_eos_inf else (),
    ).sequences  # fmt: skip
