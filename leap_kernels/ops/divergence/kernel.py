# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""`row_kl` in Triton: two launches, the vocabulary in splits, no atomics.

Definition   reference.py, for bf16, fp16 and fp32 logits.
Stage 1      grid (R, ceil(V / 4096)): maximum and sum of both rows of one split, and the moment between them.
Stage 2      grid (R,): merges the splits of a row in fixed order.
Bytes        reads 2 * R * V logits once; scratch of 20 a split; writes 4 * R.
Numerics     float32 from the load on. With m, n the largest x, y and M = sum e^(x - m) ((x - m) - (y - n)):
             kl = M / S - ln(S / T). Where m and n move by a and b, M becomes e^a (M + (a - b) S). Equal rows pass
             through equal operations and give exactly 0.
             How V is split depends on V alone, so a row does not notice the rows around it.
Bad rows     what is not below +inf (NaN compares false) is kept out of maxima and sums and makes the split's M NaN.
Lost tokens  a finite x over y = -inf makes the split's M +inf, whatever its weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Config, on_device
from ..loading import load_logits

__all__ = ["launch", "merge_config", "split_config"]

BLOCK = 4096


def split_config() -> Config:
    """How stage 1 is compiled."""
    return Config({"BLOCK": BLOCK}, {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False})


def merge_config(splits: int) -> Config:
    """How stage 2 is compiled for `splits` splits."""
    return Config(
        {"SPLITS_PAD": triton.next_power_of_2(splits)}, {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
    )


@triton.jit
def _row_kl_split_kernel(
    x_ptr,
    y_ptr,
    rows_ptr,
    previous_rows_ptr,
    suppress_ptr,
    stats_ptr,
    v,
    n_suppress,
    splits,
    stride_xr,
    stride_yr,
    stride_rows,
    stride_previous_rows,
    stride_suppress,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    x_ptr += tl.load(rows_ptr + row * stride_rows).to(tl.int64) * stride_xr
    y_ptr += tl.load(previous_rows_ptr + row * stride_previous_rows).to(tl.int64) * stride_yr

    start = split * BLOCK
    x = load_logits(x_ptr, start, v, suppress_ptr, n_suppress, stride_suppress, BLOCK)
    y = load_logits(y_ptr, start, v, suppress_ptr, n_suppress, stride_suppress, BLOCK)
    usable = (x < float("inf")) & (y < float("inf"))
    x = tl.where(usable, x, float("-inf"))
    y = tl.where(usable, y, float("-inf"))

    top_x = tl.max(x, 0)
    top_y = tl.max(y, 0)
    # Where all is -inf, sums are to be 0 and not NaN.
    below_x = x - tl.where(top_x > float("-inf"), top_x, 0.0)
    below_y = y - tl.where(top_y > float("-inf"), top_y, 0.0)
    e = tl.exp(below_x)
    term = tl.where(e > 0, e * (below_x - below_y), 0.0)
    term = tl.where((x > float("-inf")) & (y == float("-inf")), float("inf"), term)
    term = tl.where(usable, term, float("nan"))

    stats_ptr += (row * splits + split) * 5
    tl.store(stats_ptr, top_x)
    tl.store(stats_ptr + 1, tl.sum(e, 0))
    tl.store(stats_ptr + 2, top_y)
    tl.store(stats_ptr + 3, tl.sum(tl.exp(below_y), 0))
    tl.store(stats_ptr + 4, tl.sum(term, 0))


@triton.jit
def _row_kl_merge_kernel(stats_ptr, kl_ptr, splits, SPLITS_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_PAD)
    used = split < splits
    stats_ptr += (row * splits + split) * 5
    tops_x = tl.load(stats_ptr, mask=used, other=float("-inf"))
    totals_x = tl.load(stats_ptr + 1, mask=used, other=0.0)
    tops_y = tl.load(stats_ptr + 2, mask=used, other=float("-inf"))
    totals_y = tl.load(stats_ptr + 3, mask=used, other=0.0)
    moments = tl.load(stats_ptr + 4, mask=used, other=0.0)

    top_x = tl.max(tops_x, 0)
    top_y = tl.max(tops_y, 0)
    away_x = tl.where(tops_x > float("-inf"), tops_x - top_x, float("-inf"))
    away_y = tl.where(tops_y > float("-inf"), tops_y - top_y, float("-inf"))
    weight = tl.exp(away_x)
    total_x = tl.sum(weight * totals_x, 0)
    total_y = tl.sum(tl.exp(away_y) * totals_y, 0)
    moment = tl.sum(tl.where(weight > 0, weight * (moments + (away_x - away_y) * totals_x), 0.0), 0)

    # div_rn: of equal sums the ratio must be 1. Rounding may put nearly equal distributions just below 0.
    kl = tl.maximum(moment / total_x - tl.log(tl.div_rn(total_x, total_y)), 0.0)
    bad = tl.sum((moments != moments).to(tl.int32), 0)
    lost = tl.sum((moments == float("inf")).to(tl.int32), 0)
    good = (bad == 0) & (top_x > float("-inf")) & (top_y > float("-inf"))
    kl = tl.where(lost > 0, float("inf"), kl)
    tl.store(kl_ptr + row, tl.where(good, kl, float("nan")))


def launch(
    logits: Tensor, previous: Tensor, rows: Tensor, previous_rows: Tensor, suppress: Tensor | None = None
) -> Tensor:
    """Run the kernels on the device of `logits`; arguments and result as in the schema of `row_kl`."""
    r, v = rows.shape[0], logits.shape[1]
    kl = logits.new_empty((r,), dtype=torch.float32)
    if r == 0:
        return kl
    splits = triton.cdiv(v, BLOCK)
    stats = logits.new_empty((r, splits, 5), dtype=torch.float32)
    split, merge = split_config(), merge_config(splits)
    with on_device(logits):
        _row_kl_split_kernel[(r, splits)](
            logits,
            previous,
            rows,
            previous_rows,
            suppress,
            stats,
            v,
            0 if suppress is None else suppress.shape[0],
            splits,
            logits.stride(0),
            previous.stride(0),
            rows.stride(0),
            previous_rows.stride(0),
            0 if suppress is None else suppress.stride(0),
            **split.constants,
            **split.options,
        )
        _row_kl_merge_kernel[(r,)](stats, kl, splits, **merge.constants, **merge.options)
    return kl
