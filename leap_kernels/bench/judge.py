# SPDX-License-Identifier: Apache-2.0
"""Is a result right?

Integers: equal. Floats: at most 2 x (error of honest results in the same dtype + eps x max |truth|) away from the
truth, and NaN and infinities exactly where it has them. Honest are torch's own functions in the op's precision and,
for the other backends, the op's reference; the larger of the two errors counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cases import Case, Inputs, Shape

__all__ = ["Verdict", "examine", "judge", "worst"]

# (seed, fill): everything in use, and twice poisoned padding; seeds 0 to 2 take every option once (bench/cases).
VARIANTS = ((0, 1.0), (1, 0.6), (2, 0.6))


class Verdict(NamedTuple):
    """What is to be said of one output."""

    field: str
    error: float
    """Largest error, or how many integers differ."""
    budget: float
    problem: str
    """Empty when it is right."""

    @property
    def share(self) -> float:
        """Error as a share of the budget."""
        return self.error / self.budget if self.budget else float(self.error > 0)


def judge(case: Case, inputs: Inputs, got: Any, backend: str) -> list[Verdict]:
    """One verdict for each output that the op has given for `inputs` on `backend`."""
    honest = [case.plain(inputs)]
    if backend != "reference":
        honest.append(tuple(case.outputs(case.call(inputs, "reference")).values()))
    named, truth = case.outputs(got).items(), case.truth(inputs)
    return [_one(*entry) for entry in zip(*zip(*named, strict=True), zip(*honest, strict=True), truth, strict=True)]


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The first wrong one, or else the one nearest to its budget."""
    return max(verdicts, key=lambda verdict: (bool(verdict.problem), verdict.share))


def examine(case: Case, shape: Shape, dtype: torch.dtype, device: torch.device, backend: str) -> Verdict:
    """Run an op on `backend` with several inputs and judge it; what the op raises is not caught."""
    verdicts = []
    for seed, fill in VARIANTS:
        inputs = case.make(shape, dtype, device, seed, fill)
        verdicts += judge(case, inputs, case.call(inputs, backend), backend)
    return worst(verdicts)


def _one(name: str, got: Tensor, honest: Sequence[Tensor], truth: Tensor) -> Verdict:
    if got.shape != truth.shape or got.dtype != honest[0].dtype:
        told = f"{tuple(got.shape)} {got.dtype} instead of {tuple(truth.shape)} {honest[0].dtype}"
        return Verdict(name, float("inf"), 0.0, told)
    if not truth.is_floating_point():
        wrong = got.long() != truth.long()
        return Verdict(name, float(wrong.sum()), 0.0, f"{int(wrong.sum())} of {got.numel()} differ" * bool(wrong.any()))
    finite = truth.isfinite()
    marks = [torch.where(finite, 0.0, x.double()).nan_to_num(nan=0.5) for x in (got, truth)]
    if not torch.equal(*marks) or not bool(got[finite].isfinite().all()):
        return Verdict(name, float("inf"), 0.0, "NaN or infinity where none belongs, or none where one belongs")
    if not bool(finite.any()):
        return Verdict(name, 0.0, 0.0, "")
    eps = torch.finfo(got.dtype).eps
    truth = truth[finite].double()
    error, *allowed = ((x[finite].double() - truth).abs().max().item() for x in (got, *honest))
    budget = 2 * (max(allowed) + eps * truth.abs().max().item())
    return Verdict(name, error, budget, f"off by {error:.3g}, allowed {budget:.3g}" * (error > budget))
