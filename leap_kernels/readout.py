# SPDX-License-Identifier: Apache-2.0
"""`Readout`: from the rows of a forward to predictions at those that decide, and at no others."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .canvas import Canvas
from .config import DecodeConfig
from .errors import BadLogitsError, ModelError, expected
from .likely import keep_likely
from .models.backbone import Backbone
from .ops import TopEta, max_candidates, sample_rows
from .ops.candidates.api import unchecked_top_eta
from .rows import Rows
from .statistics import Forward, RowStatistics
from .strategies import View

__all__ = ["Deciding", "Readout"]


@dataclass
class Deciding:
    """The rows that decide in one forward: n masked targets, m of them with a copy."""

    sample: Tensor
    """(n,) which sample of the batch."""
    place: Tensor
    """(n,) index into the flattened (B, T) targets."""
    column: Tensor
    """(n,) the target's canvas column."""
    has_copy: Tensor
    """(m,) indices into the n."""
    copy_row: Tensor
    """(m,) the row of the copy."""

    @classmethod
    def of(cls, targets: Tensor, rows: Rows, left: list[int], copies: list[int]) -> Deciding:
        """The targets without the padding of ragged batches. The host knows how many (`left`, `copies`: of each
        sample), so nothing waits for a GPU."""
        n, column = sum(left), targets.flatten().long()
        if n == targets.numel():
            place = torch.arange(n, device=targets.device)
        else:
            place = torch.nonzero_static(column >= 0, size=n)[:, 0]
            column = column[place]
        sample = torch.div(place, targets.shape[1], rounding_mode="floor")
        if rows.copy_row is None:
            return cls(sample, place, column, place[:0], place[:0])
        # Wider than the targets where a commit came between.
        copy_row = rows.copy_row[sample, place - sample * targets.shape[1]]
        has_copy = torch.nonzero_static(copy_row >= 0, size=sum(copies))[:, 0]
        return cls(sample, place, column, has_copy, rows.base + copy_row[has_copy])


