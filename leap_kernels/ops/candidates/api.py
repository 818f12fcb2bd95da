# SPDX-License-Identifier: Apache-2.0
"""The public function `top_eta`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import validation
from ..backends import dispatch

__all__ = ["TopEta", "max_candidates", "top_eta", "unchecked_top_eta"]

MIN_ETA = 1 / 64
KERNEL_MAX_K = 16


class TopEta(NamedTuple):
    """What `top_eta` returns, R rows, K = `max_candidates(eta, V)`; probabilities are float32."""

    ids: Tensor
    """(R, K) int64: tokens with p >= eta by falling logit, then rising id; padded with -1."""
    probs: Tensor
    """(R, K) float32: their probabilities; padded with 0."""
    counts: Tensor
    """(R,) int32: how many there are."""
    top1: Tensor
    """(R,) int64: argmax of the logits, lowest id on a tie; -1 on a bad row."""
    prob1: Tensor
    """(R,) float32: its probability, the confidence."""
    lse: Tensor
    """(R,) float32: natural log of the sum of exponentials; not finite on a bad row, and only there."""
    entropy: Tensor
    """(R,) float32: entropy of the softmax in nats."""
    gap: Tensor
    """(R,) float32: largest minus second largest logit."""


def max_candidates(eta: float, vocab: int) -> int:
    """K = min(V, floor((1 + 1e-5) / eta)): no more tokens can reach probability eta, rounding included.

    Raises ConfigError for an eta outside [1/64, 1], InputError for a vocabulary without tokens.
    """
    validation.number("eta", eta, MIN_ETA, 1, "in [1/64, 1]", "The paper uses 0.2.")
    validation.integer("vocab", vocab, 1)
    return min(vocab, math.floor((1 + 1e-5) / eta))


def top_eta(
    logits: Tensor,
    eta: float,
    *,
    rows: Tensor | None = None,
    suppress: Tensor | Sequence[int] | None = None,
    backend: str = "auto",
) -> TopEta:
    """Argmax, confidence, log-sum-exp, entropy and the tokens with p >= eta of each row, in one pass over the logits.

    p = softmax(float32(logits[row])) after the suppressed ids got probability 0 (paper Eqs. 3 and 8).

    Args:
        logits: (N, V) bf16, fp16, fp32 (fp64 on the reference, rounded to fp32), any row stride, last stride 1.
        eta: probability a token must reach to be listed, in [1/64, 1].
        rows: (R,) int64 or int32 row indices in [0, N), in any order, repeats allowed; None takes all rows.
        suppress: ids that get probability 0, such as the mask token.
        backend: "auto", "reference" or "triton".

    Returns:
        TopEta. A row with a NaN, a +inf or no finite logit gets a non-finite `lse` and `top1` = -1.

    Raises:
        InputError: wrong shape, dtype, stride or device, an index out of range, or an input that requires grad.
        ConfigError: eta out of range, or an unknown backend.
        BackendError: the backend asked for cannot run here.

    Cost: reads R * V logits once; writes R * (12 K + 28) bytes.

    >>> import torch
    >>> out = top_eta(torch.tensor([[0.0, 2.0, 2.0, -1.0]]), eta=0.2)
    >>> out.ids[0, : out.counts[0]].tolist(), out.top1.tolist()
    ([1, 2], [1])
    """
    validation.logits("logits", logits)
    k = max_candidates(eta, logits.shape[1])
    if rows is None:
        every, rows = True, torch.arange(logits.shape[0], device=logits.device)
    else:
        every = False
        validation.dtype_in("rows", rows, validation.INTEGERS)
        validation.shape_is("rows", rows, ("R",))
    suppress = validation.token_ids("suppress", suppress, logits.device)
    validation.one_device(logits=logits, rows=rows, suppress=suppress)
    validation.no_gradients(logits=logits)
    if not every:
        validation.in_range("rows", rows, 0, logits.shape[0])
    validation.in_range("suppress", suppress, 0, logits.shape[1])
    return unchecked_top_eta(logits, rows.long(), eta, k, suppress, backend)


def unchecked_top_eta(
    logits: Tensor, rows: Tensor, eta: float, k: int, suppress: Tensor | None, backend: str
) -> TopEta:
    """`top_eta` for the decode loop, which asks in every forward and knows what it asks for; k = `max_candidates`."""
    args, limit = (logits, rows, eta, k, suppress), _kernel_limit(logits.dtype, k)
    return TopEta(*dispatch("top_eta", "candidates", backend, logits.device, args, limit=limit))


def _kernel_limit(dtype: torch.dtype, k: int) -> str:
    if dtype == torch.float64:
        return "the kernel takes bf16, fp16 and fp32 logits, not float64"
    if k > KERNEL_MAX_K:
        return f"the kernel lists at most {KERNEL_MAX_K} tokens a row, eta asks for {k}"
    return ""
