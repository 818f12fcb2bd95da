# SPDX-License-Identifier: Apache-2.0
"""`check_consistency`: probabilities at, above and below the thresholds, and a sample that accepts nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .case import Baseline, Case, Cost, Inputs, Shape

__all__ = ["CASE"]

PHI, TAU = 0.9, 0.7


def make(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, fill: float = 1.0) -> Inputs:
    """Half of the copies agree; a fifth of the probabilities equals a threshold. Seeds 1, 3, ... pass `base_accept`,
    seeds 2, 3, 6, ... drop the confident ones. Below fill 1 the rest of the targets is -1 and full of NaN."""
    b, t = shape["batch"], shape["targets"]
    g = torch.Generator().manual_seed(seed)
    prob1, copy_prob1 = (torch.rand(b, t, generator=g) for _ in range(2))
    prob1[torch.rand(b, t, generator=g) < 0.1] = PHI
    prob1[torch.rand(b, t, generator=g) < 0.1] = TAU
    top1, copy_top1 = (torch.randint(0, 2, (b, t), generator=g) for _ in range(2))
    copy_top1[torch.rand(b, t, generator=g) < 0.2] = -1
    targets = torch.arange(t, dtype=torch.int32).repeat(b, 1)
    prob1[-1] *= TAU * 0.99  # this sample is left to the most confident target
    if fill < 1:
        targets[:, round(fill * t) :] = -1
        for junk in (prob1, copy_prob1):
            junk[:, round(fill * t) :] = float("nan")
    tensors = {
        "targets": targets, "top1": top1, "prob1": prob1, "copy_top1": copy_top1, "copy_prob1": copy_prob1,
        **({"base_accept": (torch.rand(b, t, generator=g) < 0.3)} if seed % 2 else {}),
    }  # fmt: skip
    settings = {"phi": PHI, "tau": TAU, "kappa": 0.25, "keep_confident": seed // 2 % 2 == 0}
    return {name: x.to(device) for name, x in tensors.items()} | settings


def truth(inputs: Inputs) -> tuple[Tensor, ...]:
    """Paper Eqs. 10 and 11, one target at a time."""
    names = ("targets", "top1", "prob1", "copy_top1", "copy_prob1")
    given = [inputs[name].tolist() for name in names]
    accept = inputs["base_accept"].tolist() if "base_accept" in inputs else None
    phi, tau, kappa = torch.tensor([inputs[name] for name in ("phi", "tau", "kappa")], dtype=torch.float32).tolist()
    reasons = []
    for b, sample in enumerate(zip(*given, strict=True)):
        rows = list(zip(*sample, strict=True))
        evidence = any(target >= 0 and copy >= 0 for target, _, _, copy, _ in rows)
        reason = [0] * len(rows)
        for i, (target, y, c, copy, copy_c) in enumerate(rows):
            if target < 0:
                continue
            confident = accept[b][i] if accept is not None else c > phi
            if copy == y and copy >= 0 and c >= tau and copy_c >= kappa:
                reason[i] = 2
            if confident and (inputs["keep_confident"] or not evidence):
                reason[i] = 1
        targets = [i for i, row in enumerate(rows) if row[0] >= 0]
        if targets and not any(reason):
            reason[max(targets, key=lambda i: (rows[i][2], -i))] = 3
        reasons.append(reason)
    device = inputs["targets"].device
    decided = torch.tensor(reasons, dtype=torch.int32, device=device)
    return decided, ((inputs["targets"] >= 0) & (decided == 0)).sum(1, dtype=torch.int32)


def cost(inputs: Inputs) -> Cost:
    """28 bytes a target in (29 with base_accept), 4 out, and a counter a sample."""
    b, t = inputs["targets"].shape
    return Cost(b * t * (32 + ("base_accept" in inputs)) + 4 * b, 0)


def torch_eager(inputs: Inputs) -> Callable[[], Any]:
    """The rule without options, on the tensors as they are: what a decode loop would write."""
    targets, y, c, copy_y, copy_c = (inputs[name] for name in ("targets", "top1", "prob1", "copy_top1", "copy_prob1"))

    def call() -> tuple[Tensor, Tensor]:
        valid = targets >= 0
        confident = valid & (c > PHI)
        converged = valid & (copy_y >= 0) & (copy_y == y) & (c >= TAU) & (copy_c >= 0.25)
        nothing = ~(confident | converged).any(1, keepdim=True)
        best = c.masked_fill(~valid, -2.0).argmax(1, keepdim=True)
        forced = nothing & valid & torch.zeros_like(valid).scatter_(1, best, True)
        reason = torch.where(confident, 1, torch.where(converged, 2, torch.where(forced, 3, 0))).to(torch.int32)
        return reason, (valid & (reason == 0)).sum(1, dtype=torch.int32)

    return call


LLADA = {"batch": 1, "targets": 32}

CASE = Case(
    op="check_consistency",
    small={"batch": 3, "targets": 37},
    tiny={"batch": 1, "targets": 2},
    odd=({"targets": 1}, {"batch": 1, "targets": 33}, {"targets": 263}),  # the kernel walks 256 at a time
    shapes={"llada": LLADA, "llada-batch-8": LLADA | {"batch": 8}},
    make=make,
    truth=truth,
    plain=truth,
    cost=cost,
    baselines=(Baseline("torch eager", torch_eager, field="reason", pick=lambda result: result[0]),),
    dtypes=(torch.float32,),
)
