# SPDX-License-Identifier: Apache-2.0
"""`generate`: `decode` in the place of transformers' own loop, `model.generate(ids, custom_generate=generate, ...)`."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor

from .config import DecodeConfig, resolve
from .decoding import decode
from .errors import ConfigError, InputError, expected
from .models.load import spec_of
from .models.spec import ModelSpec
from .output import StepEvent
from .rows import Rows
from .strategies import STRATEGIES

__all__ = ["generate"]

# What transformers' own arguments say already, and the one name that it keeps for key-value caches of its own.
_THEIRS = {"max_new_tokens", "temperature", "eos_token_id", "pad_token_id", "cache"}
# What transformers prepares for a forward of one token after the other, and a canvas has no use for.
_PREPARED = {
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "cache_position",
    "logits_to_keep",
    "use_cache",
}


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    stream_to: Any = None,
    **settings: Any,
) -> Any:
    """Decode by `decode`, called by transformers: `model.generate(ids, custom_generate=leap_kernels.generate, ...)`.

    `max_new_tokens` (or `max_length`), `do_sample`, `temperature`, `eos_token_id` (several as well), `pad_token_id`,
    `attention_mask`, `num_return_sequences` and `return_dict_in_generate` mean what they do in transformers. What
    `decode` has no counterpart for (beams, top-k, penalties, stop strings, logits processors, ...) is refused.

    Args:
        stream_to: a transformers streamer, for one prompt: tokens of a block once the decoding has left it. (Releases
            of transformers that keep `streamer=` from a custom_generate show the prompt on it and nothing else.)
        **settings: settings of `decode` and options of its strategies: `block_length`, `strategy`, `tau`, ...; its
            `cache` is named `kv_cache` here. Unless `seed` is given, draws follow torch.manual_seed.

    Returns:
        (B, P + n) int64, n the longest answer; with return_dict_in_generate transformers' GenerateDecoderOnlyOutput,
        with "nfe" and "token_forwards" (B,) as further entries.

    Raises:
        ConfigError, InputError, ModelError: before the first forward.

    >>> import leap_kernels
    >>> model, tokenizer = leap_kernels.load("tiny"), leap_kernels.load_tokenizer("tiny")
    >>> text = "Ben has 16 books. He buys 7. He sells 3. How many books does Ben have?"
    >>> prompt = tokenizer(text, return_tensors="pt")
    >>> ids = model.generate(**prompt, custom_generate=leap_kernels.generate, max_new_tokens=96, tau=0.8)
    >>> tokenizer.decode(ids[0], skip_special_tokens=True).split("Answer: ")[1]
    '20 books.'
    """
    if generation_config is None:
        raise ConfigError(
            "generation_config is missing: transformers makes it. Call model.generate(ids, "
            "custom_generate=leap_kernels.generate, max_new_tokens=...), or leap_kernels.decode(model, ids)."
        )
    prepared = {name: settings.pop(name, None) for name in _PREPARED}
    theirs = sorted(name for name in settings if name not in _OURS)
    if theirs:
        raise ConfigError(f"{', '.join(theirs)}: the forwards of leap_kernels.generate do not take this. Leave it out.")
    _refuse_other_loops(generation_config, synced_gpus)
    _refuse_processors(logits_processor or (), generation_config)
    _check_prepared(input_ids, prepared)
    length, eos = _criteria(stopping_criteria or ())
    if "kv_cache" in settings:
        settings["cache"] = settings.pop("kv_cache")

    # Criteria know the model's EOS ids from its generation config alone; its spec may know more.
    own = getattr(model, "generation_config", None)
    if _ids(generation_config.eos_token_id) != _ids(getattr(own, "eos_token_id", None)):
        if eos:
            settings["eos_token_id"] = eos
        else:
            settings.setdefault("early_stop", False)
    if generation_config.pad_token_id not in (None, getattr(own, "pad_token_id", None)):
        settings["pad_token_id"] = int(generation_config.pad_token_id)
    settings["max_new_tokens"] = length - input_ids.shape[1]
    settings["temperature"] = float(generation_config.temperature or 0) if generation_config.do_sample else 0.0
    if settings["temperature"] > 0 and settings.get("seed") is None:
        settings["seed"] = torch.randint(2**62, (input_ids.shape[0],)).tolist()

    target = streamer if stream_to is None else stream_to
    spec = spec_of(model)
    config, _ = resolve(None, spec.defaults if spec else {}, settings)
    stream = None if target is None else _Stream(config, spec, input_ids, prepared["attention_mask"], target)
    if stream is not None and stream_to is not None:
        target.put(input_ids.cpu())  # what transformers does with a streamer of its own
    out = decode(model, input_ids, prepared["attention_mask"], observers=[] if stream is None else [stream], **settings)
    longest = int(out.new_tokens.max()) if config.early_stop else settings["max_new_tokens"]
    sequences = out.sequences[:, : input_ids.shape[1] + longest]
    if stream is not None:
        stream.end(sequences[0, input_ids.shape[1] :])
    if not generation_config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    result: Any = GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    result["nfe"], result["token_forwards"] = out.nfe, out.token_forwards
    return result


def _own_settings() -> list[str]:
    names = {field.name for field in dataclasses.fields(DecodeConfig)} - _THEIRS
    for rule in STRATEGIES.values():
        names |= {field.name for field in dataclasses.fields(rule)}  # type: ignore[arg-type]
    return sorted(names | {"kv_cache"})


_OURS = _own_settings()


def _signature() -> inspect.Signature:
    """transformers hands over what the signature names, and takes the rest for arguments of the model."""
    named = inspect.signature(generate).parameters
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _OURS]
    return inspect.Signature([*list(named.values())[:-1], *extra, named["settings"]])


generate.__signature__ = _signature()  # type: ignore[attr-defined]


def _refuse_other_loops(config: Any, synced_gpus: bool) -> None:
    mode = str(getattr(config.get_generation_mode(), "value", ""))
    if mode not in ("greedy_search", "sample"):
        raise ConfigError(
            f"{mode.replace('_', ' ')} has no counterpart in masked diffusion. Use num_beams=1, no assistant."
        )
    if synced_gpus:
        raise ConfigError("synced_gpus is not supported: processes may need different numbers of forwards.")
    for name in ("min_length", "min_new_tokens"):
        if getattr(config, name, None):
            raise ConfigError(f"{name} cannot be honoured. suppress_tokens=[eos] forbids the end altogether.")
    shown = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    for name in (*shown, "cache_implementation"):
        if getattr(config, name, None):
            fix = 'Use kv_cache="prefix" or "dual".' if name not in shown else "Leave it out."
            raise ConfigError(f"{name}={getattr(config, name)!r} is not supported by leap_kernels.generate. {fix}")


def _refuse_processors(processors: Any, config: Any) -> None:
    for processor in processors:
        name = type(processor).__name__
        if name == "TemperatureLogitsWarper" and processor.temperature == config.temperature and config.do_sample:
            continue  # done by decode
        raise ConfigError(
            f"{name} cannot be applied: many positions are decoded at once, not one behind a prefix. Leave its "
            "argument out; top_k=0 and top_p=1.0 where it is sampling's default; suppress_tokens=[...] bans tokens."
        )


def _criteria(criteria: Any) -> tuple[int, tuple[int, ...]]:
    """The length at which to stop, and the EOS ids."""
    lengths: list[int] = []
    eos: list[int] = []
    for criterion in criteria:
        name = type(criterion).__name__
        if name == "MaxLengthCriteria":
            lengths.append(criterion.max_length)
        elif name == "EosTokenCriteria":
            eos += _ids(criterion.eos_token_id)
        else:
            raise ConfigError(f"stopping criterion {name} cannot be honoured: it looks at text that grows at its end.")
    if not lengths:
        raise ConfigError(expected("max_new_tokens", "given, or max_length", "neither"))
    return min(lengths), tuple(eos)


def _ids(value: Any) -> list[int]:
    """One id, several, a tensor of them, or None, as a list."""
    if value is None:
        return []
    if isinstance(value, Tensor):
        value = value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_prepared(input_ids: Tensor, prepared: dict[str, Any]) -> None:
    for name in ("cache", "past_key_values"):
        cache = prepared[name]
        if cache is not None and (not hasattr(cache, "get_seq_length") or int(cache.get_seq_length()) > 0):
            raise InputError(f'{name} holds keys and values already, which a canvas cannot use. Use kv_cache="prefix".')
    pos, mask = prepared["position_ids"], prepared["attention_mask"]
    if pos is not None:
        rows = Rows.plain(input_ids, attention_mask=mask)
        if not torch.equal(
            torch.where(rows.kind < 0, 0, pos.expand_as(rows.pos)), torch.where(rows.kind < 0, 0, rows.pos)
        ):
            raise InputError("position_ids differ from 0, 1, 2, ... over each prompt, and decode has no others.")


class _Stream:
    """Puts the tokens of blocks that the decoding has left on a streamer, from the left, one prompt at a time."""

    def __init__(
        self, config: DecodeConfig, spec: ModelSpec | None, ids: Tensor, mask: Tensor | None, target: Any
    ) -> None:
        if ids.shape[0] != 1:
            raise InputError(expected("the batch of a streamer", "one prompt", f"{ids.shape[0]}"))
        self.block = config.block
        prompt = int(mask.sum()) if mask is not None else ids.shape[1]
        self.tail = prompt % self.block if spec and spec.block_causal_length else 0
        self.target, self.known, self.shown = target, dict[int, int](), 0

    def __call__(self, event: StepEvent) -> None:
        self.known |= dict(zip(event.index, event.token, strict=True))
        if event.index:
            last = max(event.index) + self.tail
            left = range(self.shown, last - last % self.block - self.tail)
            # Some rules work on several blocks at once: nothing is shown behind what is not there yet.
            self.put([self.known[i] for i in itertools.takewhile(self.known.__contains__, left)])

    def put(self, tokens: list[int]) -> None:
        if tokens:
            self.target.put(torch.tensor(tokens))
            self.shown += len(tokens)

    def end(self, generated: Tensor) -> None:
        self.put(generated[self.shown :].tolist())
        self.target.end()
