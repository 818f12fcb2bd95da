# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a training batch are masked, and what each is worth in the loss.

Half of the samples are masked all over the canvas, half as semi-autoregressive decoding meets them: everything before a
window of 32 is visible, everything behind it masked, and the window begins where a block of decoding does, at a
token that has to be computed, or anywhere. Where masks may stand, they stand in one of two ways:

- independently, LLaDA's own objective (arXiv 2502.09992, Algorithm 1): t uniform in (0, 1), every token masked with
  probability t, weight 1/t;
- value by value: all tokens that say one computed or chosen value are masked together, and few others. That is what a
  decoder that commits what it is sure of leaves for last, and what teaches arithmetic: a result stands in several
  places, so that with independent masks a model learns to copy it and hardly ever has to compute it.
"""

from __future__ import annotations

import numpy as np

__all__ = ["mask_batch"]

BLOCK = 32
LEAST = 0.1  # smallest t that weights divide by
FAINT = 0.1  # weight of what decoding reads as context only: behind the window, and EOS after the first


def mask_batch(
    rng: np.random.Generator,
    answer_start: np.ndarray,
    answer_end: np.ndarray,
    group: np.ndarray,
    window_share: float,
    value_share: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Masks (B, S) bool and loss weights (B, S) float32 (0 where nothing is masked).

    `answer_start` and `answer_end` (B,): where the answer begins and its first EOS stands; everything from
    `answer_start` on may be masked. `group` (B, S): the value a token says, 0 for other tokens. The shares are those of
    samples masked in a window, and of samples masked value by value.
    """
    batch, length = group.shape
    pos = np.arange(length)[None]
    canvas = pos >= answer_start[:, None]
    # Stratified over the batch, so that every batch has easy and hard samples.
    t = ((np.arange(batch) + rng.random(batch)) / batch)[rng.permutation(batch)][:, None]
    drill = answer_start[:, None] == 0  # no prompt, and no token that follows from another
    in_window = (rng.random((batch, 1)) < window_share) & ~drill
    by_value = (rng.random((batch, 1)) < value_share) | drill

    start = _window_starts(rng, answer_start, answer_end, group)[:, None]
    window = (pos >= start) & (pos < start + BLOCK)
    scope = np.where(in_window, window, canvas)
    value_drawn = np.take_along_axis(rng.random((batch, group.max() + 1)), group, 1)
    easy_chance = np.where(drill, 0.02, t * rng.random((batch, 1)))
    masked_values = np.where(group > 0, value_drawn < t, rng.random((batch, length)) < easy_chance)
    masked = scope & np.where(by_value, masked_values, rng.random((batch, length)) < t)
    # At least the first token of the scope: a sample without masks teaches nothing.
    first = np.where(in_window[:, 0], start[:, 0], answer_start)
    empty = ~masked.any(1)
    masked[np.flatnonzero(empty), first[empty]] = True

    count = masked.sum(1, keepdims=True)
    weight = masked / np.maximum(count, LEAST * scope.sum(1, keepdims=True))
    faint = pos > answer_end[:, None]
    weight = np.where(faint, FAINT * weight, weight)
    behind = in_window & canvas & (pos >= start + BLOCK)
    weight = np.where(behind, FAINT / length * ~faint, weight)
    return masked | behind, weight.astype(np.float32)


def _window_starts(
    rng: np.random.Generator, answer_start: np.ndarray, answer_end: np.ndarray, group: np.ndarray
) -> np.ndarray:
    starts = np.empty_like(answer_start)
    kinds = rng.choice(3, size=len(starts), p=(0.35, 0.5, 0.15))
    for i, (first, last) in enumerate(zip(answer_start, answer_end, strict=True)):
        if kinds[i] == 0:
            starts[i] = first + BLOCK * rng.integers((last - first) // BLOCK + 1)
        elif kinds[i] == 1:
            starts[i] = rng.choice(np.flatnonzero(group[i]))
        else:
            starts[i] = rng.integers(first, last + 1)
    return starts
