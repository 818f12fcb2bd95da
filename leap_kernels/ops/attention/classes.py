# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Classes of keys: the part of who sees whom that depends on kinds alone, as bits.

A class is a kind, 0 base, 1 copy, 2 candidate, 3 branch, except that base rows with hide >= 0, which branches do not
see, are class 4. Class i is bit i.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["_class_bit", "_seen_classes"]


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
