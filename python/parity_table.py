# SPDX-License-Identifier: Apache-2.0
"""How many prompts give the tokens and forwards that the authors' public code gave; exits 1 unless all do.

python python/parity_table.py            # half a minute on a CPU
python python/parity_table.py --only klass_0.9_0.01 dual_0.9

What the public code gave is in tests/data/tiny_v0/parity.json, for the model beside it in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import leap_kernels
from leap_kernels import DecodeOutput

DATA = Path(__file__).parents[1] / "tests/data/tiny_v0"
BLOCK, NEW = 32, 64


def forwards(out: DecodeOutput) -> Tensor:
    return out.nfe


def forwards_of_early_fast_dllm(out: DecodeOutput) -> Tensor:
    """On a cache it looks for masks after the forward behind a block's first one, so a block that the first forward
    finished costs it one forward more."""
    step = out.history.step.unflatten(1, (-1, BLOCK))
    return out.nfe + (step.amin(2) == step.amax(2)).sum(1)


class Run(NamedTuple):
    source: str
    options: dict[str, Any]
    nfe: Callable[[DecodeOutput], Tensor] = forwards


def fast_dllm(threshold: float, **options: Any) -> dict[str, Any]:
    return {"strategy": "threshold", "threshold": threshold, "parity": "fast_dllm", **options}


RUNS = {
    "full": Run("LLaDA", {"strategy": "full", "steps": NEW, "parity": "llada"}),
    "threshold_0.9": Run("Fast-dLLM", fast_dllm(0.9)),
    "threshold_0.6": Run("Fast-dLLM", fast_dllm(0.6)),
    "prefix_0.9": Run("Fast-dLLM", fast_dllm(0.9, cache="prefix"), forwards_of_early_fast_dllm),
    "dual_0.9": Run("Fast-dLLM", fast_dllm(0.9, cache="dual"), forwards_of_early_fast_dllm),
    "klass_0.9_0.01": Run(
        "KLASS", {"strategy": "klass", "conf_threshold": 0.9, "kl_threshold": 0.01, "parity": "klass"}
    ),
}


def compare(model: Any, cases: list[dict[str, Any]], name: str) -> tuple[int, int]:
    """In how many cases the tokens, and in how many the forwards, are those of the public code."""
    run, theirs = RUNS[name], [case["runs"][name] for case in cases]
    prompts = [torch.tensor(case["prompt_ids"]) for case in cases]
    settings = {"max_new_tokens": NEW, "block_length": BLOCK, "early_stop": False}
    out = leap_kernels.decode(model, prompts, **settings, **run.options)
    tokens = [ours == other["ids"] for ours, other in zip(out.generated.tolist(), theirs, strict=True)]
    nfe = [ours == other["nfe"] for ours, other in zip(run.nfe(out).tolist(), theirs, strict=True)]
    return sum(tokens), sum(nfe)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--file", type=Path, default=DATA / "parity.json", help="what public code gave")
    args = parser.parse_args(argv)
    cases = json.loads(args.file.read_text())
    if not cases:
        sys.exit(f"no cases in {args.file}")
    model = leap_kernels.load(DATA)
    good = True
    print("| run | public code of | equal tokens | equal NFE | `decode` with |")
    print("| --- | --- | --- | --- | --- |")
    for name in args.only:
        tokens, nfe = compare(model, cases, name)
        good &= tokens == nfe == len(cases)
        run = RUNS[name]
        note = "" if run.nfe is forwards else " (+1 a block that its first forward finishes)"
        options = ", ".join(f"{key}={value!r}" for key, value in run.options.items())
        cells = (name, run.source, f"{tokens} / {len(cases)}", f"{nfe} / {len(cases)}{note}", f"`{options}`")
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
