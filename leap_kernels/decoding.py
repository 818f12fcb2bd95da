# SPDX-License-Identifier: Apache-2.0
"""`decode`: the loop. Superpose, forward, measure, accept, commit, until no mask is left."""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import prompts as prompts_
from .caches import CACHES
from .canvas import Canvas
from .config import DecodeConfig, resolve
from .errors import BadLogitsError, InputError, LeapError, ModelError, expected
from .infilling import in_callers_columns, to_caller
from .likely import keep_likely
from .models.backbone import Backbone, backbone_for
from .models.live import adopted
from .models.load import spec_of
from .models.spec import ModelSpec
from .ops import FORCED, Superposed, TopEta, sample_rows, top_eta
from .output import DecodeOutput, History, StepEvent, Timing
from .rows import Rows
from .statistics import Forward, Memory, RowStatistics
from .strategies import Decision, Strategy, View
from .strategies.base import CANDIDATES, NEXT_BLOCK, check_runs_on
from .streaming import Stream

__all__ = ["decode"]

Observer = Callable[[StepEvent], None]


def decode(
    model: Any,
    input_ids: Tensor | Sequence[Tensor],
    attention_mask: Tensor | None = None,
    *,
    config: DecodeConfig | None = None,
    spec: ModelSpec | None = None,
    streamer: Any = None,
    observers: Iterable[Observer] = (),
    **overrides: Any,
) -> DecodeOutput:
    """Decode masked-diffusion language models, by LEAP unless told otherwise.

    Args:
        model: what `load` returns; an object of the authors' LLaDA, Dream, SDAR or Fast-dLLM v2 code, whose weights
            are used in place; any transformers decoder with a `spec`; or a callable
            `f(input_ids, position_ids=, attention_mask=4-D bool) -> logits` with a `spec`.
        input_ids: (B, P) or (P,) int64 prompts, or a list of 1-D tensors (padded on the left here). P may be 0. With
            `infill=True` the texts whose mask tokens are to be filled.
        attention_mask: (B, P), 1 on tokens and 0 on padding, which may stand on either side.
        config: a DecodeConfig; None takes the model's recommended settings.
        spec: the ModelSpec of a model that does not carry one.
        streamer: for one prompt: an object like transformers' TextStreamer. `put` gets the prompt, then the generated
            tokens as soon as no mask is left before them, up to the first EOS; `end` is called once, on errors too.
        observers: called after every forward with a StepEvent; each costs a few reads from the device.
        **overrides: fields of DecodeConfig (`max_new_tokens`, `block_length`, `strategy`, ...) and options of the
            strategy (`threshold`, `tau`, `eta`, ...). Unknown names are refused.

    Returns:
        DecodeOutput. No mask token is left behind the prompt, and the prompt columns are what was given. With
        `infill=True` no mask token is left, and every other token is what was given.

    Raises:
        InputError, ConfigError, ModelError: before the first forward.
        BadLogitsError: NaN, +inf or no finite logit on a row that decides a token; names step and position.

    >>> import leap_kernels
    >>> model, tokenizer = leap_kernels.load("tiny"), leap_kernels.load_tokenizer("tiny")
    >>> prompt = "Ben has 16 books. He buys 7. He sells 3. How many books does Ben have?"
    >>> out = leap_kernels.decode(model, **tokenizer(prompt, return_tensors="pt"))
    >>> out.text(tokenizer)[0].split("Answer: ")[1], bool(out.nfe < out.new_tokens)
    ('20 books.', True)
    """
    with Stream(streamer) as stream:
        return _decode(model, input_ids, attention_mask, config, spec, stream, observers, overrides)


