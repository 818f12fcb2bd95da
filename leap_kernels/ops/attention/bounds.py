# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Which key tiles `superposed_attention` reads, in Triton: one answer for all heads.

Definition   For every tile of BM query rows and every split of the keys four slots: tiles [first, middle) are seen by
             every row in full and need no mask; [resume, stop) need one; what lies before, between and behind them
             is seen by no row. What could be seen is judged by kind, block and window; the mask has the last word.
Grid         (query tiles, B * splits).
Bytes        12 a key slot and 16 a row for every program; writes 16.
Numerics     integers. Where a sample is split depends on its own length alone, and tiles are whole, counted from the
             start of their split: leaving out one that nobody sees changes no bit of the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launching import Config
from .rules import CHANGING, _block_end, _class_bit, _seen_classes

__all__ = ["bounds_config"]


def bounds_config(bm: int, bn: int) -> Config:
    """How this kernel is compiled for tiles of `bm` rows and `bn` keys."""
    return Config({"BM": bm, "BN": bn, "SCAN": 1024}, {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False})


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=[*CHANGING, "n_k", "stride_nb"])
def _superposed_attention_bounds_kernel(
    q_pos_ptr,
    q_kind_ptr,
    q_slot_ptr,
    k_pos_ptr,
    k_kind_ptr,
    k_hide_ptr,
    lengths_ptr,
    bounds_ptr,
    n_q,
    n_k,
    splits,
    block_causal,
    window,
    switches,
    stride_qpb,
    stride_qpm,
    stride_qkb,
    stride_qkm,
    stride_qsb,
    stride_qsm,
    stride_kpb,
    stride_kpn,
    stride_kkb,
    stride_kkn,
    stride_khb,
    stride_khn,
    stride_nb,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SCAN: tl.constexpr,
):
    batch = (tl.program_id(1) // splits).to(tl.int64)
    split = tl.program_id(1) % splits
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    in_q = row < n_q
    q_pos = tl.load(q_pos_ptr + batch * stride_qpb + row * stride_qpm, mask=in_q, other=0)
    q_kind = tl.load(q_kind_ptr + batch * stride_qkb + row * stride_qkm, mask=in_q, other=-1)
    q_slot = tl.load(q_slot_ptr + batch * stride_qsb + row * stride_qsm, mask=in_q, other=-1)
    k_pos_ptr += batch * stride_kpb
    k_kind_ptr += batch * stride_kkb
    k_hide_ptr += batch * stride_khb

    huge: tl.constexpr = 2147483647
    nowhere: tl.constexpr = -2147483648
    q_end = _block_end(q_pos, block_causal)
    q_classes = _seen_classes(q_kind, switches)
    live = q_classes != 0
    blind = (q_kind == 1) & ((switches & 1) == 0)

    # A base key is seen by all rows when it lies before everyone's end, inside everyone's window, and not where a copy
    # stands that must not see its original.
    first_end = tl.min(tl.where(live, q_end, huge), 0)
    first_pos = tl.min(tl.where(live, q_pos, huge), 0)
    last_pos = tl.max(tl.where(live, q_pos, 0), 0)
    first_blind = tl.min(tl.where(blind, q_pos, huge), 0)
    last_blind = tl.max(tl.where(blind, q_pos, nowhere), 0)
    # Any key may be seen by some row when its class is, or its slot is one of theirs (appended rows see themselves),
    # and it lies before the last end and inside the outermost window.
    some_classes = tl.reduce(q_classes, 0, _either)
    last_end = tl.max(tl.where(live, q_end, nowhere), 0)
    first_slot = tl.min(tl.where(live, q_slot, huge), 0)
    last_slot = tl.max(tl.where(live, q_slot, -1), 0)

    # This split's share of the slots in use, in whole tiles.
    length = tl.minimum(tl.load(lengths_ptr + batch * stride_nb), n_k)
    share = tl.cdiv(tl.cdiv(length, BN), splits) * BN
    begin = split * share
    end = tl.minimum(length, begin + share)

    first, middle, resume, stop = end, end, end, begin
    for start in range(begin, end, SCAN):
        slot = start + tl.arange(0, SCAN)
        place = slot.to(tl.int64)
        k_kind = tl.load(k_kind_ptr + place * stride_kkn, mask=slot < end, other=-1)
        k_pos = tl.load(k_pos_ptr + place * stride_kpn, mask=slot < end, other=0)
        k_hide = tl.load(k_hide_ptr + place * stride_khn, mask=slot < end, other=-1)

        all_see = (k_kind == 0) & (k_hide < 0) & (k_pos < first_end)
        all_see &= (window == 0) | ((last_pos - k_pos < window) & (k_pos - first_pos < window))
        all_see &= (k_pos < first_blind) | (k_pos > last_blind)
        may_see = ((_class_bit(k_kind, k_hide) & some_classes) != 0) | ((slot >= first_slot) & (slot <= last_slot))
        may_see &= (k_kind >= 0) & (k_pos < last_end)
        may_see &= (window == 0) | ((first_pos - k_pos < window) & (k_pos - last_pos < window))

        tile = start + tl.arange(0, SCAN // BN) * BN
        full = tl.min(tl.reshape(all_see.to(tl.int32), (SCAN // BN, BN)), 1) > 0
        used = tl.max(tl.reshape(may_see.to(tl.int32), (SCAN // BN, BN)), 1) > 0
        first = tl.minimum(first, tl.min(tl.where(used, tile, huge), 0))
        middle = tl.minimum(middle, tl.min(tl.where((tile >= first) & (full == 0), tile, huge), 0))
        resume = tl.minimum(resume, tl.min(tl.where((tile >= middle) & used, tile, huge), 0))
        stop = tl.maximum(stop, tl.max(tl.where(used, tile + BN, begin), 0))

    bounds_ptr += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 4
    tl.store(bounds_ptr, first)
    tl.store(bounds_ptr + 1, middle)
    tl.store(bounds_ptr + 2, resume)
    tl.store(bounds_ptr + 3, tl.minimum(stop, end))
