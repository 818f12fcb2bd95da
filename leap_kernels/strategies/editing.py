# SPDX-License-Identifier: Apache-2.0
"""Editing (LLaDA2.1): committed tokens of the current block change when the model is sure of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops import CONFIDENT
from ..statistics import RowStatistics
from .base import BLOCK_ROWS, Decision, Strategy, View, check_range

if TYPE_CHECKING:
    from ..canvas import Canvas

__all__ = ["Edits"]

MOST_EDIT_FORWARDS = 16  # LLaDA2.1's


class Edits(Strategy):
    """What rules with an `edit_threshold` share (decoders.md 2.16); without one nothing of this happens.

    Beside what the rule commits, a forward overwrites every token that it found committed in the block where it
    predicts another one with probability > edit_threshold, by base rows alone. A block without masks gets further
    forwards until one of them edits nothing, `edit_forwards` at most.
    """

    edit_threshold: float | None
    edit_forwards: int

    def check_edits(self) -> None:
        """Part of the rule's own check."""
        whole = isinstance(self.edit_forwards, int) and not isinstance(self.edit_forwards, bool)
        if not whole or self.edit_forwards < 0:
            raise ConfigError(f"edit_forwards: expected a whole number of at least 0, got {self.edit_forwards!r}.")
        if self.edit_threshold is None:
            if self.edit_forwards != MOST_EDIT_FORWARDS:
                raise ConfigError("edit_forwards bounds the edits that edit_threshold allows; pass both.")
            return
        check_range("edit_threshold", self.edit_threshold, 0, 1)
        # Of this object, not of its class.
        object.__setattr__(self, "revises", True)
        object.__setattr__(self, "needs", self.needs | {BLOCK_ROWS})

    def max_forwards(self, canvas: Canvas) -> int | None:
        if self.edit_threshold is None:
            return None
        return max(sum(block.masks for block in blocks) + self.edit_forwards * len(blocks) for blocks in canvas.blocks)

    def start(self, canvas: Canvas) -> Any:
        if self.edit_threshold is None:
            return None
        batch = len(canvas.sample)
        return _State([0] * batch, torch.zeros(batch, dtype=torch.bool, device=canvas.device))

    def leaving(self, canvas: Canvas, state: Any) -> list[int]:
        clean = super().leaving(canvas, state)
        if self.edit_threshold is None or not clean:
            return clean
        edited = state.edited.tolist()  # a second read of the host's, in forwards that leave a block clean
        spent = [n >= self.edit_forwards for n in state.after]
        return [i for i in clean if spent[i] or (state.after[i] and not edited[i])]

    def with_edits(self, decision: Decision, stats: RowStatistics, view: View, state: Any) -> Decision:
        """`decision` on the targets, and behind it the edits of this forward."""
        if self.edit_threshold is None:
            return decision
        canvas = view.canvas
        state.count(canvas)
        state.edited = torch.zeros_like(state.edited)
        held = sum(entered - left for entered, left in zip(canvas.entered, canvas.left, strict=True))
        if not held:
            return decision
        # (B, block_length) generated columns of the blocks; of these, the ones that hold tokens we committed.
        offset = canvas.start + torch.arange(canvas.block_length, device=canvas.device)
        committed = canvas.step.gather(1, offset.clamp(max=canvas.new_tokens - 1)) > 0
        flat = torch.nonzero_static((committed & (offset < canvas.stop)).flatten(), size=held)[:, 0]
        sample = torch.div(flat, canvas.block_length, rounding_mode="floor")
        column = canvas.prompt + offset.flatten()[flat]
        found = stats.forward.predict(stats.forward.logits(sample, column), sample, column)
        limit = found.prob1.new_tensor(self.edit_threshold)  # rounded to float32
        other = (found.top1 != view.ids[sample, column]) & (found.prob1 > limit)

        def laid_out(values: Tensor, empty: int) -> Tensor:
            out = values.new_full((offset.numel(),), empty)
            return out.index_copy_(0, flat, values).view(offset.shape)

        columns = laid_out(torch.where(other, column, -1), -1)
        state.edited = (columns >= 0).any(1)
        edits = torch.where(columns >= 0, CONFIDENT, 0).to(torch.int32)
        return Decision(
            token=torch.cat([decision.token, laid_out(found.top1, 0)], 1),
            reason=torch.cat([decision.reason, edits], 1),
            confidence=torch.cat([stats.prob1, laid_out(found.prob1, 0)], 1),
            column=torch.cat([view.targets.long(), columns], 1),
        )


@dataclass
class _State:
    """Where each sample stands with the edits of its block."""

    after: list[int]
    """Forwards made since the block was without masks."""
    edited: Tensor
    """(B,) bool: whether the forward just made edited anything."""

    def count(self, canvas: Canvas) -> None:
        """One more forward, of blocks as they are before its commits."""
        self.after = [
            (n if made else 0) + (left == 0)
            for n, made, left in zip(self.after, canvas.forwards, canvas.left, strict=True)
        ]

    def select(self, index: Tensor) -> None:
        self.after, self.edited = [self.after[i] for i in index.tolist()], self.edited[index]
