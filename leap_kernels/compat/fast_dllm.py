# SPDX-License-Identifier: Apache-2.0
"""`generate` and its two cached forms with the arguments and returns of Fast-dLLM's `generate.py` for LLaDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..output import DecodeOutput
from ..strategies import Factor, Full, Strategy, Threshold
from .shared import check_lengths, check_remasking, run

__all__ = ["generate", "generate_with_dual_cache", "generate_with_prefix_cache"]


@torch.no_grad()
def generate(
    model: Any,
    prompt: Tensor,
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 128,
    temperature: float = 0.0,
    remasking: str = "low_confidence",
    mask_id: int = 126336,
    threshold: float | None = None,
    factor: float | None = None,
) -> tuple[Tensor, int]:
    """Fast-dLLM's decoder without a cache.

    Args:
        model: anything that `decode` takes.
        prompt: (B, P) int64, every column a token.
        steps: without `threshold` and `factor`, forwards over which each block's masks are spread evenly, in all a
            multiple of gen_length / block_length. With one of them unused.
        gen_length, block_length: new tokens, a multiple of the block.
        temperature: 0 is greedy. Draws follow torch.manual_seed, but are not those of the public code.
        remasking: "low_confidence"; "random" without `threshold` and `factor` only.
        mask_id: id of the mask token, which is never predicted here.
        threshold: commit what has confidence >= threshold, in [0, 1], the confidence from a softmax in float64.
        factor: commit by falling confidence, the n-th while it is >= 1 - factor / (n + 1).

    Returns:
        (B, P + gen_length) int64, and the number of forwards: block by block that of the slowest sample. Nothing
        stops at an EOS.

    Raises:
        ConfigError, InputError, ModelError: before the first forward.

    >>> import leap_kernels, torch
    >>> model = leap_kernels.load("tiny")
    >>> x, nfe = generate(model, torch.tensor([[7, 8, 9]]), 8, gen_length=8, block_length=4, mask_id=1)
    >>> tuple(x.shape), nfe
    ((1, 11), 8)
    """
    given = (steps, gen_length, block_length, temperature, remasking, mask_id, threshold, factor)
    return _generate("none", model, prompt, *given)


@torch.no_grad()
def generate_with_prefix_cache(
    model: Any,
    prompt: Tensor,
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 128,
    temperature: float = 0.0,
    remasking: str = "low_confidence",
    mask_id: int = 126336,
    threshold: float | None = None,
    factor: float | None = None,
) -> tuple[Tensor, int]:
    """As `generate`, with keys and values in front of the block kept from the block's first forward.

    The forwards are counted as in the first public version, which looks for masks after the second forward of a block:
    a block that its first forward fills counts two.
    """
    given = (steps, gen_length, block_length, temperature, remasking, mask_id, threshold, factor)
    return _generate("prefix", model, prompt, *given)


@torch.no_grad()
def generate_with_dual_cache(
    model: Any,
    prompt: Tensor,
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 128,
    temperature: float = 0.0,
    remasking: str = "low_confidence",
    mask_id: int = 126336,
    threshold: float | None = None,
    factor: float | None = None,
) -> tuple[Tensor, int]:
    """As `generate`, with all keys and values but the block's kept from its first forward; counted as with the prefix
    cache."""
    given = (steps, gen_length, block_length, temperature, remasking, mask_id, threshold, factor)
    return _generate("dual", model, prompt, *given)


def _generate(
    cache: str,
    model: Any,
    prompt: Tensor,
    steps: int,
    gen_length: int,
    block_length: int,
    temperature: float,
    remasking: str,
    mask_id: int,
    threshold: float | None,
    factor: float | None,
) -> tuple[Tensor, int]:
    check_lengths(steps, gen_length, block_length)
    strategy = _strategy(steps, remasking, threshold, factor)
    out = run(
        model, prompt, strategy,
        steps=steps, gen_length=gen_length, block_length=block_length, temperature=temperature, mask_id=mask_id,
        cache=cache,
    )  # fmt: skip
    return out.sequences, forwards(out, block_length, least=1 if cache == "none" else 2)


def _strategy(steps: int, remasking: str, threshold: float | None, factor: float | None) -> Strategy:
    check_remasking(remasking)
    if threshold is not None and factor is not None:
        raise ConfigError("threshold and factor are two rules, of which the public code drops the first. Pass one.")
    if threshold is None and factor is None:
        return Full(steps=steps, remasking=remasking)
    if remasking != "low_confidence":
        raise ConfigError(f"remasking={remasking!r} does not go with threshold or factor, which rank by confidence.")
    if factor is not None:
        return Factor(factor, parity="fast_dllm")
    assert threshold is not None
    return Threshold(threshold, parity="fast_dllm")


def forwards(out: DecodeOutput, block_length: int, least: int) -> int:
    """What the public loops count: in each block the forwards of the slowest sample, for which the others wait."""
    last = out.history.step.unflatten(1, (-1, block_length)).amax(2).long()
    each = torch.cat([last[:, :1], last.diff(dim=1)], 1)
    return int(each.amax(0).clamp(min=least).sum())
