# SPDX-License-Identifier: Apache-2.0
"""Infilling: the masks inside the prompts are decoded, by the same loop (method.md section 1).

The canvas is the prompts alone, and all of its columns count as generated; results go back to the caller's columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .output import Observer, StepEvent
from .prompts import Prompts

__all__ = ["in_callers_columns", "to_caller"]


def to_caller(given: Prompts, results: Tensor, outside: Tensor) -> Tensor:
    """(B, P): results of the left-padded canvas at the columns where the caller's tokens stand, `outside` elsewhere."""
    lengths = given.valid.sum(1, keepdim=True)
    width = results.shape[1]
    own = torch.arange(width, device=results.device) >= width - lengths
    out = outside.clone()
    out[given.valid] = results[own]
    return out


def in_callers_columns(given: Prompts, observers: Sequence[Observer]) -> list[Observer]:
    """Observers whose events name the caller's columns, where padding may stand on the right."""
    lengths = given.valid.sum(1)
    first = given.valid.long().argmax(1)  # of a sample's own columns
    shift = (first - (int(lengths.max()) - lengths)).tolist()

    def moved(observer: Observer) -> Observer:
        def tell(event: StepEvent) -> None:
            index = [at + shift[sample] for sample, at in zip(event.sample, event.index, strict=True)]
            observer(dataclasses.replace(event, index=index))

        return tell

    return [moved(observer) for observer in observers]
