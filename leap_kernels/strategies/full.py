# SPDX-License-Identifier: Apache-2.0
"""`full`: one token a forward, the most confident of the block. The yardstick of every speed-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..ops import check_consistency
from ..statistics import RowStatistics
from .base import Decision, Strategy, View

__all__ = ["Full"]


@dataclass(frozen=True)
class Full(Strategy):
    """LLaDA's low-confidence remasking with as many steps as tokens (decoders.md 2.1); the lowest position on a tie."""

    name: ClassVar[str] = "full"

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        # No probability exceeds 1, so nothing is confident and the single best target is forced.
        verdict = check_consistency(
            view.targets, stats.top1, stats.prob1, stats.copy_top1, stats.copy_prob1, phi=1.0, backend=view.backend
        )
        return Decision(stats.top1, verdict.reason)
