# SPDX-License-Identifier: Apache-2.0
"""Specification of `row_kl` in plain torch (KLASS: decoders.md section 2.6, without its 1e-12 in the logarithms)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reductions import row_sums

__all__ = ["row_kl"]

INF = float("inf")


def row_kl(
    logits: Tensor, previous: Tensor, rows: Tensor, previous_rows: Tensor, suppress: Tensor | None = None
) -> Tensor:
    """For each x = float32(logits[row]) and y = float32(previous[previous_row]), with the suppressed ids at -inf,
    m = max_v x_v, n = max_v y_v, p = softmax(x) and q = softmax(y):

        S  = sum_v exp(x_v - m)        T = sum_v exp(y_v - n)
        kl = sum_v p_v (ln p_v - ln q_v) = sum_v p_v ((x_v - m) - (y_v - n)) - ln(S / T)

    x_v = -inf adds nothing; y_v = -inf where x_v is finite makes it +inf. A bad row (a NaN, a +inf, or no finite
    logit in x or in y) gives NaN.
    """
    x, y = (_selected(t, index, suppress) for t, index in ((logits, rows), (previous, previous_rows)))
    top_x, top_y = x.amax(-1), y.amax(-1)
    below_x, below_y = x - top_x[:, None], y - top_y[:, None]
    e = below_x.exp()
    total_x, total_y = row_sums(e), row_sums(below_y.exp())
    moved = row_sums(torch.where(e > 0, e * (below_x - below_y), 0.0)) / total_x
    kl = (moved - (total_x / total_y).log()).clamp(min=0)  # rounding may put equal distributions just below 0
    lost = ((x > -INF) & (y == -INF)).any(-1)
    good = top_x.isfinite() & top_y.isfinite()
    return kl.masked_fill(lost, INF).masked_fill(~good, float("nan"))


def _selected(logits: Tensor, rows: Tensor, suppress: Tensor | None) -> Tensor:
    x = logits.index_select(0, rows).float()
    return x if suppress is None else x.index_fill(1, suppress, -INF)
