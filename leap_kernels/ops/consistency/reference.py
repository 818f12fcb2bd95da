# SPDX-License-Identifier: Apache-2.0
"""Specification of `check_consistency` in plain torch (method.md section 5; paper Eqs. 3, 10 and 11)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_consistency"]


def check_consistency(
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
    """With y = top1, c = prob1 and the copy's argmax y~:

        accept = { i : c_i > phi }  +  { i : y~_i = y_i and c_i >= tau and p~_i(y_i) >= kappa }

    and where that is empty, the target with the highest c (the first on a tie). `base_accept` replaces
    { c > phi }. Without `keep_confident` the first set is dropped in samples that have evidence from a copy.
    Reasons rank confident (1) before converged (2) before forced (3); 0 is not accepted. NaN accepts nothing by
    itself. The thresholds are rounded to float32 before comparing.
    """
    # torch rounds a Python number to the dtype of the tensor that it is compared with.
    valid = targets >= 0
    evidence = valid & (copy_top1 >= 0)
    confident = valid & (prob1 > phi if base_accept is None else base_accept)
    if not keep_confident:
        confident = confident & ~evidence.any(1, keepdim=True)
    converged = evidence & (copy_top1 == top1) & (prob1 >= tau) & (copy_prob1 >= kappa)
    reason = (2 * converged.int()).masked_fill(confident, 1)
    if targets.shape[1]:
        rank = prob1.nan_to_num(nan=-1.0).masked_fill(~valid, -2.0)
        best = torch.arange(targets.shape[1], device=targets.device) == rank.argmax(1, keepdim=True)
        nothing = ~(reason > 0).any(1, keepdim=True)
        reason = reason.masked_fill(best & nothing & valid, 3)
    return reason, (valid & (reason == 0)).sum(1, dtype=torch.int32)
