# SPDX-License-Identifier: Apache-2.0
"""Every decoder but LEAP for ONE sample, written from its published description and from nothing else.

Python loops, dense masks, a whole forward a step, probabilities in float64 rounded to float32 at the end. It shares no
code with the package: tests compare the package with it. LEAP is in oracle.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
WORD = 2**32 - 1


class Sample:
    """One canvas, and how it is read and written. Decoders below take one and fill it."""

    def __init__(
        self,
        forward: Forward,
        prompt: list[int],
        *,
        mask_id: int,
        max_new_tokens: int,
        block_length: int = 32,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        suppress: Sequence[int] = (),
        early_stop: bool = True,
        shift: int = 0,
        seed: int = 0,
    ) -> None:
        self.forward, self.start, self.length = forward, len(prompt), len(prompt) + max_new_tokens
        self.canvas = [*prompt, *[mask_id] * max_new_tokens]
        self.masked = [False] * self.start + [True] * max_new_tokens
        self.block_length, self.mask_id, self.shift, self.seed = block_length, mask_id, shift, seed
        self.banned, self.eos_ids, self.pad_id, self.early_stop = [mask_id, *suppress], eos_ids, pad_id, early_stop
        self.steps = [0] * self.length
        self.nfe = 0
        self.logits = torch.zeros(0)  # of the latest forward, float64: row i is what predicts position i

    def run(self) -> Tensor:
        """One forward of the whole canvas: (L, V) probabilities, row i for position i."""
        ids = torch.tensor([self.canvas], dtype=torch.int64)
        self.nfe += 1
        return self.read(self.forward(ids, torch.arange(self.length)[None], dense(self.length))[0])

    def read(self, logits: Tensor) -> Tensor:
        """Shift, ban, softmax in float64, round to float32 (kept in float64)."""
        self.raw = torch.cat([logits[:1], logits[:-1]]) if self.shift else logits
        self.logits = self.raw.double().clone()
        self.logits[:, self.banned] = float("-inf")
        self.exact = torch.softmax(self.logits, 1)
        return self.exact.float().double()

    def blocks(self) -> list[range]:
        stops = range(self.start, self.length, self.block_length)
        return [range(s, min(s + self.block_length, self.length)) for s in stops]

    def masks(self, positions: Sequence[int]) -> list[int]:
        return [i for i in positions if self.masked[i]]

    def commit(self, position: int, token: int) -> None:
        assert self.masked[position]
        self.canvas[position], self.masked[position], self.steps[position] = token, False, self.nfe

    def ends(self, positions: Sequence[int]) -> bool:
        """Whether an EOS in a finished block ends the sample; what stands behind it is then padding."""
        found = [i for i in positions if self.canvas[i] in self.eos_ids]
        if not found or not self.early_stop:
            return False
        first = min(i for i in range(self.start, self.length) if self.canvas[i] in self.eos_ids)
        fill = self.canvas[first] if self.pad_id is None else self.pad_id
        self.canvas[first + 1 :] = [fill] * (self.length - first - 1)
        return True

    @property
    def tokens(self) -> list[int]:
        return self.canvas[self.start :]


def dense(length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool)


def first_argmax(row: Tensor) -> int:
    """Lowest id of the highest value."""
    return int((row == row.max()).nonzero()[0])


def by_falling(positions: Sequence[int], value: Callable[[int], float]) -> list[int]:
    """Positions by falling value, the lowest position first on a tie."""
    return sorted(positions, key=lambda i: (-value(i), i))


def evenly(masks: int, steps: int) -> list[int]:
    """32 masks in 5 steps: 7, 7, 6, 6, 6."""
    shares = [masks // steps] * steps
    for i in range(masks % steps):
        shares[i] += 1
    return shares


def hashed(seed: int, step: int, position: int, token: int) -> float:
    """The package's uniform numbers, in Python's integers."""

    def mix(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) & WORD
        x = ((x ^ x >> 15) * 0x846CA68B) & WORD
        return x ^ x >> 16

    key = mix(seed & WORD ^ 0x9E3779B9)
    key = mix(key ^ mix(seed >> 32 & WORD))
    key = mix(key + step * 0x85EBCA6B & WORD)
    key = mix(key + position * 0xC2B2AE35 & WORD)
    return ((mix(key + token * 0x27D4EB2F & WORD) >> 9) + 0.5) / 2**23


# --- full -------------------------------------------------------------------------------------------------------------


def full(
    sample: Sample,
    *,
    steps: int | None = None,
    remasking: str = "low_confidence",
    defer_tokens: Sequence[int] = (),
    parity: str | None = None,
) -> None:
    blocks = sample.blocks()
    for block in blocks:
        shares = evenly(len(block), steps // len(blocks) if steps else len(block))
        for share in shares:
            if share == 0 and parity is None:
                break
            p = sample.run()
            y = {i: first_argmax(p[i]) for i in sample.masks(block)}
            score = {i: float(p[i, y[i]]) for i in y}
            if remasking == "random":
                score = {i: hashed(sample.seed, sample.nfe, i, -1) for i in y}
                if parity:  # for the whole canvas, from torch's generator
                    drawn = torch.rand(1, sample.length)[0]
                    score = {i: float(drawn[i]) for i in y}
            for i in y:
                if defer_tokens and parity and remasking != "random":
                    without = sample.logits[i].clone()
                    without[list(defer_tokens)] = float("-inf")
                    score[i] = float(torch.softmax(without, 0)[y[i]].float())
                elif y[i] in defer_tokens and not parity:
                    score[i] = float("-inf")
            for i in by_falling(list(y), lambda i, score=score: score[i])[:share]:
                sample.commit(i, y[i])
        if sample.ends(block):
            return


# --- rules that look at one forward -----------------------------------------------------------------------------------


def by_block(sample: Sample, choose: Callable[[list[int], Tensor], list[int]]) -> None:
    """Fill block after block: what `choose(masked positions, probabilities)` says, with the likeliest tokens."""
    for block in sample.blocks():
        while masks := sample.masks(block):
            p = sample.run()
            for i in choose(masks, p):
                sample.commit(i, first_argmax(p[i]))
        if sample.ends(block):
            return


def float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def threshold(sample: Sample, *, threshold: float = 0.9, parity: str | None = None) -> None:
    def choose(masks: list[int], p: Tensor) -> list[int]:
        c = {i: float((sample.exact if parity else p)[i].max()) for i in masks}
        order = by_falling(masks, c.get)
        if parity:
            return [i for n, i in enumerate(order) if n == 0 or c[i] >= threshold]
        return [i for n, i in enumerate(order) if n == 0 or c[i] > float32(threshold)]

    by_block(sample, choose)


def factor(sample: Sample, *, factor: float = 1.0, parity: str | None = None) -> None:
    def choose(masks: list[int], p: Tensor) -> list[int]:
        c = {i: float((sample.exact if parity else p)[i].max()) for i in masks}
        order = by_falling(masks, c.get)
        kept = 1
        while kept < len(order):
            limit = 1 - factor / (kept + 2)
            if c[order[kept]] < (limit if parity else float32(limit)):
                break
            kept += 1
        if parity and kept == len(order) - 1:  # the only failing rank is the last one
            kept += 1
        return order[:kept]

    by_block(sample, choose)


def entropy_of(row: Tensor, epsilon: float = 0.0) -> float:
    """Of a row of float64 probabilities, in nats."""
    return -float(sum(q * math.log(q + epsilon) for q in row.tolist() if q > 0))


def entropy(sample: Sample, *, gamma: float = 0.1) -> None:
    def choose(masks: list[int], p: Tensor) -> list[int]:
        h = {i: float32(entropy_of(sample.exact[i])) for i in masks}
        order = by_falling(masks, lambda i: -h[i])
        kept = 1
        while kept < len(order) and sum(h[i] for i in order[:kept]) <= gamma:
            kept += 1
        return order[:kept]

    by_block(sample, choose)


def entropy_threshold(sample: Sample, *, threshold: float = 0.5) -> None:
    def choose(masks: list[int], p: Tensor) -> list[int]:
        h = {i: float32(entropy_of(sample.exact[i], 1e-12)) for i in masks}
        order = by_falling(masks, lambda i: -h[i])
        return [i for n, i in enumerate(order) if n == 0 or h[i] <= threshold]

    by_block(sample, choose)
