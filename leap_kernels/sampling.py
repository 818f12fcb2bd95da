# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens with temperature, by noise that depends on (seed, step, position, token id) and nothing else."""

from __future__ import annotations

from torch import Tensor

__all__ = ["draw", "uniform"]

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (xor-shift-multiply), in int64 so that every device computes the same."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def uniform(seed: Tensor, step: int, pos: Tensor, token: Tensor) -> Tensor:
    """Uniforms in (0, 1), never 0 or 1, from integers that broadcast together; float32.

    The three words are hashed one after the other, so that neighbouring seeds, steps and positions share nothing.
    """
    key = _mix((seed & _WORD) ^ 0x9E3779B9)
    key = _mix(key ^ _mix((seed >> 32) & _WORD))
    key = _mix((key + step * 0x85EBCA6B) & _WORD)
    key = _mix((key + pos * 0xC2B2AE35) & _WORD)
    # 23 bits and a half: the largest value, 1 - 2^-24, is still below 1 in float32.
    return ((_mix((key + token * 0x27D4EB2F) & _WORD) >> 9).float() + 0.5) * 2.0**-23


def draw(logits: Tensor, temperature: float, seed: Tensor, step: int, pos: Tensor, suppress: Tensor) -> Tensor:
    """One token a row from softmax(logits / temperature), by Gumbel-max: argmax_v x_v - T ln(-ln u_v).

    Args:
        logits: (n, V) of any floating dtype.
        temperature: T > 0.
        seed, pos: (n,) int64, the sample's seed and the row's target position.
        step: the sample's step.
        suppress: ids that are never drawn.

    Returns:
        (n,) int64.
    """
    import torch

    token = torch.arange(logits.shape[1], device=logits.device)
    u = uniform(seed[:, None], step, pos[:, None], token)
    noisy = logits.float() - temperature * (-u.log()).log()
    return noisy.index_fill(1, suppress, float("-inf")).argmax(1)
