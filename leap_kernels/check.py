# SPDX-License-Identifier: Apache-2.0
"""`leap-kernels check`: does each op give the right result here, on each backend that there is?

Small seeded inputs with tails, ties and poisoned padding; the truth comes from float64 or is worked out row by row
(`bench/cases`). Without a GPU the Triton kernels run in Triton's interpreter, in a process of its own, because Triton
reads TRITON_INTERPRET when a kernel is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .bench.cases import CASES, Case
from .bench.judge import examine
from .errors import BackendError, ConfigError, expected
from .ops.backends import BACKENDS, INTERPRETED, check_name

__all__ = ["Finding", "check_all", "main", "offers"]

SECONDS = 240  # more than the interpreter ever needs; a process that hangs must end all the same


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    op: str
    backend: str
    device: str
    status: str
    """"ok", "mismatch", "error" or "not available"."""
    share: float = 0.0
    """Largest error as a share of what is allowed."""
    why: str = ""

    @property
    def bad(self) -> bool:
        return self.status in ("mismatch", "error")


def main(backend: str | None = None, as_json: bool = False) -> int:
    """Check, print the report; 1 when something is wrong."""
    known = BACKENDS[1:]
    if backend is not None and backend not in known:
        raise ConfigError(expected("--backend", f"one of {', '.join(known)}", repr(backend)))
    findings = check_all(known if backend is None else (backend,))
    bad = any(finding.bad for finding in findings)
    if as_json:
        print(json.dumps({"ok": not bad, "checks": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(_table(findings))
    return int(bad)


def check_all(backends: tuple[str, ...]) -> list[Finding]:
    """Every op on these backends: on the CPU, on the first GPU where there is one."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available() and not INTERPRETED:
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    findings = []
    for device in devices:
        for backend in backends:
            if device.type == "cpu" and backend != "reference" and len(devices) > 1:
                continue  # the GPU's line says more
            found = [_check(case, backend, device) for case in CASES.values() if offers(backend, case.op)]
            if device.type == "cpu" and backend == "triton" and not INTERPRETED:
                found = _interpreted(found)
            findings += found
    order = list(CASES)
    return sorted(findings, key=lambda f: (order.index(f.op), backends.index(f.backend), f.device))


def offers(backend: str, op: str) -> bool:
    """Whether this backend has a kernel for the op at all, built and runnable or not."""
    try:
        check_name(backend, op)
    except BackendError:
        return False
    return True


def _check(case: Case, backend: str, device: torch.device) -> Finding:
    """One op, backend and device, over its dtypes; an exception is a finding."""
    interpreted = backend == "triton" and device.type == "cpu"
    name = f"{device} (interpreter)" if interpreted and INTERPRETED else str(device)
    limit = _interpreter_limit() if interpreted and INTERPRETED else ""
    if limit:
        return Finding(case.op, backend, name, "not available", why=limit)
    verdicts = []
    for dtype in case.dtypes:
        if interpreted and dtype == torch.bfloat16:
            continue  # the interpreter multiplies bf16 wrongly without a word
        try:
            verdict = examine(case, case.small, dtype, device, backend)
        except BackendError as error:
            return Finding(case.op, backend, name, "not available", why=str(error))
        except Exception as error:  # whatever a broken installation raises, the other ops are still of interest
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Finding(case.op, backend, name, "error", why=why)
        verdicts.append((verdict, f"{verdict.field}, {str(dtype).removeprefix('torch.')}"))
    verdict, where = max(verdicts, key=lambda entry: (bool(entry[0].problem), entry[0].share))
    if verdict.problem:
        return Finding(case.op, backend, name, "mismatch", verdict.share, f"{where}: {verdict.problem}")
    return Finding(case.op, backend, name, "ok", verdict.share, where if verdict.budget else "")


def _interpreted(unavailable: list[Finding]) -> list[Finding]:
    """The Triton kernels on CPU tensors, in a process with TRITON_INTERPRET=1; as given without triton."""
    if any("triton package is not installed" in finding.why for finding in unavailable):
        return unavailable
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "leap_kernels", "check", "--backend", "triton", "--json"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
        return [Finding(**entry) for entry in json.loads(done.stdout)["checks"]]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
        why = f"the process with TRITON_INTERPRET=1 failed: {type(error).__name__}: {' '.join(str(error).split())}"
        return [Finding(f.op, f.backend, "cpu (interpreter)", "error", why=why) for f in unavailable]


def _interpreter_limit() -> str:
    """Why this triton cannot interpret our kernels; empty when it can."""
    import numpy
    import triton

    def version(module: Any) -> tuple[int, ...]:
        return tuple(int(part) for part in module.__version__.split(".")[:2])

    if version(triton) < (3, 9) and version(numpy) >= (2, 4):
        return f"triton {triton.__version__} cannot interpret loops with numpy {numpy.__version__}"
    return ""


def _table(findings: list[Finding]) -> str:
    head = ("op", "backend", "device", "", "error / allowed", "")
    texts = [head] + [
        (f.op, f.backend, f.device, f.status, f"{f.share:.2g}" if f.status in ("ok", "mismatch") else "", f.why)
        for f in findings
    ]
    widths = [max(len(line[i]) for line in texts) for i in range(5)]
    lines = ["  ".join((*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[5])).rstrip() for line in texts]
    counted = {
        status: sum(f.status == status for f in findings) for status in dict.fromkeys(f.status for f in findings)
    }
    return "\n".join([*lines, ", ".join(f"{n} {status}" for status, n in counted.items())])
