# SPDX-License-Identifier: Apache-2.0
"""Weights that a checkpoint stores in one piece and the stock class in several: LLaDA2's queries, keys and values."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import CheckpointError, expected

__all__ = ["splitting"]

_lock = threading.Lock()


@contextlib.contextmanager
def splitting(fused: Mapping[str, tuple[str, ...]], config: Any) -> Iterator[None]:
    """For the length of a `from_pretrained` of `config`'s model type, split the weights named in `fused`.

    transformers keeps one table of conversions a model type and takes them from nowhere else, so ours is put into that
    table and taken out again, one load at a time.
    """
    if not fused:
        yield
        return
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightConverter

    table: Any = conversion_mapping
    with _lock:
        before = table.get_checkpoint_conversion_mapping(config.model_type)
        own = [
            WeightConverter(name, list(pieces), operations=[_split([_rows(piece, config) for piece in pieces])])
            for name, pieces in fused.items()
        ]
        table.register_checkpoint_conversion_mapping(config.model_type, own + list(before or []), overwrite=True)
        try:
            yield
        finally:
            table.register_checkpoint_conversion_mapping(config.model_type, before, overwrite=True)


def _rows(piece: str, config: Any) -> int:
    """How many rows of the fused weight are queries, or keys, or values."""
    heads: int = config.num_attention_heads if "q_proj" in piece else config.num_key_value_heads
    return heads * int(config.head_dim)


def _split(rows: list[int]) -> Any:
    """An operation of transformers' loader: the pieces of a fused weight, `rows` long each, in a tensor of its own."""
    from transformers.core_model_loading import ConversionOps

    class Split(ConversionOps):  # type: ignore[misc, unused-ignore]
        @torch.no_grad()
        def convert(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
        ) -> dict[str, Any]:
            (found,) = input_dict.values()
            weight = found[0] if isinstance(found, list) else found
            if weight.shape[0] != sum(rows):
                raise CheckpointError(expected(source_patterns[0], f"{sum(rows)} = {rows} rows", tuple(weight.shape)))
            return {name: part.clone() for name, part in zip(target_patterns, weight.split(rows), strict=True)}

        @property
        def reverse_op(self) -> ConversionOps:
            raise NotImplementedError("a loaded model is saved under the stock class's own names")

    return Split()