def _decode(
    model: Any,
    input_ids: Tensor | Sequence[Tensor],
    attention_mask: Tensor | None,
    config: DecodeConfig | None,
    spec: ModelSpec | None,
    stream: Stream,
    observers: Iterable[Observer],
    overrides: dict[str, Any],
) -> DecodeOutput:
    began = time.perf_counter()
    if spec is not None and not isinstance(spec, ModelSpec):
        raise ModelError(expected("spec", "a ModelSpec", repr(spec)))
    observers = tuple(observers) if isinstance(observers, Iterable) else (observers,)
    if not all(callable(observer) for observer in observers):
        raise InputError(expected("observers", "callables that take a StepEvent", repr(observers)))
    model = adopted(model)
    own = spec_of(model)
    if spec is not None and own is not None:
        spec.agree_with(own, model)
    known = own if spec is None else spec
    config, strategy = resolve(config, known.defaults if known else {}, overrides)
    spec = config.spec(known, model)
    backbone = backbone_for(model, spec)
    if strategy.appends and not backbone.superposes:
        raise ModelError(
            f"strategy {strategy.name!r} needs a model that takes position_ids and a 4-D attention_mask; this one "
            'does not. Use strategy="threshold" or "full", or give the callable both arguments.'
        )
    if config.cache != "none" and not backbone.stores:
        raise ModelError(
            f"cache={config.cache!r} needs a decoder of transformers: a callable shows no keys and values to keep, and "
            'masked language models recompute every row. Use cache="none".'
        )
    check_runs_on(
        strategy, shift=spec.shift, block_causal=spec.block_causal_length, cache=config.cache, infill=config.infill
    )
    given = prompts_.check(input_ids, attention_mask, model, spec, config)
    if not config.infill and any(bool((p == spec.mask_token_id).any()) for p in given.prompts):
        warnings.warn("the prompt holds mask tokens; they are kept as they are and not decoded.", stacklevel=3)

    stream.begin(given.prompts, infill=config.infill)
    with backbone, torch.inference_mode():
        if config.infill:
            # An EOS inside a text ends nothing.
            canvas = Canvas.infill(given.prompts, config.block_length, dataclasses.replace(spec, eos_token_ids=()))
            observers = tuple(in_callers_columns(given, observers))
        else:
            canvas = Canvas.create(given.prompts, given.max_new_tokens, config.block, spec)
        loop = _Loop(canvas, backbone, config, strategy, observers, stream)
        loop.retire_complete()
        while canvas.sample:
            loop.step_once()
    sequences = torch.cat([given.columns, loop.generated.clone()], 1)
    history: tuple[Tensor, ...] = (loop.step, loop.reason, loop.confidence)
    if config.infill:
        sequences = to_caller(given, loop.generated, given.columns)
        history = tuple(to_caller(given, t, t.new_zeros(given.columns.shape)) for t in history)
        loop.new_tokens = (history[0] > 0).sum(1)
    if bool((loop.generated == spec.mask_token_id).any()):
        raise LeapError("internal error: a mask token is left after decoding; please report this.")
    return DecodeOutput(
        sequences=sequences,
        prompt_length=0 if config.infill else given.columns.shape[1],
        nfe=torch.tensor(loop.nfe, device=sequences.device),
        token_forwards=torch.tensor(loop.token_forwards, device=sequences.device),
        new_tokens=loop.new_tokens.clone(),
        history=History(*(t.clone() for t in history)),
        timing=Timing(time.perf_counter() - began, loop.seconds["body"], loop.seconds["head"]),
        max_new_tokens=torch.tensor(given.max_new_tokens, device=sequences.device),
        infilled=config.infill,
    )


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
class _Deciding:
    """The rows that decide in one forward: n masked targets, m of them with a copy."""

    sample: Tensor
    """(n,) which sample of the batch."""
    slot: Tensor
    """(n,) which of its targets."""
    column: Tensor
    """(n,) the target's canvas column."""
    has_copy: Tensor
    """(m,) indices into the n."""
    copy_row: Tensor
    """(m,) the row of the copy."""


@dataclass
class _Commits:
    """What one forward decided, (n,) each: entries with reason 0 change nothing."""

    sample: Tensor
    column: Tensor
    token: Tensor
    reason: Tensor
    confidence: Tensor

    @classmethod
    def of(cls, decision: Decision, stats: RowStatistics, deciding: _Deciding) -> _Commits:
        sample, slot, column = deciding.sample, deciding.slot, deciding.column
        if decision.column is not None:
            sample, slot = (decision.column >= 0).nonzero().T
            column = decision.column[sample, slot]
        confidence = stats.prob1 if decision.confidence is None else decision.confidence
        at = (sample, slot)
        return cls(sample, column, decision.token[at], decision.reason[at].to(torch.int32), confidence[at])


