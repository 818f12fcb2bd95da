# SPDX-License-Identifier: Apache-2.0
"""What a decoding rule is: which rows it appends to a forward, and which predictions it commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..ops import Superposed, Switches
from ..ops.validation import number

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.spec import ModelSpec
    from ..statistics import RowStatistics

__all__ = ["Decision", "Strategy", "View", "check_range"]


@dataclass(frozen=True, eq=False)
class View:
    """What a strategy may look at: B samples, up to T masked targets each."""

    ids: Tensor
    """(B, L) int64: the canvas."""
    pos: Tensor
    """(B, L) int32: position of each column."""
    targets: Tensor
    """(B, T) int32: columns of the masked positions of the current block, rising; -1 where a sample has fewer."""
    cand_ids: Tensor | None
    """(B, T, K) int64: tokens that had p >= eta at these targets in the sample's previous forward, by rank."""
    cand_counts: Tensor | None
    """(B, T) int32: how many; None before the first forward and for strategies that need none."""
    spec: ModelSpec
    backend: str


@dataclass(frozen=True, eq=False)
class Decision:
    """What to commit."""

    token: Tensor
    """(B, T) int64."""
    reason: Tensor
    """(B, T) int32: 0 leaves the target masked; 1 confident, 2 converged, 3 forced."""


class Strategy:
    """Base of all decoding rules; a rule of your own is a frozen dataclass that overrides `accept`.

    Pass it as an object: `decode(model, ids, strategy=MyRule(...))`. Every forward must commit at least one target
    of every sample.
    """

    name: ClassVar[str] = "custom"
    needs_candidates: ClassVar[bool] = False
    """Whether the loop keeps the tokens with p >= eta of each forward for the next one."""
    eta: float = 1.0
    """Probability from which a token is a candidate."""

    @property
    def appends(self) -> bool:
        """Whether this rule has a `superpose` of its own."""
        return type(self).superpose is not Strategy.superpose

    @property
    def switches(self) -> Switches:
        """Who sees whom among the appended rows."""
        return Switches()

    def start(self, canvas: Canvas) -> Any:
        """State carried from step to step; None, or an object with `select(index)` that follows the batch."""
        return None

    def superpose(self, view: View, state: Any) -> Superposed | None:
        """Rows to append to the next forward; None for none."""
        return None

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        """Which targets to commit, and with which token."""
        raise TypeError(f"{type(self).__name__} is a Strategy without an accept(stats, view, state) method.")


def check_range(name: str, value: object, low: float, high: float) -> None:
    """Refuse an option outside [low, high]."""
    number(name, value, low, high, f"a number in [{low:g}, {high:g}]")