class Readout:
    """What one `decode` call reads from its model, whose rows follow the unfinished samples of `canvas`."""

    def __init__(self, canvas: Canvas, backbone: Backbone, config: DecodeConfig, eta: float) -> None:
        self.canvas, self.backbone, self.config, self.eta = canvas, backbone, config, eta
        # The mask token is never predicted, whatever its logit.
        self.suppress = torch.tensor(sorted({canvas.spec.mask_token_id, *config.suppress_tokens}), device=canvas.device)
        seeds = [config.seed] * len(canvas.sample) if isinstance(config.seed, int) else list(config.seed)
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=canvas.device)
        self.width = 0
        """Of the logits, known from the first forward on."""
        self.most = 0
        """Candidates that a row can have at most, known then too."""
        self.now = 0
        """The latest forward."""
        self.seconds = {"body": 0.0, "head": 0.0}

    def forward(self, rows: Rows, now: int) -> Forward:
        """Run the model's body on the rows of forward `now`, counted from 1."""
        self.now = now
        hidden = self._timed("body", self.backbone.body, rows)
        row = functools.partial(self._row, rows)
        return Forward(hidden, rows.base, self._head, row, self._drawn, self.suppress, self.config.backend)

    def measure(self, forward: Forward, view: View, deciding: Deciding) -> tuple[RowStatistics, TopEta, Tensor]:
        """Head and `top_eta` on the rows that decide: the masked targets and their copies.

        Returns what a strategy decides on, `top_eta` of the targets, and of every row whether it decides nothing.
        """
        sample, column, place, n = deciding.sample, deciding.column, deciding.place, len(deciding.sample)
        of, row = sample, forward.row(sample, column)
        if len(deciding.copy_row):
            of, row = torch.cat([of, sample[deciding.has_copy]]), torch.cat([row, deciding.copy_row])
        logits = self._head(forward.hidden[of, row])
        if not self.width:
            self._learn_width(logits.shape[1])
        top = self.top_eta(logits)
        base, copies = top, None
        if len(logits) > n:
            base, copy = TopEta(*(t[:n] for t in top)), TopEta(*(t[n:] for t in top))
            copies, logits = (copy, place[deciding.has_copy]), logits[:n]
        predicted = self._drawn(logits, base, sample, column)
        shape = (view.targets.shape[0], view.targets.shape[1])
        stats = RowStatistics.of_rows(place, shape, predicted, copies, logits, forward)
        return stats, base, top.top1 < 0

    def top_eta(self, logits: Tensor) -> TopEta:
        """With the strategy's eta, never of a suppressed token."""
        every = torch.arange(len(logits), device=logits.device)
        return unchecked_top_eta(logits, every, self.eta, self.most, self.suppress, self.config.backend)

    def report_bad(self, bad: Tensor, view: View, deciding: Deciding, forward: Forward) -> None:
        """Raise with the first row whose logits decide nothing."""
        with_copy, n = deciding.has_copy, len(deciding.sample)
        everything = [
            (bad[:n], deciding.sample, deciding.column, "base row"),
            (bad[n:], deciding.sample[with_copy], deciding.column[with_copy], "mask copy"),
            *((*flags_and_place, "row read by the strategy") for flags_and_place in forward.bad),
        ]
        flags, samples, columns, what = next(found for found in everything if found[0].any())
        row = int(flags.nonzero()[0])
        sample = int(samples[row])
        position = int(view.pos[sample, columns[row]]) - view.spec.position_offset
        raise BadLogitsError(
            f"NaN, +inf or no finite logit at step {self.now}, position {position} "
            f"of sample {self.canvas.sample[sample]} ({what}). "
            "Check the model's weights and dtype (float16 overflows where bfloat16 does not) and suppress_tokens."
        )

    def select(self, index: Tensor) -> None:
        """Follow the batch."""
        self.seeds = self.seeds[index]

    def _drawn(self, logits: Tensor, top: TopEta, sample: Tensor, column: Tensor) -> TopEta:
        """`top` of n rows, with temperature the drawn tokens and their probabilities in place of the likeliest ones."""
        config = self.config
        if config.temperature <= 0:
            return top
        pos = self.canvas.pos[sample, column]
        limited = config.top_p is not None or config.top_k is not None
        likely = logits
        if limited:
            likely = keep_likely(
                logits, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, suppress=self.suppress
            )
        drawn = sample_rows(
            likely, self.seeds[sample], torch.full_like(pos, self.now), pos,
            temperature=config.temperature, suppress=self.suppress, backend=config.backend,
        )  # fmt: skip
        prob = drawn.prob
        if limited:  # the confidence is that among all tokens
            x = logits.gather(1, drawn.token.clamp(min=0)[:, None])[:, 0].float()
            prob = (x - top.lse).exp()
        return top._replace(top1=drawn.token, prob1=prob)

    def _head(self, hidden: Tensor) -> Tensor:
        return self._timed("head", self.backbone.head, hidden)

    def _row(self, rows: Rows, sample: Tensor, column: Tensor) -> Tensor:
        """The base row that predicts a column: its own, or the one before in shifted models."""
        if self.canvas.spec.shift:
            column = column - (self.canvas.pos[sample, column] > 0).long()
        return rows.row_of(sample, column)

    def _learn_width(self, width: int) -> None:
        """What a callable's vocabulary is shows in its first logits only; ModelError where ids are not in it."""
        self.width, self.most, spec = width, max_candidates(self.eta, width), self.canvas.spec
        named = {"mask_token_id": (spec.mask_token_id,), "eos_token_ids": spec.eos_token_ids}
        named |= {"suppress_tokens": tuple(self.config.suppress_tokens)}
        for name, ids in named.items():
            if any(i >= width for i in ids):
                raise ModelError(expected(name, f"in [0, {width}), the width of the logits", max(ids)))

    def _timed(self, what: str, call: Callable[..., Tensor], *args: Any) -> Tensor:
        began = time.perf_counter()
        out = call(*args)
        self.seconds[what] += time.perf_counter() - began
        return out
