# SPDX-License-Identifier: Apache-2.0
"""`credit`: predictions that come back gain weight (CreditDecoding as found in dInfer)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..ops import CONFIDENT, FORCED
from ..statistics import RowStatistics
from .base import Decision, Strategy, View, check_range

if TYPE_CHECKING:
    from ..canvas import Canvas

__all__ = ["Credit"]

NEAR = 1e-5  # of the highest confidence: what is this close to it goes with it


@dataclass(frozen=True)
class Credit(Strategy):
    """Confidence and token come from logits + alpha ln(1 + M), M the credit of a block's positions and tokens.

    In every forward M is first multiplied by beta, then each prediction gains its confidence to the power of gamma
    (here the mask token may be one). Commit { i : c_i >= min(threshold, max c - 1e-5) }. Memory: 4 bytes a token of the
    vocabulary for each position of a block.
    """

    threshold: float = 0.9
    """In [0, 1], inclusive."""
    alpha: float = 0.7
    """Weight of the credit, [0, 1e6]."""
    beta: float = 0.8
    """What is left of a credit after a forward, [0, 1]."""
    gamma: float = 0.2
    """Exponent of the confidence, [0, 1e6]."""

    name: ClassVar[str] = "credit"

    def __post_init__(self) -> None:
        for option, high in (("threshold", 1), ("alpha", 1e6), ("beta", 1), ("gamma", 1e6)):
            check_range(option, getattr(self, option), 0, high)

    def start(self, canvas: Canvas) -> _State:
        return _State(canvas)

    def accept(self, stats: RowStatistics, view: View, state: _State) -> Decision:
        sample, column = stats.sample, stats.flat(view.targets).long()
        never = stats.forward.suppress
        banned = never[never != view.spec.mask_token_id]
        p = stats.logits.float().index_fill(1, banned, float("-inf")).softmax(1)
        credit = state.add(sample, column, p, self.beta, self.gamma)
        fused = stats.forward.predict(stats.logits.float() + self.alpha * credit.log1p(), sample, column)
        token, c = stats.spread(fused.top1, -1), stats.spread(fused.prob1)
        best = c.masked_fill(view.targets < 0, 0).amax(1, keepdim=True)
        threshold = c.new_tensor(self.threshold)
        take = (c >= torch.minimum(threshold, best - NEAR)) & (view.targets >= 0)
        why = torch.where(c >= threshold, CONFIDENT, FORCED)
        return Decision(token, torch.where(take, why, 0).to(torch.int32), c)


class _State:
    """M, (B, block_length, V) float32, of each sample's current block."""

    def __init__(self, canvas: Canvas) -> None:
        self.canvas = canvas
        self.credit: Tensor | None = None

    def add(self, sample: Tensor, column: Tensor, p: Tensor, beta: float, gamma: float) -> Tensor:
        """Decay all, credit the likeliest token of n rows of probabilities; their credits, (n, V)."""
        if self.credit is None:
            shape = (len(self.canvas.sample), self.canvas.block_length, p.shape[1])
            self.credit = torch.zeros(shape, dtype=torch.float32, device=p.device)
        decay = torch.tensor([beta if n else 0.0 for n in self.canvas.forwards], device=p.device)
        self.credit *= decay[:, None, None]
        offset = column - self.canvas.prompt - self.canvas.start[sample, 0]
        c, token = p.amax(1), p.argmax(1)
        self.credit[sample, offset, token] += c**gamma
        return self.credit[sample, offset]

    def select(self, index: Tensor) -> None:
        if self.credit is not None:
            self.credit = self.credit[index]
