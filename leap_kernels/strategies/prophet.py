# SPDX-License-Identifier: Apache-2.0
"""`prophet`: one token a forward until the answer is clear, then everything at once (Prophet)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError, expected
from ..ops import CONFIDENT, FORCED
from ..statistics import RowStatistics
from .base import (
    CANVAS,
    NEW_TOKENS,
    Decision,
    Strategy,
    View,
    check_choice,
    check_count,
    ranks,
    schedule,
    steps_per_block,
)

if TYPE_CHECKING:
    from ..canvas import Canvas

__all__ = ["Prophet"]

EARLY, LATE = 0.33, 0.67  # shares of the steps at which the limit falls


@dataclass(frozen=True)
class Prophet(Strategy):
    """`full`, until the mean gap between the two highest logits over the answer reaches a limit; then fill all masks.

    Steps count from 1 over all blocks; below a third of them the first limit holds, below two thirds the second, then
    the third. The forward that reaches it is the sample's last.
    """

    answer_start: int | None = None
    """First generated token of the answer, counted from 0; None measures the gap over everything generated."""
    window: int = 5
    """Tokens of the answer over which the gap is measured, filled ones included."""
    limits: Sequence[float] = (7.5, 5.0, 2.5)
    """Gaps, in logits, that end decoding early, in the middle and late."""
    constraints: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Tokens that are given: generated index (from 0) -> id. They are there before the first forward."""
    steps: int | None = None
    """As in `full`."""
    parity: str | None = None
    """None, or "prophet": the gap of the first sample decides for the whole batch; `window` must be 5."""

    name: ClassVar[str] = "prophet"
    needs: ClassVar[frozenset[str]] = frozenset({CANVAS, NEW_TOKENS})

    def __post_init__(self) -> None:
        if self.answer_start is not None and (type(self.answer_start) is not int or self.answer_start < 0):
            raise ConfigError(
                expected("answer_start", "a whole number of at least 0, or None", repr(self.answer_start))
            )
        check_count("window", self.window)
        check_count("steps", self.steps, none=True)
        check_choice("parity", self.parity, (None, "prophet"))
        if self.parity and self.window != 5:
            raise ConfigError(expected("window", 'the 5 of parity="prophet"', self.window))
        good = isinstance(self.limits, Sequence) and len(self.limits) == 3 and all(map(_is_number, self.limits))
        if not good:
            raise ConfigError(expected("limits", "three numbers", repr(self.limits)))
        object.__setattr__(self, "limits", tuple(self.limits))
        pairs = self.constraints.items() if isinstance(self.constraints, Mapping) else [(None, None)]
        if not all(type(x) is int and x >= 0 for pair in pairs for x in pair):
            what = "a dictionary from generated index to token id, both at least 0"
            raise ConfigError(expected("constraints", what, repr(self.constraints)))
        object.__setattr__(self, "constraints", dict(self.constraints))

    def start(self, canvas: Canvas) -> None:
        steps_per_block(canvas, self.steps)
        new, vocab = min(canvas.n_new), canvas.spec.vocab_size
        if self.answer_start is not None and self.answer_start + self.window > new:
            what = f"at most max_new_tokens {new} - window {self.window}"
            raise ConfigError(expected("answer_start", what, self.answer_start))
        outside = [i for i in self.constraints if i >= new]
        wrong = [t for t in self.constraints.values() if t == canvas.spec.mask_token_id or t >= (vocab or math.inf)]
        if outside or wrong or len(self.constraints) == new:
            what = f"fewer than max_new_tokens {new}, at indices below it, ids of the vocabulary and not the mask token"
            raise ConfigError(expected("constraints", what, dict(self.constraints)))
        canvas.pin(self.constraints)

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        k = torch.tensor(schedule(view.canvas, self.steps), device=view.targets.device)[:, None]
        take = (ranks(stats.prob1, view.targets) < k) & (view.targets >= 0)
        step = Decision(stats.top1, torch.where(take, FORCED, 0).to(torch.int32))
        exits = self._gap(stats, view) >= torch.tensor(self._limits(view.canvas), device=k.device)
        if self.parity:
            exits = exits[:1].expand_as(exits)
        return _with_all_masks(exits, step, stats, view) if bool(exits.any()) else step

    def _gap(self, stats: RowStatistics, view: View) -> Tensor:
        """(B,) mean of largest minus second largest logit over the answer."""
        canvas, device = view.canvas, view.targets.device
        first, counts = 0, canvas.n_new
        if self.answer_start is not None:
            first, counts = self.answer_start, [self.window] * len(canvas.sample)
        places = [(i, canvas.prompt + first + j) for i, count in enumerate(counts) for j in range(count)]
        sample, column = torch.tensor(places, device=device).T
        gap = stats.forward.predict(stats.forward.logits(sample, column), sample, column).gap
        return torch.stack([own.mean() for own in gap.split(counts)])

    def _limits(self, canvas: Canvas) -> list[float]:
        """(B,) the gap from which each sample is done."""
        per_block = steps_per_block(canvas, self.steps) or [canvas.block_length] * len(canvas.sample)
        total = [self.steps or n for n in canvas.n_new]
        where = zip(canvas.block, per_block, canvas.forwards, total, strict=True)
        progress = [(block * steps + j + 1) / all_steps for block, steps, j, all_steps in where]
        return [self.limits[0 if p < EARLY else 1 if p < LATE else 2] for p in progress]


def _with_all_masks(exits: Tensor, step: Decision, stats: RowStatistics, view: View) -> Decision:
    """`step` for most samples; for those that exit, every mask of the canvas with what this forward predicts there."""
    prompt, generated = view.canvas.prompt, view.ids[:, view.canvas.prompt :]
    column = torch.arange(generated.shape[1], device=exits.device).expand_as(generated) + prompt
    token, reason = torch.zeros_like(generated), torch.zeros_like(generated, dtype=torch.int32)
    confidence = torch.zeros_like(generated, dtype=torch.float32)

    sample = stats.sample
    offset = stats.flat(view.targets).long() - prompt
    token[sample, offset], reason[sample, offset] = stats.flat(step.token), stats.flat(step.reason)
    confidence[sample, offset] = stats.flat(stats.prob1)

    sample, offset = ((generated == view.spec.mask_token_id) & exits[:, None]).nonzero().T
    there = stats.forward.predict(stats.forward.logits(sample, prompt + offset), sample, prompt + offset)
    token[sample, offset], confidence[sample, offset] = there.top1, there.prob1
    reason[sample, offset] = CONFIDENT
    return Decision(token, reason, confidence, torch.where(reason > 0, column, -1))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
