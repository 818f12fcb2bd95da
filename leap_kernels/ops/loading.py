# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""How the kernels over logits read a row. Imports triton, so only `kernel.py` files import this."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_logits"]


@triton.jit
def load_logits(x_ptr, start, v, suppress_ptr, n_suppress, stride_suppress, BLOCK: tl.constexpr):
    """Columns [start, start + BLOCK) of the row at x_ptr in float32; -inf at suppressed ids and behind the end, v."""
    column = start + tl.arange(0, BLOCK)
    # A mask that ends at an odd V would turn the vector loads of every block into scalar ones.
    if start + BLOCK <= v:
        x = tl.load(x_ptr + column).to(tl.float32)
    else:
        x = tl.load(x_ptr + column, mask=column < v, other=float("-inf")).to(tl.float32)
    if suppress_ptr is not None:
        for i in range(n_suppress):
            x = tl.where(column == tl.load(suppress_ptr + i * stride_suppress), float("-inf"), x)
    return x
