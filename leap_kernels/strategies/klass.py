# SPDX-License-Identifier: Apache-2.0
"""`klass`: commit what is confident and has stopped changing (KLASS)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..ops import CONFIDENT, FORCED
from ..statistics import RowStatistics
from .base import (
    NEXT_BLOCK,
    Decision,
    Strategy,
    View,
    check_choice,
    check_count,
    check_range,
    noise,
    ranks,
    schedule,
    steps_per_block,
)

if TYPE_CHECKING:
    from ..canvas import Canvas

__all__ = ["Klass"]


@dataclass(frozen=True)
class Klass(Strategy):
    """Commit { i : c_i > conf_threshold, and KL(p_i now, p_i before) < kl_threshold in the last `history` forwards }.

    Both strict, c from a softmax in float64. If that is empty, the k most confident targets, k the even share of
    `steps`. The forward that finished a block has read the next one as well, so the first KL of a block compares with
    that; a sample's first forward has nothing to compare with, and `history` forwards of a block must have passed.
    """

    conf_threshold: float = 0.9
    """In [0, 1]. Tuned for LLaDA: 0.6 (GSM8K, MATH), 0.9 (HumanEval), 0.7 (MBPP); Dream: 0.9, HumanEval 0.8."""
    kl_threshold: float = 0.01
    """In nats, [0, 1e6]. Tuned for LLaDA: 0.015 (GSM8K), 0.01; Dream: 0.005 (MATH), 0.001."""
    history: int = 2
    """Forwards that must agree, at least 1."""
    steps: int | None = None
    """Forwards of the schedule that commits when nothing is ready; None: as many as tokens, so one token."""
    select: str = "all"
    """Which of the ready targets: "all", the most "confident", the one of lowest "kl", or a "random" one."""
    parity: str | None = None
    """None, or "klass": KL in float64, and 1e-12 added inside its logarithms."""

    name: ClassVar[str] = "klass"
    needs: ClassVar[frozenset[str]] = frozenset({NEXT_BLOCK})

    def __post_init__(self) -> None:
        check_range("conf_threshold", self.conf_threshold, 0, 1)
        check_range("kl_threshold", self.kl_threshold, 0, 1e6)
        check_count("history", self.history)
        check_count("steps", self.steps, none=True)
        check_choice("select", self.select, ("all", "confident", "kl", "random"))
        check_choice("parity", self.parity, (None, "klass"))

    def start(self, canvas: Canvas) -> _State:
        steps_per_block(canvas, self.steps)
        return _State(canvas)

    def look_into(self, state: _State, sample: Tensor, column: Tensor, logits: Tensor) -> None:
        state.store(sample, column, logits)

    def accept(self, stats: RowStatistics, view: View, state: _State) -> Decision:
        there = view.targets >= 0
        kl = self._divergence(stats, view, state)
        c = stats.exact_prob1()  # early on most targets are sure: float32 cannot rank what is 1e-8 from 1
        limit_kl = kl.new_tensor(self.kl_threshold)
        stable = state.stable_for(stats.sample, stats.flat(view.targets).long(), stats.flat(kl < limit_kl))
        ready = (stats.spread(stable) >= self.history) & (c > self.conf_threshold) & there
        if self.select != "all":
            ready &= ranks(self._preference(c, kl, view).masked_fill(~ready, float("-inf")), view.targets) == 0
        left = view.canvas.left
        k = [min(max(k, 1), n) for k, n in zip(schedule(view.canvas, self.steps), left, strict=True)]
        top = (ranks(c, view.targets) < torch.tensor(k, device=c.device)[:, None]) & ~ready.any(1, keepdim=True) & there
        return Decision(stats.top1, torch.where(ready, CONFIDENT, torch.where(top, FORCED, 0)).to(torch.int32))

    def _divergence(self, stats: RowStatistics, view: View, state: _State) -> Tensor:
        """(B, T) KL of each target's distribution from the one before, +inf without one; remembers this one."""
        sample, column = stats.sample, stats.flat(view.targets).long()
        before, known = state.before(sample, column, stats.logits)
        kl = _kl(stats.logits, before, stats.forward.suppress, exact=self.parity is not None)
        state.store(sample, column, stats.logits)
        return stats.spread(kl.masked_fill(~known, float("inf")))

    def _preference(self, c: Tensor, kl: Tensor, view: View) -> Tensor:
        """(B, T) which of the ready targets goes first."""
        if self.select == "random":
            return noise(view).to(c.dtype)
        return c if self.select == "confident" else -kl


class _State:
    """By sample and generated column: the logits before, and for how many forwards they have hardly moved."""

    def __init__(self, canvas: Canvas) -> None:
        self.canvas = canvas
        self.known = torch.zeros(canvas.step.shape, dtype=torch.bool, device=canvas.device)
        self.streak = torch.zeros_like(canvas.step)
        self.logits: Tensor | None = None
        """(B, block_length, V): of the current block, or of the next once a sample has entered it."""

    def before(self, sample: Tensor, column: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """(n, V) logits that these columns had in the forward before, and (n,) whether they had any."""
        if self.logits is None:
            batch, block = len(self.canvas.sample), self.canvas.block_length
            self.logits = like.new_zeros((batch, block, like.shape[1]))
        offset = column - self.canvas.prompt
        return self.logits[sample, offset - self.canvas.start[sample, 0]], self.known[sample, offset]

    def store(self, sample: Tensor, column: Tensor, logits: Tensor) -> None:
        assert self.logits is not None
        offset = column - self.canvas.prompt
        self.logits[sample, offset - self.canvas.start[sample, 0]] = logits
        self.known[sample, offset] = True

    def stable_for(self, sample: Tensor, column: Tensor, still: Tensor) -> Tensor:
        """(n,) forwards in a row, this one included, in which a column was `still`."""
        at = (sample, column - self.canvas.prompt)
        self.streak[at] = torch.where(still, self.streak[at] + 1, 0)
        return self.streak[at]

    def select(self, index: Tensor) -> None:
        self.known, self.streak = self.known[index], self.streak[index]
        if self.logits is not None:
            self.logits = self.logits[index]


def _kl(now: Tensor, before: Tensor, suppress: Tensor, *, exact: bool) -> Tensor:
    """(n,) sum_v p_v (ln p_v - ln q_v) of the softmaxes of (n, V) logits."""
    if exact:
        p, q = (x.double().index_fill(1, suppress, float("-inf")).softmax(1) for x in (now, before))
        return (p * ((p + 1e-12).log() - (q + 1e-12).log())).sum(1)
    log_p, log_q = (x.float().index_fill(1, suppress, float("-inf")).log_softmax(1) for x in (now, before))
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(1).clamp(min=0)
