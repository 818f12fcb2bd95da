# SPDX-License-Identifier: Apache-2.0
"""`full`: a fixed number of tokens a forward. One, the most confident, is the yardstick of every speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError, expected
from ..ops import FORCED
from ..statistics import RowStatistics
from .base import Decision, Strategy, View, check_choice, check_count, noise, ranks, schedule, steps_per_block

if TYPE_CHECKING:
    from ..canvas import Canvas

__all__ = ["Full"]


@dataclass(frozen=True)
class Full(Strategy):
    """LLaDA's decoder (decoders.md 2.1): each block's masks are spread evenly over its share of the steps.

    A forward commits the k highest-ranking targets, the lowest position first on a tie. Steps that have nothing to
    commit run no forward. parity="llada" runs them (the end of a block with fewer masks than steps), draws `random`
    ranks for the whole canvas from torch's generator, and defers as its code does.
    """

    steps: int | None = None
    """Forwards for the whole canvas, a multiple of its number of blocks; None: as many as tokens, one token each."""
    remasking: str = "low_confidence"
    """What ranks the targets: "low_confidence" (the highest confidence first) or "random"."""
    defer_tokens: Sequence[int] = ()
    """Ids whose predictions rank last, such as EOS."""
    parity: str | None = None
    """None or "llada"."""

    name: ClassVar[str] = "full"

    def __post_init__(self) -> None:
        check_count("steps", self.steps, none=True)
        check_choice("remasking", self.remasking, ("low_confidence", "random"))
        check_choice("parity", self.parity, (None, "llada"))
        ids = self.defer_tokens
        if not isinstance(ids, Sequence) or not all(type(i) is int and i >= 0 for i in ids):
            raise ConfigError(expected("defer_tokens", "token ids of at least 0", repr(ids)))
        object.__setattr__(self, "defer_tokens", tuple(ids))

    def start(self, canvas: Canvas) -> None:
        steps_per_block(canvas, self.steps)

    def max_forwards(self, canvas: Canvas) -> int | None:
        return self.steps if self.parity else None

    def leaving(self, canvas: Canvas, state: Any) -> list[int]:
        clean = super().leaving(canvas, state)
        least = steps_per_block(canvas, self.steps) if self.parity else None
        return [i for i in clean if canvas.forwards[i] >= least[i]] if least else clean

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        k = torch.tensor(schedule(view.canvas, self.steps), device=view.targets.device)[:, None]
        take = (ranks(self.score(stats, view), view.targets) < k) & (view.targets >= 0)
        return Decision(stats.top1, torch.where(take, FORCED, 0).to(torch.int32))

    def score(self, stats: RowStatistics, view: View) -> Tensor:
        """(B, T) what ranks the targets."""
        column = view.targets.clamp(min=0).long()
        if self.remasking == "low_confidence":
            score = stats.prob1
        elif self.parity:
            score = torch.rand(view.ids.shape, device=column.device).gather(1, column)
        else:
            score = noise(view)
        if not self.defer_tokens or (self.parity and self.remasking == "random"):
            return score
        ids = torch.tensor(self.defer_tokens, device=column.device)
        if not self.parity:
            return score.masked_fill(torch.isin(stats.top1, ids), float("-inf"))
        # LLaDA's code masks the first id in the noised logits and the others in those that give the confidence; without
        # temperature both are one tensor. The confidence is then that of a softmax without these ids.
        ids = ids[1:] if view.temperature > 0 else ids
        kept = stats.logits.float().index_fill(1, torch.cat([stats.forward.suppress, ids]), float("-inf"))
        return stats.spread(kept.softmax(1).gather(1, stats.flat(stats.top1)[:, None])[:, 0])
