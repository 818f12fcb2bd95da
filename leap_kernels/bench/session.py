# SPDX-License-Identifier: Apache-2.0
"""One measuring run: the ceilings of the machine, the versions, and rows of one CSV layout for every program."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError, expected
from ..version import __version__
from .cases import Cost
from .device import Device, Times

__all__ = ["COLUMNS", "Ceilings", "Session", "commit", "shape_text"]

COLUMNS = (
    "program", "op", "what", "shape", "dtype", "how", "median_us", "p20_us", "p80_us", "bytes", "flops", "gb_s",
    "tflop_s", "copy_gb_s", "matmul_tflop_s", "percent_of_roofline", "gpu", "clocks", "simulated", "leap_kernels",
    "commit", "torch", "triton", "transformers", "numpy", "cuda", "python", "date",
)  # fmt: skip


class Ceilings(NamedTuple):
    """What this device reaches when nothing but memory, or nothing but arithmetic, is asked of it."""

    copy_gb_s: float
    matmul_tflop_s: float

    def microseconds(self, cost: Cost) -> float:
        """The roofline: the least time for this work."""
        return max(cost.bytes / self.copy_gb_s / 1e3, cost.flops / self.matmul_tflop_s / 1e6)

    @classmethod
    def measure(cls, device: Device, dtype: torch.dtype) -> Ceilings:
        """A copy of 1 GiB and a product of two 8192 x 8192 matrices; 64 MiB and 1024 x 1024 on a CPU."""
        size, n = (2**30, 8192) if device.is_gpu else (2**26, 1024)
        if device.seconds == 0:  # a dry run
            size, n = 2**20, 64
        source, target = (torch.zeros(size, dtype=torch.int8, device=device.torch) for _ in range(2))
        copy = device.times(lambda: target.copy_(source)).median
        a, b = (torch.randn(n, n, device=device.torch).to(dtype) for _ in range(2))
        product = device.times(lambda: a @ b).median
        return cls(2 * size / copy / 1e3, 2 * n**3 / product / 1e6)


class Session:
    """Collects rows, and writes each one to the CSV at once so that an interrupted run keeps what it has."""

    def __init__(
        self,
        device: Device,
        program: str,
        file: Path | None = None,
        ceilings: Ceilings | None = None,
        commit_text: str | None = None,
    ) -> None:
        self.device, self.file, self.rows = device, file, list[dict[str, Any]]()
        self.ceilings = ceilings
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        versions = {name: _version(name) for name in ("torch", "triton", "transformers", "numpy")}
        self._fixed = {
            "program": program, **device.facts(), **versions, "leap_kernels": __version__,
            "commit": commit_text or commit(), "python": platform.python_version(), "date": now,
        }  # fmt: skip

    def add(
        self, op: str, what: str, shape: Mapping[str, int], dtype: torch.dtype | str, how: str, times: Times,
        cost: Cost | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """One row; `how` says what was timed: "events, cold cache", "in a graph", "clock", "host"."""
        row: dict[str, Any] = dict.fromkeys(COLUMNS, "") | self._fixed
        row |= {
            "op": op, "what": what, "shape": shape_text(shape), "dtype": str(dtype).removeprefix("torch."), "how": how,
            "median_us": _round(times.median), "p20_us": _round(times.p20), "p80_us": _round(times.p80),
            "simulated": int(bool(self.device.simulated)),
        }  # fmt: skip
        if cost is not None:
            row |= {"bytes": cost.bytes, "flops": cost.flops}
            row |= {"gb_s": _round(cost.bytes / times.median / 1e3), "tflop_s": _round(cost.flops / times.median / 1e6)}
        if cost is not None and self.ceilings is not None:
            row |= {name: _round(value) for name, value in self.ceilings._asdict().items()}
            row["percent_of_roofline"] = _round(100 * self.ceilings.microseconds(cost) / times.median)
        self.rows.append(row)
        if self.file is not None:
            _append(self.file, row)
        return row


def _append(file: Path, row: Mapping[str, Any]) -> None:
    new = not file.exists() or not file.stat().st_size
    if not new and file.open(newline="").readline().strip() != ",".join(COLUMNS):
        raise ConfigError(expected("the CSV file", "new, or one that this version wrote", str(file)))
    with file.open("a", newline="") as target:
        writer = csv.DictWriter(target, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def shape_text(shape: Mapping[str, int]) -> str:
    """`rows=32 vocab=126464 k=5`"""
    return " ".join(f"{name}={size}" for name, size in shape.items())


def commit() -> str:
    """The commit of the source tree this package runs from, with a + when it differs; "unknown" outside of one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return "unknown"
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _round(value: float) -> float:
    """Four digits say all that a timing knows."""
    return float(f"{value:.4g}")
