# SPDX-License-Identifier: Apache-2.0
"""What a step is, and what it is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from leap_kernels.bench.cases import Case, Shape
from leap_kernels.bench.device import Device, device_for
from leap_kernels.bench.session import Ceilings, Session

__all__ = ["Context", "Failed", "NotHere", "Step"]


class Failed(Exception):
    """The step ran and found something wrong."""


class NotHere(Exception):
    """What the step needs is not installed; no reason to worry."""


@dataclass
class Context:
    """One process of the check."""

    dry: bool
    csv: Path
    state: Path
    """A folder for what steps hand to later ones."""
    commit: str | None

    @cached_property
    def device(self) -> Device:
        if self.dry:
            return device_for(torch.device("cpu"), seconds=0.0)
        if not torch.cuda.is_available():
            raise Failed("torch.cuda.is_available() is False. Without a GPU, use --dry-run.")
        return device_for(torch.device("cuda", 0))

    @property
    def dtypes(self) -> set[torch.dtype]:
        """What kernels are run in; the interpreter multiplies bf16 wrongly without a word."""
        return {torch.float16, torch.float32, torch.int64} | (set() if self.dry else {torch.bfloat16})

    @property
    def half(self) -> torch.dtype:
        """What timings are made in."""
        return torch.float16 if self.dry else torch.bfloat16

    def shapes(self, case: Case) -> dict[str, Shape]:
        """The shapes to time; in a dry run the small one in place of every size."""
        return {name: case.small if self.dry else shape for name, shape in case.shapes.items()}

    def dtype(self, case: Case) -> torch.dtype:
        return self.half if len(case.dtypes) > 1 else case.dtypes[0]

    @cached_property
    def session(self) -> Session:
        return Session(self.device, "gpu_check", self.csv, self.ceilings, self.commit)

    @property
    def ceilings(self) -> Ceilings | None:
        file = self.state / "ceilings.json"
        return Ceilings(*json.loads(file.read_text())) if file.exists() else None


@dataclass(frozen=True)
class Step:
    """One guarded part of the check."""

    name: str
    run: Callable[[Context], str]
    """Returns a line to remember; raises Failed, NotHere, or anything."""
    limit: int
    """Seconds after which it is stopped, whatever it is doing."""
    expected: int
    """Seconds kept free for it while earlier steps run."""
    proves: bool = False
    """Whether its failure means that something is wrong, and not only unmeasured."""
