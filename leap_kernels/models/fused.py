# SPDX-License-Identifier: Apache-2.0
"""Weights that a checkpoint stores in one piece and the stock class in several (LLaDA2's queries, keys and values), or
in many pieces and the stock class in one (experts)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import CheckpointError, expected

__all__ = ["converting"]

_lock = threading.Lock()


@contextlib.contextmanager
def converting(fused: Mapping[str, tuple[str, ...]], config: Any, *, split_among_processes: bool) -> Iterator[None]:
    """For the length of a `from_pretrained` of `config`'s model type, split the weights named in `fused`, and merge
    experts without a copy in between.

    transformers keeps one table of conversions a model type and takes them from nowhere else, so ours is put into that
    table and taken out again, one load at a time.
    """
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightConverter

    table: Any = conversion_mapping
    with _lock:
        before = table.get_checkpoint_conversion_mapping(config.model_type)
        own = [
            WeightConverter(name, list(pieces), operations=[_split([_rows(piece, config) for piece in pieces])])
            for name, pieces in fused.items()
        ]
        # Processes that share a model get parts of experts, which transformers' own operations know about.
        merging = [each if split_among_processes else _merging(each) for each in before or []]
        if not own and all(new is old for new, old in zip(merging, before or [], strict=True)):
            yield
            return
        table.register_checkpoint_conversion_mapping(config.model_type, own + merging, overwrite=True)
        try:
            yield
        finally:
            table.register_checkpoint_conversion_mapping(config.model_type, before, overwrite=True)


def _merging(conversion: Any) -> Any:
    """A conversion of transformers' that merges experts, as one that needs no memory beside the result; others as
    they are."""
    from transformers.core_model_loading import WeightConverter

    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in getattr(conversion, "operations", ())]
    if steps not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        return conversion
    return WeightConverter(list(conversion.source_patterns), list(conversion.target_patterns), operations=[_merge()])


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


def _merge() -> Any:
    """An operation of transformers' loader: the experts' weights, those of several names below each other, in one."""
    from transformers.core_model_loading import ConversionOps

    class Merge(ConversionOps):  # type: ignore[misc, unused-ignore]
        @torch.no_grad()
        def convert(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
        ) -> dict[str, Any]:
            parts = [input_dict.pop(name, []) for name in source_patterns]
            count, rows = len(parts[0]), [part[0].shape[0] if part else 0 for part in parts]
            if not all(len(part) == count > 0 for part in parts):
                raise CheckpointError(
                    f"{[len(part) for part in parts]} experts of {source_patterns}: not as many each."
                )
            merged = parts[0][0].new_empty((count, sum(rows), parts[0][0].shape[1]))
            for places, part in zip(merged.split(rows, 1), parts, strict=True):
                for place, weight in zip(places, part, strict=True):
                    if place.shape != weight.shape:  # which copy_ might broadcast
                        raise CheckpointError(
                            f"experts of {tuple(place.shape)} and {tuple(weight.shape)} in one layer."
                        )
                    place.copy_(weight)
            return {target_patterns[0]: merged}

        @property
        def reverse_op(self) -> ConversionOps:
            raise NotImplementedError("a loaded model is saved under the stock class's own names")

    return Merge()
