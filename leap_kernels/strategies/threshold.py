# SPDX-License-Identifier: Apache-2.0
"""`threshold`: confidence-based parallel decoding, the baseline LEAP is compared with (Fast-dLLM; paper Eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..ops import check_consistency
from ..statistics import RowStatistics
from .base import BaseRule, Decision, View, check_choice, check_range
from .editing import MOST_EDIT_FORWARDS, Edits

__all__ = ["Threshold"]


@dataclass(frozen=True)
class Threshold(Edits, BaseRule):
    """Commit { i : c_i > threshold }; if that is empty, the most confident target."""

    threshold: float = 0.9
    """phi, in [0, 1]; strict. The paper and Fast-dLLM use 0.9."""
    parity: str | None = None
    """None, or "fast_dllm": c_i >= threshold, with c from a softmax in float64."""
    edit_threshold: float | None = None
    """Probability above which another token replaces one committed in the current block, in [0, 1]; LLaDA2.1 uses 0.9.
    None: what is committed stays."""
    edit_forwards: int = MOST_EDIT_FORWARDS
    """With `edit_threshold`: forwards for edits alone that a block without masks gets at most, at least 0."""

    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0, 1)
        check_choice("parity", self.parity, (None, "fast_dllm"))
        self.check_edits()

    def qualifies(self, stats: RowStatistics, view: View) -> Tensor:
        if self.parity:
            return stats.exact_prob1() >= self.threshold
        return stats.prob1 > stats.prob1.new_tensor(self.threshold)  # rounded to float32

    def order(self, stats: RowStatistics) -> Tensor:
        return stats.exact_prob1() if self.parity else stats.prob1

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        return self.with_edits(self._commits(stats, view, state), stats, view, state)

    def _commits(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        if self.parity:
            return BaseRule.accept(self, stats, view, state)
        verdict = check_consistency(  # one launch on a GPU
            view.targets, stats.top1, stats.prob1, stats.copy_top1, stats.copy_prob1,
            phi=self.threshold, backend=view.backend,
        )  # fmt: skip
        return Decision(stats.top1, verdict.reason)
