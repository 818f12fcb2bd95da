# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""`sample_rows` in Triton: two launches, the vocabulary in splits, no atomics, no random state.

Definition   reference.py, for bf16, fp16 and fp32 logits.
Stage 1      grid (R, ceil(V / 4096)): maximum, sum, and the first largest noisy logit of one split.
Stage 2      grid (R,): merges the splits of a row in fixed order; reads the drawn token's logit.
Bytes        reads R * V logits once; scratch of 16 a split; writes 12 * R. Arithmetic: three 32-bit products and
             three transcendentals an element.
Numerics     the hash in uint32, which wraps where the reference masks: uniforms are bit-equal to the reference's.
             float32 from the load on; noisy = x - temperature * ln(-ln u) in this order, without fused multiply-add,
             so that only the logarithms can round differently. Equal noisy logits rank by id.
             How V is split depends on V alone, so a row does not notice the rows around it.
Bad rows     what is not below +inf (NaN compares false) is kept out of maxima and makes the split's sum NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Config, on_device
from ..loading import load_logits

__all__ = ["launch", "merge_config", "row_key", "split_config", "uniform"]

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
def _times(x, factor):
    """Modulo 2^32; without the overflow check that TRITON_DEBUG=1 would add."""
    return tl.mul(x, factor, sanitize_overflow=False)


@triton.jit
def _mix(x):
    x = _times(x ^ (x >> 16), 0x7FEB352D)
    x = _times(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


@triton.jit
def row_key(seed, step, position):
    """What the hash makes of an int64 seed, step and position; uint32."""
    key = _mix(seed.to(tl.uint32) ^ 0x9E3779B9)
    key = _mix(key ^ _mix((seed >> 32).to(tl.uint32)))
    key = _mix(tl.add(key, _times(step.to(tl.uint32), 0x85EBCA6B), sanitize_overflow=False))
    return _mix(tl.add(key, _times(position.to(tl.uint32), 0xC2B2AE35), sanitize_overflow=False))


@triton.jit
def uniform(key, token):
    """Uniforms in (0, 1) of a row's key and token ids; float32."""
    bits = _mix(tl.add(key, _times(token.to(tl.uint32), 0x27D4EB2F), sanitize_overflow=False))
    return ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)


@triton.jit
def _sample_rows_split_kernel(
    x_ptr,
    rows_ptr,
    seeds_ptr,
    steps_ptr,
    positions_ptr,
    suppress_ptr,
    stats_ptr,
    ids_ptr,
    temperature,
    v,
    n_suppress,
    splits,
    stride_xr,
    stride_rows,
    stride_seeds,
    stride_steps,
    stride_positions,
    stride_suppress,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    x_ptr += tl.load(rows_ptr + row * stride_rows).to(tl.int64) * stride_xr
    key = row_key(
        tl.load(seeds_ptr + row * stride_seeds),
        tl.load(steps_ptr + row * stride_steps),
        tl.load(positions_ptr + row * stride_positions),
    )

    start = split * BLOCK
    x = load_logits(x_ptr, start, v, suppress_ptr, n_suppress, stride_suppress, BLOCK)
    usable = x < float("inf")
    x = tl.where(usable, x, float("-inf"))
    top = tl.max(x, 0)
    # Where all is -inf, the sum is to be 0 and not NaN.
    e = tl.exp(x - tl.where(top > float("-inf"), top, 0.0))
    noisy = x - temperature * tl.log(-tl.log(uniform(key, start + tl.arange(0, BLOCK))))
    best, at = tl.max(noisy, 0, return_indices=True)

    part = row * splits + split
    tl.store(stats_ptr + part * 3, top)
    tl.store(stats_ptr + part * 3 + 1, tl.sum(tl.where(usable, e, float("nan")), 0))
    tl.store(stats_ptr + part * 3 + 2, best)
    tl.store(ids_ptr + part, start + at)


@triton.jit
def _sample_rows_merge_kernel(
    x_ptr,
    rows_ptr,
    stats_ptr,
    ids_ptr,
    token_ptr,
    prob_ptr,
    splits,
    stride_xr,
    stride_rows,
    SPLITS_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_PAD)
    used = split < splits
    stats_ptr += (row * splits + split) * 3
    tops = tl.load(stats_ptr, mask=used, other=float("-inf"))
    totals = tl.load(stats_ptr + 1, mask=used, other=0.0)
    noisy = tl.load(stats_ptr + 2, mask=used, other=float("-inf"))
    ids = tl.load(ids_ptr + row * splits + split, mask=used, other=0)

    top = tl.max(tops, 0)
    # A split of -inf has the sum 0, or NaN.
    total = tl.sum(tl.exp(tl.where(tops > float("-inf"), tops - top, 0.0)) * totals, 0)
    good = (top > float("-inf")) & (total > 0)

    # Entries stand by split: of equal noisy logits the leftmost has the lowest id.
    _, at = tl.max(noisy, 0, return_indices=True)
    token = tl.sum(tl.where(split == at, ids, 0), 0)
    x_ptr += tl.load(rows_ptr + row * stride_rows).to(tl.int64) * stride_xr
    logit = tl.load(x_ptr + token).to(tl.float32)
    prob = tl.exp(logit - top) / total
    tl.store(token_ptr + row, tl.where(good, token, -1).to(tl.int64))
    tl.store(prob_ptr + row, tl.where(good, prob, float("nan")))


def launch(
    logits: Tensor,
    rows: Tensor,
    seeds: Tensor,
    steps: Tensor,
    positions: Tensor,
    temperature: float,
    suppress: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernels on the device of `logits`; arguments and results as in the schema of `sample_rows`."""
    r, v = rows.shape[0], logits.shape[1]
    token = logits.new_empty((r,), dtype=torch.int64)
    prob = logits.new_empty((r,), dtype=torch.float32)
    if r == 0:
        return token, prob
    splits = triton.cdiv(v, BLOCK)
    stats = logits.new_empty((r, splits, 3), dtype=torch.float32)
    ids = logits.new_empty((r, splits), dtype=torch.int32)
    split, merge = split_config(), merge_config(splits)
    with on_device(logits):
        _sample_rows_split_kernel[(r, splits)](
            logits,
            rows,
            seeds,
            steps,
            positions,
            suppress,
            stats,
            ids,
            float(temperature),  # an int would be compiled in
            v,
            0 if suppress is None else suppress.shape[0],
            splits,
            logits.stride(0),
            rows.stride(0),
            seeds.stride(0),
            steps.stride(0),
            positions.stride(0),
            0 if suppress is None else suppress.stride(0),
            **split.constants,
            **split.options,
        )
        _sample_rows_merge_kernel[(r,)](
            logits,
            rows,
            stats,
            ids,
            token,
            prob,
            splits,
            logits.stride(0),
            rows.stride(0),
            **merge.constants,
            **merge.options,
        )
    return token, prob
