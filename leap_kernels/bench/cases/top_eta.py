# SPDX-License-Identifier: Apache-2.0
"""`top_eta`: rows with none to four tokens above eta, ties among them, and a suppressed token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .case import Baseline, Case, Cost, Inputs, Shape, compiled

__all__ = ["CASE", "LLADA", "SHAPES", "poison_rows"]

INF = float("inf")
ETA = {1: 0.6}  # by K; else 1 / K


def make(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, fill: float = 1.0) -> Inputs:
    """Row i has i mod 5 peaks of like height over noise: probabilities far from eta on either side.

    The peaks are multiples of 1/8, exact in every dtype; on even rows they tie. Below fill 1 the suppressed token
    stands above all, rows that `rows` does not name hold NaN, and the last two named ones are bad: a +inf and a NaN.
    """
    n, v, k = shape["rows"], shape["vocab"], shape["k"]
    g = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(n, v, generator=g, device=device)
    row = torch.arange(n, device=device)
    for j in range(4):
        has = row[row % 5 > j]
        logits[has, (has * 7919 + j * (v // 5) + 3) % (v - 1)] = 18 - j / 8 * (has % 2)
    logits[:, v - 1] = (
        25.0 if fill < 1 else -30.0
    )  # without weight it changes nothing, for baselines that suppress none
    logits = logits.to(dtype)

    rows = row if fill == 1 else poison_rows(logits, fill)
    return {"logits": logits, "eta": ETA.get(k, 1 / k), "rows": rows, "suppress": torch.tensor([v - 1], device=device)}


def poison_rows(logits: Tensor, fill: float) -> Tensor:
    """Row indices, any order and repeats, into the first `fill` of `logits`, and two bad rows; the rest becomes NaN."""
    n, v = logits.shape
    used = max(1, round(fill * n))
    rows = (torch.arange(n, device=logits.device) % used).flip(0)
    logits[used:] = float("nan")
    if n - used >= 2:
        logits[used] = 0.0
        logits[used, v // 2] = INF
        rows[-2], rows[-1] = used, used + 1
    return rows


def statistics(inputs: Inputs, exact: torch.dtype) -> tuple[Tensor, ...]:
    """Every output of `top_eta` by torch's own functions, computed in `exact`."""
    from ...ops import max_candidates

    logits, eta = inputs["logits"], inputs["eta"]
    k = max_candidates(eta, logits.shape[1])
    x = logits[inputs["rows"]].to(exact)
    x[:, inputs["suppress"]] = -INF
    top = x.amax(-1)
    good = top.isfinite()
    p = x.softmax(-1)
    entropy = torch.special.entr(p).sum(-1)
    values, ids = (t[:, : max(k, 2)] for t in x.sort(dim=-1, descending=True, stable=True))
    probs = p.gather(1, ids[:, :k])
    keep = (probs >= eta) & good[:, None]
    nan = float("nan")
    return (
        ids[:, :k].masked_fill(~keep, -1),
        probs.masked_fill(~keep, 0.0),
        keep.sum(-1, dtype=torch.int32),
        ids[:, 0].masked_fill(~good, -1),
        p.amax(-1).masked_fill(~good, nan),
        torch.where(good, x.logsumexp(-1), top),
        entropy.masked_fill(~good, nan),
        (values[:, 0] - values[:, 1]).masked_fill(~good, nan),
    )


def cost(inputs: Inputs) -> Cost:
    """Each logit once, and 6 operations on it: subtract, exp, two sums, a product, a comparison."""
    from ...ops import max_candidates

    r, v = inputs["rows"].shape[0], inputs["logits"].shape[1]
    k = max_candidates(inputs["eta"], v)
    return Cost(r * v * inputs["logits"].element_size() + r * (12 * k + 28), 6 * r * v)


def softmax_topk(inputs: Inputs) -> Callable[[], Any]:
    """On the same rows, already sliced: probabilities in float32 and the K largest; no entropy, no suppression."""
    from ...ops import max_candidates

    logits, k = inputs["logits"], max_candidates(inputs["eta"], inputs["logits"].shape[1])
    return lambda: torch.softmax(logits, -1, dtype=torch.float32).topk(k)


def confidence(result: Any) -> Tensor:
    largest: Tensor = result.values[:, 0]
    return largest


def compiled_softmax_topk(inputs: Inputs) -> Callable[[], Any]:
    from ...ops import max_candidates

    logits, k = inputs["logits"], max_candidates(inputs["eta"], inputs["logits"].shape[1])
    call = compiled(lambda x: torch.softmax(x, -1, dtype=torch.float32).topk(k), logits)
    return lambda: call(logits)


def flashinfer_softmax(inputs: Inputs) -> Callable[[], Any]:
    import flashinfer

    logits = inputs["logits"].float()
    return lambda: flashinfer.sampling.softmax(logits)


LLADA = {"rows": 32, "vocab": 126464, "k": 5}

SHAPES = {
    "llada": LLADA,
    "llada-1024": LLADA | {"rows": 1024},
    "llada-64": LLADA | {"rows": 64},
    "sdar": LLADA | {"vocab": 151936},
    "dream": LLADA | {"vocab": 152064},
    "llada2": LLADA | {"vocab": 157184},
    "odd-vocab": LLADA | {"vocab": 126463},
}

CASE = Case(
    op="top_eta",
    small={"rows": 6, "vocab": 8209, "k": 5},  # a split and a tail of 17
    tiny={"rows": 1, "vocab": 16},
    odd=(
        {"rows": 1, "vocab": 997},
        {"rows": 33, "vocab": 1009, "k": 1},
        {"rows": 33, "vocab": 12289, "k": 10},
        LLADA,
    ),
    shapes=SHAPES,
    make=make,
    truth=lambda inputs: statistics(inputs, torch.float64),
    plain=lambda inputs: statistics(inputs, torch.float32),
    cost=cost,
    baselines=(
        Baseline("torch softmax + topk", softmax_topk, field="prob1", pick=confidence),
        Baseline(
            "torch softmax + topk, compiled", compiled_softmax_topk, field="prob1", pick=confidence, compiled=("llada",)
        ),
        Baseline("FlashInfer softmax alone", flashinfer_softmax, gpu=True, package="flashinfer", compiled=("llada",)),
    ),
)
