# SPDX-License-Identifier: Apache-2.0
"""What a decoding rule is: which rows it appends to a forward, and which predictions it commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError, expected
from ..ops import CONFIDENT, FORCED, Superposed, Switches
from ..ops.sampling.reference import uniform
from ..ops.validation import number

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.spec import ModelSpec
    from ..statistics import RowStatistics

__all__ = [
    "BLOCK_ROWS",
    "CANDIDATES",
    "CANVAS",
    "FULL_ATTENTION",
    "NEW_TOKENS",
    "NEXT_BLOCK",
    "NO_SHIFT",
    "BaseRule",
    "Decision",
    "Strategy",
    "View",
    "check_choice",
    "check_count",
    "check_range",
    "check_runs_on",
    "even_share",
    "noise",
    "ranks",
    "reasons",
    "schedule",
    "steps_per_block",
]

CANDIDATES, NEXT_BLOCK, CANVAS = "candidates", "next block", "canvas"
BLOCK_ROWS, NO_SHIFT, FULL_ATTENTION, NEW_TOKENS = "block rows", "no shift", "full attention", "new tokens"


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
    canvas: Canvas
    """Where each sample stands: block numbers, masks left, forwards made on the block (all on the host)."""
    seeds: Tensor
    """(B,) int64: the samples' seeds."""
    step: int
    """The coming forward, counted from 1; in `accept`, the one just made."""
    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    early_stop: bool = True
    """These four as in DecodeConfig."""


@dataclass(frozen=True, eq=False)
class Decision:
    """What to commit."""

    token: Tensor
    """(B, T) int64."""
    reason: Tensor
    """(B, T) int32: 0 leaves a position as it is; 1 confident, 2 converged, 3 forced."""
    confidence: Tensor | None = None
    """(B, T) float32: the tokens' probabilities, for the history; None is `stats.prob1`."""
    column: Tensor | None = None
    """(B, T') int64 columns of the canvas, -1 for none, to which the others then belong; None is `view.targets`."""


class Strategy:
    """Base of all decoding rules; a rule of your own is a frozen dataclass that overrides `accept`.

    Pass it as an object: `decode(model, ids, strategy=MyRule(...))`. Every forward must commit at least one target
    of every sample, unless `max_forwards` says otherwise.
    """

    name: ClassVar[str] = "custom"
    needs: ClassVar[frozenset[str]] = frozenset()
    """What costs something and is done only for rules that name it. "candidates": the loop keeps the tokens with
    p >= `eta` of each forward for the next one. "next block": it calls `look_into`. "canvas": rows outside of the block
    are read, which caches and block-causal models do not always compute. "block rows": those of tokens in the block are
    read, which cache="delayed" does not compute. And what it does not run on: "no shift" refuses models with shifted
    logits, "full attention" those that are block-causal, "new tokens" infilling."""
    revises: ClassVar[bool] = False
    """Whether it may change or mask again what it has committed in the current block; it is streamed by blocks then."""
    whole_canvas: ClassVar[bool] = False
    """Whether the rule knows no blocks: its block is everything generated, unless `block_length` is given."""
    eta: float = 1.0
    """Probability from which a token is a candidate."""
    parity: str | None = None
    """Whose public code to follow in its quirks."""

    @property
    def appends(self) -> bool:
        """Whether this rule has a `superpose` of its own."""
        return type(self).superpose is not Strategy.superpose

    @property
    def switches(self) -> Switches:
        """Who sees whom among the appended rows."""
        return Switches()

    def max_forwards(self, canvas: Canvas) -> int | None:
        """Bound on a sample's forwards; None for rules that commit a target of every sample in every forward."""
        return None

    def start(self, canvas: Canvas) -> Any:
        """State carried from step to step; None, or an object with `select(index)` that follows the batch."""
        return None

    def superpose(self, view: View, state: Any) -> Superposed | None:
        """Rows to append to the next forward; None for none."""
        return None

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        """Which targets to commit, and with which token."""
        raise TypeError(f"{type(self).__name__} is a Strategy without an accept(stats, view, state) method.")

    def look_into(self, state: Any, sample: Tensor, column: Tensor, logits: Tensor) -> None:
        """What the forward just made predicts in blocks that samples have entered: (n,), (n,) and (n, V).

        Called for rules that need "next block", where that forward computed all rows of the block.
        """

    def leaving(self, canvas: Canvas, state: Any) -> list[int]:
        """Samples (indices of the batch) that leave their block after this forward: those without a mask in it."""
        return [i for i, left in enumerate(canvas.left) if not left]


