# SPDX-License-Identifier: Apache-2.0
"""Everything that only a GPU can prove, in one call of at most ten minutes: `benchmarks/gpu_check.sh`.

First whether the ops are right, then how fast they are beside what torch offers. Each step is a process of its own with
its own time limit, so that one which fails, hangs or leaves the GPU in an error does not stop the rest. Figures go to a
CSV in benchmarks/results/, the floors are judged from it. Needs torch, triton, transformers and numpy, no installation.

    benchmarks/gpu_check.sh                        everything
    benchmarks/gpu_check.sh --only "decode step"   one step (--list names them)
    benchmarks/gpu_check.sh --dry-run              on a CPU: kernels in Triton's interpreter, small shapes, no GPU

Exit code: 0 when everything ran, 1 when something is wrong, 3 when something could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_steps.context import Step
    from gpu_steps.floors import Floor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the source tree, whatever else is installed

RESULTS = Path(__file__).parent / "results"
SECONDS = 570  # of the ten minutes
DRY_SLACK = 4  # the interpreter on a busy CPU: only a step that hangs is to be stopped there


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    step: str
    status: str
    """"ok", "failed", "not here", "stopped", "no time"."""
    note: str
    seconds: float
    proves: bool

    @property
    def bad(self) -> bool:
        return self.status in ("failed", "stopped", "no time")


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.step:
        return _child(args)
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from gpu_steps.steps import steps

    listed = [step for step in steps() if not args.only or step.name in args.only or step.name == "environment"]
    if args.list:
        print("\n".join(step.name for step in steps()))
        return 0
    unknown = set(args.only or ()) - {step.name for step in steps()}
    if unknown:
        print(f"no such step: {', '.join(sorted(unknown))}. --list names them.", file=sys.stderr)
        return 2
    return _parent(args, listed)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dry-run", action="store_true", help="no GPU: everything on the CPU at small shapes")
    add("--only", nargs="+", metavar="STEP", help="these steps and the environment")
    add("--list", action="store_true", help="name the steps")
    add("--out", type=Path, help="folder for CSV and JSON (default benchmarks/results; a temporary one in a dry run)")
    add("--commit", help="what to write as commit where there is no git")
    add("--seconds", type=float, default=SECONDS, help="time for all steps together (default %(default)s)")
    for name in ("--step", "--state", "--csv"):  # of the processes this one starts
        add(name, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# --- the process that starts the others -----------------------------------------------------------------------------


def _parent(args: argparse.Namespace, steps: list[Step]) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        out = args.out or (Path(tempfile.mkdtemp(prefix="gpu_check_dry_run_")) if args.dry_run else RESULTS)
        out.mkdir(parents=True, exist_ok=True)
        unnamed = state / "rows.csv"
        name, outcomes = "", []
        for i, step in enumerate(steps):
            reserved = sum(later.expected for later in steps[i + 1 :])
            left = args.seconds - (time.monotonic() - began)
            limit = min(step.limit, max(left - reserved, min(left, 5)))
            outcomes.append(_run(args, step, state, unnamed, step.limit * DRY_SLACK if args.dry_run else limit))
            name = name or _name(state, args.only)
            if unnamed.exists():  # after each step, so that a check which is cut short leaves what it has
                (out / f"{name}.csv").write_text(unnamed.read_text())
            if step.name == "environment" and outcomes[-1].bad:
                break  # without a GPU there is nothing to find out
        rows = list(csv.DictReader(unnamed.open(newline=""))) if unnamed.exists() else []
        floors = _floors(rows, args.dry_run)
        simulated = _simulated(state)
    print(_report(outcomes, floors, simulated, time.monotonic() - began, args.dry_run))
    report = {
        "outcomes": [vars(outcome) for outcome in outcomes],
        "floors": [floor._asdict() for floor in floors],
        "simulated": simulated,
    }
    (out / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {out / name}.csv and .json")
    if any(outcome.bad and outcome.proves for outcome in outcomes):
        return 1
    return 3 if any(outcome.bad for outcome in outcomes) else 0


def _name(state: Path, only: list[str] | None) -> str:
    """What the results are called: by the GPU, and by the steps where they are not all, to leave a full run's alone."""
    gpu = (state / "gpu").read_text() if (state / "gpu").exists() else "nothing"
    return "-".join(["gpu_check", _slug(gpu), *map(_slug, only or ())])


