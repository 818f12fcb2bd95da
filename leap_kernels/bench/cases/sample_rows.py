# SPDX-License-Identifier: Apache-2.0
"""`sample_rows`: draws whose noisy logit leads by enough for any rounding of the noise to draw the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.sampling.reference import uniform
from .case import Baseline, Case, Cost, Inputs, Shape
from .row_kl import without_k
from .top_eta import LLADA, SHAPES, poison_rows

__all__ = ["CASE"]

INF = float("inf")
TEMPERATURE = 0.75
LEAD = 1e-3  # many times the 2^-19 (18 temperature + |x|) that the op promises to resolve


def make(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, fill: float = 1.0) -> Inputs:
    """Noise with a peak of a few nats; seeds of 64 bits, negative ones among them.

    Positions are moved until the drawn token leads. Below fill 1 the suppressed token stands above all, unnamed rows
    hold NaN, and the last two named ones are bad.
    """
    n, v = shape["rows"], shape["vocab"]
    g = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(n, v, generator=g, device=device)
    row = torch.arange(n, device=device)
    logits[row, row * 7919 % (v - 1)] = 9.0
    logits[:, v - 1] = 25.0 if fill < 1 else -60.0
    logits = logits.to(dtype)
    rows = row if fill == 1 else poison_rows(logits, fill)
    inputs: Inputs = {
        "logits": logits,
        "rows": rows,
        "seeds": torch.randint(-(2**62), 2**62, (n,), generator=g, device=device),
        "steps": torch.randint(1, 100, (n,), generator=g, device=device),
        "positions": row.clone(),
        "temperature": TEMPERATURE,
        "suppress": torch.tensor([v - 1], device=device),
    }
    while True:
        first, second = noisy(inputs, torch.float64).topk(2, -1).values.unbind(-1)
        close = (first - second) < LEAD  # NaN, of bad rows, is not
        if not bool(close.any()):
            return inputs
        inputs["positions"] = torch.where(close, inputs["positions"] + 10_000, inputs["positions"])


def noisy(inputs: Inputs, exact: torch.dtype) -> Tensor:
    """x - temperature ln(-ln u), in `exact`; the uniforms are part of the op's definition."""
    x: Tensor = inputs["logits"][inputs["rows"]].to(exact).index_fill(1, inputs["suppress"], -INF)
    token = torch.arange(x.shape[1], device=x.device)
    seeds, steps, positions = (inputs[name][:, None] for name in ("seeds", "steps", "positions"))
    noise: Tensor = (-uniform(seeds, steps, positions, token).to(exact).log()).log()
    temperature: float = inputs["temperature"]
    return x - temperature * noise


def draw(inputs: Inputs, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest noisy logit, and its probability by torch's softmax, in `exact`."""
    x = inputs["logits"][inputs["rows"]].to(exact).index_fill(1, inputs["suppress"], -INF)
    good = x.amax(-1).isfinite()
    token = noisy(inputs, exact).argmax(-1)
    prob = x.softmax(-1).gather(1, token[:, None])[:, 0]
    return token.masked_fill(~good, -1), prob.masked_fill(~good, float("nan"))


def cost(inputs: Inputs) -> Cost:
    """Each logit once; 8 operations besides the hash: two logs, a product, two differences, exp, sum, comparison."""
    r, v = inputs["rows"].shape[0], inputs["logits"].shape[1]
    return Cost(r * v * inputs["logits"].element_size() + 12 * r, 8 * r * v)


def softmax_exponential(inputs: Inputs) -> Callable[[], Any]:
    """How torch programs draw without a sync: p over exponential noise, argmax. No seed a row, no confidence."""
    x = inputs["logits"][inputs["rows"]]

    def call() -> Tensor:
        p = torch.softmax(x.float() / TEMPERATURE, -1)
        return (p / torch.empty_like(p).exponential_()).argmax(-1)

    return call


CASE = Case(
    op="sample_rows",
    small={"rows": 6, "vocab": 4111},  # a split and a tail of 15
    tiny={"rows": 1, "vocab": 16},
    odd=({"rows": 1, "vocab": 997}, {"rows": 33, "vocab": 12289}, without_k(LLADA)),
    shapes={name: without_k(shape) for name, shape in SHAPES.items()},
    make=make,
    truth=lambda inputs: draw(inputs, torch.float64),
    plain=lambda inputs: draw(inputs, torch.float32),
    cost=cost,
    baselines=(Baseline("torch softmax / exponential, argmax (other draws)", softmax_exponential),),
)