class _Loop:
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
        self.canvas, self.backbone, self.config, self.strategy = canvas, backbone, config, strategy
        self.observers, self.stream = observers, stream
        batch, device = len(canvas.sample), canvas.device
        # The mask token is never predicted, whatever its logit.
        self.suppress = torch.tensor(sorted({canvas.spec.mask_token_id, *config.suppress_tokens}), device=device)
        seeds = [config.seed] * batch if isinstance(config.seed, int) else list(config.seed)
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=device)
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
        self.seconds = {"body": 0.0, "head": 0.0}

    def step_once(self) -> None:
        """One forward: superposed rows in, commits out."""
        canvas, strategy = self.canvas, self.strategy
        self.now += 1
        view = self._view(max(canvas.left))
        rows = self._rows()
        hidden = self._timed("body", self.backbone.body, rows)

        deciding = self._deciding(view.targets, rows)
        row = functools.partial(self._read_row, rows)
        forward = Forward(hidden, rows.base, self._head, row, self._drawn, self.suppress, self.config.backend)
        stats, top, bad = self._measure(forward, view, deciding)
        decision = strategy.accept(stats, view, self.state)
        if not isinstance(decision, Decision):
            got = type(decision).__name__
            raise LeapError(expected(f"accept() of strategy {strategy.name!r}", "a Decision", got))
        made = _Commits.of(decision, stats, deciding)
        if self.config.free_first_token:
            made.reason = self._with_free_tokens(made)
        foreign = (made.reason > 0) & ((made.token < 0) | (made.token >= self.width))
        canvas.commit(made.sample, made.column, made.token, made.reason, made.confidence, self.now)
        if CANDIDATES in strategy.needs:
            self._remember(deciding, top)
        if strategy.appends:
            self.ahead.rows = strategy.superpose(self._view(view.targets.shape[1]), self.state)

        # The one thing that the host reads in a step.
        batch, before = len(canvas.sample), self.ahead.counts
        wrong = torch.stack([torch.cat([bad, *(flags for flags, *_ in forward.bad)]).any(), foreign.any()])
        *table, any_bad, any_foreign = torch.cat([canvas.masks_and_eos().flatten(), self._sizes(), wrong]).tolist()
        left, eos, remaining, counts, copies = (table[i * batch : (i + 1) * batch] for i in range(5))
        if any_bad:
            self._report_bad(bad, view, deciding, forward)
        if any_foreign:
            raise LeapError(f"strategy {strategy.name!r} committed a token outside the vocabulary of {self.width}.")
        if self.observers:
            self._tell_observers(made, before)
        self._check_progress(left)
        canvas.left, self.ahead.counts, self.ahead.copies = left, counts, copies
        canvas.forwards = [n + 1 for n in canvas.forwards]
        self._end_blocks(eos, remaining, forward)
        if self.stream:
            self._follow()

    def _rows(self) -> Rows:
        """The coming forward's rows: what the cache has recomputed, and what the strategy appended."""
        canvas, ahead = self.canvas, self.ahead
        rows, computed = self.cache.rows(canvas, self.now)
        rows.switches, rows.backend, rows.window = self.strategy.switches, self.config.backend, canvas.spec.window
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
            self.seeds,
            self.now,
            self.config.temperature,
            self.config.top_p,
            self.config.top_k,
            self.config.early_stop,
        )

    def _deciding(self, targets: Tensor, rows: Rows) -> _Deciding:
        """The targets without the padding of ragged batches. The host knows how many, so nothing waits for a GPU."""
        width = targets.shape[1]
        flat = torch.nonzero_static((targets >= 0).flatten(), size=sum(self.canvas.left))[:, 0]
        sample = torch.div(flat, width, rounding_mode="floor")
        slot, column = flat - sample * width, targets.flatten()[flat].long()
        if rows.copy_row is None:
            return _Deciding(sample, slot, column, flat[:0], flat[:0])
        copy_row = rows.copy_row[sample, slot]
        has_copy = torch.nonzero_static(copy_row >= 0, size=sum(self.ahead.copies))[:, 0]
        return _Deciding(sample, slot, column, has_copy, rows.base + copy_row[has_copy])

    def _measure(self, forward: Forward, view: View, deciding: _Deciding) -> tuple[RowStatistics, TopEta, Tensor]:
        """Head and `top_eta` on the rows that decide: the masked targets and their copies."""
        sample, column, n = deciding.sample, deciding.column, len(deciding.sample)
        at = (
            torch.cat([sample, sample[deciding.has_copy]]),
            torch.cat([forward.row(sample, column), deciding.copy_row]),
        )
        logits = self._head(forward.hidden[at])
        if self.now == 1:
            self._check_width(logits.shape[1])
        top = top_eta(logits, self.strategy.eta, suppress=self.suppress, backend=self.config.backend)
        base, copy = TopEta(*(t[:n] for t in top)), TopEta(*(t[n:] for t in top))
        predicted = self._drawn(logits[:n], base, sample, column)
        shape = (view.targets.shape[0], view.targets.shape[1])
        place = sample * shape[1] + deciding.slot
        stats = RowStatistics.of_rows(place, shape, predicted, copy, place[deciding.has_copy], logits[:n], forward)
        return stats, base, ~top.lse.isfinite()

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

    def _with_free_tokens(self, made: _Commits) -> Tensor:
        """Reasons with which targets whose row lies in an earlier block go too (decoders.md 2.14): no later forward can
        change them."""
        canvas, at = self.canvas, (made.sample, made.column)
        pos, masked = canvas.pos[at], canvas.ids[at] == canvas.spec.mask_token_id
        free = masked & (pos > 0) & (pos % canvas.spec.block_causal_length == 0)
        return made.reason.masked_fill(free & (made.reason == 0), FORCED)

    def _check_width(self, width: int) -> None:
        """What a callable's vocabulary is shows in its first logits only."""
        self.width, spec = width, self.canvas.spec
        named = {"mask_token_id": (spec.mask_token_id,), "eos_token_ids": spec.eos_token_ids}
        named |= {"suppress_tokens": tuple(self.config.suppress_tokens)}
        for name, ids in named.items():
            if any(i >= width for i in ids):
                raise ModelError(expected(name, f"in [0, {width}), the width of the logits", max(ids)))

    def _read_row(self, rows: Rows, sample: Tensor, column: Tensor) -> Tensor:
        """The base row that predicts a column: its own, or the one before in shifted models."""
        if self.canvas.spec.shift:
            column = column - (self.canvas.pos[sample, column] > 0).long()
        return rows.row_of(sample, column)

    def _remember(self, deciding: _Deciding, top: TopEta) -> None:
        canvas = self.canvas
        if self.memory is None:
            self.memory = Memory(len(canvas.sample), canvas.new_tokens, top.ids.shape[1], canvas.device)
        self.memory.forget()
        self.memory.store(deciding.sample, deciding.column - canvas.prompt, top)

    def _sizes(self) -> Tensor:
        """(2 B,): appended rows of each sample, then copies of each."""
        rows = self.ahead.rows
        if rows is None:
            return torch.zeros(2 * len(self.canvas.sample), dtype=torch.int64, device=self.canvas.device)
        return torch.cat([rows.count.long(), (rows.copy_row >= 0).sum(1)])

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
            sizes, batch = self._sizes().tolist(), len(canvas.sample)
            self.ahead.counts, self.ahead.copies = sizes[:batch], sizes[batch:]

    def _look_into(self, samples: list[int], forward: Forward) -> None:
        """Read what the forward just made predicts for the blocks these samples are entering, if the rule needs it."""
        canvas, needs = self.canvas, self.strategy.needs
        if not samples or not needs & {CANDIDATES, NEXT_BLOCK}:
            return
        places = [(i, canvas.prompt + offset) for i in samples for offset in range(*canvas.span(i, canvas.block[i]))]
        sample, column = torch.tensor(places, device=canvas.device).T
        logits = forward.logits(sample, column)
        if NEXT_BLOCK in needs:
            self.strategy.look_into(self.state, sample, column, logits)
        if self.memory is not None:
            top = top_eta(logits, self.strategy.eta, suppress=self.suppress, backend=self.config.backend)
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
        self.seeds = self.seeds[kept]
        self.ahead.select(keep, kept)
        self.cache.select(keep, kept)
        for follower in (self.memory, self.state):
            if follower is not None:
                follower.select(kept)

    def _follow(self) -> None:
        """Show the streamer the only sample's tokens; of a strategy that revises them, those of finished blocks."""
        canvas, tokens = self.canvas, self.generated[0]
        if canvas.sample:
            done = canvas.span(0, canvas.block[0])[0] if self.strategy.revises else canvas.new_tokens
            tokens = canvas.ids[0, canvas.prompt : canvas.prompt + done]
        self.stream.follow(tokens, canvas.spec.mask_token_id, canvas.is_eos(tokens))

    def _timed(self, what: str, call: Callable[..., Tensor], *args: Any) -> Tensor:
        began = time.perf_counter()
        out = call(*args)
        self.seconds[what] += time.perf_counter() - began
        return out

    def _report_bad(self, bad: Tensor, view: View, deciding: _Deciding, forward: Forward) -> None:
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
