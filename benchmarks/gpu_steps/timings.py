# SPDX-License-Identifier: Apache-2.0
"""How fast? Ceilings, ops beside their baselines, and what a call costs the host."""

from __future__ import annotations

import json

from leap_kernels.bench import timing
from leap_kernels.bench.cases import CASES, Baseline, Case
from leap_kernels.bench.session import Ceilings

from .context import Context, Failed, NotHere

__all__ = ["baseline", "ceilings", "host", "op"]


def ceilings(context: Context) -> str:
    """What copying and multiplying reach on this GPU, in this run."""
    found = Ceilings.measure(context.device, context.half)
    (context.state / "ceilings.json").write_text(json.dumps(found))
    return f"copy {found.copy_gb_s:.4g} GB/s, matmul {found.matmul_tflop_s:.4g} TFLOP/s"


def op(context: Context, case: Case) -> str:
    """The op at every shape, and what torch offers at the same."""
    session, problems = context.session, list[str]()
    eager = [b for b in case.baselines if not b.compiled]
    for name, shape in context.shapes(case).items():
        first = len(session.rows)
        timing.own_rows(session, case, shape, context.dtype(case), interpret=context.dry)
        problems += timing.baseline_rows(session, case, shape, context.dtype(case), eager, dry=context.dry)
        print(f"[{name}] " + timing.table(case.op, session.rows[first:]))
        if context.dry:
            break
    if problems:
        raise Failed("\n".join(problems))
    return f"{len(session.rows)} rows"


def baseline(context: Context, case: Case, which: Baseline, name: str) -> str:
    """One that takes long to prepare, at one shape."""
    if context.dry and which.gpu:
        raise NotHere("it exists on CUDA only")
    if not timing.installed(which.package):
        raise NotHere(f"{which.package} is not installed")
    shape, session = context.shapes(case)[name], context.session
    problems = timing.baseline_rows(session, case, shape, context.dtype(case), [which], dry=context.dry)
    if problems:
        raise Failed("\n".join(problems))
    if context.dry:
        context.device.simulated["torch.compile of baselines"] = "they were called uncompiled"
    print(timing.table(case.op, session.rows))
    return f"{session.rows[0]['median_us']} us"


def host(context: Context) -> str:
    """Registered op against a direct call of the same Python body; public validation apart."""
    told = []
    for case in CASES.values():
        found = timing.host_rows(context.session, case, rounds=2 if context.dry else 200)
        print(case.op, {name: f"{times.median:.1f} us" for name, times in found.items()})
        told.append(f"{case.op} {found['registering'].median:.1f} + {found['validating'].median:.1f} us")
    if context.dry:
        context.device.simulated["host time of launching kernels"] = "the references were called instead"
    return ", ".join(told)
