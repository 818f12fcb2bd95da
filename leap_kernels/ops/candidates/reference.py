# SPDX-License-Identifier: Apache-2.0
"""Specification of `top_eta` in plain torch (method.md sections 1 and 2; paper Eqs. 3 and 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reductions import row_sums

__all__ = ["top_eta"]

INF = float("inf")


def top_eta(
    logits: Tensor, rows: Tensor, eta: float, k: int, suppress: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For each x = float32(logits[row]), with the suppressed ids at -inf, and m = max_v x_v:

        S       = sum_v exp(x_v - m)            lse = m + ln S           p_v = exp(x_v - m) / S
        top1    = argmax_v x_v, first id on a tie                        prob1 = p_top1
        ids     = { v : p_v >= eta }, by falling logit, then rising id; at most k, padded with -1
        entropy = - sum_v p_v ln p_v = ln S - sum_v p_v (x_v - m)
        gap     = largest logit - second largest logit

    A bad row (a NaN, a +inf, or no finite logit) has its NaN, +inf or -inf as `lse`, top1 = -1, no ids, and NaN
    for the other statistics.
    """
    x = logits.index_select(0, rows).float()  # a copy, changed in place from here on: rows may be long
    if suppress is not None:
        x.index_fill_(1, suppress, -INF)
    values, ids = _largest(x, max(k, 2))
    top, top1 = values[:, 0], ids[:, 0]
    below = x.sub_(top[:, None])
    e = below.exp()
    total = row_sums(e)
    bad = total.isnan()  # as x - m is where x is NaN, where m is +inf, and where all are -inf
    log_total = total.log()
    # 0 ln 0 = 0: exp is 0 in float32 from -104 down, where `below` may be -inf.
    entropy = log_total - row_sums(below.clamp_(min=-200.0).mul_(e)) / total
    gap = values[:, 0] - values[:, 1] if x.shape[1] > 1 else torch.full_like(top, INF)
    ids = ids[:, :k]
    probs = e.gather(1, ids) / total[:, None]
    keep = probs >= eta
    drop = ~keep

    # What is computed from `total` is NaN on bad rows by itself.
    return (
        ids.masked_fill(drop, -1),
        probs.masked_fill(drop, 0.0),
        keep.sum(-1, dtype=torch.int32),
        top1.masked_fill(bad, -1),
        total.reciprocal(),
        torch.where(bad, top, top + log_total),
        entropy.clamp(min=0),  # rounding may put a certain row just below 0
        gap.masked_fill(bad, float("nan")),
    )


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row and their ids, equal values by rising id."""
    k, size = min(k, x.shape[1]), x.shape[1]
    values, ids = x.topk(min(k + 1, size), -1)
    if bool(values.diff().all()):  # no two are equal (infinities aside, which are never listed): there is no choice
        return values[:, :k], ids[:, :k]
    if k < size:
        # torch.topk takes any of equal values: where the k-th equals the next, only a stable sort knows the right ones.
        tied = (values[:, k - 1] == values[:, k]) & values[:, k].isfinite()
        for row in tied.nonzero()[:, 0].tolist():
            ids[row] = x[row].sort(descending=True, stable=True).indices[: k + 1]
        values, ids = x.gather(1, ids[:, :k]), ids[:, :k]
    # It also orders equal values as it likes: order by id first, then stably by value.
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
