# SPDX-License-Identifier: Apache-2.0
"""Specification of `top_eta` in plain torch (method.md sections 1 and 2; paper Eqs. 3 and 8)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["top_eta"]

INF = float("inf")


def top_eta(
    logits: Tensor, rows: Tensor, eta: float, k: int, suppress: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For each x = float32(logits[row]), with the suppressed ids at -inf:

        lse     = ln sum_v exp(x_v)             p_v = exp(x_v - lse)
        top1    = argmax_v x_v, first id on a tie             prob1 = p_top1
        ids     = { v : p_v >= eta }, by falling logit, then rising id; at most k, padded with -1
        entropy = - sum_v p_v ln p_v            gap = largest logit - second largest logit

    A bad row (a NaN, a +inf, or no finite logit) has its NaN, +inf or -inf as `lse`, top1 = -1, no ids, and NaN
    for the other statistics.
    """
    x = logits.index_select(0, rows).float()
    if suppress is not None:
        x = x.index_fill(1, suppress, -INF)
    # Not torch.logsumexp: it rounds one row differently from many, and a sample must not notice its neighbours.
    logp = x.log_softmax(-1)
    top = x.amax(-1)
    top1 = x.argmax(-1)
    good = top.isfinite()

    row = torch.arange(x.shape[0], device=x.device)
    logp1 = logp[row, top1]
    lse = torch.where(good, top - logp1, top)
    prob1 = logp1.exp()
    entropy = torch.special.entr(logp.exp()).sum(-1)

    # torch.topk picks the right values but orders ties as it likes: order by id first, then stably by value.
    values, ids = x.topk(min(max(k, 2), x.shape[1]), -1)
    gap = values[:, 0] - values[:, 1] if x.shape[1] > 1 else torch.full_like(top, INF)
    ids, order = ids[:, :k].sort(-1)
    values, order2 = values[:, :k].gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order2)
    probs = logp.gather(1, ids).exp()
    keep = (probs >= eta) & good[:, None]

    nan = float("nan")
    return (
        ids.masked_fill(~keep, -1),
        probs.masked_fill(~keep, 0.0),
        keep.sum(-1, dtype=torch.int32),
        top1.masked_fill(~good, -1),
        prob1.masked_fill(~good, nan),
        lse,
        entropy.masked_fill(~good, nan),
        gap.masked_fill(~good, nan),
    )
