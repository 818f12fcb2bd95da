# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""`check_consistency` in Triton: one launch, one program a sample.

Definition   reference.py.
Grid         (B,); each program walks its T targets twice, 256 at a time: first to count what is accepted and to find
             the most confident target, then to write the reasons. So each output has one writer and one write.
Bytes        reads 28 (29 with base_accept) and writes 4 a target; the second walk finds its data in L1.
Numerics     comparisons of float32 only, the thresholds rounded to float32 by the launch, so the results are those of
             the reference bit for bit. NaN fails every comparison; as a rank it stands below every probability and
             above what is no target.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Config, on_device

__all__ = ["config", "launch"]


def config(keep_confident: bool) -> Config:
    """How the kernel is compiled."""
    return Config(
        {"KEEP_CONFIDENT": keep_confident, "BLOCK": 256},
        {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False},
    )


@triton.jit
def _classify(
    targets_ptr,
    top1_ptr,
    prob1_ptr,
    copy_top1_ptr,
    copy_prob1_ptr,
    accept_ptr,
    column,
    inside,
    stride_tt,
    stride_yt,
    stride_ct,
    stride_zt,
    stride_dt,
    stride_at,
    phi,
    tau,
    kappa,
):
    """Of the targets in `column`: which are targets, have evidence, are confident, have converged; and prob1."""
    valid = tl.load(targets_ptr + column * stride_tt, mask=inside, other=-1) >= 0
    y = tl.load(top1_ptr + column * stride_yt, mask=inside, other=-1)
    c = tl.load(prob1_ptr + column * stride_ct, mask=inside, other=0.0)
    copy_y = tl.load(copy_top1_ptr + column * stride_zt, mask=inside, other=-1)
    copy_c = tl.load(copy_prob1_ptr + column * stride_dt, mask=inside, other=0.0)
    evidence = valid & (copy_y >= 0)
    if accept_ptr is not None:
        confident = valid & (tl.load(accept_ptr + column * stride_at, mask=inside, other=0) != 0)
    else:
        confident = valid & (c > phi)
    converged = evidence & (copy_y == y) & (c >= tau) & (copy_c >= kappa)
    return valid, evidence, confident, converged, c


@triton.jit(
    do_not_specialize=[
        "t",
        "stride_tb",
        "stride_tt",
        "stride_yb",
        "stride_yt",
        "stride_cb",
        "stride_ct",
        "stride_zb",
        "stride_zt",
        "stride_db",
        "stride_dt",
        "stride_ab",
        "stride_at",
    ]
)
def _check_consistency_kernel(
    targets_ptr,
    top1_ptr,
    prob1_ptr,
    copy_top1_ptr,
    copy_prob1_ptr,
    accept_ptr,
    reason_ptr,
    left_ptr,
    t,
    stride_tb,
    stride_tt,
    stride_yb,
    stride_yt,
    stride_cb,
    stride_ct,
    stride_zb,
    stride_zt,
    stride_db,
    stride_dt,
    stride_ab,
    stride_at,
    phi,
    tau,
    kappa,
    KEEP_CONFIDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    targets_ptr += sample * stride_tb
    top1_ptr += sample * stride_yb
    prob1_ptr += sample * stride_cb
    copy_top1_ptr += sample * stride_zb
    copy_prob1_ptr += sample * stride_db
    if accept_ptr is not None:
        accept_ptr += sample * stride_ab

    n_evidence = 0
    n_confident = 0
    n_converged = 0
    best = float("-inf")
    best_at = 0
    for start in range(0, t, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = column < t
        valid, evidence, confident, converged, c = _classify(
            targets_ptr, top1_ptr, prob1_ptr, copy_top1_ptr, copy_prob1_ptr, accept_ptr, column, inside,
            stride_tt, stride_yt, stride_ct, stride_zt, stride_dt, stride_at, phi, tau, kappa,
        )  # fmt: skip
        n_evidence += tl.sum(evidence.to(tl.int32), 0)
        n_confident += tl.sum(confident.to(tl.int32), 0)
        n_converged += tl.sum(converged.to(tl.int32), 0)
        rank = tl.where(valid, tl.where(c != c, -1.0, c), -2.0)
        value, at = tl.max(tl.where(inside, rank, float("-inf")), 0, return_indices=True)
        if value > best:  # strictly: of equals the first stays
            best = value
            best_at = start + at

    drop_confident = False
    if not KEEP_CONFIDENT:
        drop_confident = n_evidence > 0
    nothing = (n_converged == 0) & ((n_confident == 0) | drop_confident)

    left = 0
    for start in range(0, t, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = column < t
        valid, evidence, confident, converged, c = _classify(
            targets_ptr, top1_ptr, prob1_ptr, copy_top1_ptr, copy_prob1_ptr, accept_ptr, column, inside,
            stride_tt, stride_yt, stride_ct, stride_zt, stride_dt, stride_at, phi, tau, kappa,
        )  # fmt: skip
        confident = confident & (drop_confident == 0)
        reason = tl.where(confident, 1, tl.where(converged, 2, 0))
        reason = tl.where(nothing & valid & (column == best_at), 3, reason)
        tl.store(reason_ptr + sample * t + column, reason, mask=inside)
        left += tl.sum((valid & (reason == 0)).to(tl.int32), 0)
    tl.store(left_ptr + sample, left)


def launch(
    targets: Tensor,
    top1: Tensor,
    prob1: Tensor,
    copy_top1: Tensor,
    copy_prob1: Tensor,
    base_accept: Tensor | None,
    phi: float,
    tau: float,
    kappa: float,
    keep_confident: bool,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on the device of `targets`; arguments and results as in the schema of `check_consistency`."""
    b, t = targets.shape
    reason = targets.new_empty((b, t), dtype=torch.int32)
    left = targets.new_empty((b,), dtype=torch.int32)
    if b == 0:
        return reason, left
    how = config(keep_confident)
    with on_device(targets):
        _check_consistency_kernel[(b,)](
            targets,
            top1,
            prob1,
            copy_top1,
            copy_prob1,
            base_accept,
            reason,
            left,
            t,
            *targets.stride(),
            *top1.stride(),
            *prob1.stride(),
            *copy_top1.stride(),
            *copy_prob1.stride(),
            *((0, 0) if base_accept is None else base_accept.stride()),
            phi,
            tau,
            kappa,
            **how.constants,
            **how.options,
        )
    return reason, left
