# SPDX-License-Identifier: Apache-2.0
"""`Entry`: all that is known about the checkpoints of one architecture, as data, and the few rules that read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError, ModelError
from .spec import ModelSpec

__all__ = ["Entry", "Ids", "Key", "Raw"]

Raw = Mapping[str, Any]  # a config.json

_REQUIRED = object()


class Key:
    """The value that config.json has under the first of these names; `default` may be a function of config.json."""

    def __init__(self, *names: str, default: Any = _REQUIRED) -> None:
        self.names, self.default = names, default

    def __call__(self, raw: Raw) -> Any:
        for name in self.names:
            if raw.get(name) is not None:
                return raw[name]
        if self.default is _REQUIRED:
            raise KeyError(self.names[0])
        return _value(self.default, raw)


def _value(value: Any, raw: Raw) -> Any:
    """What a field of the table stands for in this config.json: the result of a Key or function, or itself."""
    return value(raw) if callable(value) else value


@dataclass(frozen=True)
class Ids:
    """Token ids and limits of the published checkpoints.

    The ids count where config.json leaves them out and the vocabulary has the published width; a small checkpoint of
    the same architecture has ids of its own.
    """

    vocabulary: tuple[int, ...]
    """Embedding rows of the published checkpoints, which may be more than there are tokens."""
    mask: int
    eos: int | None = None
    turn_end: int | None = None
    pad: int | None = None
    positions: str = ""
    """Longest sequence, for the documentation; what counts is config.json."""


@dataclass(frozen=True)
class Entry:
    """How checkpoints of one architecture are loaded and decoded.

    Fields that depend on the checkpoint hold a `Key`, or a function of its config.json.
    """

    architecture: str
    """`architectures[0]` of config.json."""
    family: str
    """What the authors call it."""
    model_class: str
    """Name of the stock class in transformers."""
    translation: Mapping[str, Any] | None = None
    """Key of the stock class's config -> where its value comes from; None when config.json is that config already."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Key of config.json -> the only value for which the stock class computes the same; absent or null is fine."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Regular expression on a weight's name in the file -> its name in the stock class (one group at most)."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Weight that is stored in one piece -> the weights it holds, one below the other, in the stock class."""
    unused: tuple[str, ...] = ()
    """Regular expressions on weights that published files hold and the stock class has no use for."""
    ids: Ids | None = None
    shift: Any = 0
    """1 when row i - 1 predicts token i."""
    block_causal: Any = 0
    """Block size of models that see earlier blocks and their own only; 0 for full attention."""
    rope_fp32: Any = False
    """Whether queries and keys are rotated in float32 whatever the dtype; None where nothing is rotated."""
    position_offset: Any = 0
    """Position of the first token, where a model does not count from 0."""
    window: Any = 0
    """In layers with a sliding window: see positions closer than this."""
    masked_lm: bool = False
    """A masked language model: it fills masks inside a text and generates none behind it."""
    head: tuple[str, ...] = ()
    """Submodules that make logits of hidden states, in order; empty for the output embeddings alone."""
    defaults: Any = field(default_factory=dict)
    """Decode settings recommended for these checkpoints."""
    checkpoints: tuple[str, ...] = ()
    """Published repositories."""
    licence: str = ""
    citation: str = ""
    note: str = ""

    def config(self, raw: Raw) -> dict[str, Any]:
        """config.json -> keyword arguments of the stock class's own config, which can be saved and loaded again."""
        wrong = {key: raw[key] for key, value in self.fixed.items() if raw.get(key) not in (None, value)}
        if wrong:
            shape = self.model_class.removesuffix("ForCausalLM").removesuffix("ForMaskedLM")
            raise CheckpointError(f"this {self.family} config is not {shape}-shaped: {wrong}; expected {self.fixed}.")
        if self.translation is None:
            own = dict(raw)
        else:
            own = {key: _value(value, raw) for key, value in self.translation.items()}
            own |= {key: raw.get(key) for key in ("pad_token_id", "bos_token_id")}
            own["eos_token_id"] = list(self._eos(raw)) or None
        spec = self.spec(raw)
        own |= {"mask_token_id": spec.mask_token_id, "leap_defaults": dict(spec.defaults)}
        if self.masked_lm:
            return own
        # Kept in the config, so that a saved model can be loaded again for what it is.
        own |= {"logits_shift": spec.shift, "block_causal_length": spec.block_causal_length}
        own |= {"rope_fp32": spec.rope_fp32}
        # A causal model's cache is of no use, and some releases mix dtypes in it.
        return own | {"is_causal": False, "use_cache": False}

    def spec(self, raw: Raw) -> ModelSpec:
        """config.json -> ModelSpec."""
        positions, offset = self._stock(raw, "max_position_embeddings"), _value(self.position_offset, raw)
        return ModelSpec(
            mask_token_id=self._mask(raw),
            eos_token_ids=self._eos(raw),
            pad_token_id=raw.get("pad_token_id"),
            shift=_value(self.shift, raw),
            block_causal_length=_value(self.block_causal, raw),
            rope_fp32=bool(_value(self.rope_fp32, raw)),
            position_offset=offset,
            window=_value(self.window, raw),
            max_positions=None if positions is None else positions - offset,
            vocab_size=self._width(raw),
            defaults={**_value(self.defaults, raw), **raw.get("leap_defaults", {})},
        )

    def _stock(self, raw: Raw, key: str) -> Any:
        """A value of the stock config; None where config.json, being that config, leaves it out."""
        return raw.get(key) if self.translation is None else _value(self.translation[key], raw)

    def _width(self, raw: Raw) -> int:
        width = self._stock(raw, "vocab_size")
        if width is None:
            raise KeyError("vocab_size")
        return int(width)

    def _published(self, raw: Raw) -> Ids | None:
        """The published ids, where the vocabulary is the published one."""
        return self.ids if self.ids is not None and self._width(raw) in self.ids.vocabulary else None

    def _mask(self, raw: Raw) -> int:
        published = self._published(raw)
        if raw.get("mask_token_id") is not None:
            return int(raw["mask_token_id"])
        if published is None:
            raise ModelError(
                "config.json declares no mask_token_id: leap_kernels decodes masked-diffusion models only. "
                "An autoregressive model cannot be decoded; a masked one needs the id in its config."
            )
        return published.mask

    def _eos(self, raw: Raw) -> tuple[int, ...]:
        """The ids of config.json (one, several or none), and the end of a turn in the published vocabulary."""
        own, published = raw.get("eos_token_id"), self._published(raw)
        ids = () if own is None else tuple(own) if isinstance(own, (list, tuple)) else (own,)
        if published is not None:
            known = (*(ids or (published.eos,)), published.turn_end)
            ids = tuple(i for i in known if i is not None)
        return tuple(dict.fromkeys(ids))
