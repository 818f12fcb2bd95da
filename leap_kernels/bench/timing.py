# SPDX-License-Identifier: Apache-2.0
"""One op beside its fair baselines, its host overhead, and the command `leap-kernels bench`."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, expected
from . import calls
from .cases import CASES, Baseline, Case, Inputs
from .device import Times, device_for, summarise
from .session import Ceilings, Session, shape_text

__all__ = ["OWN", "baseline_rows", "check_baseline", "host_rows", "installed", "main", "own_rows", "table"]

OWN = "leap_kernels"  # what the rows of the op itself are called
COLD, HOT, COLD_GRAPH, CLOCK, HOST = "events, cold L2", "graph, hot L2", "graph, cold L2", "clock", "host"


def own_rows(
    session: Session, case: Case, shape: Mapping[str, int], dtype: torch.dtype, *, interpret: bool = False
) -> None:
    """Time the registered op: between events with a cold cache, and inside a graph with a hot and a cold one.

    On a CPU by the clock. `interpret` times the Triton launcher in the interpreter and goes through the motions of
    the GPU's measurements: a dry run.
    """
    device, make = session.device, calls.interpreted if interpret else calls.registered
    inputs = case.make(shape, dtype, device.torch, 0, 1.0)
    cost = case.cost(inputs)
    _record(session, case, OWN, shape, dtype, make(case, inputs), cost, graphs=device.is_gpu or interpret)
    if cost.bytes > 2**20 and (device.is_gpu or interpret):
        # Inputs take turns so that each finds a cache full of others.
        copies = 2 if interpret else min(32, 2 + 3 * device.cache_bytes() // cost.bytes)
        turns = [make(case, case.make(shape, dtype, device.torch, 0, 1.0)) for _ in range(copies)]
        session.add(case.op, OWN, shape, dtype, COLD_GRAPH, device.graph_times(turns), cost)


def baseline_rows(
    session: Session,
    case: Case,
    shape: Mapping[str, int],
    dtype: torch.dtype,
    baselines: Iterable[Baseline],
    *,
    dry: bool = False,
) -> list[str]:
    """Time these baselines where they exist; returns what went wrong with the others, one line each."""
    device, problems = session.device, []
    inputs = case.make(shape, dtype, device.torch, 0, 1.0)
    for baseline in baselines:
        if (baseline.gpu and not device.is_gpu) or not installed(baseline.package):
            continue
        try:
            # One mode for checking and timing: torch.compile would compile again under another.
            with torch.no_grad():
                call = baseline.build(inputs)
                check_baseline(case, baseline, inputs, call())
                graphs = (device.is_gpu or dry) and not baseline.compiled
                _record(session, case, baseline.name, shape, dtype, call, case.cost(inputs), graphs=graphs)
        except Exception as error:  # somebody else's code, and the other figures are still wanted
            problems.append(f"{baseline.name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return problems


def check_baseline(case: Case, baseline: Baseline, inputs: Inputs, result: Any) -> None:
    """Refuse to time what computes something else: 16 roundings of the largest value are allowed."""
    if not baseline.field:
        return
    names = list(case.outputs(case.call(inputs, "reference")))
    truth = case.truth(inputs)[names.index(baseline.field)]
    got = baseline.pick(result)
    eps = torch.finfo(got.dtype).eps if got.is_floating_point() else 0.0
    error = (got.double() - truth.double()).abs().max().item()
    if not error <= 16 * eps * truth.double().abs().max().item():
        raise ValueError(f"its {baseline.field} is off by {error:.3g}, so it does not compute the same")


def _record(
    session: Session, case: Case, what: str, shape: Mapping[str, int], dtype: torch.dtype, call: Callable[[], Any],
    cost: Any, *, graphs: bool,
) -> None:  # fmt: skip
    device = session.device
    with torch.no_grad():
        session.add(case.op, what, shape, dtype, COLD if device.is_gpu else CLOCK, device.times(call), cost)
        if graphs:
            session.add(case.op, what, shape, dtype, HOT, device.graph_times([call]), cost)


def host_rows(session: Session, case: Case, rounds: int = 200, calls_a_round: int = 20) -> dict[str, Times]:
    """What the host spends on one call: the Python body alone, the registered op, the public function.

    At a size with next to no work, in turns. Adds rows for the three and for what each step costs more than the one
    before, which is taken pair by pair.
    """
    device = session.device
    shape = {**case.small, **case.tiny}
    inputs = case.make(shape, case.dtypes[0], device.torch, 0, 1.0)
    ways: dict[str, Callable[[], Any]] = {
        "body": calls.body(case, inputs),
        "registered op": calls.registered(case, inputs),
        "public function": lambda: case.call(inputs),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for round_ in range(rounds + 3):
            for name, call in ways.items():
                device.synchronize()
                began = time.perf_counter()
                for _ in range(calls_a_round):
                    call()
                if round_ >= 3:  # the first ones warm up
                    spent[name].append((time.perf_counter() - began) / calls_a_round * 1e6)
    bodies, ops, publics = spent.values()
    spent["registering"] = [b - a for a, b in zip(bodies, ops, strict=True)]
    spent["validating"] = [b - a for a, b in zip(ops, publics, strict=True)]
    found = {name: summarise(samples) for name, samples in spent.items()}
    for name, times in found.items():
        session.add(case.op, name, shape, case.dtypes[0], HOST, times)
    return found


def installed(package: str) -> bool:
    """Whether a package that a baseline needs is here; none is needed where the name is empty."""
    return not package or importlib.util.find_spec(package) is not None


# --- the command ----------------------------------------------------------------------------------------------------


def main(
    op: str, *, shape: Sequence[str] = (), dtype: str = "auto", device: str = "cpu", csv_file: str | None = None
) -> int:
    """Time `op` at the named or changed shape and print a table; 1 when a baseline failed."""
    if op != "all" and op not in CASES:
        raise ConfigError(expected("OP", f"one of {', '.join(CASES)}, or all", repr(op)))
    measured = device_for(torch.device(device))
    session = Session(measured, "leap-kernels bench", Path(csv_file) if csv_file else None)
    code = 0
    for case in CASES.values() if op == "all" else [CASES[op]]:
        chosen = _dtype(dtype, case, measured.is_gpu)
        shapes = _shapes(case, shape, everything=measured.is_gpu)
        timed = chosen if chosen.is_floating_point else torch.float32
        session.ceilings = Ceilings.measure(measured, timed)
        for one in shapes:
            first = len(session.rows)
            own_rows(session, case, one, chosen)
            eager = [b for b in case.baselines if not b.compiled or (measured.is_gpu and _wanted(case, b, one))]
            problems = baseline_rows(session, case, one, chosen, eager)
            print(table(case.op, session.rows[first:]))
            for problem in problems:
                print(f"  failed: {problem}")
                code = 1
            print()
        first = len(session.rows)
        host_rows(session, case)
        print(f"{case.op}, host time of one call at {session.rows[first]['shape']}")
        for row in session.rows[first:]:
            print(f"  {row['what']:<18} {row['median_us']:>9,.6g} us   {row['p20_us']:,.6g} .. {row['p80_us']:,.6g}")
        print()
    return code


def _shapes(case: Case, changes: Sequence[str], *, everything: bool) -> list[dict[str, int]]:
    """The shapes asked for: a name, `dim=size` changes to it, or (on a GPU) all of them."""
    default = next(iter(case.shapes))
    names = [change for change in changes if "=" not in change]
    if not changes:
        return [dict(shape) for shape in (case.shapes.values() if everything else [case.shapes[default]])]
    unknown = [name for name in names if name not in case.shapes]
    if unknown or len(names) > 1:
        what = f"one of {', '.join(map(repr, case.shapes))}, or changes such as {shape_text(case.shapes[default])}"
        raise ConfigError(expected("--shape", what, " ".join(map(repr, changes))))
    shape = dict(case.shapes[names[0] if names else default])
    for change in changes:
        name, equals, size = change.partition("=")
        if equals and (name not in shape or not size.isascii() or not size.isdigit() or int(size) < 1):
            what = f"{', '.join(f'{dim}=N' for dim in shape)} with N >= 1 for {case.op}"
            raise ConfigError(expected("--shape", what, repr(change)))
        if equals:
            shape[name] = int(size)
    return [shape]


def _wanted(case: Case, baseline: Baseline, shape: Mapping[str, int]) -> bool:
    """A baseline that a compiler prepares is timed at the shapes it names, and at any of the user's own."""
    return shape not in case.shapes.values() or any(shape == case.shapes[name] for name in baseline.compiled)