class BaseRule(Strategy):
    """A rule that looks at one forward alone: what qualifies is committed, or else the first in its order.

    LEAP can stand on any of these: `Leap(base=...)`.
    """

    def qualifies(self, stats: RowStatistics, view: View) -> Tensor:
        """(B, T) bool: the targets that the rule commits; what it says of no targets does not matter."""
        raise TypeError(f"{type(self).__name__} is a BaseRule without a qualifies(stats, view) method.")

    def order(self, stats: RowStatistics) -> Tensor:
        """(B, T) what to rank the targets by, the highest first."""
        return stats.prob1

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        rank = ranks(self.order(stats), view.targets)
        return Decision(stats.top1, reasons(self.qualifies(stats, view), rank, view.targets))


# --- what several rules share ----------------------------------------------------------------------------------------


def noise(view: View) -> Tensor:
    """(B, T) uniforms in (0, 1) from the samples' seeds, the step and the targets' positions."""
    pos = view.pos.gather(1, view.targets.clamp(min=0).long()).long()
    step, no_token = torch.tensor(view.step), torch.tensor(-1)  # where tokens are drawn, an id stands here
    return uniform(view.seeds[:, None], step, pos, no_token)


def ranks(score: Tensor, targets: Tensor) -> Tensor:
    """(B, T) rank of each target by falling score, from 0; the lowest position first on a tie, no targets last."""
    order = score.masked_fill(targets < 0, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    return torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )


def reasons(qualified: Tensor, rank: Tensor, targets: Tensor) -> Tensor:
    """(B, T) int32: CONFIDENT where a target qualified; where none of a sample did, FORCED for its first by rank."""
    qualified = qualified & (targets >= 0)
    first = (rank == 0) & (targets >= 0) & ~qualified.any(1, keepdim=True)
    return torch.where(qualified, CONFIDENT, torch.where(first, FORCED, 0)).to(torch.int32)


def check_runs_on(strategy: Strategy, *, shift: int, block_causal: int, cache: str, infill: bool) -> None:
    """ConfigError for a rule that this model, cache or task does not give what it `needs`."""
    for need, missing, why in (
        (CANVAS, block_causal, "reads rows of the whole canvas, which block-causal models do not compute every time"),
        (CANVAS, cache != "none", f"reads rows of the whole canvas, which cache={cache!r} does not compute every time"),
        (BLOCK_ROWS, cache == "delayed", "with edits reads tokens that are committed; cache='delayed' leaves them out"),
        (NEW_TOKENS, infill, "decodes what is behind the prompt; with infill=True nothing is"),
        (NO_SHIFT, shift, "does not run on models with shifted logits (docs/strategies.md says why)"),
        (FULL_ATTENTION, block_causal, "does not run on models that are block-causal (docs/strategies.md says why)"),
    ):
        if missing and need in strategy.needs:
            raise ConfigError(f"strategy {strategy.name!r} {why}.")


def even_share(masks: int, steps: int, step: int) -> int:
    """How many of `masks` the `step`-th of `steps` steps commits, from 0: evenly, the remainder to the first steps."""
    return masks // steps + (step < masks % steps)


def schedule(canvas: Canvas, steps: int | None) -> list[int]:
    """(B,) commits of the coming forward where `steps` are spread evenly over blocks and masks; None is one a step."""
    per_block = steps_per_block(canvas, steps)
    if per_block is None:
        return [min(1, left) for left in canvas.left]
    return [even_share(*now) for now in zip(canvas.entered, per_block, canvas.forwards, strict=True)]


def steps_per_block(canvas: Canvas, steps: int | None) -> list[int] | None:
    """(B,) `steps` divided among the blocks of each sample; ConfigError where that does not go."""
    if steps is None:
        return None
    for blocks in canvas.blocks:
        if blocks and steps % len(blocks):
            masks = sum(block.masks for block in blocks)
            what = f"a multiple of the {len(blocks)} blocks ({masks} new tokens of {canvas.block_length} a block)"
            raise ConfigError(expected("steps", what, steps))
    return [steps // max(len(blocks), 1) for blocks in canvas.blocks]


def check_range(name: str, value: object, low: float, high: float) -> None:
    """Refuse an option outside [low, high]."""
    number(name, value, low, high, f"a number in [{low:g}, {high:g}]")


def check_count(name: str, value: object, *, none: bool = False) -> None:
    """Refuse an option that is no whole number of at least 1 (or None, with `none`)."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not whole and not (none and value is None):
        raise ConfigError(expected(name, "a whole number of at least 1" + ", or None" * none, repr(value)))


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """Refuse an option that is none of `choices`."""
    if value not in choices:
        raise ConfigError(expected(name, "one of " + ", ".join(str(c) for c in choices), repr(value)))
