# SPDX-License-Identifier: Apache-2.0
"""Caching, reduced to one question: which base rows does a forward recompute?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .canvas import Canvas
from .ops import PADDING
from .rows import Rows

__all__ = ["CACHES", "every_row"]


def every_row(canvas: Canvas) -> tuple[Rows, list[int]]:
    """No cache: every column of the canvas as a base row, exact.

    Block-causal models get the blocks up to the current one only: no earlier row sees a later block.
    Returns the rows and how many of them each sample computes.
    """
    ids, pos, kind, hide = canvas.ids, canvas.pos, canvas.kind, canvas.hide
    computed = [n + canvas.new_tokens for n in canvas.n_prompt]
    size = canvas.spec.block_causal_length
    if size:
        stops = [canvas.computed_columns(i) for i in range(len(computed))]
        computed = [stop - canvas.prompt + n for stop, n in zip(stops, canvas.n_prompt, strict=True)]
        behind = torch.arange(ids.shape[1], device=ids.device) >= torch.tensor(stops, device=ids.device)[:, None]
        kind = kind.masked_fill(behind, PADDING)
        ids, pos, kind, hide = (t[:, : max(stops)] for t in (ids, pos, kind, hide))
    return Rows(ids, pos, kind, hide, base=ids.shape[1], block_causal=size), computed


CACHES: dict[str, Callable[[Canvas], tuple[Rows, list[int]]]] = {"none": every_row}