def _run(args: argparse.Namespace, step: Step, state: Path, rows: Path, limit: float) -> Outcome:
    """One step in a process of its own, stopped after `limit` seconds with all that it has started."""
    print(f"\n=== {step.name} (at most {limit:.0f} s)", flush=True)
    if limit < 5:
        return Outcome(step.name, "no time", "the steps before it took all there was", 0.0, step.proves)
    command = [sys.executable, "-u", __file__, "--step", step.name, "--state", str(state), "--csv", str(rows)]
    command += ["--dry-run"] * args.dry_run + (["--commit", args.commit] if args.commit else [])
    began = time.monotonic()
    status = run_limited(command, limit)
    spent = time.monotonic() - began
    answer = state / f"{_slug(step.name)}.answer"
    if status is None:
        return Outcome(step.name, "stopped", f"after {limit:.0f} s", spent, step.proves)
    if not answer.exists():
        return Outcome(step.name, "failed", f"its process ended with {status}", spent, step.proves)
    return Outcome(step.name, *json.loads(answer.read_text())[:2], spent, step.proves)


def run_limited(command: list[str], limit: float) -> int | None:
    """The exit code of a command, or None when it had to be stopped; what it started and left running is stopped too,
    so that it does not share the GPU with the steps that follow."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _floors(rows: list[dict[str, str]], dry: bool) -> list[Floor]:
    from gpu_steps import floors

    from leap_kernels.bench.cases import CASES
    from leap_kernels.bench.timing import CLOCK

    if dry:
        found = floors.judge(rows, lambda op, name: CASES[op].small, CLOCK)
        return [floor._replace(verdict="(dry run)") for floor in found]
    return floors.judge(rows)


def _simulated(state: Path) -> dict[str, str]:
    found = {}
    for file in sorted(state.glob("*.answer")):
        found |= json.loads(file.read_text())[2]
    return found


def _report(outcomes: list[Outcome], floors: list[Floor], simulated: dict[str, str], seconds: float, dry: bool) -> str:
    width = max(len(outcome.step) for outcome in outcomes)
    lines = ["", "=== steps"]
    for o in outcomes:
        lines.append(
            f"  {o.step:<{width}}  {o.status:<8}  {o.seconds:5.1f} s  {o.note.splitlines()[0] if o.note else ''}"
        )
        lines += [f"  {'':<{width}}            {line}" for line in o.note.splitlines()[1:]]
    width = max(len(floor.text) for floor in floors)
    lines += ["", "=== floors", *(f"  {f.text:<{width}}  {f.verdict:<12}  {f.figures}".rstrip() for f in floors)]
    if dry:
        lines += ["", "=== simulated, and so not shown", *(f"  {what}: {how}" for what, how in simulated.items())]
        lines += ["  bf16 kernels: the interpreter multiplies bf16 wrongly", "  every timing: a CPU's, at small shapes"]
    return "\n".join([*lines, f"\n{seconds:.0f} s in all"])


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# --- one step -------------------------------------------------------------------------------------------------------


def _child(args: argparse.Namespace) -> int:
    from gpu_steps.context import Context, Failed, NotHere
    from gpu_steps.steps import small_cases, steps

    if args.dry_run:
        warnings.filterwarnings("ignore", module="triton.runtime.interpreter")  # numpy computes both sides of a where
    step = next(step for step in [*steps(), small_cases()] if step.name == args.step)
    context = Context(args.dry_run, Path(args.csv), Path(args.state), args.commit)
    try:
        status, note = "ok", step.run(context)
    except NotHere as reason:
        status, note = "not here", str(reason)
    except Failed as failure:
        status, note = "failed", str(failure)
    except Exception as error:
        traceback.print_exc()
        status, note = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    print(f"{step.name}: {status}: {note}")
    simulated = context.device.simulated if "device" in vars(context) else {}
    answer = Path(args.state) / f"{_slug(step.name)}.answer"
    answer.write_text(json.dumps([status, note, simulated]))
    return int(status == "failed")


if __name__ == "__main__":
    sys.exit(main())
