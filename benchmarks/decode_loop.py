# SPDX-License-Identifier: Apache-2.0
"""Where the time of `decode` goes: model body, head, and everything else, batch 1, on the bundled model.

    python benchmarks/decode_loop.py [--problems 20] [--runs 5] [--csv FILE]

"Everything else" is what this package adds around the model: rows, masks, statistics, decisions, commits. Strategies
alternate problem by problem within a run, after one untimed decode each; the table shows the median run with the 20th
and 80th percentile. Exits 1 when the median overhead of any strategy reaches 25 %.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
from collections import defaultdict
from pathlib import Path

import torch
import transformers

import leap_kernels
from leap_kernels.bench.session import commit
from leap_kernels.models.tiny import problems

STRATEGIES = ("full", "threshold", "leap")
LIMIT = 0.25


def measure(device: str, count: int, runs: int) -> dict[str, list[dict[str, float]]]:
    """For each strategy, one row a run: seconds per problem and the shares of body, head and the rest."""
    model = leap_kernels.load("tiny", device=device)
    tokenizer = leap_kernels.load_tokenizer("tiny")
    by_task = defaultdict(list)
    for problem in problems():
        by_task[problem.task].append(problem)
    chosen = [p for group in zip(*by_task.values(), strict=False) for p in group][:count]
    prompts = [tokenizer(p.prompt, return_tensors="pt").to(device) for p in chosen]
    for strategy in STRATEGIES:
        leap_kernels.decode(model, **prompts[0], strategy=strategy)

    rows: dict[str, list[dict[str, float]]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(runs):
        spent = {strategy: [0.0, 0.0, 0.0] for strategy in STRATEGIES}
        for prompt in prompts:
            for strategy in STRATEGIES:
                timing = leap_kernels.decode(model, **prompt, strategy=strategy).timing
                for i, part in enumerate((timing.total, timing.body, timing.head)):
                    spent[strategy][i] += part
        for strategy, (total, body, head) in spent.items():
            rows[strategy].append(
                {
                    "seconds": total / count,
                    "body": body / total,
                    "head": head / total,
                    "overhead": 1 - (body + head) / total,
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu"], help="shares of a GPU need events: CPU only")
    parser.add_argument("--csv", type=Path, help="also write the table there")
    args = parser.parse_args()

    setting = {
        "commit": commit(), "leap_kernels": leap_kernels.__version__, "torch": torch.__version__,
        "transformers": transformers.__version__, "python": platform.python_version(), "device": args.device,
        "threads": torch.get_num_threads(), "dtype": "float32", "model": "tiny", "batch": 1,
        "problems": args.problems, "runs": args.runs,
    }  # fmt: skip
    print(", ".join(f"{k} {v}" for k, v in setting.items()))
    table = []
    for strategy, rows in measure(args.device, args.problems, args.runs).items():
        overheads = sorted(row["overhead"] for row in rows)
        deciles = statistics.quantiles(overheads, n=10, method="inclusive") if len(overheads) > 1 else overheads * 9
        table.append(
            {
                "strategy": strategy,
                **{k: round(statistics.median(row[k] for row in rows), 4) for k in ("seconds", "body", "head")},
                "overhead": round(statistics.median(overheads), 4),
                "overhead_p20": round(deciles[1], 4),
                "overhead_p80": round(deciles[7], 4),
            }
        )
    print(f"{'strategy':10} {'s/problem':>9} {'body':>7} {'head':>7} {'overhead':>8}  p20 .. p80")
    for row in table:
        print(
            f"{row['strategy']:10} {row['seconds']:9.4f} {row['body']:7.1%} {row['head']:7.1%} {row['overhead']:8.1%}  "
            f"{row['overhead_p20']:.1%} .. {row['overhead_p80']:.1%}"
        )
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=[*setting, *table[0]])
            writer.writeheader()
            writer.writerows({**setting, **row} for row in table)
    worst = max(row["overhead"] for row in table)
    print(f"largest median overhead {worst:.1%}, limit {LIMIT:.0%}: {'ok' if worst < LIMIT else 'TOO MUCH'}")
    return int(worst >= LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
