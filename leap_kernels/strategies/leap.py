# SPDX-License-Identifier: Apache-2.0
"""`leap`: commit early what survives a look ahead (arXiv 2605.10980; method.md is the specification)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError, expected
from ..ops import Superposed, Switches, check_consistency, superpose
from ..ops.validation import flag
from ..statistics import RowStatistics
from .base import CANDIDATES, BaseRule, Decision, View, check_range
from .editing import MOST_EDIT_FORWARDS, Edits
from .entropy import Entropy
from .entropy_threshold import EntropyThreshold
from .factor import Factor

__all__ = ["Leap"]

BASES: dict[str, Callable[[], BaseRule | None]] = {
    "threshold": lambda: None,
    **{rule.name: rule for rule in (Factor, Entropy, EntropyThreshold)},
}


@dataclass(frozen=True)
class Leap(Edits):
    """Append copies of the masked tokens and their likely values; commit what the copies predict as well.

    accept = { i : c_i > threshold } + { i : copy's argmax = y_i and c_i >= tau }, at least one (paper Eqs. 8 to 11).
    """

    threshold: float = 0.9
    """phi, in [0, 1]: confidence above which a token is committed whatever its copy says (paper Eq. 3)."""
    tau: float = 0.7
    """Confidence from which agreement of copy and base commits, in [0, 1] (paper Eq. 11)."""
    eta: float = 0.2
    """Probability from which a token is a candidate, in [1/64, 1] (paper Eq. 8)."""
    keep_confident: bool = True
    """Keep the first set where the copy disagrees; False is Eq. 11 alone."""
    copy_threshold: float = 0.0
    """Probability the copy must give its argmax, in [0, 1]; 0 is the paper (ours, method.md 5.3)."""
    require_lookahead: bool = False
    """A copy that sees no candidate at another position is no evidence (ours, method.md 4)."""
    copy_sees_original: bool = True
    """A copy sees the base row at its own position."""
    copies_see_copies: bool = True
    """A copy sees the copies of other targets."""
    candidates_see_candidates: bool = True
    """A candidate sees the candidates of other targets."""
    candidates_see_copies: bool = True
    """A candidate sees the copies of other targets."""
    base: str | BaseRule = "threshold"
    """The rule whose set is kept beside what the copies agree on: "threshold" (with the `threshold` above), "factor",
    "entropy" or "entropy_threshold" with their defaults, or an object such as EntropyThreshold(0.45)."""
    edit_threshold: float | None = None
    """Probability above which another token replaces one committed in the current block, by base rows alone, in [0, 1];
    LLaDA2.1 uses 0.9. None: what is committed stays."""
    edit_forwards: int = MOST_EDIT_FORWARDS
    """With `edit_threshold`: forwards for edits alone that a block without masks gets at most, at least 0."""

    name: ClassVar[str] = "leap"
    needs: ClassVar[frozenset[str]] = frozenset({CANDIDATES})

    def __post_init__(self) -> None:
        for name in ("threshold", "tau", "copy_threshold"):
            check_range(name, getattr(self, name), 0, 1)
        check_range("eta", self.eta, 1 / 64, 1)
        for name in ("keep_confident", "require_lookahead"):
            flag(name, getattr(self, name))
        self.switches  # noqa: B018 - checks the four
        if not isinstance(self.base, BaseRule) and not (isinstance(self.base, str) and self.base in BASES):
            what = f"one of {', '.join(BASES)}, or an object of such a rule"
            raise ConfigError(expected("base", what, repr(self.base)))
        if self.base != "threshold" and self.threshold != Leap.threshold:
            raise ConfigError('threshold belongs to base="threshold". Pass an object: base=EntropyThreshold(0.45).')
        if getattr(self.base, "edit_threshold", None) is not None:
            raise ConfigError("edit_threshold is an option of leap itself, not of its base.")
        self.check_edits()

    @property
    def switches(self) -> Switches:
        return Switches(
            self.copy_sees_original, self.copies_see_copies, self.candidates_see_candidates, self.candidates_see_copies
        )

    def superpose(self, view: View, state: Any) -> Superposed | None:
        if view.cand_ids is None or view.cand_counts is None or not view.targets.shape[1]:
            return None
        return superpose(
            view.ids, view.pos, view.targets, view.cand_ids, view.cand_counts,
            mask_id=view.spec.mask_token_id, shift=view.spec.shift, backend=view.backend,
        )  # fmt: skip

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        copy_top1 = stats.copy_top1
        if self.require_lookahead and view.cand_counts is not None:
            copy_top1 = copy_top1.masked_fill(~_looks_ahead(view), -1)
        base = self.base if isinstance(self.base, BaseRule) else BASES[self.base]()
        verdict = check_consistency(
            view.targets, stats.top1, stats.prob1, copy_top1, stats.copy_prob1,
            phi=self.threshold, tau=self.tau, kappa=self.copy_threshold, keep_confident=self.keep_confident,
            base_accept=None if base is None else base.qualifies(stats, view), backend=view.backend,
        )  # fmt: skip
        return self.with_edits(Decision(stats.top1, verdict.reason), stats, view, state)


def _looks_ahead(view: View) -> Tensor:
    """(B, T) bool: whether the target's copy sees a candidate at another position."""
    assert view.cand_counts is not None
    pos = view.pos.gather(1, view.targets.clamp(min=0).long())
    has = (view.targets >= 0) & (view.cand_counts > 0)
    sees = has[:, None, :] & (pos[:, None, :] != pos[:, :, None])
    if view.spec.block_causal_length:
        block = view.spec.block_causal_length
        own = torch.div(pos - view.spec.shift, block, rounding_mode="floor")
        sees = sees & (torch.div(pos, block, rounding_mode="floor")[:, None, :] <= own[:, :, None])
    return sees.any(2)
