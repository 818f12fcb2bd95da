# SPDX-License-Identifier: Apache-2.0
"""`Case`: all that checking and timing need to know about one op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import ops

__all__ = ["Baseline", "Case", "Cost", "Inputs", "Shape", "compiled"]

Shape = Mapping[str, int]
Inputs = dict[str, Any]  # the keyword arguments of the public function

HALF_AND_SINGLE = (torch.bfloat16, torch.float16, torch.float32)


class Cost(NamedTuple):
    """What a call has to do at least; the same count stands for every contender."""

    bytes: int
    """Memory traffic with every input read once and every output written once."""
    flops: int
    """Floating-point operations, hidden pairs of attention included."""


def compiled(function: Callable[..., Any], where: Tensor) -> Callable[..., Any]:
    """The function under torch.compile; on a CPU, where these baselines are not timed but in dry runs, as it is."""
    return torch.compile(function, dynamic=False) if where.is_cuda else function


@dataclass(frozen=True)
class Baseline:
    """Something else that does the op's work, or a stated part of it."""

    name: str
    build: Callable[[Inputs], Callable[[], Any]]
    """Prepares for these inputs (masks, plans, compilation) and returns the call to time."""
    field: str = ""
    """The op's output that the call computes as well; empty where it computes something else (said in the name)."""
    pick: Callable[[Any], Tensor] = lambda result: result
    """That output, out of what the call returns."""
    gpu: bool = False
    """It exists on CUDA only."""
    package: str = ""
    """A package that it needs and that this one does not depend on."""
    compiled: tuple[str, ...] = ()
    """A compiler prepares it, which takes long: the names of the only shapes it is timed at."""


@dataclass(frozen=True)
class Case:
    """One op: `make` inputs, the `truth` about them, what it costs, and what to compare with."""

    op: str
    small: Shape
    """Primes and tails, in well under a second of Triton's interpreter."""
    tiny: Shape
    """Next to no work, for the cost of the call itself; changes to `small`."""
    odd: tuple[Shape, ...]
    """More of that, for a GPU: what `small` leaves out, given as changes to it."""
    shapes: Mapping[str, Shape]
    """The shapes to time, by name; the first is the default."""
    make: Callable[[Shape, torch.dtype, torch.device, int, float], Inputs]
    """make(shape, dtype, device, seed, fill): below fill 1 that share of the tensors is in use and the rest poisoned,
    so that shapes stay and the counts on the device change."""
    truth: Callable[[Inputs], tuple[Tensor, ...]]
    """Every output, from float64 or by hand: nothing of the op's own code decides it."""
    plain: Callable[[Inputs], tuple[Tensor, ...]]
    """The same straightforwardly in torch, in the op's own precision: how far off honest rounding is."""
    cost: Callable[[Inputs], Cost]
    baselines: tuple[Baseline, ...]
    dtypes: tuple[torch.dtype, ...] = field(default=HALF_AND_SINGLE)
    """Dtypes of its floating-point inputs; one entry where it takes no choice of them."""

    def call(self, inputs: Inputs, backend: str = "auto") -> Any:
        """The public function on these inputs."""
        return getattr(ops, self.op)(**inputs, backend=backend)

    def outputs(self, result: Any) -> dict[str, Tensor]:
        """What the public function has returned, by name; an op with one output gives it its own."""
        return {self.op: result} if isinstance(result, Tensor) else result._asdict()
