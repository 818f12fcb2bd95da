# SPDX-License-Identifier: Apache-2.0
"""`sample_rows`: draws from noise, seeds of 64 bits, and a suppressed token above all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .case import Baseline, Case, Cost, Inputs, Shape, compiled

__all__ = ["CASE"]

INF = float("inf")


def make(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, fill: float = 1.0) -> Inputs:
    """Below fill 1, rows that no index names hold NaN, and the last index names one of them."""
    n, v = shape["rows"], shape["vocab"]
    g = torch.Generator(device).manual_seed(seed)
    logits = 3 * torch.randn(n, v, generator=g, device=device)
    logits[:, v - 1] = 60.0
    rows = torch.arange(n, device=device)
    if fill < 1:
        used = max(1, round(fill * n))
        logits[used:] = float("nan")
        rows = rows % used
        if used < n:
            rows[-1] = used
    return {
        "logits": logits.to(dtype), "seeds": rows * 0x1_0000_0003 + seed, "steps": rows % 7 + 1,
        "positions": rows * 31 + 5, "temperature": (0.7, 0.0, 1.5)[seed % 3], "rows": rows,
        "suppress": torch.tensor([v - 1], device=device),
    }  # fmt: skip


def _uniforms(inputs: Inputs) -> Tensor:
    """The hash of ops/sampling/reference.py once more, in NumPy's wrapping 32-bit integers; float64."""
    v = inputs["logits"].shape[1]

    def words(t: Tensor) -> Any:
        return (t.cpu().numpy() & 0xFFFFFFFF).astype(np.uint32)[:, None]

    def mix(x: Any) -> Any:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    key = mix(mix(words(inputs["seeds"]) ^ np.uint32(0x9E3779B9)) ^ mix(words(inputs["seeds"] >> 32)))
    key = mix(key + words(inputs["steps"]) * np.uint32(0x85EBCA6B))
    key = mix(key + words(inputs["positions"]) * np.uint32(0xC2B2AE35))
    hashed = mix(key + np.arange(v, dtype=np.uint32) * np.uint32(0x27D4EB2F)) >> np.uint32(9)
    return torch.from_numpy((hashed.astype(np.float64) + 0.5) * 2.0**-23).to(inputs["logits"].device)


def draws(inputs: Inputs, exact: torch.dtype) -> tuple[Tensor, ...]:
    """Gumbel-max in float64, probabilities by torch's softmax in `exact`."""
    x = inputs["logits"][inputs["rows"]].to(exact)
    x[:, inputs["suppress"]] = -INF
    good = x.amax(-1).isfinite()
    token = (x.double() - inputs["temperature"] * (-_uniforms(inputs).log()).log()).argmax(-1)
    prob = x.softmax(-1).gather(1, token[:, None])[:, 0]
    return token.masked_fill(~good, -1), prob.masked_fill(~good, float("nan"))


def cost(inputs: Inputs) -> Cost:
    """Each logit once, and 20 operations on it: the hash, two logarithms, exp, sums and comparisons."""
    r, v = inputs["rows"].shape[0], inputs["logits"].shape[1]
    return Cost(r * v * inputs["logits"].element_size() + 12 * r, 20 * r * v)


def _gumbel(x: Tensor, temperature: float) -> Tensor:
    noise = -torch.empty(x.shape, dtype=torch.float32, device=x.device).exponential_().log()
    return (x.float() + temperature * noise).argmax(-1)


def stateful(inputs: Inputs) -> Callable[[], Any]:
    """On the same rows, already sliced: noise of torch's generator, the draw alone (no probability)."""
    x, temperature = inputs["logits"], inputs["temperature"]
    return lambda: _gumbel(x, temperature)


def compiled_stateful(inputs: Inputs) -> Callable[[], Any]:
    x, temperature = inputs["logits"], inputs["temperature"]
    call = compiled(_gumbel, x)
    return lambda: call(x, temperature)


LLADA = {"rows": 32, "vocab": 126464}

CASE = Case(
    op="sample_rows",
    small={"rows": 6, "vocab": 8209},
    tiny={"rows": 1, "vocab": 16},
    odd=({"rows": 1, "vocab": 997}, {"rows": 33, "vocab": 1009}, LLADA),
    shapes={"llada": LLADA, "llada-1024": LLADA | {"rows": 1024}},
    make=make,
    truth=lambda inputs: draws(inputs, torch.float64),
    plain=lambda inputs: draws(inputs, torch.float32),
    cost=cost,
    baselines=(
        Baseline("torch Gumbel-max, draw alone", stateful),
        Baseline("torch Gumbel-max, draw alone, compiled", compiled_stateful, compiled=("llada",)),
    ),
)
