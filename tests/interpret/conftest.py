# SPDX-License-Identifier: Apache-2.0
"""Kernels on CPU tensors, in Triton's interpreter. A process of its own: Triton reads the variable at import."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

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
from torch import Tensor

SENTINEL = -77


def pytest_collection_modifyitems(items):
    """Triton 3.6 cannot interpret loops with runtime bounds on numpy 2.4."""

    def version(module) -> tuple[int, ...]:
        return tuple(int(part) for part in module.__version__.split(".")[:2])

    if version(triton) < (3, 9) and version(numpy) >= (2, 4):
        reason = f"triton {triton.__version__} cannot interpret loops with numpy {numpy.__version__}"
        for item in items:
            if item.get_closest_marker("interpret"):
                item.add_marker(pytest.mark.skip(reason=reason))


BAND = 32  # elements before and behind


class _Guarded:
    """Memory for launchers: poisoned, so that what no kernel writes shows, between bands that nobody may write."""

    def __init__(self, new_empty: Callable[..., Tensor]) -> None:
        self._new_empty, self._waiting = new_empty, deque[tuple[Tensor, int]]()

    def make(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = self._new_empty(tensor, *args, **kwargs)
        size = wanted.numel()
        whole = self._new_empty(wanted, (size + 2 * BAND,))
        whole.fill_(float("nan") if whole.is_floating_point() else SENTINEL)
        self._waiting.append((whole, size))
        if len(self._waiting) > 64:  # its launch is long over
            self._check(*self._waiting.popleft())
        return whole[BAND : BAND + size].view(wanted.shape)

    def check(self) -> None:
        while self._waiting:
            self._check(*self._waiting.popleft())

    @staticmethod
    def _check(whole: Tensor, size: int) -> None:
        bands = torch.cat([whole[:BAND], whole[BAND + size :]])
        clean = bands.isnan() if bands.is_floating_point() else bands == torch.full_like(bands, SENTINEL)
        assert clean.all(), f"a kernel wrote beside an output of {size} {whole.dtype}: {bands.tolist()}"


@pytest.fixture(autouse=True)
def guard(monkeypatch):
    """Whatever a launcher allocates comes poisoned and guarded; the bands are looked at when the test is over."""
    guarded = _Guarded(torch.Tensor.new_empty)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *args, **kwargs: guarded.make(self, *args, **kwargs))
    yield
    guarded.check()
