# SPDX-License-Identifier: Apache-2.0
"""What the public functions have in common: fixed lengths, no stop at an EOS, torch's generator behind every draw."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..config import DecodeConfig
from ..decoding import decode
from ..errors import ConfigError, InputError, expected
from ..output import DecodeOutput
from ..strategies import Dream, Full, Strategy
from ..strategies.base import check_choice, check_count

__all__ = ["run"]


def run(
    model: Any,
    prompt: Tensor,
    strategy: Strategy,
    *,
    steps: int,
    gen_length: int,
    block_length: int,
    temperature: float,
    mask_id: int,
    attention_mask: Tensor | None = None,
    **settings: Any,
) -> DecodeOutput:
    """`decode` as a public loop would have done it; ConfigError or InputError for what those assert or do otherwise."""
    check_lengths(steps, gen_length, block_length)
    if not isinstance(prompt, Tensor) or prompt.dim() != 2:
        got = tuple(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
        raise InputError(expected("prompt", "a (B, P) int64 tensor", got))
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise InputError(expected("attention_mask", "a (B, P) tensor or None", type(attention_mask).__name__))
    if not isinstance(mask_id, int) or isinstance(mask_id, bool) or mask_id < 0:
        raise ConfigError(expected("mask_id", "a token id of at least 0", repr(mask_id)))
    valid = prompt if attention_mask is None or attention_mask.shape != prompt.shape else prompt[attention_mask != 0]
    if bool((valid == mask_id).any()):
        raise InputError(
            f"prompt holds the mask token {mask_id}, which the public function would replace. This one fills the "
            "gen_length positions behind the prompt only."
        )
    config = DecodeConfig(
        max_new_tokens=gen_length,
        block_length=block_length,
        strategy=strategy,
        temperature=temperature,
        early_stop=False,
        mask_token_id=mask_id,
        **settings,
    )
    if temperature > 0 or _draws(strategy):
        # What is drawn follows torch.manual_seed, and a second call draws anew, as in the public code.
        config = dataclasses.replace(config, seed=torch.randint(2**62, (prompt.shape[0],)).tolist())
    return decode(model, prompt, attention_mask, config=config)


def _draws(strategy: Strategy) -> bool:
    """Whether a rule draws by the samples' seeds, even without temperature."""
    if isinstance(strategy, Dream):
        return strategy.alg == "origin" or bool(strategy.alg_temp)
    return isinstance(strategy, Full) and strategy.remasking == "random" and not strategy.parity


def check_lengths(steps: int, gen_length: int, block_length: int) -> None:
    """What the public functions assert."""
    for name, value in (("steps", steps), ("gen_length", gen_length), ("block_length", block_length)):
        check_count(name, value)
    if gen_length % block_length:
        raise ConfigError(expected("gen_length", f"a multiple of block_length {block_length}", gen_length))
    blocks = gen_length // block_length
    if steps % blocks:
        raise ConfigError(expected("steps", f"a multiple of the {blocks} blocks", steps))


def check_remasking(remasking: str) -> None:
    check_choice("remasking", remasking, ("low_confidence", "random"))
