# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Who sees whom, as far as the kernels for bounds and for tiles both compute it.

Kinds come in as classes of keys: a class is a kind, 0 base, 1 copy, 2 candidate, 3 branch, except that base rows with
hide >= 0, which branches do not see, are class 4. Class i is bit i.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["CHANGING", "_block_end", "_class_bit", "_seen_classes"]

# Arguments of both kernels: lengths and settings, of which a changed one must not compile a kernel again.
CHANGING = ["n_q", "splits", "block_causal", "window", "switches"]
CHANGING += ["stride_qpb", "stride_qpm", "stride_qkb", "stride_qkm", "stride_qsb", "stride_qsm"]
CHANGING += ["stride_kpb", "stride_kpn", "stride_kkb", "stride_kkn", "stride_khb", "stride_khn"]


@triton.jit
def _class_bit(kind, hide):
    """The class of a key as a bit; 0 for padding, of no class."""
    return tl.where(kind >= 0, 1 << tl.maximum(tl.where((kind == 0) & (hide >= 0), 4, kind), 0), 0)


@triton.jit
def _seen_classes(kind, switches):
    """The classes of keys that a row of this kind sees.

    The switches copies_see_copies and candidates_see_candidates are the bits 1 and 2 as they come.
    """
    copy = 0b10101 | (switches & 0b10)
    candidate = 0b10001 | (switches & 0b100) | ((switches & 0b1000) >> 2)
    seen = tl.where(kind == 0, 0b10001, tl.where(kind == 3, 0b01001, 0))
    return tl.where(kind == 1, copy, tl.where(kind == 2, candidate, seen))


@triton.jit
def _block_end(pos, block_causal):
    """The position where the first block begins that a row at `pos` does not see."""
    size = tl.maximum(block_causal, 1)
    return tl.where(block_causal > 0, (pos // size + 1) * size, 2147483647)
