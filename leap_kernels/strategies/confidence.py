# SPDX-License-Identifier: Apache-2.0
"""What Dream's code ranks predictions by: probability, margin, or negative entropy (decoders.md P3)."""

from __future__ import annotations

from torch import Tensor

from ..likely import keep_likely
from .base import View

__all__ = ["CONFIDENCES", "confidence", "tempered_confidence"]

CONFIDENCES = ("probability", "margin", "neg_entropy")


def confidence(kind: str, logits: Tensor, prob: Tensor, entropy: Tensor, suppress: Tensor) -> Tensor:
    """(n,) float32 confidences of n predictions, from the float32 softmax at temperature 1.

    "probability" of the prediction, "margin" between the two likeliest tokens, or "neg_entropy", sum p ln p.
    """
    if kind == "probability":
        return prob
    if kind == "neg_entropy":
        return -entropy
    p = logits.float().index_fill(1, suppress, float("-inf")).softmax(1)
    return _margin(p)


def tempered_confidence(kind: str, logits: Tensor, token: Tensor, view: View, suppress: Tensor) -> Tensor:
    """The same as Dream's code has it: softmax in the logits' dtype, of what temperature, top-p and top-k leave."""
    x = logits.index_fill(1, suppress, float("-inf"))
    if view.temperature > 0:
        out = keep_likely(
            logits, temperature=view.temperature, top_p=view.top_p, top_k=view.top_k, suppress=suppress
        ).isneginf()
        x = (x / view.temperature).masked_fill(out, float("-inf"))
    p = x.softmax(1)
    if kind == "probability":
        return p.gather(1, token[:, None])[:, 0]
    return _margin(p) if kind == "margin" else (p * (p + 1e-10).log()).sum(1)


def _margin(p: Tensor) -> Tensor:
    two = p.topk(2, 1).values
    return two[:, 0] - two[:, 1]
