# SPDX-License-Identifier: Apache-2.0
"""Caching, reduced to one question: which base rows does a forward recompute?

| cache | a block's first forward | the others | source |
| --- | --- | --- | --- |
| none | all | all | exact |
| prefix | all | from the block on | Fast-dLLM, arXiv 2505.22618 |
| dual | all | the block | Fast-dLLM |
| delayed | all, and the second too | masks, and what the last forward committed | dKV-Cache, arXiv 2505.15781 |
| block | the block that was finished, and the new one | the block | exact; block-causal models only |

What is not recomputed is read from the store as it was last computed. A shifted model reads the first prediction of a
block at the row before it, so that row is always among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .canvas import Canvas
from .ops import PADDING
from .rows import Rows
from .store import Store, Stored

__all__ = ["CACHES", "Cache"]


class Cache:
    """`none`: every row in every forward. Base of the others, which keep keys and values in a store."""

    exact = True
    """Whether decoding gives the tokens that it would give without a cache."""

    def __init__(self, canvas: Canvas, refresh: int | None) -> None:
        self._refresh = refresh

    def rows(self, canvas: Canvas, now: int) -> tuple[Rows, list[int]]:
        """The base rows of forward `now` (from 1), and how many of them each sample computes.

        Block-causal models get the blocks up to the current one only: no earlier row sees a later block.
        """
        size = canvas.spec.block_causal_length
        firsts, stops = _whole(canvas)
        ids, pos, kind, hide = canvas.ids, canvas.pos, canvas.kind, canvas.hide
        if size:
            kind = _known(canvas, stops)
        ids, pos, kind, hide = (t[:, : max(stops)] for t in (ids, pos, kind, hide))
        computed = [stop - first for first, stop in zip(firsts, stops, strict=True)]
        return Rows(ids, pos, kind, hide, base=ids.shape[1], block_causal=size), computed

    def covers_next_block(self, canvas: Canvas, i: int) -> bool:
        """Whether the forward just made has predictions for the block behind sample i's current one."""
        return canvas.covers_next_block(i)

    def select(self, keep: list[int], index: Tensor) -> None:
        """Follow the batch."""


class _Storing(Cache, ABC):
    """Rows of which some are recomputed, and a store for the others."""

    exact = False

    def __init__(self, canvas: Canvas, refresh: int | None) -> None:
        super().__init__(canvas, refresh)
        self.store = Store(canvas.ids.shape[1])
        self._block = [-1] * len(canvas.sample)  # of each sample's latest forward
        self._age = [0] * len(canvas.sample)  # forwards that it has had in this block

    def rows(self, canvas: Canvas, now: int) -> tuple[Rows, list[int]]:
        entered = [old != new for old, new in zip(self._block, canvas.block, strict=True)]
        self._age = [0 if new else age + 1 for new, age in zip(entered, self._age, strict=True)]
        column, computed = self._columns(canvas, now)
        self._block = list(canvas.block)

        there = column >= 0
        at = column.clamp(min=0)
        kind = canvas.kind.gather(1, at).masked_fill(~there, PADDING)
        rows = Rows(
            canvas.ids.gather(1, at), canvas.pos.gather(1, at), kind, canvas.hide.gather(1, at),
            base=column.shape[1], block_causal=canvas.spec.block_causal_length, column=column,
            stored=Stored(self.store, canvas.pos, _known(canvas, _whole(canvas)[1]), canvas.hide),
        )  # fmt: skip
        return rows, computed

    @abstractmethod
    def _columns(self, canvas: Canvas, now: int) -> tuple[Tensor, list[int]]:
        """(B, R) int64 columns to recompute, rising, -1 behind them, and how many of them a sample has."""

    def _is_refresh(self, i: int) -> bool:
        """Whether this forward computes every row of sample i."""
        return self._age[i] % self._refresh == 0 if self._refresh else self._age[i] == 0

    def select(self, keep: list[int], index: Tensor) -> None:
        self._block, self._age = [self._block[i] for i in keep], [self._age[i] for i in keep]
        self.store.select(index)


