# SPDX-License-Identifier: Apache-2.0
"""The public function `row_kl`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ...errors import InputError, expected
from .. import validation
from ..backends import dispatch

__all__ = ["row_kl"]


def row_kl(
    logits: Tensor,
    previous: Tensor,
    *,
    rows: Tensor | None = None,
    previous_rows: Tensor | None = None,
    suppress: Tensor | Sequence[int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """KL(p || q) in nats of each row's softmax p against the softmax q it had before, in one pass over both logits.

    kl = sum_v p_v (ln p_v - ln q_v), p = softmax(float32(logits[row])), q = softmax(float32(previous[previous_row])),
    both after the suppressed ids got probability 0. This is the quantity that KLASS holds against its threshold, in
    its direction (now against before); its public code adds 1e-12 inside both logarithms, this is the exact value.

    Args:
        logits: (N, V) bf16, fp16, fp32 (fp64 on the reference, rounded to fp32), any row stride, last stride 1.
        previous: (M, V), likewise; its dtype may be another one.
        rows: (R,) int64 or int32 row indices in [0, N), in any order, repeats allowed; None takes all rows.
        previous_rows: (R,) int64 or int32 row indices in [0, M), the same row of the forward before; None where it
            stands at the same index (then M = N).
        suppress: ids that get probability 0 in both, such as the mask token.
        backend: "auto", "reference" or "triton".

    Returns:
        (R,) float32, at least 0; +inf where q gives no probability to a token with a finite logit now; NaN where
        either row has a NaN, a +inf or no finite logit. The absolute error is that of float32: some 1e-6.

    Raises:
        InputError: wrong shape, dtype, stride or device, an index out of range, or an input that requires grad.
        ConfigError: an unknown backend.
        BackendError: the backend asked for cannot run here.

    Cost: reads 2 * R * V logits once; writes R * 4 bytes.

    >>> import torch
    >>> now, before = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> kl = row_kl(now, before)  # 1/2 ln 2 + 1/2 ln 2/3
    >>> round(kl.item(), 4)
    0.1438
    """
    validation.logits("logits", logits)
    validation.logits("previous", previous)
    validation.shape_is("previous", previous, ("M", logits.shape[1]))
    if rows is None:
        rows = torch.arange(logits.shape[0], device=logits.device)
    if previous_rows is None:
        if previous.shape[0] != logits.shape[0]:
            raise InputError(
                expected("previous.shape", f"{tuple(logits.shape)} where previous_rows is None", tuple(previous.shape))
            )
        previous_rows = rows
    validation.dtype_in("rows", rows, validation.INTEGERS)
    validation.shape_is("rows", rows, ("R",))
    validation.dtype_in("previous_rows", previous_rows, validation.INTEGERS)
    validation.shape_is("previous_rows", previous_rows, (rows.shape[0],))
    suppress = validation.token_ids("suppress", suppress, logits.device)
    device = validation.one_device(
        logits=logits, previous=previous, rows=rows, previous_rows=previous_rows, suppress=suppress
    )
    validation.no_gradients(logits=logits, previous=previous)
    validation.in_range("rows", rows, 0, logits.shape[0])
    validation.in_range("previous_rows", previous_rows, 0, previous.shape[0])
    validation.in_range("suppress", suppress, 0, logits.shape[1])
    double = torch.float64 in (logits.dtype, previous.dtype)
    limit = "the kernel takes bf16, fp16 and fp32 logits, not float64" if double else ""
    args = (logits, previous, rows.long(), previous_rows.long(), suppress)
    return cast(Tensor, dispatch("row_kl", "divergence", backend, device, args, limit=limit))
