# SPDX-License-Identifier: Apache-2.0
"""`row_kl`: two independent rows of noise each, one token lost on the way, and a suppressed token above all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .case import Baseline, Case, Cost, Inputs, Shape, compiled

__all__ = ["CASE"]

INF = float("inf")


def make(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, fill: float = 1.0) -> Inputs:
    """Row 1 gives a token probability that had none before. Below fill 1, rows that no index names hold NaN, and the
    last index names one of them."""
    n, v = shape["rows"], shape["vocab"]
    g = torch.Generator(device).manual_seed(seed)
    now, before = (torch.randn(n, v, generator=g, device=device) for _ in range(2))
    now[:, v - 1], before[:, v - 1] = 25.0, 30.0
    if n > 1:
        before[n - 2, v // 3] = -INF  # row 1 below, where the side before is read from behind
    rows = torch.arange(n, device=device)
    if fill < 1:
        used = max(1, round(fill * n))
        now[used:] = float("nan")
        rows = rows % used
        if used < n:
            rows[-1] = used
    return {
        "logits": now.to(dtype), "previous": before.to(dtype), "rows": rows, "previous_rows": rows.flip(0) % n,
        "suppress": torch.tensor([v - 1], device=device),
    }  # fmt: skip


def divergence(inputs: Inputs, exact: torch.dtype) -> tuple[Tensor, ...]:
    """By torch's own `kl_div`, computed in `exact`."""
    sides = []
    for name, index in (("previous", "previous_rows"), ("logits", "rows")):
        x = inputs[name][inputs[index]].to(exact)
        x[:, inputs["suppress"]] = -INF
        sides.append(x.log_softmax(-1))
    before, now = sides
    terms = torch.nn.functional.kl_div(before, now, log_target=True, reduction="none")
    # -inf on both sides, which torch takes for NaN, adds nothing.
    kl = torch.where(now == -INF, 0.0, terms).sum(-1)
    return (kl.masked_fill(now.isnan().any(-1) | before.isnan().any(-1), float("nan")),)


def cost(inputs: Inputs) -> Cost:
    """Each logit of both sides once, and 8 operations on a pair: two differences, two exp, two sums, two products."""
    r, v = inputs["rows"].shape[0], inputs["logits"].shape[1]
    return Cost(r * v * (inputs["logits"].element_size() + inputs["previous"].element_size()) + 4 * r, 8 * r * v)


def _eager(now: Tensor, before: Tensor) -> Tensor:
    p = torch.log_softmax(now, -1, dtype=torch.float32)
    return (p.exp() * (p - torch.log_softmax(before, -1, dtype=torch.float32))).sum(-1)


def log_softmaxes(inputs: Inputs) -> Callable[[], Any]:
    """On the same rows, already sliced (no suppression)."""
    now, before = inputs["logits"], inputs["previous"]
    return lambda: _eager(now, before)


def compiled_log_softmaxes(inputs: Inputs) -> Callable[[], Any]:
    now, before = inputs["logits"], inputs["previous"]
    call = compiled(_eager, now)
    return lambda: call(now, before)


LLADA = {"rows": 32, "vocab": 126464}

CASE = Case(
    op="row_kl",
    small={"rows": 6, "vocab": 8209},
    tiny={"rows": 1, "vocab": 16},
    odd=({"rows": 1, "vocab": 997}, {"rows": 33, "vocab": 1009}, LLADA),
    shapes={"llada": LLADA, "llada-1024": LLADA | {"rows": 1024}},
    make=make,
    truth=lambda inputs: divergence(inputs, torch.float64),
    plain=lambda inputs: divergence(inputs, torch.float32),
    cost=cost,
    baselines=(
        Baseline("torch two log_softmax", log_softmaxes),
        Baseline("torch two log_softmax, compiled", compiled_log_softmaxes, compiled=("llada",)),
    ),
)
