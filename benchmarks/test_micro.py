# SPDX-License-Identifier: Apache-2.0
"""Microbenchmarks on a CPU: each op's reference, what a call costs the host, building rows and superpositions.

    pytest benchmarks/ --benchmark-only

Every group has an entry named "torch", timed in the same run; `ratios.py` says what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from leap_kernels import ModelSpec, Rows, ops
from leap_kernels.bench import calls
from leap_kernels.bench.cases import CASES, Case, Inputs

CPU = torch.device("cpu")
MASK = 126336


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


def twenty_adds() -> Callable[[], Any]:
    """What twenty of torch's smallest calls cost: the yardstick where torch has no function to compare with."""
    x = torch.zeros(8)

    def call() -> None:
        for _ in range(20):
            torch.add(x, 1.0)

    return call


def inputs_of(case: Case, tiny: bool) -> Inputs:
    shape = {**case.small, **case.tiny} if tiny else next(iter(case.shapes.values()))
    return case.make(shape, torch.float32, CPU, 0, 1.0)


@pytest.mark.parametrize("what", ["torch", "reference"])
@pytest.mark.parametrize("op", CASES)
def test_reference(op: str, what: str, timed: Any) -> None:
    """The reference at LLaDA-8B's shape, beside the first of the op's baselines, or the yardstick for integers."""
    case = CASES[op]
    inputs = inputs_of(case, tiny=False)
    if what == "reference":
        timed(f"{op}: reference", what, calls.registered(case, inputs))
    else:
        floats = len(case.dtypes) > 1
        timed(f"{op}: reference", what, case.baselines[0].build(inputs) if floats else twenty_adds())


@pytest.mark.parametrize("what", ["torch", "body", "registered op", "public function"])
@pytest.mark.parametrize("op", CASES)
def test_host_overhead(op: str, what: str, timed: Any) -> None:
    """One call with next to no work: the Python body, torch's dispatcher on top, validation on top of that."""
    case = CASES[op]
    inputs = inputs_of(case, tiny=True)
    ways: dict[str, Callable[[], Any]] = {
        "torch": twenty_adds(),
        "body": calls.body(case, inputs),
        "registered op": calls.registered(case, inputs),
        "public function": lambda: case.call(inputs),
    }
    timed(f"{op}: host", what, ways[what])


@pytest.mark.parametrize("what", ["torch", "Rows.plain", "ops.superpose", "Rows.superpose"])
def test_building_rows(what: str, timed: Any) -> None:
    """1024 columns, the last 32 masked, with two candidates each."""
    ids = torch.arange(1024)[None].clone()
    ids[:, -32:] = MASK
    masked, spec = ids == MASK, ModelSpec(mask_token_id=MASK)
    logits = torch.randn(32, 512, generator=torch.Generator().manual_seed(0))
    logits[:, 5:7] = 20.0
    top = ops.top_eta(logits, 0.2)
    assert top.counts.tolist() == [2] * 32
    pos = torch.arange(1024, dtype=torch.int32)[None]
    targets = pos[:, -32:].contiguous()
    ways: dict[str, Callable[[], Any]] = {
        "torch": twenty_adds(),
        "Rows.plain": lambda: Rows.plain(ids, spec),
        "ops.superpose": lambda: ops.superpose(ids, pos, targets, top.ids[None], top.counts[None], mask_id=MASK),
        "Rows.superpose": lambda: Rows.superpose(ids, masked, top, spec),
    }
    timed("rows", what, ways[what])
