# SPDX-License-Identifier: Apache-2.0
"""`dream`: a fixed number of forwards, each committing its share of all masks (Dream)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..ops import FORCED
from ..statistics import RowStatistics
from .base import (
    Decision,
    Strategy,
    View,
    check_choice,
    check_count,
    check_range,
    noise,
    ranks,
    steps_per_block,
)
from .confidence import confidence

if TYPE_CHECKING:
    from ..canvas import Canvas

__all__ = ["Dream"]

RANKED_BY = {"maskgit_plus": "probability", "topk_margin": "margin", "entropy": "neg_entropy"}


@dataclass(frozen=True)
class Dream(Strategy):
    """Time runs from 1 to `eps` in equal steps; the step from t to s takes the share 1 - s / t of the masks.

    The last step takes all. "origin" commits each mask by itself with that probability; the other algorithms commit the
    int(masks * share) masks of highest rank. Early steps may have nothing to commit; they are forwards all the same, as
    published. It knows no blocks: with `block_length` given, each block is such a canvas with its part of the steps.
    """

    alg: str = "origin"
    """"origin" (at random), or what ranks the masks: "maskgit_plus" (probability), "topk_margin" (between the two
    likeliest tokens), "entropy" (the least first)."""
    steps: int | None = None
    """Forwards for the whole canvas; None: as many as tokens. Dream's code has 512."""
    eps: float = 1e-3
    """Time at the end, in [0, 1)."""
    alg_temp: float | None = None
    """Draw the masks without replacement from softmax(rank / alg_temp), at least 0; None and 0 take the highest."""
    parity: str | None = None
    """None, or "dream": ranks from a softmax in the logits' dtype, after temperature, top_p and top_k; the number of
    masks is the mean of the batch."""

    name: ClassVar[str] = "dream"
    whole_canvas: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("alg", self.alg, ("origin", *RANKED_BY))
        check_count("steps", self.steps, none=True)
        check_range("eps", self.eps, 0, 1 - 2**-20)
        if self.alg_temp is not None:
            check_range("alg_temp", self.alg_temp, 0, 1e6)
        check_choice("parity", self.parity, (None, "dream"))

    def start(self, canvas: Canvas) -> None:
        steps_per_block(canvas, self.steps)

    def max_forwards(self, canvas: Canvas) -> int | None:
        return self.steps or max(canvas.n_new)

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        there = view.targets >= 0
        share = self._shares(view.canvas)
        if self.alg == "origin":
            take = (noise(view) < share.to(there.device)[:, None]) & there
        else:
            masks = torch.tensor(view.canvas.left)
            mean = masks.sum() / len(masks) if self.parity else masks
            count = torch.where(share < 1, (mean * share).int(), masks)  # in float32
            take = (ranks(self._rank(stats, view), view.targets) < count.to(there.device)[:, None]) & there
        return Decision(stats.top1, torch.where(take, FORCED, 0).to(torch.int32))

    def _shares(self, canvas: Canvas) -> Tensor:
        """(B,) float32, on the host: the part of its masks that each sample commits in this forward."""
        per_block = steps_per_block(canvas, self.steps) or canvas.entered
        shares = []
        for steps, step in zip(per_block, canvas.forwards, strict=True):
            time = torch.linspace(1, self.eps, steps + 1)
            shares.append(1 - time[step + 1] / time[step] if step < steps - 1 else torch.tensor(1.0))
        return torch.stack(shares)

    def _rank(self, stats: RowStatistics, view: View) -> Tensor:
        """(B, T) what goes first."""
        token, never = stats.flat(stats.top1), stats.forward.suppress
        rank = confidence(RANKED_BY[self.alg], stats.logits, token, view, never, published=self.parity is not None)
        if not self.alg_temp:
            return stats.spread(rank)
        # The highest of log-probability and Gumbel noise are a draw without replacement.
        return stats.spread(rank.double() / self.alg_temp) - (-noise(view).double().log()).log()
