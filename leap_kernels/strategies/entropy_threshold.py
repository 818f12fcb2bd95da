# SPDX-License-Identifier: Apache-2.0
"""`entropy_threshold`: what has little entropy is committed (dParallel)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..statistics import RowStatistics
from .base import BaseRule, View, check_range

__all__ = ["EntropyThreshold"]


@dataclass(frozen=True)
class EntropyThreshold(BaseRule):
    """Commit { i : H_i <= threshold }; if that is empty, the target of least entropy. For distilled checkpoints."""

    threshold: float = 0.5
    """In nats, [0, 1e6], inclusive. dParallel uses 0.5, and 0.45 for MBPP and Dream."""

    name: ClassVar[str] = "entropy_threshold"

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0, 1e6)

    def order(self, stats: RowStatistics) -> Tensor:
        return -stats.entropy

    def qualifies(self, stats: RowStatistics, view: View) -> Tensor:
        return stats.entropy <= stats.entropy.new_tensor(self.threshold)
