# SPDX-License-Identifier: Apache-2.0
"""`wino`: draft many tokens, and mask those again that a look without them does not confirm (WINO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..ops import CONFIDENT, COPY, PADDING, Superposed, Switches
from ..statistics import RowStatistics
from .base import NO_SHIFT, Decision, Strategy, View, check_range, ranks, reasons

if TYPE_CHECKING:
    from ..canvas import Canvas

__all__ = ["Wino"]

LAST_AT_START = 30
SHARE, LEAST, MOST = 0.7, 5, 20  # a forward drafts at most this share of the masks; the limit is at least 5, at most 20


@dataclass(frozen=True)
class Wino(Strategy):
    """Draft: commit { i : c_i > threshold }, of many the surest; if that is empty, the most confident target.

    Verify: every position of the block has a shadow, a mask that sees all but its own position, and the other shadows.
    A forward that drafts more than one token looks at the shadows of the tokens committed before it in this block, and
    masks those again to which their shadows give less than `threshold_back`: the least likely, and fewer than the
    forward before had drafted. So masks plus the latest draft fall by one a forward or more, and a block of m masks
    ends within m forwards.

    Shadows are appended where tokens are under check, so not to the first forward of a block.
    """

    threshold: float = 0.6
    """Confidence above which a token is drafted, in [0, 1]; strict."""
    threshold_back: float = 0.9
    """Probability at its shadow below which a token is masked again, in [0, 1]; strict."""

    name: ClassVar[str] = "wino"
    needs: ClassVar[frozenset[str]] = frozenset({NO_SHIFT})
    revises: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0, 1)
        check_range("threshold_back", self.threshold_back, 0, 1)

    @property
    def switches(self) -> Switches:
        return Switches(copy_sees_original=False)

    def max_forwards(self, canvas: Canvas) -> int | None:
        return max(canvas.n_new)

    def start(self, canvas: Canvas) -> _State:
        return _State(canvas)

    def superpose(self, view: View, state: _State) -> Superposed | None:
        """A mask copy of every position of the blocks that hold tokens to check."""
        canvas, offset = view.canvas, state.offsets()
        inside = offset < canvas.stop
        shadows = inside & state.under_check(offset).any(1, keepdim=True)
        column = (canvas.prompt + offset).clamp(max=view.ids.shape[1] - 1)
        pos = torch.where(shadows, view.pos.gather(1, column), 0)
        return Superposed(
            token=torch.full_like(column, view.spec.mask_token_id),
            pos=pos,
            kind=torch.where(shadows, COPY, PADDING).to(torch.int32),
            hide=torch.where(shadows, pos, -1),
            copy_row=torch.full_like(pos, -1),  # what decides is read below, from the positions that hold tokens
            count=shadows.sum(1, dtype=torch.int32),
        )

    def accept(self, stats: RowStatistics, view: View, state: _State) -> Decision:
        take = self._draft(stats, view)
        drafted = (take > 0).sum(1, keepdim=True)
        offset, again = self._verify(stats, view, state, drafted)
        state.update(view.targets, take > 0, offset, again, drafted)

        columns = torch.where(again, view.canvas.prompt + offset, -1)
        return Decision(
            token=torch.cat([stats.top1, torch.full_like(columns, view.spec.mask_token_id)], 1),
            reason=torch.cat([take, torch.where(again, CONFIDENT, 0).to(torch.int32)], 1),
            confidence=torch.cat([stats.prob1, torch.zeros_like(columns, dtype=torch.float32)], 1),
            column=torch.cat([view.targets.long(), columns], 1),
        )

    def _draft(self, stats: RowStatistics, view: View) -> Tensor:
        """(B, T) why to commit a target, 0 where not."""
        c, rank = stats.prob1, ranks(stats.prob1, view.targets)
        cap = torch.tensor([min(max(int(SHARE * left), LEAST), MOST) for left in view.canvas.left], device=c.device)
        return reasons((c > c.new_tensor(self.threshold)) & (rank < cap[:, None]), rank, view.targets)

    def _verify(self, stats: RowStatistics, view: View, state: _State, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """(B, block) generated columns of the block, and which of them to mask again."""
        canvas, forward, offset = view.canvas, stats.forward, state.offsets()
        checked = state.under_check(offset)
        sample, place = checked.nonzero().T
        column = canvas.prompt + offset[sample, place]
        logits = forward.appended(sample, place)
        shadow = forward.predict(logits, sample, column)
        in_place = logits.gather(1, view.ids[sample, column][:, None])[:, 0].float()
        q = torch.ones_like(checked, dtype=torch.float32)
        q[sample, place] = (in_place - shadow.lse).exp()

        fails = checked & (q < q.new_tensor(self.threshold_back)) & (drafted > 1)
        last = state.last_draft()
        few = fails.sum(1, keepdim=True) < last
        lowest = ranks(-q, torch.where(fails, 0, -1)) < last - 1
        return offset, fails & (few | lowest)


class _State:
    """Which tokens of each sample's block are under check, and how many the forward before drafted."""

    def __init__(self, canvas: Canvas) -> None:
        self.canvas = canvas
        self.checked = torch.zeros(canvas.step.shape, dtype=torch.bool, device=canvas.device)
        self.last = torch.zeros((len(canvas.sample), 1), dtype=torch.int64, device=canvas.device)

    def offsets(self) -> Tensor:
        """(B, block_length) generated columns of the samples' blocks; those from `canvas.stop` on are beyond."""
        return self.canvas.start + torch.arange(self.canvas.block_length, device=self.canvas.device)

    def under_check(self, offset: Tensor) -> Tensor:
        """(B, block_length) bool."""
        there = self.checked.gather(1, offset.clamp(max=self.checked.shape[1] - 1))
        return there & (offset < self.canvas.stop)

    def last_draft(self) -> Tensor:
        """(B, 1)"""
        first = torch.tensor([n == 0 for n in self.canvas.forwards], device=self.last.device)
        return torch.where(first[:, None], LAST_AT_START, self.last)

    def update(self, targets: Tensor, taken: Tensor, offset: Tensor, again: Tensor, drafted: Tensor) -> None:
        sample, slot = taken.nonzero().T
        self.checked[sample, targets[sample, slot].long() - self.canvas.prompt] = True
        sample, place = again.nonzero().T
        self.checked[sample, offset[sample, place]] = False
        self.last = drafted

    def select(self, index: Tensor) -> None:
        self.checked, self.last = self.checked[index], self.last[index]
