# SPDX-License-Identifier: Apache-2.0
"""The steps of the check, in order. One more op in the table of cases is two more steps here, by itself."""

from __future__ import annotations

from functools import partial

from leap_kernels.bench.cases import CASES

from . import correctness, llada_step, timings
from .context import Step

__all__ = ["steps"]


def steps() -> list[Step]:
    """Seconds are limits of each, and what is kept free for it while earlier ones run."""
    listed = [
        Step("environment", correctness.environment, 40, 10, proves=True),
        Step("against float64", correctness.against_float64, 120, 45, proves=True),
        Step("registration", correctness.registration, 90, 20, proves=True),
        Step("graphs", correctness.graphs, 60, 15, proves=True),
        Step("no syncs", correctness.syncs, 60, 15, proves=True),
        Step("sanitizer", correctness.sanitizer, 130, 5, proves=True),
        Step("ceilings", timings.ceilings, 40, 10),
    ]
    for case in CASES.values():
        listed.append(Step(f"time {case.op}", partial(timings.op, case=case), 60, 15))
    for case in CASES.values():
        for baseline in case.baselines:
            for name in baseline.compiled:
                run = partial(timings.baseline, case=case, which=baseline, name=name)
                listed.append(Step(f"time {case.op} beside {baseline.name}, {name}", run, 60, 10))
    listed.append(Step("host time", timings.host, 60, 10))
    listed.append(Step("decode step", llada_step.run, 150, 75))
    return listed


def small_cases() -> Step:
    """Not in the list: what the sanitizer step runs under compute-sanitizer."""
    return Step("small cases", correctness.small_cases, 60, 0, proves=True)