class _Range(_Storing):
    """One range of columns is recomputed."""

    def _columns(self, canvas: Canvas, now: int) -> tuple[Tensor, list[int]]:
        firsts, stops = _whole(canvas)
        for i in range(len(firsts)):
            if not self._is_refresh(i):
                begin, end = self._range(canvas, i)
                firsts[i], stops[i] = max(firsts[i], begin - canvas.spec.shift), end
        computed = [stop - first for first, stop in zip(firsts, stops, strict=True)]
        first, stop = torch.tensor([firsts, stops], device=canvas.device)[:, :, None]
        column = first + torch.arange(max(computed), device=canvas.device)
        return torch.where(column < stop, column, -1), computed

    @abstractmethod
    def _range(self, canvas: Canvas, i: int) -> tuple[int, int]:
        """First and past-the-last column that sample i recomputes when it does not recompute all."""


class Prefix(_Range):
    """Keys and values in front of the block stay; block and everything behind it are recomputed."""

    def _range(self, canvas: Canvas, i: int) -> tuple[int, int]:
        first = canvas.shared[i] if canvas.shared is not None else canvas.span(i, canvas.block[i])[0]
        return canvas.prompt + first, canvas.prompt + canvas.n_new[i]


class Dual(_Range):
    """Only the block is recomputed; what is in front of it and behind it stays."""

    def _range(self, canvas: Canvas, i: int) -> tuple[int, int]:
        start, stop = canvas.span(i, canvas.block[i])
        return canvas.prompt + start, canvas.prompt + stop

    def covers_next_block(self, canvas: Canvas, i: int) -> bool:
        return False  # also where the refresh finished the block, so that candidates do not depend on how fast it was


class Delayed(_Storing):
    """A token's keys and values are kept from the second forward after its commit on."""

    def _columns(self, canvas: Canvas, now: int) -> tuple[Tensor, list[int]]:
        shift, prompt = canvas.spec.shift, canvas.prompt
        refresh = torch.tensor([self._is_refresh(i) for i in range(len(canvas.sample))], device=canvas.device)
        masked = torch.zeros_like(canvas.ids, dtype=torch.bool)
        masked[:, prompt:] = canvas.ids[:, prompt:] == canvas.spec.mask_token_id
        wanted = masked.clone()
        wanted[:, prompt:] |= canvas.step == now - 1
        if shift:  # and the rows that masks are read from
            wanted[:, :-1] |= masked[:, 1:]
        wanted = (wanted | refresh[:, None]) & (canvas.kind != PADDING)
        computed = wanted.sum(1).tolist()  # how many were committed is not known to the host
        width = wanted.shape[1]
        column = torch.where(wanted, torch.arange(width, device=canvas.device), width).sort(1).values
        column = column[:, : max(computed)]
        return torch.where(column < width, column, -1), computed

    def _is_refresh(self, i: int) -> bool:
        return self._age[i] <= 1 or super()._is_refresh(i)


class Block(_Range):
    """Exact: earlier blocks never see later ones, so a block is computed for the last time when it has no mask left.

    That is together with the first forward of the block behind it, and costs no forward of its own.
    """

    exact = True

    def _is_refresh(self, i: int) -> bool:
        return self._block[i] < 0

    def _range(self, canvas: Canvas, i: int) -> tuple[int, int]:
        size, n_prompt = canvas.spec.block_causal_length, canvas.n_prompt[i]
        start = n_prompt + canvas.span(i, self._block[i])[0]  # of the block of the latest forward
        return canvas.prompt - n_prompt + start // size * size, canvas.computed_columns(i)

    def covers_next_block(self, canvas: Canvas, i: int) -> bool:
        return canvas.covers_next_block(i)


def _whole(canvas: Canvas) -> tuple[list[int], list[int]]:
    """First and past-the-last column that each sample computes without a cache."""
    firsts = [canvas.prompt - n for n in canvas.n_prompt]
    if canvas.spec.block_causal_length:
        return firsts, [canvas.computed_columns(i) for i in range(len(firsts))]
    return firsts, [canvas.prompt + n for n in canvas.n_new]


def _known(canvas: Canvas, stops: list[int]) -> Tensor:
    """(B, L) kinds of the columns, with padding behind `stops`."""
    behind = torch.arange(canvas.ids.shape[1], device=canvas.device)
    return canvas.kind.masked_fill(behind >= torch.tensor(stops, device=canvas.device)[:, None], PADDING)


CACHES: dict[str, type[Cache]] = {
    "none": Cache,
    "prefix": Prefix,
    "dual": Dual,
    "delayed": Delayed,
    "block": Block,
}
