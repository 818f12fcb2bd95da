# SPDX-License-Identifier: Apache-2.0
"""`generate`: `decode` in the place of transformers' own loop, `model.generate(ids, custom_generate=generate, ...)`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor

from .config import DecodeConfig, resolve
from .decoding import decode
from .errors import ConfigError, InputError, expected
from .models.load import spec_of
from .rows import Rows
from .strategies import STRATEGIES

__all__ = ["generate"]

# What transformers' own arguments say already, and the one name that it keeps for key-value caches of its own.
_THEIRS = {"max_new_tokens", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id", "cache"}
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

    `max_new_tokens` (or `max_length`), `do_sample`, `temperature`, `top_k`, `top_p`, `eos_token_id` (several as well),
    `pad_token_id`, `attention_mask`, `num_return_sequences` and `return_dict_in_generate` mean what they do in
    transformers. What `decode` has no counterpart for (beams, penalties, stop strings, logits processors, ...) is
    refused.

    Args:
        stream_to: a transformers streamer, for one prompt: `decode`'s `streamer`. (Releases of transformers that keep
            `streamer=` from a custom_generate show the prompt on it and nothing else.)
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
    if settings.get("infill"):
        raise ConfigError("infill: model.generate adds tokens. Use leap_kernels.decode(model, ids, infill=True).")
    theirs = sorted(name for name in settings if name not in _OURS)
    if theirs:
        raise ConfigError(f"{', '.join(theirs)}: the forwards of leap_kernels.generate do not take this. Leave it out.")
    _refuse_other_loops(generation_config, synced_gpus)
    settings |= _limits(logits_processor or (), generation_config)
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

    spec = spec_of(model)
    config, _ = resolve(None, spec.defaults if spec else {}, settings)
    # A streamer that transformers hands over was given the prompt there already.
    target = stream_to if streamer is None else _WithoutPrompt(streamer)
    out = decode(model, input_ids, prepared["attention_mask"], streamer=target, **settings)
    longest = int((out.new_tokens if config.early_stop else out.max_new_tokens).max())
    sequences = out.sequences[:, : input_ids.shape[1] + longest]
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


def _limits(processors: Any, config: Any) -> dict[str, Any]:
    """`top_k` or `top_p` as decode has them, of the processors that transformers made of its own arguments."""
    limits: dict[str, Any] = {}
    for processor in processors:
        name = type(processor).__name__
        if name == "TemperatureLogitsWarper" and processor.temperature == config.temperature and config.do_sample:
            continue  # done by decode
        if name == "TopKLogitsWarper" and processor.top_k == config.top_k and config.do_sample:
            limits["top_k"] = int(processor.top_k)
        elif name == "TopPLogitsWarper" and processor.top_p == config.top_p and config.do_sample:
            limits["top_p"] = float(processor.top_p)
        else:
            raise ConfigError(
                f"{name} cannot be applied: many positions are decoded at once, not one behind a prefix. Leave its "
                "argument out; suppress_tokens=[...] bans tokens."
            )
    if len(limits) == 2:
        raise ConfigError(
            f"top_k={limits['top_k']} together with top_p={limits['top_p']}: transformers takes the shares for top_p "
            "among the top_k, decode among all tokens. Pass one of them: top_k=0 or top_p=1.0 switches the other off."
        )
    return limits


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


class _WithoutPrompt:
    """A streamer without the first thing that is put on it."""

    def __init__(self, target: Any) -> None:
        self.target, self.began = target, False

    def put(self, tokens: Tensor) -> None:
        if self.began:
            self.target.put(tokens)
        self.began = True

    def end(self) -> None:
        self.target.end()
