# SPDX-License-Identifier: Apache-2.0
"""`decode`: check what it is given, run the loop, hand back what came out."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import prompts as prompts_
from .canvas import Canvas
from .config import DecodeConfig, resolve
from .errors import InputError, LeapError, ModelError, expected
from .infilling import in_callers_columns, to_caller
from .loop import Loop
from .models.backbone import backbone_for
from .models.live import adopted
from .models.load import spec_of
from .models.spec import ModelSpec
from .output import DecodeOutput, History, Observer, Timing
from .strategies.base import check_runs_on
from .streaming import Stream

__all__ = ["decode"]


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
            tokens as soon as no mask is left before them, with `early_stop` up to the first EOS; `end` is called once,
            on errors too.
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
    block_causal = known.block_causal_length if known else 0
    config, strategy = resolve(config, known.defaults if known else {}, overrides, block_causal=block_causal)
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
        loop = Loop(canvas, backbone, config, strategy, observers, stream)
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
        timing=Timing(time.perf_counter() - began, loop.readout.seconds["body"], loop.readout.seconds["head"]),
        max_new_tokens=torch.tensor(given.max_new_tokens, device=sequences.device),
        infilled=config.infill,
    )
