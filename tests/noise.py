# SPDX-License-Identifier: Apache-2.0
"""The draws of `sample_rows` a second time, in Python integers and float64, and how far two of them may disagree."""

from __future__ import annotations

import torch
from torch import Tensor

MOD = 2**32


def mix(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D % MOD
    x = (x ^ (x >> 15)) * 0x846CA68B % MOD
    return x ^ (x >> 16)


def uniform(seed: int, step: int, position: int, token: int) -> float:
    """Exact: an odd multiple of 2^-24."""
    key = mix(mix(seed % MOD ^ 0x9E3779B9) ^ mix(seed // MOD % MOD))
    key = mix((key + step * 0x85EBCA6B) % MOD)
    key = mix((key + position * 0xC2B2AE35) % MOD)
    return ((mix((key + token * 0x27D4EB2F) % MOD) >> 9) + 0.5) / 2**23


def noisy_logits(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """x - T ln(-ln u) in float64, of float32 logits and a float32 temperature."""
    t = torch.tensor(temperature, dtype=torch.float32).double()
    return logits.float().double() - t * (-uniforms.double().log()).log()


def check_draws(token: Tensor, logits: Tensor, uniforms: Tensor, temperature: float, *, clear: float = 0.9) -> None:
    """`token` is the exact argmax where that leads by more than the documented bound, and within it elsewhere.

    `clear` is the least share of rows in which only one token is right.
    """
    noisy = noisy_logits(logits, uniforms, temperature)
    drawn = noisy.gather(1, token[:, None])[:, 0]
    best = noisy.max(1)
    x = logits.float().double()
    size = torch.maximum(*(x.gather(1, t[:, None])[:, 0].abs() for t in (token, best.indices)))
    bound = 2.0**-19 * (18 * temperature + size)
    assert (drawn >= best.values - bound).all()
    if logits.shape[1] > 1:
        # The runner-up may have a larger logit than either: its bound counts here.
        lead = best.values - noisy.topk(2, 1).values[:, 1]
        sure = lead > 2.0**-19 * (18 * temperature + x.masked_fill(x.isinf(), 0).abs().amax(1))
        assert torch.equal(token[sure], best.indices[sure])
        assert sure.double().mean() >= clear
