# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""`top_eta` in Triton: two launches, the vocabulary in splits, no atomics.

Definition   reference.py, for bf16, fp16 and fp32 logits and K <= 16.
Stage 1      grid (R, ceil(V / 8192)): max, sum, entropy moment and the top max(K, 2) of one split.
Stage 2      grid (R,): merges the splits of a row in fixed order and writes every output.
Bytes        reads R * V logits once; scratch of 12 + 8 * max(K, 2) a split; writes R * (12 K + 28).
Numerics     float32 from the load on. With m the largest x, S = sum e^(x - m) and M = sum (x - m) e^(x - m):
             lse = m + ln S, ln p = (x - m) - ln S, entropy = ln S - M / S; no step subtracts large numbers from
             each other. Equal logits rank by id: a maximum takes the leftmost, and earlier splits win.
             How V is split depends on V alone, so a row does not notice the rows around it.
Bad rows     NaN is looked for by x != x, since tl.max may or may not return it, and kept out of all maxima.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Config, on_device
from ..loading import load_logits

__all__ = ["launch", "merge_config", "split_config"]

SPLIT = 8192
BLOCK = 4096


def split_config(k: int) -> Config:
    """How stage 1 is compiled for K = `k`."""
    top = max(k, 2)  # gap needs the second largest logit also where K = 1
    return Config(
        {"TOP": top, "TOP_PAD": triton.next_power_of_2(top), "SPLIT": SPLIT, "BLOCK": BLOCK},
        {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False},
    )


def merge_config(k: int, splits: int) -> Config:
    """How stage 2 is compiled for K = `k` and `splits` splits."""
    top = max(k, 2)
    top_pad, splits_pad = triton.next_power_of_2(top), triton.next_power_of_2(splits)
    # One warp reduces without shared memory, which is fastest while a thread holds few values.
    return Config(
        {"K": k, "TOP": top, "TOP_PAD": top_pad, "SPLITS_PAD": splits_pad},
        {"num_warps": 1 if top_pad * splits_pad <= 1024 else 4, "num_stages": 1, "enable_fp_fusion": False},
    )


@triton.jit
def _top_eta_split_kernel(
    x_ptr,
    rows_ptr,
    suppress_ptr,
    stats_ptr,
    values_ptr,
    ids_ptr,
    v,
    n_suppress,
    splits,
    stride_xr,
    stride_rows,
    stride_suppress,
    TOP: tl.constexpr,
    TOP_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    x_ptr += tl.load(rows_ptr + row * stride_rows).to(tl.int64) * stride_xr

    lane = tl.arange(0, BLOCK)
    rank = tl.arange(0, TOP_PAD)
    best = tl.full([TOP_PAD], float("-inf"), tl.float32)
    best_id = tl.zeros([TOP_PAD], tl.int32)
    top = float("-inf")
    total = 0.0
    moment = 0.0
    nans = 0

    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, v), BLOCK):
        x = load_logits(x_ptr, start, v, suppress_ptr, n_suppress, stride_suppress, BLOCK)
        nans += tl.sum((x != x).to(tl.int32), 0)
        x = tl.where(x != x, float("-inf"), x)

        # Sum and moment move to the new maximum; where all is -inf yet, they stay 0 instead of becoming NaN.
        new_top = tl.maximum(top, tl.max(x, 0))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        e = tl.exp(x - origin)
        if top > float("-inf"):
            decay = tl.exp(top - origin)
            moment = decay * (moment + (top - origin) * total)
            total = decay * total
        total += tl.sum(e, 0)
        moment += tl.sum(tl.where(e > 0, e * (x - origin), 0.0), 0)
        top = new_top

        # The top of this block and of the blocks before it, largest first. Earlier blocks have the lower ids.
        merged = tl.full([TOP_PAD], float("-inf"), tl.float32)
        merged_id = tl.zeros([TOP_PAD], tl.int32)
        for i in range(TOP):
            new, new_at = tl.max(x, 0, return_indices=True)
            old, old_at = tl.max(best, 0, return_indices=True)
            old_id = tl.sum(tl.where(rank == old_at, best_id, 0), 0)
            merged = tl.where(rank == i, tl.maximum(old, new), merged)
            merged_id = tl.where(rank == i, tl.where(old >= new, old_id, start + new_at), merged_id)
            best = tl.where(rank == tl.where(old >= new, old_at, -1), float("-inf"), best)
            x = tl.where(lane == tl.where(old >= new, -1, new_at), float("-inf"), x)
        best = merged
        best_id = merged_id

    part = row * splits + split
    tl.store(stats_ptr + part * 3, tl.where(nans > 0, float("nan"), top))
    tl.store(stats_ptr + part * 3 + 1, total)
    tl.store(stats_ptr + part * 3 + 2, moment)
    tl.store(values_ptr + part * TOP + rank, best, mask=rank < TOP)
    tl.store(ids_ptr + part * TOP + rank, best_id, mask=rank < TOP)


