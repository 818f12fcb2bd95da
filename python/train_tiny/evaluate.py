# SPDX-License-Identifier: Apache-2.0
"""Every strategy on every held-out problem: accuracy, forwards, token forwards, paired on the same problems.

    python python/train_tiny/evaluate.py tiny --out runs/eval    # resumes; some 40 minutes on two cores
    python python/train_tiny/evaluate.py tiny --out runs/eval --problems 50 --only full "threshold 0.9" leap

A strategy may have been run on fewer problems than another; what it gains and loses is counted on its own.

Writes one line a problem and strategy to OUT/records.jsonl, then OUT/summary.csv and OUT/pareto.svg, and prints a
Markdown table. Intervals are 95 %: Wilson's for shares, a seeded bootstrap over problems for the rest. "At that
accuracy" is read off the line between the threshold settings on either side.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from rich.progress import Progress

import leap_kernels
from leap_kernels.models.tiny import is_right, problems
from leap_kernels.ops import FORCED
from leap_kernels.statistics import RowStatistics
from leap_kernels.strategies.base import Decision, Strategy, View
from leap_kernels.strategies.leap import Leap


@dataclass(frozen=True)
class LeftToRight(Strategy):
    """One token a forward, the leftmost of the block: how an autoregressive model would decode."""

    name: ClassVar[str] = "left to right"

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        reason = torch.zeros_like(view.targets)
        reason[:, 0] = FORCED  # targets rise, so the first is the leftmost
        return Decision(stats.top1, reason)


THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
BASELINE = "threshold 0.9"
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {"strategy": "full"},
    "left to right": {"strategy": LeftToRight()},
    **{f"threshold {value}": {"strategy": "threshold", "threshold": value} for value in THRESHOLDS},
    "leap": {"strategy": "leap"},
    "leap, candidates apart": {"strategy": Leap(candidates_see_candidates=False)},
    "leap, tau 0.5, copy 0.9": {"strategy": Leap(tau=0.5, copy_threshold=0.9)},
}

Record = dict[str, Any]


def collect(
    path: str, out: Path, only: Sequence[str], count: int, batch: int, dtype: str, cache: str = "none"
) -> list[Record]:
    """Decode what out/records.jsonl does not hold yet; all its records."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "records.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(record["strategy"], record["id"]) for record in records}
    chosen = [p for task in dict.fromkeys(p.task for p in problems()) for p in problems(task)[:count]]
    left = {name: [p for p in chosen if (name, p.id) not in done] for name in only}
    if any(left.values()):
        model, tokenizer = leap_kernels.load(path, dtype=dtype), leap_kernels.load_tokenizer(path)
        with Progress() as bar, file.open("a") as sink:
            for name, todo in left.items():
                task = bar.add_task(name, total=len(todo))
                for start in range(0, len(todo), batch):
                    part = todo[start : start + batch]
                    ids = [torch.tensor(tokenizer(p.prompt)["input_ids"]) for p in part]
                    decoded = leap_kernels.decode(model, ids, cache=cache, **STRATEGIES[name])
                    for i, (problem, text) in enumerate(zip(part, decoded.text(tokenizer), strict=True)):
                        record = {
                            "strategy": name,
                            "id": problem.id,
                            "task": problem.task,
                            "right": is_right(problem, text),
                            "nfe": int(decoded.nfe[i]),
                            "token_forwards": int(decoded.token_forwards[i]),
                            "new_tokens": int(decoded.new_tokens[i]),
                            "text": text,
                        }
                        records.append(record)
                        sink.write(json.dumps(record) + "\n")
                    sink.flush()
                    bar.advance(task, len(part))
    ids = {p.id for p in chosen}
    return [record for record in records if record["strategy"] in only and record["id"] in ids]


def wilson(right: int, n: int) -> tuple[float, float]:
    """95 % interval of a share."""
    z, share = 1.959964, right / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return middle - half, middle + half


def bootstrap(statistic: Callable[[np.ndarray], float], n: int, draws: int = 2000) -> tuple[float, float]:
    """95 % interval of a statistic of problem indices, problems drawn with replacement; the same every time."""
    rng = np.random.default_rng(0)
    values = [statistic(rng.integers(n, size=n)) for _ in range(draws)]
    return tuple(np.quantile(values, (0.025, 0.975)).tolist())


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p value that as many answers are gained as lost."""
    n, k = gained + lost, min(gained, lost)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def at_equal_accuracy(curve: Sequence[tuple[float, float]], accuracy: float) -> float | None:
    """Cost of the threshold rule at an accuracy, on straight lines between its (accuracy, cost) points.

    The cheapest crossing; the cheapest point where all are more accurate; None where none is accurate enough.
    """
    costs = [cost for share, cost in curve if share == accuracy]
    for (a, cost_a), (b, cost_b) in itertools.pairwise(curve):
        if min(a, b) < accuracy < max(a, b):
            costs.append(cost_a + (cost_b - cost_a) * (accuracy - a) / (b - a))
    if not costs and accuracy < min(share for share, _ in curve):
        return min(cost for _, cost in curve)
    return min(costs, default=None)


def summarise(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row a family and strategy, and for all families together."""
    families = list(dict.fromkeys(record["task"] for record in records))
    strategies = [name for name in STRATEGIES if any(record["strategy"] == name for record in records)]
    rows = []
    for family in [*families, "all"]:
        own = [record for record in records if family in (record["task"], "all")]
        of = {name: sorted((r for r in own if r["strategy"] == name), key=lambda r: r["id"]) for name in strategies}
        curve = [
            tuple(_columns(of[name])[key].mean() for key in ("right", "nfe", "token_forwards"))
            for name in (f"threshold {value}" for value in THRESHOLDS)
            if name in of
        ]
        for name in strategies:
            ids = {record["id"] for record in of[name]}
            base = [record for record in of.get(BASELINE, []) if record["id"] in ids]
            paired = base if len(base) == len(ids) else []  # compared on the same problems only
            rows.append(_row(family, name, _columns(of[name]), _columns(paired) if paired else None, curve))
    return rows


