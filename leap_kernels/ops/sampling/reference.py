# SPDX-License-Identifier: Apache-2.0
"""Specification of `sample_rows` in plain torch (method.md section 1; decoders.md P1 in the log domain)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reductions import row_sums

__all__ = ["sample_rows", "uniform"]

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (xor-shift-multiply), in int64 so that every device computes the same."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def uniform(seed: Tensor, step: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Uniforms in (0, 1), never 0 or 1, from int64 that broadcast together; float32.

    The words are hashed one after the other, so that neighbouring seeds, steps and positions share nothing. Of a seed
    all 64 bits count, of the others the low 32.
    """
    key = _mix((seed & _WORD) ^ 0x9E3779B9)
    key = _mix(key ^ _mix((seed >> 32) & _WORD))
    key = _mix((key + step * 0x85EBCA6B) & _WORD)
    key = _mix((key + position * 0xC2B2AE35) & _WORD)
    # 23 bits and a half: the largest value, 1 - 2^-24, is still below 1 in float32.
    return ((_mix((key + token * 0x27D4EB2F) & _WORD) >> 9).float() + 0.5) * 2.0**-23


def sample_rows(
    logits: Tensor,
    rows: Tensor,
    seeds: Tensor,
    steps: Tensor,
    positions: Tensor,
    temperature: float,
    suppress: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """For each x = float32(logits[row]), with the suppressed ids at -inf, and m = max_v x_v:

        token = argmax_v x_v - temperature * ln(-ln u_v), first id on a tie,   u_v = uniform(seed, step, position, v)
        prob  = exp(x_token - m) / sum_v exp(x_v - m)

    A bad row (a NaN, a +inf, or no finite logit) gives token -1 and prob NaN.
    """
    x = logits.index_select(0, rows).float()
    if suppress is not None:
        x = x.index_fill(1, suppress, float("-inf"))
    token = torch.arange(x.shape[1], device=x.device)
    u = uniform(seeds[:, None], steps[:, None], positions[:, None], token)
    drawn = (x - temperature * (-u.log()).log()).argmax(-1)
    top = x.amax(-1)
    good = top.isfinite()
    prob = (1 / row_sums((x - top[:, None]).exp())) * (x.gather(1, drawn[:, None])[:, 0] - top).exp()
    return drawn.masked_fill(~good, -1), prob.masked_fill(~good, float("nan"))
