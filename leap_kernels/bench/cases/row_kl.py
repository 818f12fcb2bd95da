# SPDX-License-Identifier: Apache-2.0
"""`row_kl`: rows that moved a little, a lot and not at all, and a token whose probability was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Baseline, Case, Cost, Inputs, Shape
from .top_eta import LLADA, SHAPES, poison_rows

__all__ = ["CASE"]

INF = float("inf")


def make(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, fill: float = 1.0) -> Inputs:
    """Noise around a peak, and the same with other noise before; every third row's peak has moved, row 0 is as it was.

    Below fill 1 the suppressed token stands above all, unnamed rows hold NaN, the last two named ones are bad, and the
    first named one has a token that had no probability.
    """
    n, v = shape["rows"], shape["vocab"]
    g = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(n, v, generator=g, device=device)
    previous = logits + 0.5 * torch.randn(n, v, generator=g, device=device)
    row = torch.arange(n, device=device)
    logits[row, row * 7919 % (v - 1)] = 9.0
    previous[row, (row * 7919 + (row % 3 == 2).long()) % (v - 1)] = 8.0
    previous[0] = logits[0]
    logits[:, v - 1], previous[:, v - 1] = 25.0 if fill < 1 else -30.0, -30.0
    logits, previous = logits.to(dtype), previous.to(dtype)
    rows = row
    if fill < 1:
        rows = poison_rows(logits, fill)
        previous[torch.ones_like(row).index_fill_(0, rows, 0).bool()] = float("nan")
        previous[rows[0], v // 3] = -INF
    suppress = torch.tensor([v - 1], device=device)
    return {
        "logits": logits, "previous": previous.flip(0), "rows": rows, "previous_rows": n - 1 - rows,
        "suppress": suppress,
    }  # fmt: skip


def kl(inputs: Inputs, exact: torch.dtype) -> tuple[Tensor]:
    """sum p (ln p - ln q) by torch's log_softmax, in `exact`."""
    x, y = (
        inputs[name][inputs[rows]].to(exact).index_fill(1, inputs["suppress"], -INF)
        for name, rows in (("logits", "rows"), ("previous", "previous_rows"))
    )
    good = x.amax(-1).isfinite() & y.amax(-1).isfinite()
    log_p, log_q = x.log_softmax(-1), y.log_softmax(-1)
    found = torch.where(log_p == -INF, 0.0, log_p.exp() * (log_p - log_q)).sum(-1)
    return (found.masked_fill(~good, float("nan")),)


def cost(inputs: Inputs) -> Cost:
    """Each of two logits once; 9 operations on a pair: three differences, two exps, three sums, a product."""
    r, v = inputs["rows"].shape[0], inputs["logits"].shape[1]
    return Cost(r * v * (inputs["logits"].element_size() + inputs["previous"].element_size()) + 4 * r, 9 * r * v)


def torch_kl(inputs: Inputs) -> Callable[[], Any]:
    """On the same rows, already sliced; no suppression."""
    x, y = inputs["logits"][inputs["rows"]], inputs["previous"][inputs["previous_rows"]]

    def call() -> Tensor:
        log_p, log_q = (t.log_softmax(-1, dtype=torch.float32) for t in (x, y))
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    return call


def without_k(shape: Shape) -> dict[str, int]:
    return {name: size for name, size in shape.items() if name != "k"}


CASE = Case(
    op="row_kl",
    small={"rows": 6, "vocab": 4111},  # a split and a tail of 15
    tiny={"rows": 1, "vocab": 16},
    odd=({"rows": 1, "vocab": 997}, {"rows": 33, "vocab": 12289}, without_k(LLADA)),
    shapes={name: without_k(shape) for name, shape in SHAPES.items()},
    make=make,
    truth=lambda inputs: kl(inputs, torch.float64),
    plain=lambda inputs: kl(inputs, torch.float32),
    cost=cost,
    baselines=(Baseline("torch log_softmax, twice, + kl_div", torch_kl, field="row_kl"),),
)