@triton.jit
def _top_eta_merge_kernel(
    stats_ptr,
    values_ptr,
    part_ids_ptr,
    ids_ptr,
    probs_ptr,
    counts_ptr,
    top1_ptr,
    prob1_ptr,
    lse_ptr,
    entropy_ptr,
    gap_ptr,
    splits,
    eta,
    K: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    nan = float("nan")

    split = tl.arange(0, SPLITS_PAD)
    used = split < splits
    stats_ptr += row * splits * 3
    tops = tl.load(stats_ptr + split * 3, mask=used, other=float("-inf"))
    totals = tl.load(stats_ptr + split * 3 + 1, mask=used, other=0.0)
    moments = tl.load(stats_ptr + split * 3 + 2, mask=used, other=0.0)

    has_nan = tl.sum((tops != tops).to(tl.int32), 0) > 0
    top = tl.max(tl.where(tops != tops, float("-inf"), tops), 0)
    good = (has_nan == 0) & (top > float("-inf")) & (top < float("inf"))
    live = tops > float("-inf")
    away = tl.where(live, tops - top, 0.0)
    weight = tl.where(live, tl.exp(away), 0.0)
    total = tl.sum(weight * totals, 0)
    moment = tl.sum(weight * (moments + away * totals), 0)
    log_total = tl.log(total)
    # Rounding may put the entropy of a certain row just below 0.
    entropy = tl.maximum(log_total - moment / total, 0.0)

    # Entries stand by split, then rank: of equal values the leftmost has the lowest id.
    entry = tl.arange(0, SPLITS_PAD * TOP_PAD)
    part, place = entry // TOP_PAD, entry % TOP_PAD
    listed = (part < splits) & (place < TOP)
    offset = row * splits * TOP + part * TOP + place
    values = tl.load(values_ptr + offset, mask=listed, other=float("-inf"))
    part_ids = tl.load(part_ids_ptr + offset, mask=listed, other=0)
    rank = tl.arange(0, TOP_PAD)
    best = tl.full([TOP_PAD], float("-inf"), tl.float32)
    best_id = tl.zeros([TOP_PAD], tl.int32)
    for i in range(TOP):
        value, at = tl.max(values, 0, return_indices=True)
        best = tl.where(rank == i, value, best)
        best_id = tl.where(rank == i, tl.sum(tl.where(entry == at, part_ids, 0), 0), best_id)
        values = tl.where(entry == at, float("-inf"), values)

    first_id = tl.sum(tl.where(rank == 0, best_id, 0), 0)
    # Not a sum: the other ranks may hold -inf.
    second = tl.max(tl.where(rank == 1, best, float("-inf")), 0)
    probs = tl.exp((best - top) - log_total)
    keep = (probs >= eta) & (rank < tl.where(good, K, 0))

    tl.store(ids_ptr + row * K + rank, tl.where(keep, best_id, -1).to(tl.int64), mask=rank < K)
    tl.store(probs_ptr + row * K + rank, tl.where(keep, probs, 0.0), mask=rank < K)
    tl.store(counts_ptr + row, tl.sum(keep.to(tl.int32), 0))
    tl.store(top1_ptr + row, tl.where(good, first_id, -1).to(tl.int64))
    tl.store(prob1_ptr + row, tl.where(good, tl.exp(-log_total), nan))
    tl.store(lse_ptr + row, tl.where(has_nan, nan, tl.where(good, top + log_total, top)))
    tl.store(entropy_ptr + row, tl.where(good, entropy, nan))
    tl.store(gap_ptr + row, tl.where(good, top - second, nan))


def launch(
    logits: Tensor, rows: Tensor, eta: float, k: int, suppress: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the kernels on the device of `logits`; arguments and results as in the schema of `top_eta`."""
    r, v = rows.shape[0], logits.shape[1]
    splits = triton.cdiv(v, SPLIT)
    ids = logits.new_empty((r, k), dtype=torch.int64)
    probs = logits.new_empty((r, k), dtype=torch.float32)
    counts = logits.new_empty((r,), dtype=torch.int32)
    top1 = logits.new_empty((r,), dtype=torch.int64)
    prob1, lse, entropy, gap = (logits.new_empty((r,), dtype=torch.float32) for _ in range(4))
    if r == 0:
        return ids, probs, counts, top1, prob1, lse, entropy, gap

    split, merge = split_config(k), merge_config(k, splits)
    top = split.constants["TOP"]
    stats = logits.new_empty((r, splits, 3), dtype=torch.float32)
    values = logits.new_empty((r, splits, top), dtype=torch.float32)
    part_ids = logits.new_empty((r, splits, top), dtype=torch.int32)
    with on_device(logits):
        _top_eta_split_kernel[(r, splits)](
            logits,
            rows,
            suppress,
            stats,
            values,
            part_ids,
            v,
            0 if suppress is None else suppress.shape[0],
            splits,
            logits.stride(0),
            rows.stride(0),
            0 if suppress is None else suppress.stride(0),
            **split.constants,
            **split.options,
        )
        _top_eta_merge_kernel[(r,)](
            stats,
            values,
            part_ids,
            ids,
            probs,
            counts,
            top1,
            prob1,
            lse,
            entropy,
            gap,
            splits,
            eta,
            **merge.constants,
            **merge.options,
        )
    return ids, probs, counts, top1, prob1, lse, entropy, gap
