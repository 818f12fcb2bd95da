# SPDX-License-Identifier: Apache-2.0
"""`DecodeConfig`: every knob that all strategies share, its unit, range, default and source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .caches import CACHES
from .errors import ConfigError, ModelError, expected
from .models.spec import ModelSpec, limits_of
from .ops.backends import check_name
from .ops.validation import flag
from .strategies import STRATEGIES, Strategy
from .strategies.base import check_count, check_range

__all__ = ["DecodeConfig", "resolve"]


@dataclass(frozen=True)
class DecodeConfig:
    """Settings of one `decode` call, checked when made.

    A strategy's own options (`threshold`, `tau`, `eta`, ...) are fields of its class; as keywords of `decode` they
    find their way there. Raises ConfigError for a value out of range.
    """

    max_new_tokens: int | Sequence[int] = 256
    """Tokens to generate, at least 1, for every sample, or one a sample; need not be a multiple of the block. Default:
    the LEAP paper's (GSM8K). The bundled model recommends 96."""
    block_length: int | None = None
    """Positions decoded together, left to right block by block, at least 1. None: what the model recommends, or else
    the 32 of the LEAP paper; strategies that know no blocks then take the whole canvas, `infill` all masks at once."""
    infill: bool = False
    """Fill the mask tokens that stand inside the prompts, wherever they are, and generate nothing behind them. EOS and
    `early_stop` then mean nothing. Masked language models recommend it."""
    strategy: str | Strategy = "leap"
    """Name of a decoding rule, or an object with its options set."""
    cache: str = "none"
    """Which base rows a forward recomputes: "none" all of them, which is exact; "prefix" from the block on; "dual" the
    block; "delayed" masks and what was just committed; "block", for block-causal models only and exact, the block."""
    cache_refresh: int | None = None
    """With "prefix", "dual" and "delayed": every so many forwards of a block recompute all rows, at least 1; None for
    a block's first forward only (delayed: the second too)."""
    free_first_token: bool = False
    """Commit the first token of a block in the block's first forward, whatever its confidence. For models that are
    shifted and block-causal (Fast-dLLM v2): it is read in the block before, so no later forward can change it."""
    temperature: float = 0.0
    """0 is greedy and draws no random number; above 0 tokens are drawn by the Gumbel-max trick."""
    top_p: float | None = None
    """With a temperature: draw from the likeliest tokens up to the first with which their sum exceeds this, in [0, 1].
    None draws from all."""
    top_k: int | None = None
    """With a temperature: draw from this many of the likeliest tokens (of those that `top_p` leaves), at least 1."""
    seed: int | Sequence[int] = 0
    """Seed of the draws, for every sample, or one a sample. A sample's draws do not depend on its neighbours."""
    early_stop: bool = True
    """Stop a sample when a finished block holds an EOS, and fill what follows the EOS with the pad token."""
    suppress_tokens: Sequence[int] = ()
    """Ids that are never predicted. The mask token never is."""
    mask_token_id: int | None = None
    """Overrides the model's mask token id."""
    eos_token_id: int | Sequence[int] | None = None
    """Overrides the model's EOS ids, one or several."""
    pad_token_id: int | None = None
    """Overrides the model's pad token id."""
    backend: str = "auto"
    """Which implementation of the ops runs: "auto", "reference" or "triton"."""

    def __post_init__(self) -> None:
        check_count("block_length", self.block_length, none=True)
        if not isinstance(self.strategy, Strategy) and not _is_key(self.strategy, STRATEGIES):
            names = ", ".join(STRATEGIES)
            raise ConfigError(expected("strategy", f"one of {names}, or a Strategy object", repr(self.strategy)))
        if not _is_key(self.cache, CACHES):
            raise ConfigError(expected("cache", f"one of {', '.join(CACHES)}", repr(self.cache)))
        check_count("cache_refresh", self.cache_refresh, none=True)
        if self.cache_refresh is not None and CACHES[self.cache].exact:
            raise ConfigError(f"cache_refresh is for approximate caches; cache={self.cache!r} is exact. Leave it out.")
        check_range("temperature", self.temperature, 0, 1e6)
        if self.top_p is not None:
            check_range("top_p", self.top_p, 0, 1)
        check_count("top_k", self.top_k, none=True)
        for name in ("top_p", "top_k"):
            if getattr(self, name) is not None and not self.temperature:
                raise ConfigError(
                    f"{name} limits which tokens are drawn, and temperature 0 draws none: it takes the likeliest. "
                    f"Pass a temperature above 0, or leave {name} out."
                )
        for name in ("early_stop", "infill", "free_first_token"):
            flag(name, getattr(self, name))
        # Whatever sequence was given, keep one that stays.
        for name in ("max_new_tokens", "seed", "suppress_tokens", "eos_token_id"):
            value = getattr(self, name)
            if not _is_int(value) and value is not None and isinstance(value, (Sequence, range)):
                object.__setattr__(self, name, tuple(value))
        if not _are_ints(self.max_new_tokens, 1, one=True) or self.max_new_tokens == ():
            what = "a whole number of at least 1, or one a sample"
            raise ConfigError(expected("max_new_tokens", what, repr(self.max_new_tokens)))
        if not _are_ints(self.seed, -(2**63), one=True) or self.seed == ():
            raise ConfigError(expected("seed", "a whole number, or one a sample", repr(self.seed)))
        if not _are_ints(self.suppress_tokens, 0):
            raise ConfigError(expected("suppress_tokens", "token ids of at least 0", repr(self.suppress_tokens)))
        if self.eos_token_id is not None and not _are_ints(self.eos_token_id, 0, one=True):
            raise ConfigError(expected("eos_token_id", "token ids of at least 0", repr(self.eos_token_id)))
        for name in ("mask_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 0):
                raise ConfigError(expected(name, "a token id of at least 0", repr(value)))
        check_name(self.backend)

    @property
    def block(self) -> int:
        """`block_length`, or the paper's where it was left open."""
        return self.block_length or 32

    def spec(self, spec: ModelSpec | None, model: Any) -> ModelSpec:
        """`spec` with this config's ids and the model's own limits; ModelError when nobody knows a mask token."""
        own: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "eos_token_ids": (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        own = {name: value for name, value in own.items() if value is not None}
        if spec is None and self.mask_token_id is None:
            raise ModelError(
                f"no mask token known for {type(model).__name__}: leap_kernels decodes masked-diffusion models only. "
                "Pass spec=ModelSpec(mask_token_id=...), or mask_token_id=..., or use leap_kernels.load."
            )
        limits = limits_of(model)
        if spec is not None and "max_positions" in limits:
            limits["max_positions"] -= spec.position_offset
        for name, limit in limits.items():
            claimed = getattr(spec, name, None)
            if claimed is None or claimed > limit:
                own[name] = limit
        if spec is None:
            return ModelSpec(**own)
        return dataclasses.replace(spec, **own) if own else spec


_SHARED = frozenset(f.name for f in dataclasses.fields(DecodeConfig))
_OF_ANY_STRATEGY = frozenset(f.name for rule in STRATEGIES.values() for f in dataclasses.fields(rule))  # type: ignore[arg-type]


def resolve(
    config: DecodeConfig | None, defaults: Mapping[str, Any], overrides: Mapping[str, Any], *, block_causal: int = 0
) -> tuple[DecodeConfig, Strategy]:
    """Settings by rising priority: the model's `defaults` (only without a `config`), `config`, keyword `overrides`.

    Keywords that `DecodeConfig` does not have go to the strategy; what neither has is a ConfigError.
    """
    if config is not None and not isinstance(config, DecodeConfig):
        raise ConfigError(expected("config", "a DecodeConfig", type(config).__name__))
    recommended = {} if config is not None else defaults
    unheard_of = sorted(recommended.keys() - _SHARED - _OF_ANY_STRATEGY)
    if unheard_of:
        raise ConfigError(f"the model recommends settings that nobody knows: {', '.join(unheard_of)}.")
    given = {**recommended, **overrides}
    said = DecodeConfig if config is None else config
    says_length = "max_new_tokens" in overrides or said.max_new_tokens != DecodeConfig.max_new_tokens
    says_block = overrides.get("block_length") is not None or said.block_length is not None
    of_all = {name: value for name, value in given.items() if name in _SHARED}
    config = DecodeConfig(**of_all) if config is None else dataclasses.replace(config, **of_all)
    if config.infill and says_length:
        raise ConfigError(
            "max_new_tokens does not go with infill=True (which masked language models recommend): nothing is "
            "generated behind the prompt. Leave it out, or pass infill=False."
        )
    by_name = not isinstance(config.strategy, Strategy)
    strategy = STRATEGIES[config.strategy]() if isinstance(config.strategy, str) else config.strategy
    options = {name: value for name, value in overrides.items() if name not in _SHARED}
    known: set[str] = {f.name for f in dataclasses.fields(strategy)} if dataclasses.is_dataclass(strategy) else set()
    unknown = sorted(options.keys() - known)
    if unknown:
        hint = ""
        if "token_type_ids" in unknown:
            hint = " Call the tokenizer with return_token_type_ids=False."
        raise ConfigError(
            f"unknown argument {', '.join(unknown)} for strategy {strategy.name!r}, which has "
            f"{'the options ' + ', '.join(sorted(known)) if known else 'no options'}; "
            f"decode knows: {', '.join(sorted(_SHARED))}.{hint}"
        )
    if by_name:  # an object says all of it; and what is recommended for one rule may not exist in another
        options = {name: value for name, value in recommended.items() if name in known - _SHARED} | options
    if options:
        strategy = dataclasses.replace(strategy, **options)  # type: ignore[type-var]
    if strategy.whole_canvas and not says_block and not config.infill and not block_causal:
        length = config.max_new_tokens
        config = dataclasses.replace(config, block_length=length if isinstance(length, int) else max(length))
    check_range("eta", strategy.eta, 1 / 64, 1)  # of a rule that does not check it itself
    return config, strategy


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ints(value: object, least: int, *, one: bool = False) -> bool:
    """Whether this is a tuple of whole numbers of 64 bits from `least` on, or, with `one`, a single number."""
    values = value if isinstance(value, tuple) else (value,) if one else (None,)
    return all(_is_int(v) and least <= v < 2**63 for v in values)


def _is_key(value: object, table: Mapping[str, Any]) -> bool:
    return isinstance(value, str) and value in table
