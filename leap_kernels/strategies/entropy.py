# SPDX-License-Identifier: Apache-2.0
"""`entropy`: as many tokens as a bound on their summed entropy allows (EB-Sampler)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..statistics import RowStatistics
from .base import BaseRule, View, check_range

__all__ = ["Entropy"]


@dataclass(frozen=True)
class Entropy(BaseRule):
    """By rising entropy: commit the largest k with H_1 + ... + H_(k-1) <= gamma; the lowest position first on a tie.

    The sum of the first k minus the largest of them bounds what committing them together can lose. On the whole canvas
    with block_length=max_new_tokens.
    """

    gamma: float = 0.1
    """In nats, [0, 1e6]. Ports use 0.1, 0.001, 0.15 and 0."""

    name: ClassVar[str] = "entropy"

    def __post_init__(self) -> None:
        check_range("gamma", self.gamma, 0, 1e6)

    def order(self, stats: RowStatistics) -> Tensor:
        return -stats.entropy

    def qualifies(self, stats: RowStatistics, view: View) -> Tensor:
        rising, order = stats.entropy.double().masked_fill(view.targets < 0, float("inf")).sort(dim=1, stable=True)
        before = rising.cumsum(1).roll(1, 1)  # the sum of those in front
        before[:, :1] = 0
        inside = before.float() <= stats.entropy.new_tensor(self.gamma)
        return torch.empty_like(inside).scatter_(1, order, inside)
