# SPDX-License-Identifier: Apache-2.0
"""`Loop`: superpose, forward, measure, accept, commit, until no mask is left."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .caches import CACHES
from .canvas import Canvas
from .config import DecodeConfig
from .errors import LeapError, expected
from .models.backbone import Backbone
from .ops import FORCED, Superposed, TopEta
from .output import Observer, StepEvent
from .readout import Deciding, Readout
from .rows import Rows
from .statistics import Forward, Memory, RowStatistics
from .strategies import Decision, Strategy, View
from .strategies.base import CANDIDATES, NEXT_BLOCK
from .streaming import Stream

__all__ = ["Loop"]


@dataclass
class _Lookahead:
    """What the coming forward has appended: the rows, and per sample how many, and how many of those are copies."""

    rows: Superposed | None
    counts: list[int]
    copies: list[int]

    def select(self, keep: list[int], index: Tensor) -> None:
        self.counts, self.copies = [self.counts[i] for i in keep], [self.copies[i] for i in keep]
        if self.rows is not None:
            self.rows = Superposed(*(t.index_select(0, index) for t in self.rows))


@dataclass
class _Commits:
    """What one forward decided, (n,) each: entries with reason 0 change nothing."""

    sample: Tensor
    column: Tensor
    token: Tensor
    reason: Tensor
    confidence: Tensor

    @classmethod
    def of(cls, decision: Decision, stats: RowStatistics, deciding: Deciding) -> _Commits:
        sample, column, flat = deciding.sample, deciding.column, stats.flat
        if decision.column is not None:
            there = decision.column >= 0
            sample, column = there.nonzero()[:, 0], decision.column[there]
            flat = functools.partial(torch.masked_select, mask=there)
        confidence = stats.prob1 if decision.confidence is None else decision.confidence
        return cls(sample, column, flat(decision.token), flat(decision.reason).to(torch.int32), flat(confidence))


class Loop:
    """One `decode` call: the canvas of unfinished samples, and the results of finished ones."""

    def __init__(
        self,
        canvas: Canvas,
        backbone: Backbone,
        config: DecodeConfig,
        strategy: Strategy,
        observers: Sequence[Observer],
        stream: Stream,
    ) -> None:
        self.canvas, self.config, self.strategy = canvas, config, strategy
        self.observers, self.stream, self.switches = observers, stream, strategy.switches
        self.readout = Readout(canvas, backbone, config, strategy.eta)
        batch, device = len(canvas.sample), canvas.device
        self.state = strategy.start(canvas)
        if self.state is not None and not hasattr(self.state, "select"):
            got = type(self.state).__name__
            raise LeapError(expected(f"start() of strategy {strategy.name!r}", "an object with select(index)", got))
        self.most = strategy.max_forwards(canvas)
        self.memory: Memory | None = None
        self.ahead = _Lookahead(None, [0] * batch, [0] * batch)
        self.cache = CACHES[config.cache](canvas, config.cache_refresh)
        self.now = 0

        self.generated = canvas.ids[:, canvas.prompt :].clone()
        self.step, self.reason, self.confidence = canvas.step.clone(), canvas.reason.clone(), canvas.confidence.clone()
        self.new_tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.nfe, self.token_forwards = [0] * batch, [0] * batch

    def step_once(self) -> None:
        """One forward: superposed rows in, commits out."""
        canvas, strategy, readout = self.canvas, self.strategy, self.readout
        self.now += 1
        view = self._view(max(canvas.left))
        rows = self._rows()
        forward = readout.forward(rows, self.now)
        deciding = Deciding.of(view.targets, rows, canvas.left, self.ahead.copies)
        stats, top, bad = readout.measure(forward, view, deciding)
        decision = strategy.accept(stats, view, self.state)
        if not isinstance(decision, Decision):
            got = type(decision).__name__
            raise LeapError(expected(f"accept() of strategy {strategy.name!r}", "a Decision", got))
        made = _Commits.of(decision, stats, deciding)
        if self.config.free_first_token:
            made.reason = self._with_free_tokens(made)
        foreign = (made.reason > 0) & (made.token != made.token.clamp(0, readout.width - 1))
        canvas.commit(made.sample, made.column, made.token, made.reason, made.confidence, self.now)
        if CANDIDATES in strategy.needs:
            self._remember(deciding, top)
        if strategy.appends:
            self.ahead.rows = strategy.superpose(self._view(view.targets.shape[1]), self.state)

        # The one thing that the host reads in a step.
        batch, before = len(canvas.sample), self.ahead.counts
        wrong = [flags.any()[None] for flags in (foreign, bad, *(flags for flags, *_ in forward.bad))]
        table = torch.cat([*wrong, canvas.masks_and_eos().flatten(), *self._sizes()]).tolist()
        any_foreign, *any_bad = table[: len(wrong)]
        left, eos, remaining, *sizes = (table[i : i + batch] for i in range(len(wrong), len(table), batch))
        if any(any_bad):
            readout.report_bad(bad, view, deciding, forward)
        if any_foreign:
            raise LeapError(f"strategy {strategy.name!r} committed a token outside the vocabulary of {readout.width}.")
        if self.observers:
            self._tell_observers(made, before)
        self._check_progress(left)
        canvas.left = left
        self.ahead.counts, self.ahead.copies = sizes or ([0] * batch, [0] * batch)
        canvas.forwards = [n + 1 for n in canvas.forwards]
        self._end_blocks(eos, remaining, forward)
        if self.stream:
            self._follow()

    def _rows(self) -> Rows:
        """The coming forward's rows: what the cache has recomputed, and what the strategy appended."""
        canvas, ahead = self.canvas, self.ahead
        rows, computed = self.cache.rows(canvas, self.now)
        rows.switches, rows.backend, rows.window = self.switches, self.config.backend, canvas.spec.window
        most = max(ahead.counts)
        if ahead.rows is not None and most:
            # As many as needed on a CPU; a multiple of 32 on a GPU, so that shapes repeat.
            rows = rows.append(ahead.rows, most if canvas.device.type == "cpu" else -(-most // 32) * 32)
        for i, sample in enumerate(canvas.sample):
            self.nfe[sample] += 1
            self.token_forwards[sample] += computed[i] + ahead.counts[i]
        return rows

    def _view(self, width: int) -> View:
        canvas = self.canvas
        targets = canvas.targets(width)
        ids, counts = self.memory.at(targets - canvas.prompt) if self.memory else (None, None)
        return View(
            canvas.ids,
            canvas.pos,
            targets,
            ids,
            counts,
            canvas.spec,
            self.config.backend,
            canvas,
            self.readout.seeds,
            self.now,
            self.config.temperature,
            self.config.top_p,
            self.config.top_k,
            self.config.early_stop,
        )

    def _with_free_tokens(self, made: _Commits) -> Tensor:
        """Reasons with which targets whose row lies in an earlier block go too (decoders.md 2.14): no later forward can
        change them."""
        canvas, at = self.canvas, (made.sample, made.column)
        pos, masked = canvas.pos[at], canvas.ids[at] == canvas.spec.mask_token_id
        free = masked & (pos > 0) & (pos % canvas.spec.block_causal_length == 0)
        return made.reason.masked_fill(free & (made.reason == 0), FORCED)

    def _remember(self, deciding: Deciding, top: TopEta) -> None:
        canvas = self.canvas
        if self.memory is None:
            self.memory = Memory(len(canvas.sample), canvas.new_tokens, top.ids.shape[1], canvas.device)
        self.memory.forget()
        self.memory.store(deciding.sample, deciding.column - canvas.prompt, top)

    def _sizes(self) -> list[Tensor]:
        """(B,) appended rows of each sample, and copies of each; nothing where none are appended."""
        rows = self.ahead.rows
        return [] if rows is None else [rows.count.long(), (rows.copy_row >= 0).sum(1)]

    def _check_progress(self, left: list[int]) -> None:
        """Refuse to go round in circles."""
        canvas, strategy = self.canvas, self.strategy
        if self.most is None:
            stuck = [canvas.sample[i] for i in range(len(left)) if left[i] >= canvas.left[i]]
            if stuck:
                raise LeapError(
                    f"strategy {strategy.name!r} committed no token of sample {stuck[0]} at step {self.now}."
                )
        elif self.now > self.most:
            raise LeapError(f"strategy {strategy.name!r} needs more than the {self.most} forwards it promised.")

    def _end_blocks(self, eos: list[int], remaining: list[int], forward: Forward) -> None:
        """Move samples that finished a block to the next one, and those that finished their last out of the batch."""
        canvas = self.canvas
        ended = self.strategy.leaving(canvas, self.state)
        clean = [i for i in ended if not canvas.left[i]]
        done = [i for i in clean if not remaining[i] or (self.config.early_stop and eos[i])]
        moved = [i for i in ended if i not in done]
        if moved:
            covered = [i for i in moved if self.cache.covers_next_block(canvas, i)]
            canvas.advance(moved)
            self._look_into(covered, forward)
        if done:
            self._retire(done)
        if moved and self.strategy.appends:
            # A new block has candidates of its own: superpose again. Only here the host reads a second time.
            self.ahead.rows = self.strategy.superpose(self._view(max(canvas.left)), self.state)
            none = [0] * len(canvas.sample)
            sizes = self._sizes()
            self.ahead.counts, self.ahead.copies = torch.stack(sizes).tolist() if sizes else (none, none)

    def _look_into(self, samples: list[int], forward: Forward) -> None:
        """Read what the forward just made predicts for the blocks these samples are entering, if the rule needs it."""
        canvas, needs = self.canvas, self.strategy.needs
        samples = [i for i in samples if canvas.left[i]]
        if not samples or not needs & {CANDIDATES, NEXT_BLOCK}:
            return
        # Masks only: the rows of tokens given between them are not in every forward (cache="delayed").
        counts, index = [canvas.left[i] for i in samples], torch.tensor(samples, device=canvas.device)
        targets = canvas.targets(max(counts))[index]
        flat = torch.nonzero_static((targets >= 0).flatten(), size=sum(counts))[:, 0]
        sample = index[torch.div(flat, max(counts), rounding_mode="floor")]
        column = targets.flatten()[flat].long()
        logits = forward.logits(sample, column)
        if NEXT_BLOCK in needs:
            self.strategy.look_into(self.state, sample, column, logits)
        if self.memory is not None:
            top = self.readout.top_eta(logits)
            self.memory.store(sample, column - canvas.prompt, top)

    def retire_complete(self) -> None:
        """Take samples that hold no mask (infilling) out of the batch."""
        complete = [i for i, left in enumerate(self.canvas.left) if not left]
        if complete:
            self._retire(complete)

    def _retire(self, done: list[int]) -> None:
        """Take finished samples out of the batch; behind an EOS and behind a sample's own columns stands padding."""
        canvas = self.canvas
        keep = [i for i in range(len(canvas.sample)) if i not in done]
        index = torch.tensor(done, device=canvas.device)
        target = torch.tensor([canvas.sample[i] for i in done], device=canvas.device)
        tokens = canvas.ids[index, canvas.prompt :]
        eos = canvas.is_eos(tokens)
        behind = eos.cumsum(1) - eos.long() > 0
        if self.config.early_stop:
            first = tokens.gather(1, eos.long().argmax(1, keepdim=True))
            fill = canvas.spec.pad_token_id
            tokens = torch.where(behind, first if fill is None else fill, tokens)
        self.generated[target] = tokens
        self.new_tokens[target] = (canvas.is_own()[index] & ~behind).sum(1)
        self.step[target], self.reason[target] = canvas.step[index], canvas.reason[index]
        self.confidence[target] = canvas.confidence[index]

        kept = torch.tensor(keep, dtype=torch.int64, device=canvas.device)
        canvas.select(keep, kept)
        self.ahead.select(keep, kept)
        self.cache.select(keep, kept)
        self.readout.select(kept)
        for follower in (self.memory, self.state):
            if follower is not None:
                follower.select(kept)

    def _follow(self) -> None:
        """Show the streamer the only sample's tokens; of a strategy that revises them, those of finished blocks."""
        canvas, tokens = self.canvas, self.generated[0]
        if canvas.sample:
            done = canvas.span(0, canvas.block[0])[0] if self.strategy.revises else canvas.new_tokens
            tokens = canvas.ids[0, canvas.prompt : canvas.prompt + done]
        ends = canvas.is_eos(tokens) & self.config.early_stop
        self.stream.follow(tokens, canvas.spec.mask_token_id, ends)

    def _tell_observers(self, made: _Commits, appended: list[int]) -> None:
        canvas, taken = self.canvas, made.reason > 0
        event = StepEvent(
            step=self.now,
            sample=[canvas.sample[i] for i in made.sample[taken].tolist()],
            index=(made.column[taken] - canvas.prompt).tolist(),
            token=made.token[taken].tolist(),
            reason=made.reason[taken].tolist(),
            confidence=made.confidence[taken].tolist(),
            appended=dict(zip(canvas.sample, appended, strict=True)),
        )
        for observer in self.observers:
            observer(event)
