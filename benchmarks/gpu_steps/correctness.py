# SPDX-License-Identifier: Apache-2.0
"""Is it right? Against float64, as registered operators, inside graphs, without syncs, under compute-sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leap_kernels import env
from leap_kernels.bench import calls
from leap_kernels.bench.cases import CASES, Case, Shape
from leap_kernels.bench.judge import examine, judge, worst
from leap_kernels.check import offers
from leap_kernels.errors import BackendError
from leap_kernels.ops.backends import BACKENDS

from .context import Context, Failed, NotHere

__all__ = ["against_float64", "environment", "graphs", "registration", "sanitizer", "small_cases", "syncs"]

# Seeds of which all take the same options (0 mod 4), and how much of the padded tensors is in use: down, and up again.
COUNTS = ((0, 1.0), (4, 0.6), (8, 0.3), (12, 0.0), (16, 0.3), (20, 1.0))


def environment(context: Context) -> str:
    """What is here."""
    facts = context.device.facts()
    print(env.render(env.collect()))
    print(facts)
    (context.state / "gpu").write_text("dry-run" if context.dry else str(facts["gpu"]))
    return str(facts["gpu"])


def against_float64(context: Context) -> str:
    """Every op, backend, dtype and shape; twice, for equal bits."""
    wrong, examined = [], 0
    for case, shape, dtype in _every(context):
        for backend in BACKENDS[1:]:
            if not offers(backend, case.op):
                continue
            try:
                verdict = examine(case, shape, dtype, context.device.torch, backend)
            except BackendError as error:
                print(f"{case.op}: {error}")
                continue
            examined += 1
            line = f"{case.op} {backend} {dtype} {dict(shape)}: {verdict.field} {verdict.share:.2g} of the budget"
            print(line, verdict.problem)
            if verdict.problem:
                wrong.append(f"{line}: {verdict.problem}")
        inputs = case.make(shape, dtype, context.device.torch, 1, 0.6)
        first, second = (case.outputs(case.call(inputs, "triton")) for _ in range(2))
        if not all(_same_bits(first[name], second[name]) for name in first):
            wrong.append(f"{case.op} {dtype} {dict(shape)}: two runs differ")
    if wrong:
        raise Failed("\n".join(wrong))
    return f"{examined} combinations of op, backend, dtype and shape within the budget, each twice with equal bits"


def _every(context: Context) -> Iterator[tuple[Case, Shape, torch.dtype]]:
    for case in CASES.values():
        shapes = [{**case.small, **change} for change in ({}, *case.odd)]
        if context.dry:
            shapes = shapes[:2]
        for shape in shapes:
            for dtype in case.dtypes:
                if dtype in context.dtypes:
                    yield case, shape, dtype


def _same_bits(a: Tensor, b: Tensor) -> bool:
    as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*as_bytes)


def registration(context: Context) -> str:
    """torch.library.opcheck with all its utilities, on this device."""
    checked = 0
    for case in CASES.values():
        for dtype in case.dtypes:
            for shape in (case.small, {**case.small, **case.tiny}):
                operator, args = calls.raw(case, case.make(shape, dtype, context.device.torch, 0, 1.0))
                torch.library.opcheck(operator, args)
                checked += 1
        print(f"opcheck {case.op}")
    if context.dry:
        context.device.simulated["opcheck on CUDA"] = "the CPU key, which is the reference, was checked"
    return f"{checked} opchecks"


def graphs(context: Context) -> str:
    """Capture once, replay with counts on the device going down and up, padding and outputs poisoned before each."""
    wrong, replays = [], 0
    device = context.device
    for case in CASES.values():
        shape = case.small if context.dry else next(iter(case.shapes.values()))
        static = case.make(shape, context.dtype(case), device.torch, *COUNTS[0])
        with torch.inference_mode():
            graph = device.graph(lambda case=case, static=static: case.call(static, "triton"))
            for seed, fill in COUNTS:
                fresh = case.make(shape, context.dtype(case), device.torch, seed, fill)
                for name, value in fresh.items():
                    if isinstance(value, Tensor):
                        static[name].copy_(value)
                for t in case.outputs(graph.output).values():
                    t.fill_(float("nan") if t.is_floating_point() else -77)
                graph.replay()
                device.synchronize()
                verdict = worst(judge(case, static, graph.output, "triton"))
                replays += 1
                if verdict.problem:
                    wrong.append(f"{case.op}, {fill:.0%} in use: {verdict.field} {verdict.problem}")
        print(f"{case.op} {dict(shape)}: {len(COUNTS)} replays")
    if wrong:
        raise Failed("\n".join(wrong))
    return f"{len(CASES)} graphs, {replays} replays within the budget"


def syncs(context: Context) -> str:
    """No op, and no decode step built from them and a stock model, makes the host wait."""
    from .llada_step import Steps

    device = context.device
    with torch.inference_mode():
        for case in CASES.values():
            inputs = case.make(case.small, context.dtype(case), device.torch, 0, 1.0)
            case.call(inputs, "triton")  # compiles, which may sync
            with device.forbid_syncs():
                case.call(inputs, "triton")
        print("the ops")
        with Steps.small(device.torch) as steps:
            for name, step in steps.all().items():
                step()
                with device.forbid_syncs():
                    step()
                print(name)
    return "the ops and decode steps of a small model"


def small_cases(context: Context) -> str:
    """What runs under compute-sanitizer: each op once on a small input with padding."""
    for case in CASES.values():
        for dtype in case.dtypes:
            if dtype in context.dtypes:
                case.call(case.make(case.small, dtype, context.device.torch, 1, 0.6), "triton")
    context.device.synchronize()
    return "each op once a dtype"


def sanitizer(context: Context) -> str:
    """memcheck and racecheck on the small cases."""
    program = context.device.sanitizer()
    if context.dry:
        small_cases(context)
    if program is None:
        raise NotHere("compute-sanitizer is not installed")
    script = Path(__file__).parents[1] / "gpu_check.py"
    child = [sys.executable, str(script), "--step", "small cases", "--state", str(context.state)]
    # One allocation a tensor, so that a write beside one is a write beside an allocation.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = []
    for tool in ("memcheck", "racecheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", *child, "--csv", str(context.csv)]
        try:
            run: Any = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:  # what it examined goes on; gpu_check stops it when this step ends
            done.append(f"{tool} did not finish within 60 s")
            continue
        print(run.stdout[-3000:], run.stderr[-1000:])
        if run.returncode:
            raise Failed(f"compute-sanitizer --tool {tool} ended with {run.returncode}; its report is above")
        done.append(f"{tool} found nothing")
    return ", ".join(done)