def _dtype(name: str, case: Case, gpu: bool) -> torch.dtype:
    if len(case.dtypes) == 1:
        return case.dtypes[0]
    if name == "auto":
        return torch.bfloat16 if gpu else torch.float32
    found = getattr(torch, name, None)
    if found not in case.dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in case.dtypes)
        raise ConfigError(expected("--dtype", f"auto, {names}", repr(name)))
    return found  # type: ignore[no-any-return]


def table(op: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of one op and shape as text; `times` is the median over that of the op, timed in the same way."""
    first = rows[0]
    own = {row["how"]: row["median_us"] for row in rows if row["what"] == OWN}
    work = f"{first['bytes'] / 1e6:.4g} MB, {first['flops'] / 1e9:.4g} GFLOP counted"
    ceilings = f"copy {first['copy_gb_s']} GB/s, matmul {first['matmul_tflop_s']} TFLOP/s" * bool(first["copy_gb_s"])
    head = ("", "median us", "p20", "p80", "GB/s", "TFLOP/s", "% of roofline", "times")
    body = [
        (
            f"{row['what']} ({row['how']})",
            *(row[name] for name in ("median_us", "p20_us", "p80_us", "gb_s", "tflop_s", "percent_of_roofline")),
            f"{row['median_us'] / own[row['how']]:.2f}" if row["how"] in own else "",
        )
        for row in rows
    ]  # fmt: skip
    texts = [[cell if isinstance(cell, str) else f"{cell:,.6g}" for cell in line] for line in (head, *body)]
    widths = [max(len(line[i]) for line in texts) for i in range(len(head))]
    lines = [f"{op}, {first['shape']}, {first['dtype']}, {first['gpu']}; {work}; {ceilings or 'no ceilings'}"]
    for line in texts:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