def _columns(records: Sequence[Record]) -> dict[str, np.ndarray]:
    return {key: np.array([r[key] for r in records], dtype=float) for key in ("right", "nfe", "token_forwards")}


def _row(
    family: str, name: str, own: dict[str, Any], base: dict[str, Any] | None, curve: Sequence[tuple[float, ...]]
) -> dict[str, Any]:
    n, right = len(own["right"]), int(own["right"].sum())
    low, high = wilson(right, n)
    nfe_low, nfe_high = bootstrap(lambda i: own["nfe"][i].mean(), n)
    row: dict[str, Any] = {
        "family": family, "strategy": name, "problems": n, "right": right,
        "accuracy": right / n, "accuracy_low": low, "accuracy_high": high,
        "nfe": own["nfe"].mean(), "nfe_low": nfe_low, "nfe_high": nfe_high,
        "token_forwards": own["token_forwards"].mean(),
    }  # fmt: skip
    if base is not None and name != BASELINE:
        gained = int((own["right"] > base["right"]).sum())
        lost = int((own["right"] < base["right"]).sum())
        ratio = bootstrap(lambda i: own["nfe"][i].mean() / base["nfe"][i].mean(), n)
        row |= {"gained": gained, "lost": lost, "p": mcnemar(gained, lost)}
        row |= {"nfe_ratio": own["nfe"].mean() / base["nfe"].mean(), "ratio_low": ratio[0], "ratio_high": ratio[1]}
    if name.startswith("leap") and len(curve) > 1:
        for i, key in ((1, "nfe"), (2, "token_forwards")):
            equal = at_equal_accuracy([(point[0], point[i]) for point in curve], right / n)
            row[f"threshold_{key}_at_equal_accuracy"] = equal
    return row


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy and forwards, then what is gained and lost against the baseline."""
    lines = [
        f"| family | strategy | right | 95 % | NFE | 95 % | token forwards | NFE / {BASELINE} | gained, lost | p |"
        " threshold's NFE (token forwards) at that accuracy |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        ratio = gained = p = equal = ""
        if "p" in row:
            ratio = f"{row['nfe_ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
            gained, p = f"{row['gained']}, {row['lost']}", f"{row['p']:.2g}"
        if "threshold_nfe_at_equal_accuracy" in row:
            nfe, rows_ = row["threshold_nfe_at_equal_accuracy"], row["threshold_token_forwards_at_equal_accuracy"]
            equal = "not reached" if nfe is None else f"{nfe:.2f} ({rows_:.0f})"
        cells = [
            row["family"], row["strategy"], f"{row['right']}/{row['problems']}",
            f"{row['accuracy_low']:.1%} to {row['accuracy_high']:.1%}", f"{row['nfe']:.2f}",
            f"{row['nfe_low']:.2f} to {row['nfe_high']:.2f}", f"{row['token_forwards']:.0f}", ratio, gained, p, equal,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Accuracy over forwards, a panel a family: the thresholds joined by a line, the others as points."""
    import matplotlib.pyplot as plt

    families = list(dict.fromkeys(row["family"] for row in rows))
    figure, panels = plt.subplots(1, len(families), figsize=(3.6 * len(families), 3.6), layout="constrained")
    for panel, family in zip(np.atleast_1d(panels), families, strict=True):
        own = [row for row in rows if row["family"] == family and row["strategy"] not in ("full", "left to right")]
        curve = [row for row in own if row["strategy"].startswith("threshold")]
        panel.plot([r["nfe"] for r in curve], [100 * r["accuracy"] for r in curve], "o-", ms=4, label="threshold")
        for row in own:
            if row["strategy"].startswith("leap"):
                error = [
                    [100 * (row["accuracy"] - row["accuracy_low"])],
                    [100 * (row["accuracy_high"] - row["accuracy"])],
                ]
                panel.errorbar(row["nfe"], 100 * row["accuracy"], error, fmt="s", ms=5, label=row["strategy"])
        panel.set(title=family, xlabel="forwards a problem", ylabel="right, %")
    np.atleast_1d(panels)[0].legend(fontsize=7)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help='checkpoint folder, or "tiny"')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--problems", type=int, default=300, help="of each family")
    parser.add_argument("--batch", type=int, default=30)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cache", default="none", help="give each cache an --out of its own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="decode nothing, summarise what OUT holds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    file = args.out / "records.jsonl"
    records = (
        [json.loads(line) for line in file.read_text().splitlines()]
        if args.report
        else collect(args.model, args.out, args.only, args.problems, args.batch, args.dtype, args.cache)
    )
    rows = summarise(records)
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with (args.out / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(
            {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )
    draw(rows, args.out / "pareto.svg")
    print(markdown(rows))


if __name__ == "__main__":
    main()
