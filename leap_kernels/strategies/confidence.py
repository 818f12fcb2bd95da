# SPDX-License-Identifier: Apache-2.0
"""What Dream's code ranks predictions by: probability, margin, or negative entropy (decoders.md P3)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..likely import keep_likely
from .base import View

__all__ = ["CONFIDENCES", "confidence"]

CONFIDENCES = ("probability", "margin", "neg_entropy")


def confidence(kind: str, logits: Tensor, token: Tensor, view: View, suppress: Tensor, *, published: bool) -> Tensor:
    """(n,) confidences of n predictions `token` from their (n, V) logits.

    "probability" of the prediction, "margin" between the two likeliest tokens, or "neg_entropy", sum p ln p. From a
    float64 softmax at temperature 1, since many masks are within 1e-7 of certain, and float32 cannot rank those; or as
    published, in the logits' dtype, of what temperature, top-p and top-k leave.
    """
    x = logits if published else logits.double()
    x = x.index_fill(1, suppress, float("-inf"))
    if published and view.temperature > 0:
        out = keep_likely(
            logits, temperature=view.temperature, top_p=view.top_p, top_k=view.top_k, suppress=suppress
        ).isneginf()
        x = (x / view.temperature).masked_fill(out, float("-inf"))
    p = x.softmax(1)
    if kind == "probability":
        return p.gather(1, token.clamp(min=0)[:, None])[:, 0]
    if kind == "margin":
        two = p.topk(2, 1).values
        return two[:, 0] - two[:, 1]
    return (p * (p + 1e-10).log()).sum(1) if published else -torch.special.entr(p).sum(1)
