# SPDX-License-Identifier: Apache-2.0
"""`threshold`: confidence-based parallel decoding, the baseline LEAP is compared with (Fast-dLLM; paper Eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..ops import check_consistency
from ..statistics import RowStatistics
from .base import Decision, Strategy, View, check_range

__all__ = ["Threshold"]


@dataclass(frozen=True)
class Threshold(Strategy):
    """Commit { i : c_i > threshold }; if that is empty, the most confident target."""

    threshold: float = 0.9
    """phi, in [0, 1]; strict. The paper and Fast-dLLM use 0.9."""

    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0, 1)

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        verdict = check_consistency(
            view.targets, stats.top1, stats.prob1, stats.copy_top1, stats.copy_prob1,
            phi=self.threshold, backend=view.backend,
        )  # fmt: skip
        return Decision(stats.top1, verdict.reason)
