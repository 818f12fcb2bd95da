# SPDX-License-Identifier: Apache-2.0
"""`decode`: the loop. Superpose, forward, measure, accept, commit, until no mask is left."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import prompts as prompts_
from .caches import CACHES
from .canvas import Canvas
from .config import DecodeConfig, resolve
from .errors import BadLogitsError, LeapError, ModelError
from .models.backbone import Backbone, backbone_for
from .models.load import spec_of
from .models.spec import ModelSpec
from .ops import COPY, Superposed, top_eta
from .output import DecodeOutput, History, StepEvent, Timing
from .rows import Rows
from .sampling import draw
from .statistics import Memory, RowStatistics
from .strategies import Decision, Strategy, View

__all__ = ["decode"]

Observer = Callable[[StepEvent], None]


def decode(
    model: Any,
    input_ids: Tensor | Sequence[Tensor],
    attention_mask: Tensor | None = None,
    *,
    config: DecodeConfig | None = None,
    spec: ModelSpec | None = None,
    observers: Sequence[Observer] = (),
    **overrides: Any,
) -> DecodeOutput:
    """Decode masked-diffusion language models, by LEAP unless told otherwise.

    Args:
        model: what `load` returns; any transformers decoder with a `spec`; or a callable
            `f(input_ids, position_ids=, attention_mask=4-D bool) -> logits` with a `spec`.
        input_ids: (B, P) or (P,) int64 prompts, or a list of 1-D tensors (padded on the left here). P may be 0.
        attention_mask: (B, P), 1 on tokens and 0 on padding, which may stand on either side.
        config: a DecodeConfig; None takes the model's recommended settings.
        spec: the ModelSpec of a model that does not carry one.
        observers: called after every forward with a StepEvent.
        **overrides: fields of DecodeConfig (`max_new_tokens`, `block_length`, `strategy`, ...) and options of the
            strategy (`threshold`, `tau`, `eta`, ...). Unknown names are refused.

    Returns:
        DecodeOutput. No mask token is left behind the prompt, and the prompt columns are what was given.

    Raises:
        InputError, ConfigError, ModelError: before the first forward.
        BadLogitsError: NaN, +inf or no finite logit on a row that decides a token; names step and position.

    >>> import leap_kernels
    >>> model, tokenizer = leap_kernels.load("tiny"), leap_kernels.load_tokenizer("tiny")
    >>> out = leap_kernels.decode(model, **tokenizer("What is 4 7 + 2 5 ?", return_tensors="pt"))
    >>> out.text(tokenizer)[0].split(" #### ")[1], bool(out.nfe < out.new_tokens)
    ('7 2', True)
    """
    began = time.perf_counter()
    known = spec_of(model) if spec is None else spec
    config, strategy = resolve(config, known.defaults if known else {}, overrides)
    spec = config.spec(known, model)
    backbone = backbone_for(model)
    if strategy.needs_candidates and not backbone.superposes:
        raise ModelError(
            f"strategy {strategy.name!r} needs a model that takes position_ids and a 4-D attention_mask; this one "
            'does not. Use strategy="threshold" or "full", or give the callable both arguments.'
        )
    given = prompts_.check(input_ids, attention_mask, model, spec, config)
    if any(bool((p == spec.mask_token_id).any()) for p in given.prompts):
        warnings.warn("the prompt holds mask tokens; they are kept as they are and not decoded.", stacklevel=2)

    with backbone, torch.inference_mode():
        canvas = Canvas.create(given.prompts, config.max_new_tokens, config.block_length, spec)
        loop = _Loop(canvas, backbone, config, strategy, observers)
        loop.run()
    sequences = torch.cat([given.columns, loop.generated.clone()], 1)
    if bool((loop.generated == spec.mask_token_id).any()):
        raise LeapError("internal error: a mask token is left after decoding; please report this.")
    return DecodeOutput(
        sequences=sequences,
        prompt_length=given.columns.shape[1],
        nfe=torch.tensor(loop.nfe),
        token_forwards=torch.tensor(loop.token_forwards),
        new_tokens=loop.new_tokens.clone(),
        history=History(*(t.clone() for t in (loop.step, loop.reason, loop.confidence))),
        timing=Timing(time.perf_counter() - began, loop.seconds["body"], loop.seconds["head"]),
    )


class _Loop:
    """One `decode` call: the canvas of unfinished samples, and the results of finished ones."""

    def __init__(
        self,
        canvas: Canvas,
        backbone: Backbone,
        config: DecodeConfig,
        strategy: Strategy,
        observers: Sequence[Observer],
    ) -> None:
        self.canvas, self.backbone, self.config, self.strategy = canvas, backbone, config, strategy
        self.observers = observers
        spec = canvas.spec
        # The mask token is never predicted, whatever its logit.
        self.suppress = torch.tensor(sorted({spec.mask_token_id, *config.suppress_tokens}), device=canvas.device)
        seeds = [config.seed] * len(canvas.sample) if isinstance(config.seed, int) else list(config.seed)
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=canvas.device)
        self.state = strategy.start(canvas)
        self.memory: Memory | None = None
        self.seconds = {"body": 0.0, "head": 0.0}

        self.generated = canvas.ids[:, canvas.prompt :].clone()
        self.step, self.reason, self.confidence = canvas.step.clone(), canvas.reason.clone(), canvas.confidence.clone()
        self.new_tokens = torch.zeros(len(canvas.sample), dtype=torch.int64, device=canvas.device)
        self.nfe = [0] * len(canvas.sample)
        self.token_forwards = [0] * len(canvas.sample)

    def run(self) -> None:
        canvas, strategy = self.canvas, self.strategy
        extra: Superposed | None = None
        appended = [0] * len(canvas.sample)  # rows appended to each sample in the coming forward
        now = 0
        while canvas.sample:
            now += 1
            view = self._view(max(canvas.left))
            rows, computed = CACHES[self.config.cache](canvas)
            rows.switches, rows.backend = strategy.switches, self.config.backend
            if extra is not None and max(appended):
                rows = rows.append(extra, _round_up(max(appended), canvas.device))
            hidden = self._timed("body", self.backbone.body, rows)
            for i, member in enumerate(canvas.sample):
                self.nfe[member] += 1
                self.token_forwards[member] += computed[i] + appended[i]

            sample, slot, column = _places(view.targets, canvas.left)
            stats, top, bad = self._measure(hidden, rows, view, (sample, slot, column), now)
            decision = strategy.accept(stats, view, self.state)
            canvas.commit(
                sample, column, decision.token[sample, slot], decision.reason[sample, slot], stats.prob1[sample, slot],
                now,
            )  # fmt: skip
            if strategy.needs_candidates:
                self._remember(sample, column - canvas.prompt, top)
                extra = strategy.superpose(self._view(view.targets.shape[1]), self.state)

            # The one thing that the host reads in a step.
            status = canvas.masks_and_eos()
            counts = extra.count if extra is not None else torch.zeros_like(status[0])
            *table, last = torch.cat([status.flatten(), counts, bad.any()[None]]).tolist()
            if last:
                self._report_bad(bad, view, rows, (sample, slot), now)
            if self.observers:
                self._tell_observers(now, view, decision, stats, (sample, slot, column), appended)
            batch = len(canvas.sample)
            left, eos, appended = (table[i * batch : (i + 1) * batch] for i in range(3))
            stuck = [canvas.sample[i] for i in range(batch) if left[i] >= canvas.left[i]]
            if stuck:
                raise LeapError(f"strategy {strategy.name!r} committed no token of sample {stuck[0]} at step {now}.")
            canvas.left = left

            ended = [i for i in range(batch) if not left[i]]
            done = {i for i in ended if canvas.is_last_block(i) or (self.config.early_stop and eos[i])}
            moved = [i for i in ended if i not in done]
            self._move(moved, hidden, rows)
            if done:
                keep = [i for i in range(batch) if i not in done]
                self._retire(sorted(done), keep)
                appended = [appended[i] for i in keep]
                if extra is not None and keep:
                    index = torch.tensor(keep, device=canvas.device)
                    extra = Superposed(*(t.index_select(0, index) for t in extra))
            if moved and strategy.needs_candidates and canvas.sample:
                # A new block has candidates of its own: superpose again, the only step with a second host read.
                extra = strategy.superpose(self._view(max(canvas.left)), self.state)
                appended = extra.count.tolist() if extra is not None else [0] * len(canvas.sample)

    def _view(self, width: int) -> View:
        canvas = self.canvas
        targets = canvas.targets(width)
        ids, counts = self.memory.at(targets - canvas.prompt) if self.memory else (None, None)
        return View(canvas.ids, canvas.pos, targets, ids, counts, canvas.spec, self.config.backend)

    def _measure(
        self, hidden: Tensor, rows: Rows, view: View, place: tuple[Tensor, Tensor, Tensor], now: int
    ) -> tuple[RowStatistics, Any, Tensor]:
        """Head and `top_eta` on the rows that decide: the masked targets and their copies."""
        sample, slot, column = place
        shape = (view.targets.shape[0], view.targets.shape[1])
        base_row = self._read_row(sample, column)
        has_copy = copy_row = sample[:0]
        if rows.copy_row is not None:
            copy_row = rows.copy_row[sample, slot]
            has_copy = (copy_row >= 0).nonzero()[:, 0]
            copy_row = rows.base + copy_row[has_copy]
        picked = torch.cat([sample, sample[has_copy]]), torch.cat([base_row, copy_row])
        logits = self._timed("head", self.backbone.head, hidden[picked])
        top = top_eta(logits, self.strategy.eta, suppress=self.suppress, backend=self.config.backend)
        n = len(sample)
        base, copy = (type(top)(*(t[part] for t in top)) for part in (slice(n), slice(n, None)))
        bad = ~top.lse.isfinite()
        if self.config.temperature > 0:
            pos = view.pos[sample, column].long()
            drawn = draw(logits[:n], self.config.temperature, self.seeds[sample], now, pos, self.suppress)
            prob = (logits[:n].float().gather(1, drawn[:, None])[:, 0] - base.lse).exp()
            base = base._replace(top1=drawn, prob1=prob)
        flat = sample * shape[1] + slot
        return RowStatistics.spread(flat, shape, base, copy, flat[has_copy]), base, bad

    def _read_row(self, sample: Tensor, column: Tensor) -> Tensor:
        """The base row that predicts a column: its own, or the one before in shifted models."""
        if not self.canvas.spec.shift:
            return column
        return column - (self.canvas.pos[sample, column] > 0).long()

    def _remember(self, sample: Tensor, offset: Tensor, top: Any) -> None:
        if self.memory is None:
            canvas = self.canvas
            self.memory = Memory(len(canvas.sample), canvas.new_tokens, top.ids.shape[1], canvas.device)
        self.memory.forget()
        self.memory.store(sample, offset, top)

    def _move(self, moved: list[int], hidden: Tensor, rows: Rows) -> None:
        """Start the next block of samples that finished one, with the candidates this forward saw there."""
        canvas = self.canvas
        covered = [i for i in moved if canvas.covers_next_block(i)]
        for i in moved:
            canvas.advance(i)
        if not covered or self.memory is None:
            return
        places = [(i, canvas.prompt + offset) for i in covered for offset in range(*canvas.span(i, canvas.block[i]))]
        sample, column = torch.tensor(places, device=canvas.device).T
        logits = self._timed("head", self.backbone.head, hidden[sample, self._read_row(sample, column)])
        top = top_eta(logits, self.strategy.eta, suppress=self.suppress, backend=self.config.backend)
        self.memory.store(sample, column - canvas.prompt, top)

    def _retire(self, done: list[int], keep: list[int]) -> None:
        """Take finished samples out of the batch; behind an EOS stands padding."""
        canvas = self.canvas
        index = torch.tensor(done, device=canvas.device)
        target = torch.tensor([canvas.sample[i] for i in done], device=canvas.device)
        tokens = canvas.ids[index, canvas.prompt :]
        eos = canvas.is_eos(tokens)
        seen = eos.cumsum(1)
        behind = (seen - eos.long()) > 0
        if self.config.early_stop:
            first = tokens.gather(1, eos.long().argmax(1, keepdim=True))
            fill = canvas.spec.pad_token_id
            tokens = torch.where(behind, first if fill is None else fill, tokens)
        self.generated[target] = tokens
        self.new_tokens[target] = (~behind).sum(1)
        for name in ("step", "reason", "confidence"):
            getattr(self, name)[target] = getattr(canvas, name)[index]
        canvas.select(keep)
        kept = torch.tensor(keep, dtype=torch.int64, device=canvas.device)
        self.seeds = self.seeds[kept]
        if self.memory is not None:
            self.memory.select(kept)
        if self.state is not None:
            self.state.select(kept)

    def _timed(self, what: str, call: Callable[..., Tensor], *args: Any) -> Tensor:
        began = time.perf_counter()
        out = call(*args)
        self.seconds[what] += time.perf_counter() - began
        return out

    def _report_bad(self, bad: Tensor, view: View, rows: Rows, place: tuple[Tensor, Tensor], now: int) -> None:
        sample, slot = place
        which = int(bad.nonzero()[0])
        is_copy = which >= len(sample)
        if is_copy:
            assert rows.copy_row is not None
            which = int((rows.copy_row[sample, slot] >= 0).nonzero()[which - len(sample)])
        i = int(sample[which])
        position = int(view.pos[i, int(view.targets[i, int(slot[which])])])
        row = f"the mask copy (kind {COPY}) for" if is_copy else "the base row of"
        raise BadLogitsError(
            f"NaN, +inf or no finite logit at step {now} on {row} position {position} of sample "
            f"{self.canvas.sample[i]}. Check the weights and dtype of the model (bfloat16 overflows less than float16)."
        )

    def _tell_observers(
        self, now: int, view: View, decision: Decision, stats: RowStatistics,
        place: tuple[Tensor, Tensor, Tensor], appended: list[int],
    ) -> None:  # fmt: skip
        sample, slot, column = place
        taken = (decision.reason[sample, slot] > 0).nonzero()[:, 0]
        sample, slot, column = sample[taken], slot[taken], column[taken]
        event = StepEvent(
            step=now,
            sample=[self.canvas.sample[i] for i in sample.tolist()],
            index=(column - self.canvas.prompt).tolist(),
            token=decision.token[sample, slot].tolist(),
            reason=decision.reason[sample, slot].tolist(),
            confidence=stats.prob1[sample, slot].tolist(),
            appended=dict(zip(self.canvas.sample, appended, strict=True)),
        )
        for observer in self.observers:
            observer(event)


def _places(targets: Tensor, left: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(sample, slot, column) of every target, each (n,): the padding of ragged batches left out.

    The host knows how many there are, so nothing waits for the device.
    """
    width = targets.shape[1]
    flat = torch.nonzero_static((targets >= 0).flatten(), size=sum(left))[:, 0]
    sample = torch.div(flat, width, rounding_mode="floor")
    return sample, flat - sample * width, targets.flatten()[flat].long()


def _round_up(width: int, device: torch.device) -> int:
    """Appended rows to compute: exactly as many on a CPU, a multiple of 32 on a GPU so that shapes repeat."""
    return width if device.type == "cpu" else -(-width // 32) * 32
