# SPDX-License-Identifier: Apache-2.0
"""Arguments of `check_consistency` for the tests of the extension, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leap_kernels.ops.consistency import reference

NAN = float("nan")
THRESHOLDS = [(0.9, 0.7, 0.0), (0.7, 0.9, 0.5), (1.0, 0.0, 1.0), (0.5, 0.5, 0.3), (1 / 3, 0.1, 0.7)]
EDGES = torch.tensor([0.0, -0.0, 0.1, 0.3, 1 / 3, 0.5, 0.7, 0.9, 1.0])
# In float32: the thresholds, where equality decides, and their neighbours; 0 and -0 are equals; NaN.
PROBS = torch.cat(
    [EDGES, EDGES.nextafter(torch.tensor(2.0)), EDGES[3:].nextafter(torch.tensor(-1.0)), torch.tensor([NAN])]
)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "every second of every second row": lambda t: torch.ones(2 * t.shape[0] + 1, 2 * t.shape[1] + 1, dtype=t.dtype)[
        1::2, 1::2
    ].copy_(t),
    "transposed": lambda t: t.t().contiguous().t(),
    "one row for all": lambda t: t[:1].expand(t.shape[0], -1),
}


def same(got: Any, args: tuple[Any, ...]) -> None:
    want = reference.check_consistency(*args)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype == torch.int32
        assert a.is_contiguous()
        assert torch.equal(a, b), (a, b, args)


def random_case(b: int, t: int, seed: int, layout: str = "contiguous") -> tuple[Any, ...]:
    """Few tokens and probabilities at the thresholds, so that ties and equalities are common."""
    g = torch.Generator().manual_seed(seed)

    def probs() -> Tensor:
        return PROBS[torch.randint(0, len(PROBS), (b, t), generator=g)]

    tensors = (
        torch.randint(-1, 3, (b, t), generator=g, dtype=torch.int32),
        torch.randint(0, 3, (b, t), generator=g),
        probs() * (0.5 if seed % 3 == 0 else 1),  # often nothing is accepted, and one is forced
        torch.randint(-1 - 2 * (seed % 2), 3, (b, t), generator=g),
        probs(),
        torch.rand(b, t, generator=g) < 0.02,
    )
    tensors = tuple(LAYOUTS[layout](x) for x in tensors)
    return *tensors[:5], tensors[5] if seed % 2 else None, *THRESHOLDS[seed % len(THRESHOLDS)], seed % 4 < 2
