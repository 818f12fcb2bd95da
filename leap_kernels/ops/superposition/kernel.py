# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""`superpose` in Triton: one launch, one program a sample, no atomics.

Definition   reference.py.
Grid         (B,). Each program walks its T targets twice, 64 at a time: first to count copies and candidates, which
             decides whether the sample gets any row and where the candidates start, then to write. Rows of a
             target's candidates are consecutive, so running sums over targets place every row; what is left up to
             the capacity is padding. Each output has one writer.
Bytes        reads 8 a target and 8 a candidate, and 12 of the canvas per copy; writes B * (20 A + 4 T + 4).
Numerics     integers; equal to the reference bit for bit. One compiled form for all shapes and strides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Config, on_device

__all__ = ["config", "launch"]


def config() -> Config:
    """How the kernel is compiled."""
    return Config(
        {"BLOCK_T": 64, "BLOCK_K": 8, "BLOCK_PAD": 256},
        {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False},
    )


@triton.jit
def _read_targets(
    targets_ptr, counts_ptr, pos_ptr, start, t, k, shift, stride_tt, stride_nt, stride_pl, BLOCK_T: tl.constexpr
):
    """Of the targets from `start` on: index, column, position, whether each can have a copy, how many candidates."""
    index = start + tl.arange(0, BLOCK_T).to(tl.int64)
    inside = index < t
    column = tl.load(targets_ptr + index * stride_tt, mask=inside, other=-1).to(tl.int64)
    valid = column >= 0
    pos = tl.load(pos_ptr + column * stride_pl, mask=valid, other=0)
    count = tl.load(counts_ptr + index * stride_nt, mask=valid, other=0)
    count = tl.minimum(tl.maximum(count, 0), k)
    can_copy = valid & (column >= shift) & (pos >= shift)
    return index, inside, valid, column, pos, can_copy, count


@triton.jit(
    do_not_specialize=[
        "t",
        "k",
        "capacity",
        "shift",
        "mask_id",
        "stride_ib",
        "stride_il",
        "stride_pb",
        "stride_pl",
        "stride_tb",
        "stride_tt",
        "stride_cb",
        "stride_ct",
        "stride_ck",
        "stride_nb",
        "stride_nt",
    ]
)
def _superpose_rows_kernel(
    ids_ptr,
    pos_ptr,
    targets_ptr,
    cand_ids_ptr,
    counts_ptr,
    token_ptr,
    new_pos_ptr,
    kind_ptr,
    hide_ptr,
    copy_row_ptr,
    count_ptr,
    t,
    k,
    capacity,
    shift,
    mask_id,
    stride_ib,
    stride_il,
    stride_pb,
    stride_pl,
    stride_tb,
    stride_tt,
    stride_cb,
    stride_ct,
    stride_ck,
    stride_nb,
    stride_nt,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    ids_ptr += sample * stride_ib
    pos_ptr += sample * stride_pb
    targets_ptr += sample * stride_tb
    cand_ids_ptr += sample * stride_cb
    counts_ptr += sample * stride_nb
    token_ptr += sample * capacity
    new_pos_ptr += sample * capacity
    kind_ptr += sample * capacity
    hide_ptr += sample * capacity
    copy_row_ptr += sample * t

    n_target = 0
    n_copy = 0
    n_cand = 0
    for start in range(0, t, BLOCK_T):
        index, inside, valid, column, pos, can_copy, count = _read_targets(
            targets_ptr, counts_ptr, pos_ptr, start, t, k, shift, stride_tt, stride_nt, stride_pl, BLOCK_T
        )
        n_target += tl.sum(valid.to(tl.int32), 0)
        n_copy += tl.sum(can_copy.to(tl.int32), 0)
        n_cand += tl.sum(count, 0)
    active = (n_target > 1) & (n_cand > 0)
    n_active = tl.where(active, t, 0)  # so many of the targets append rows: all or none

    copies_before = 0
    next_cand = n_copy
    for start in range(0, t, BLOCK_T):
        index, inside, valid, column, pos, can_copy, count = _read_targets(
            targets_ptr, counts_ptr, pos_ptr, start, t, k, shift, stride_tt, stride_nt, stride_pl, BLOCK_T
        )
        is_copy = can_copy & (index < n_active)
        count = tl.where(index < n_active, count, 0)

        row = copies_before + tl.cumsum(is_copy.to(tl.int32), 0) - 1
        source = column - shift
        tl.store(token_ptr + row, tl.load(ids_ptr + source * stride_il, mask=is_copy, other=0), mask=is_copy)
        tl.store(new_pos_ptr + row, tl.load(pos_ptr + source * stride_pl, mask=is_copy, other=0), mask=is_copy)
        tl.store(kind_ptr + row, 1, mask=is_copy)
        tl.store(hide_ptr + row, pos, mask=is_copy)
        tl.store(copy_row_ptr + index, tl.where(is_copy, row, -1), mask=inside)

        first = next_cand + tl.cumsum(count, 0) - count
        for start_k in range(0, k, BLOCK_K):
            rank = start_k + tl.arange(0, BLOCK_K)
            is_cand = rank[None, :] < count[:, None]
            cand_row = first[:, None] + rank[None, :]
            cand_ptr = cand_ids_ptr + index[:, None] * stride_ct + rank.to(tl.int64)[None, :] * stride_ck
            cand_pos = tl.broadcast_to(pos[:, None], cand_row.shape)
            tl.store(token_ptr + cand_row, tl.load(cand_ptr, mask=is_cand, other=0), mask=is_cand)
            tl.store(new_pos_ptr + cand_row, cand_pos, mask=is_cand)
            tl.store(kind_ptr + cand_row, 2, mask=is_cand)
            tl.store(hide_ptr + cand_row, cand_pos, mask=is_cand)
        copies_before += tl.sum(is_copy.to(tl.int32), 0)
        next_cand += tl.sum(count, 0)

    n_rows = tl.where(active, n_copy + n_cand, 0)
    tl.store(count_ptr + sample, n_rows)
    for start in range(n_rows, capacity, BLOCK_PAD):
        row = start + tl.arange(0, BLOCK_PAD)
        unused = row < capacity
        tl.store(token_ptr + row, mask_id, mask=unused)
        tl.store(new_pos_ptr + row, 0, mask=unused)
        tl.store(kind_ptr + row, -1, mask=unused)
        tl.store(hide_ptr + row, -1, mask=unused)


def launch(
    ids: Tensor, pos: Tensor, targets: Tensor, cand_ids: Tensor, counts: Tensor, capacity: int, shift: int, mask_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the kernel on the device of `ids`; arguments and results as in the schema of `superpose`."""
    b, t = targets.shape
    token = ids.new_empty((b, capacity), dtype=torch.int64)
    new_pos, kind, hide = (ids.new_empty((b, capacity), dtype=torch.int32) for _ in range(3))
    copy_row = ids.new_empty((b, t), dtype=torch.int32)
    count = ids.new_empty((b,), dtype=torch.int32)
    if b == 0:
        return token, new_pos, kind, hide, copy_row, count
    how = config()
    with on_device(ids):
        _superpose_rows_kernel[(b,)](
            ids,
            pos,
            targets,
            cand_ids,
            counts,
            token,
            new_pos,
            kind,
            hide,
            copy_row,
            count,
            t,
            cand_ids.shape[2],
            capacity,
            shift,
            mask_id,
            *ids.stride(),
            *pos.stride(),
            *targets.stride(),
            *cand_ids.stride(),
            *counts.stride(),
            **how.constants,
            **how.options,
        )
    return token, new_pos, kind, hide, copy_row, count
