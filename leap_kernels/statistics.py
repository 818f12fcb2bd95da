# SPDX-License-Identifier: Apache-2.0
"""From hidden states to what a strategy decides on: the head and `top_eta` on the deciding rows, and on no others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .ops import TopEta

__all__ = ["Memory", "RowStatistics"]


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """Statistics of one forward at the masked targets, laid out (B, T) like `View.targets`.

    Unscaled float32 softmax throughout. Where a sample has no target, values mean nothing.
    """

    top1: Tensor
    """(B, T) int64: the prediction y: the argmax, or the drawn token with temperature."""
    prob1: Tensor
    """(B, T) float32: its probability c."""
    entropy: Tensor
    """(B, T) float32: entropy of the softmax in nats."""
    gap: Tensor
    """(B, T) float32: largest minus second largest logit."""
    copy_top1: Tensor
    """(B, T) int64: argmax at the target's copy; -1 where there is none."""
    copy_prob1: Tensor
    """(B, T) float32: its probability; 0 where there is none."""

    @classmethod
    def spread(
        cls, place: Tensor, shape: tuple[int, int], base: TopEta, copy: TopEta, copy_place: Tensor
    ) -> RowStatistics:
        """From one entry a row to (B, T): row j of `base` belongs to flat place `place[j]`, likewise for copies."""

        def lay_out(values: Tensor, where: Tensor, empty: float) -> Tensor:
            if len(where) == shape[0] * shape[1]:  # every place has a row, in order
                return values.view(shape)
            out = values.new_full((shape[0] * shape[1],), empty)
            return out.index_copy_(0, where, values).view(shape)

        return cls(
            top1=lay_out(base.top1, place, -1),
            prob1=lay_out(base.prob1, place, 0),
            entropy=lay_out(base.entropy, place, 0),
            gap=lay_out(base.gap, place, 0),
            copy_top1=lay_out(copy.top1, copy_place, -1),
            copy_prob1=lay_out(copy.prob1, copy_place, 0),
        )


class Memory:
    """The candidates of each sample's latest forward, by generated column (method.md section 2)."""

    def __init__(self, batch: int, new_tokens: int, k: int, device: torch.device) -> None:
        self.ids = torch.full((batch, new_tokens, k), -1, dtype=torch.int64, device=device)
        self.counts = torch.zeros((batch, new_tokens), dtype=torch.int32, device=device)

    def forget(self) -> None:
        """Candidates come from the immediately preceding forward only."""
        self.counts.zero_()

    def store(self, sample: Tensor, offset: Tensor, top: TopEta) -> None:
        """Remember the candidates of n rows, each at (sample, generated column)."""
        self.ids[sample, offset] = top.ids
        self.counts[sample, offset] = top.counts

    def at(self, offset: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, K) ids and (B, T) counts at generated columns (B, T); negative columns read column 0."""
        offset = offset.clamp(min=0).long()
        rows = torch.arange(offset.shape[0], device=offset.device)[:, None]
        return self.ids[rows, offset], self.counts[rows, offset]

    def select(self, index: Tensor) -> None:
        """Follow the batch."""
        self.ids, self.counts = self.ids.index_select(0, index), self.counts.index_select(0, index)
