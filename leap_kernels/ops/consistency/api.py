# SPDX-License-Identifier: Apache-2.0
"""The public function `check_consistency`, and the reasons a token can be committed for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import validation
from ..backends import dispatch

__all__ = ["CONFIDENT", "CONVERGED", "FORCED", "Consistency", "check_consistency"]

CONFIDENT, CONVERGED, FORCED = 1, 2, 3


class Consistency(NamedTuple):
    """What `check_consistency` returns for B samples with up to T masked targets each."""

    reason: Tensor
    """(B, T) int32: 0 stays masked, 1 confident, 2 converged, 3 forced."""
    left: Tensor
    """(B,) int32: targets that stay masked."""


def check_consistency(
    targets: Tensor,
    top1: Tensor,
    prob1: Tensor,
    copy_top1: Tensor,
    copy_prob1: Tensor,
    *,
    phi: float = 0.9,
    tau: float = 0.7,
    kappa: float = 0.0,
    base_accept: Tensor | None = None,
    keep_confident: bool = True,
    backend: str = "auto",
) -> Consistency:
    """Commit what is confident, and what the mask copy predicts as well (paper Eqs. 10 and 11).

    accept = {prob1 > phi} + {copy_top1 == top1, prob1 >= tau, copy_prob1 >= kappa}; at least one a sample.

    Args:
        targets: (B, T) int32, anything >= 0 is a masked target, -1 is none.
        top1, prob1: (B, T) int64 and float32, the base row's argmax (or drawn token) and its probability.
        copy_top1, copy_prob1: (B, T) int64 and float32, the same of the target's copy; -1 means no evidence.
        phi: confidence above which a target is committed whatever its copy says (strict), in [0, 1].
        tau: confidence from which agreement commits, in [0, 1].
        kappa: probability the copy must give its argmax, in [0, 1]; 0 is the paper.
        base_accept: (B, T) bool that replaces `prob1 > phi`; None for the paper's rule.
        keep_confident: False leaves out the first set in samples that have evidence.
        backend: "auto", "reference", "triton", or "cuda" for the optional extension, which "auto" never takes.

    Returns:
        Consistency.

    Raises:
        InputError, ConfigError, BackendError as in `top_eta`.

    Cost: one launch; reads 28 bytes and writes 4 a target.

    >>> import torch
    >>> f, i = torch.tensor([[0.95, 0.8, 0.75]]), torch.tensor([[4, 5, 6]])
    >>> check_consistency(i.int(), i, f, torch.tensor([[4, 5, 9]]), f).reason.tolist()
    [[1, 2, 0]]
    """
    validation.dtype_in("targets", targets, (torch.int32,))
    validation.shape_is("targets", targets, ("B", "T"))
    for name, t, dtype in (
        ("top1", top1, torch.int64),
        ("prob1", prob1, torch.float32),
        ("copy_top1", copy_top1, torch.int64),
        ("copy_prob1", copy_prob1, torch.float32),
        *([("base_accept", base_accept, torch.bool)] if base_accept is not None else []),
    ):
        validation.dtype_in(name, t, (dtype,))
        validation.shape_is(name, t, targets.shape)
    for name, value in (("phi", phi), ("tau", tau), ("kappa", kappa)):
        validation.number(name, value, 0, 1, "in [0, 1]")
    validation.flag("keep_confident", keep_confident)
    device = validation.one_device(
        targets=targets, top1=top1, prob1=prob1, copy_top1=copy_top1, copy_prob1=copy_prob1, base_accept=base_accept
    )
    validation.no_gradients(prob1=prob1, copy_prob1=copy_prob1)
    args = (
        targets,
        top1,
        prob1,
        copy_top1,
        copy_prob1,
        base_accept,
        float(phi),
        float(tau),
        float(kappa),
        keep_confident,
    )
    return Consistency(*dispatch("check_consistency", "consistency", backend, device, args))
