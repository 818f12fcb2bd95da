# SPDX-License-Identifier: Apache-2.0
"""Top-p and top-k: which tokens of a row may be drawn at all. Greedy decoding never comes here."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["keep_likely"]


def keep_likely(
    logits: Tensor, *, temperature: float, top_p: float | None, top_k: int | None, suppress: Tensor
) -> Tensor:
    """(n, V) float32 logits with -inf at the tokens that top-p, and then top-k, take out (decoders.md P3).

    Both look at softmax(logits / temperature) without the suppressed ids. Top-p keeps the likeliest tokens up to and
    including the first with which their sum exceeds `top_p`; tokens of equal probability count in the order of their
    ids. Top-k keeps the `top_k` likeliest of those, and all that equal the last of them. The likeliest always stays.

    Cost: top-p sorts the rows, 16 bytes of memory a logit; top-k selects in them.

    >>> import torch
    >>> logits, none = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), torch.tensor([], dtype=torch.int64)
    >>> keep_likely(logits, temperature=1.0, top_p=0.7, top_k=None, suppress=none).isfinite().tolist()
    [[True, True, False, False]]
    """
    x = logits.float().index_fill(1, suppress, float("-inf"))
    if top_p is not None and top_p < 1:
        scaled = (x - x.amax(1, keepdim=True)) / temperature
        p, order = scaled.softmax(1).sort(dim=1, descending=True, stable=True)
        before = p.double().cumsum(1).roll(1, 1)  # the sum in front of each token
        before[:, 0] = 0
        x = x.masked_fill(torch.zeros_like(x, dtype=torch.bool).scatter_(1, order, before > top_p), float("-inf"))
    if top_k is not None and top_k < x.shape[1]:
        x = x.masked_fill(x < x.topk(top_k, 1).values[:, -1:], float("-inf"))
    return x
