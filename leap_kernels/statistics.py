# SPDX-License-Identifier: Apache-2.0
"""What a strategy decides on: the statistics of a forward's rows, and the candidates kept between forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .ops import TopEta, top_eta

__all__ = ["Forward", "Memory", "RowStatistics"]


@dataclass(frozen=True, eq=False)
class Forward:
    """The forward just made: the logits of any of its rows. What is read goes through the head once more."""

    hidden: Tensor
    """(B, R, D) hidden states, appended rows behind `base` rows."""
    base: int
    head: Callable[[Tensor], Tensor]
    row: Callable[[Tensor, Tensor], Tensor]
    """(sample, column) -> the base row that predicts it."""
    drawn: Callable[[Tensor, TopEta, Tensor, Tensor], TopEta]
    suppress: Tensor
    """Ids that are never predicted, the mask token among them."""
    backend: str
    bad: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """For all rows that were predicted from: whether they decide nothing, their sample, their column."""

    def logits(self, sample: Tensor, column: Tensor) -> Tensor:
        """(n, V) what predicts n columns of the canvas."""
        return self.head(self.hidden[sample, self.row(sample, column)])

    def appended(self, sample: Tensor, index: Tensor) -> Tensor:
        """(n, V) at n appended rows, counted from the first of their sample."""
        return self.head(self.hidden[sample, self.base + index])

    def predict(self, logits: Tensor, sample: Tensor, column: Tensor) -> TopEta:
        """Predictions and statistics of (n, V) logits for n columns; drawn tokens with temperature, as everywhere."""
        top = top_eta(logits, 1.0, suppress=self.suppress, backend=self.backend)
        self.bad.append((top.top1 < 0, sample, column))
        return self.drawn(logits, top, sample, column)


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
    logits: Tensor
    """(n, V) in the model's dtype: the targets' logits as the model gave them, one row a target that is there."""
    place: Tensor
    """(n,) int64: flat index into (B, T) of each of these rows."""
    forward: Forward
    """Where to read any other row of this forward."""

    @classmethod
    def of_rows(
        cls,
        place: Tensor,
        shape: tuple[int, int],
        base: TopEta,
        copies: tuple[TopEta, Tensor] | None,
        logits: Tensor,
        forward: Forward,
    ) -> RowStatistics:
        """From one entry a row to (B, T): row j of `base` belongs to flat place `place[j]`, likewise for copies."""
        if copies is None:
            copy_top1, copy_prob1 = place.new_full(shape, -1), base.prob1.new_zeros(shape)
        else:
            copy, at = copies
            copy_top1, copy_prob1 = _spread(copy.top1, at, shape, -1), _spread(copy.prob1, at, shape, 0)
        return cls(
            top1=_spread(base.top1, place, shape, -1),
            prob1=_spread(base.prob1, place, shape, 0),
            entropy=_spread(base.entropy, place, shape, 0),
            gap=_spread(base.gap, place, shape, 0),
            copy_top1=copy_top1,
            copy_prob1=copy_prob1,
            logits=logits,
            place=place,
            forward=forward,
        )

    def spread(self, values: Tensor, empty: float = 0) -> Tensor:
        """(n,) one value for each row of `logits` -> (B, T); `empty` where a sample has no target."""
        return _spread(values, self.place, (self.top1.shape[0], self.top1.shape[1]), empty)

    def flat(self, values: Tensor) -> Tensor:
        """(B, T) -> (n,), the values of the rows of `logits`."""
        values = values.flatten()
        return values if len(self.place) == len(values) else values[self.place]

    @property
    def sample(self) -> Tensor:
        """(n,) which sample each row of `logits` belongs to."""
        return torch.div(self.place, self.top1.shape[1], rounding_mode="floor")

    def exact_prob1(self) -> Tensor:
        """(B, T) float64: `prob1` from a softmax in float64, as most public code computes it."""
        exact = self.logits.double().index_fill(1, self.forward.suppress, float("-inf")).softmax(1)
        return self.spread(exact.gather(1, self.flat(self.top1).clamp(min=0)[:, None])[:, 0])


def _spread(values: Tensor, place: Tensor, shape: tuple[int, int], empty: float) -> Tensor:
    if len(place) == shape[0] * shape[1]:  # every place has a row, in order
        return values.view(shape)
    out = values.new_full((shape[0] * shape[1],), empty)
    return out.index_copy_(0, place, values).view(shape)


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
