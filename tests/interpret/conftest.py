# SPDX-License-Identifier: Apache-2.0
"""Kernels on CPU tensors, in Triton's interpreter. A process of its own: Triton reads the variable at import."""

from __future__ import annotations

import os
import sys

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    imported = [name for name in ("triton", "leap_kernels") if name in sys.modules]
    if imported:
        raise pytest.UsageError(
            f"{' and '.join(imported)} imported before tests/interpret could set TRITON_INTERPRET=1. "
            "Run this tier alone: TRITON_INTERPRET=1 python -m pytest tests/interpret"
        )
    os.environ["TRITON_INTERPRET"] = "1"

import numpy
import torch
import triton

SENTINEL = -77
BAND = 32


def pytest_collection_modifyitems(items):
    """Triton 3.6 cannot interpret loops with runtime bounds on numpy 2.4."""

    def version(module) -> tuple[int, ...]:
        return tuple(int(part) for part in module.__version__.split(".")[:2])

    if version(triton) < (3, 9) and version(numpy) >= (2, 4):
        reason = f"triton {triton.__version__} cannot interpret loops with numpy {numpy.__version__}"
        for item in items:
            if item.get_closest_marker("interpret"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Memory that a launcher allocates comes filled with NaN or SENTINEL, so that what no kernel writes shows, and
    between bands of the same, which must still be there when the test ends: nothing else was written.
    """
    new_empty = torch.Tensor.new_empty
    bands = []

    def filled(self, *args, **kwargs):
        shape = new_empty(self, *args, **{**kwargs, "device": "meta"}).shape
        whole = new_empty(self, (shape.numel() + 2 * BAND,), **kwargs)
        whole.fill_(float("nan") if whole.is_floating_point() else SENTINEL)
        inside = whole[BAND : BAND + shape.numel()]
        bands.extend((whole[:BAND], whole[BAND + shape.numel() :]))
        return inside.view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    yield
    for band in bands:
        intact = band.isnan() if band.is_floating_point() else band == torch.full_like(band, SENTINEL)
        assert intact.all(), "a kernel wrote beyond its output"
