# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Merging the splits of `superposed_attention` in Triton.

Definition   out = sum_i w_i out_i with w_i = exp(lse_i - lse) and lse = ln sum_i exp(lse_i), i in order.
Grid         (ceil(Q / BM), H, B): one program merges BM rows of one head.
Bytes        reads (D + 1) * 4 a row and split; writes out and lse.
Numerics     float32, fixed order, so two runs are bit-equal. Rows that saw nothing in any split give 0 and -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launching import Config

__all__ = ["merge_config"]


def merge_config(head_size: int) -> Config:
    """How the merge of the splits is compiled."""
    width = triton.next_power_of_2(head_size)
    return Config(
        {"HEAD_SIZE": head_size, "WIDTH": width, "BM": max(1, 1024 // width)},
        {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False},
    )


@triton.jit(do_not_specialize=["n_q", "splits"])
def _superposed_attention_merge_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    n_q,
    splits,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
):
    """out = sum_i w_i out_i with w_i = exp(lse_i - lse), over the splits i in order.

    Parts are [split, B, H, Q], out is [B, Q, H, D] in memory; one program merges BM rows of one head.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    batch, batches = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    dim = tl.arange(0, WIDTH)
    inside = row < n_q
    inside_head = inside[:, None] & (dim < HEAD_SIZE)[None, :]
    head_row = (batch * heads + head) * n_q + row
    split_rows = batches.to(tl.int64) * heads * n_q

    top = tl.full([BM], float("-inf"), tl.float32)
    for split in range(splits):
        part = split * split_rows + head_row
        top = tl.maximum(top, tl.load(part_lse_ptr + part, mask=inside, other=float("-inf")))
    origin = tl.where(top == float("-inf"), 0.0, top)  # nothing seen in any split

    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, WIDTH], tl.float32)
    for split in range(splits):
        part = split * split_rows + head_row
        weight = tl.exp(tl.load(part_lse_ptr + part, mask=inside, other=float("-inf")) - origin)
        total += weight
        part_ptrs = part_ptr + part[:, None] * HEAD_SIZE + dim[None, :]
        acc += weight[:, None] * tl.load(part_ptrs, mask=inside_head, other=0.0)

    seen = top > float("-inf")
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    lse = tl.where(seen, top + tl.log(total), float("-inf"))
    out_row = (batch * n_q + row) * heads + head
    out_ptrs = out_ptr + out_row[:, None] * HEAD_SIZE + dim[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside_head)
    tl.store(lse_ptr + head_row, lse, mask=inside)
