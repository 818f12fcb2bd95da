# SPDX-License-Identifier: Apache-2.0
"""What every cache costs and saves on the bundled model: right answers, NFE and token forwards, beside no cache.

    python python/cache_table.py                                 # 100 problems a family: 20 minutes of one core
    python python/cache_table.py --problems 5 --only "leap dual" # and the run without a cache it is compared with

Writes one row a run and family to benchmarks/results/tiny_caches.csv and prints the Markdown table of docs/caches.md.
A run is compared with the same strategy, block length and problems without a cache.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track

import leap_kernels
from leap_kernels.models.tiny import Problem, is_right, problems

RESULTS = Path(__file__).parents[1] / "benchmarks/results/tiny_caches.csv"
STRATEGIES = ("threshold", "leap")


class Run(NamedTuple):
    strategy: str
    cache: str = "none"
    refresh: int | None = None
    block: int = 32

    @property
    def name(self) -> str:
        words = [self.strategy, self.cache]
        words += [f"refresh {self.refresh}"] * (self.refresh is not None) + [f"block {self.block}"] * (self.block != 32)
        return " ".join(words)

    def without_cache(self) -> Run:
        return Run(self.strategy, block=self.block)


CACHES = (("none", None), ("prefix", None), ("dual", None), ("dual", 3), ("dual", 2), ("delayed", None))
RUNS = {
    run.name: run
    for run in (
        *(Run(strategy, cache, refresh) for strategy in STRATEGIES for cache, refresh in CACHES),
        Run("leap", "dual", 1),  # nothing is stale: what differs from no cache is that no candidate crosses a block
        *(Run(s, cache, block=block) for block in (16, 96) for s in STRATEGIES for cache in ("none", "dual")),
    )
}
SUMS = ("right", "nfe", "token_forwards", "appended", "superposed", "blocks")
Record = dict[str, Any]


def decode(model: Any, tokenizer: Any, part: Sequence[Problem], run: Run) -> list[Record]:
    """One batch of problems: a record each."""
    events: list[leap_kernels.StepEvent] = []
    ids = [torch.tensor(tokenizer(problem.prompt)["input_ids"]) for problem in part]
    options = {"strategy": run.strategy, "cache": run.cache, "block_length": run.block}
    if run.refresh is not None:
        options["cache_refresh"] = run.refresh
    out = leap_kernels.decode(model, ids, observers=[events.append], **options)
    records = []
    for i, (problem, text) in enumerate(zip(part, out.text(tokenizer), strict=True)):
        appended = [event.appended.get(i, 0) for event in events]
        reached = (out.history.step[i] > 0).nonzero().max()  # the last token that was decoded
        records.append(
            {
                "id": problem.id,
                "family": problem.task,
                "right": is_right(problem, text),
                "nfe": int(out.nfe[i]),
                "token_forwards": int(out.token_forwards[i]),
                "appended": sum(appended),
                "superposed": sum(n > 0 for n in appended),
                "blocks": int(reached) // run.block + 1,
            }
        )
    return records


def row(run: Run, family: str, own: Sequence[Record], plain: Sequence[Record]) -> Record:
    """Means over one family's problems; `plain` is what the same problems gave without a cache."""
    right = {record["id"]: record["right"] for record in plain}
    means = {key: sum(record[key] for record in own) / len(own) for key in SUMS[1:]}
    return {
        "strategy": run.strategy,
        "cache": run.cache,
        "refresh": "" if run.refresh is None else run.refresh,
        "block": run.block,
        "family": family,
        "problems": len(own),
        "right": sum(record["right"] for record in own),
        "gained": sum(record["right"] > right[record["id"]] for record in own),
        "lost": sum(record["right"] < right[record["id"]] for record in own),
        **{key: round(value, 4) for key, value in means.items()},
    }


def measure(names: Iterable[str], count: int, batch: int, dtype: str) -> Iterator[list[Record]]:
    """The rows of these runs and of those they are compared with, as soon as a run is done."""
    model, tokenizer = leap_kernels.load("tiny", dtype=dtype), leap_kernels.load_tokenizer("tiny")
    families = list(dict.fromkeys(problem.task for problem in problems()))
    chosen = [problem for family in families for problem in problems(family)[:count]]
    chosen.sort(key=lambda problem: (problem.task, len(problem.prompt)))  # alike lengths: little padding
    runs = list(dict.fromkeys(r for name in names for r in (RUNS[name].without_cache(), RUNS[name])))
    of: dict[Run, list[Record]] = {}
    for run in track(runs, "caches"):
        parts = [chosen[i : i + batch] for i in range(0, len(chosen), batch)]
        of[run] = [record for part in parts for record in decode(model, tokenizer, part, run)]
        rows = []
        for family in (*families, "all"):
            own, plain = (
                [record for record in of[r] if family in (record["family"], "all")] for r in (run, run.without_cache())
            )
            rows.append(row(run, family, own, plain))
        yield rows


def markdown(rows: Sequence[Record], family: str = "all") -> str:
    """One family's rows, each beside the same without a cache. Takes rows read back from the CSV as well."""
    own = [r for r in rows if r["family"] == family]
    plain = {(r["strategy"], int(r["block"])): r for r in own if r["cache"] == "none"}
    lines = [
        "| block | strategy | cache | right | gained, lost | NFE | x none | token forwards | x none | appended |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in own:
        base = plain[r["strategy"], int(r["block"])]
        nfe, rows_, appended = (float(r[key]) for key in ("nfe", "token_forwards", "appended"))
        cache = r["cache"] + (f", refresh {r['refresh']}" if r["refresh"] else "")
        changed = "" if r["cache"] == "none" else f"{r['gained']}, {r['lost']}"
        cells = [
            r["block"], r["strategy"], cache, f"{r['right']}/{r['problems']}", changed, f"{nfe:.2f}",
            f"{nfe / float(base['nfe']):.2f}", f"{rows_:.0f}", f"{rows_ / float(base['token_forwards']):.2f}",
            f"{appended / rows_:.0%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--problems", type=int, default=100, help="of each family")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    rows: list[Record] = []
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with args.csv.open("w", newline="") as file:
        for own in measure(args.only, args.problems, args.batch, args.dtype):
            writer = csv.DictWriter(file, list(own[0]))
            if not rows:
                writer.writeheader()
            writer.writerows(own)
            file.flush()
            rows += own
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
