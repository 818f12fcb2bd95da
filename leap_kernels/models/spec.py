# SPDX-License-Identifier: Apache-2.0
"""`ModelSpec`: what decoding needs to know about a model beyond its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelError, expected

__all__ = ["ModelSpec", "limits_of"]


@dataclass(frozen=True)
class ModelSpec:
    """The facts about a masked-diffusion language model that a decode loop must know.

    Raises ModelError for ids that are negative, outside the vocabulary, or contradict each other.
    """

    mask_token_id: int
    """Id of the mask token; never predicted, never a candidate."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a sample (end of text, end of turn)."""
    pad_token_id: int | None = None
    """Id that fills the canvas behind an EOS; None takes the first EOS id."""
    shift: int = 0
    """1 when the prediction for position i is read at row i - 1 (Dream, Fast-dLLM v2), else 0."""
    block_causal_length: int = 0
    """Block size of models that see earlier blocks and their own only; 0 for full attention."""
    rope_fp32: bool = False
    """Whether the model rotates queries and keys in float32 whatever its dtype (LLaDA does)."""
    position_offset: int = 0
    """Position of the first token, in models that do not count from 0 (RoBERTa counts from its padding id + 1)."""
    window: int = 0
    """In layers with a sliding window, a row sees positions closer than this (ModernBERT); 0 for no such layers."""
    max_positions: int | None = None
    """Longest sequence, prompt and new tokens, in tokens; None when the model sets no limit."""
    vocab_size: int | None = None
    """Width of the logits; None when unknown before the first forward."""
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Decode settings recommended for this checkpoint; `decode`'s own arguments win over them."""

    def __post_init__(self) -> None:
        if isinstance(self.eos_token_ids, int) or not all(_whole(i) for i in self.eos_token_ids):
            raise ModelError(expected("eos_token_ids", "a tuple of token ids", repr(self.eos_token_ids)))
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        for name in (
            "mask_token_id", "pad_token_id", "shift", "block_causal_length", "position_offset", "window",
            "max_positions", "vocab_size",
        ):  # fmt: skip
            value = getattr(self, name)
            optional = name in ("pad_token_id", "max_positions", "vocab_size")
            if not _whole(value) and not (optional and value is None):
                raise ModelError(expected(name, "a whole number" + (" or None" if optional else ""), repr(value)))
        for name in ("max_positions", "vocab_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ModelError(expected(name, "at least 1", getattr(self, name)))
        top = self.vocab_size
        ids = {"mask_token_id": self.mask_token_id, "pad_token_id": self.pad_token_id}
        ids |= {f"eos_token_ids[{i}]": id_ for i, id_ in enumerate(self.eos_token_ids)}
        for name, id_ in ids.items():
            if id_ is not None and (id_ < 0 or (top is not None and id_ >= top)):
                raise ModelError(expected(name, f"in [0, {top if top is not None else 'vocabulary size'})", id_))
        if self.mask_token_id in (self.pad_token_id, *self.eos_token_ids):
            raise ModelError(
                f"mask_token_id {self.mask_token_id} is also the pad or an EOS id. "
                "Pass the id that stands for unknown tokens in training."
            )
        if self.shift not in (0, 1):
            raise ModelError(expected("shift", "0 or 1", self.shift))
        for name in ("block_causal_length", "position_offset", "window"):
            if getattr(self, name) < 0:
                raise ModelError(expected(name, "at least 0", getattr(self, name)))
        if self.position_offset and (self.shift or self.block_causal_length):
            raise ModelError("position_offset goes with neither shift nor block_causal_length: no such model is known.")

    def agree_with(self, own: ModelSpec, model: Any) -> None:
        """ModelError when this spec reads a model's rows otherwise than its config, or what loaded it, says."""
        for name, wrong in (
            ("shift", self.shift != own.shift),
            ("block_causal_length", bool(self.block_causal_length) != bool(own.block_causal_length)),
            ("position_offset", self.position_offset != own.position_offset),
        ):
            if wrong:
                raise ModelError(
                    f"spec.{name} is {getattr(self, name)}, but {type(model).__name__} says {getattr(own, name)}: its "
                    "predictions would be read from wrong rows. Leave spec out, or start from "
                    "dataclasses.replace(model.leap_spec, ...)."
                )

    @property
    def fill_token_id(self) -> int | None:
        """What stands behind an EOS: the pad id, or the first EOS id where there is none."""
        if self.pad_token_id is not None or not self.eos_token_ids:
            return self.pad_token_id
        return self.eos_token_ids[0]


def limits_of(model: Any) -> dict[str, int]:
    """`vocab_size` and `max_positions` of a transformers model, as far as it has them."""
    limits: dict[str, int] = {}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    # Quantised weights may be packed in any shape, or be no tensors.
    width = getattr(head, "out_features", None)
    shape = getattr(getattr(head, "weight", None), "shape", None)
    if width is None and shape is not None:
        width = shape[0]
    if width is not None:
        limits["vocab_size"] = int(width)
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        limits["max_positions"] = positions
    return limits


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
