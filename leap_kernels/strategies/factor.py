# SPDX-License-Identifier: Apache-2.0
"""`factor`: the more tokens a forward commits, the surer the last of them must be (Fast-dLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..statistics import RowStatistics
from .base import BaseRule, View, check_choice, check_range, ranks

__all__ = ["Factor"]


@dataclass(frozen=True)
class Factor(BaseRule):
    """By falling confidence, n = 1, 2, ...: commit until the first c_n < 1 - factor / (n + 1); n = 1 always.

    Factor 1 has the limits .667, .75, .8 for n = 2, 3, 4: of .95 .80 .70 .50 it commits two.
    """

    factor: float = 1.0
    """In [0, 1e6]; higher commits more."""
    parity: str | None = None
    """None, or "fast_dllm": c from a softmax in float64, and a block's last mask is committed too when it is the only
    one that fails."""

    name: ClassVar[str] = "factor"

    def __post_init__(self) -> None:
        check_range("factor", self.factor, 0, 1e6)
        check_choice("parity", self.parity, (None, "fast_dllm"))

    def order(self, stats: RowStatistics) -> Tensor:
        return stats.exact_prob1() if self.parity else stats.prob1

    def qualifies(self, stats: RowStatistics, view: View) -> Tensor:
        c, there = self.order(stats), view.targets >= 0
        rank = ranks(c, view.targets)
        limit = (1 - self.factor / (rank + 2).double()).to(c.dtype)
        fails = (c < limit) & (rank > 0) & there
        count = there.sum(1, keepdim=True)
        first = torch.where(fails, rank, count).amin(1, keepdim=True)
        if self.parity:
            first = torch.where(first == count - 1, count, first)
        return (rank < first) & there
