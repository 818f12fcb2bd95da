# SPDX-License-Identifier: Apache-2.0
"""What the agreement of copy and base predicts: how often a prediction is right where they agree, and where not.

    python python/train_tiny/agreement.py tiny --problems 100

Decodes with threshold 0.9 while LEAP's copies and candidates are appended but commit nothing, and notes for every
masked position of every forward its prediction, its confidence and whether its copy agrees. A prediction is right when
the finished text, which must itself be right, has that token there: with free choices in the text there is no other
reference. Each (position, forward) is one case, so cases of one problem are not independent; the intervals are a
bootstrap over problems.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from evaluate import bootstrap
from rich.progress import track

import leap_kernels
from leap_kernels.models.tiny import Problem, is_right, problems
from leap_kernels.statistics import RowStatistics
from leap_kernels.strategies.base import Decision, View
from leap_kernels.strategies.leap import Leap

EDGES = (0.2, 0.5, 0.7, 0.8, 0.9)  # confidence bins; above the last one the threshold rule commits anyway


@dataclass(frozen=True)
class Watch(Leap):
    """Threshold 0.9's decisions, with LEAP's rows appended and their answers written down. One sample at a time."""

    tau: float = 1.0  # agreement commits nothing that the threshold would not
    seen: list[tuple[list[int], list[int], list[float], list[int]]] = field(default_factory=list, compare=False)

    def accept(self, stats: RowStatistics, view: View, state: Any) -> Decision:
        values = (view.targets, stats.top1, stats.prob1, stats.copy_top1)
        self.seen.append(tuple(value[0].tolist() for value in values))
        return super().accept(stats, view, state)


Case = tuple[float, bool, bool]  # confidence, agrees, right


def cases(model: Any, tokenizer: Any, problem: Problem) -> list[Case]:
    """Every prediction with a copy, of every forward; none when the text comes out wrong."""
    watch = Watch()
    out = leap_kernels.decode(model, torch.tensor(tokenizer(problem.prompt)["input_ids"]), strategy=watch)
    if not is_right(problem, out.text(tokenizer)[0]):
        return []
    final, end = out.sequences[0].tolist(), out.prompt_length + int(out.new_tokens[0])
    return [
        (confidence, copy == token, token == final[column])
        for columns, tokens, confidences, copies in watch.seen
        for column, token, confidence, copy in zip(columns, tokens, confidences, copies, strict=True)
        if column >= 0 and copy >= 0 and column < end
    ]


def table(by_problem: dict[str, list[list[Case]]]) -> str:
    """A row a family and bin: cases and share right, where copy and base agree and where they do not."""
    head = "| family | confidence | agree: right | 95 % | disagree: right | 95 % |"
    lines = [head, "| --- | --- | ---: | ---: | ---: | ---: |"]
    for family, found in by_problem.items():
        for low, high in itertools.pairwise(EDGES):
            cells = []
            for agrees in (True, False):
                counts = np.array(
                    [
                        (sum(right for _, _, right in chosen), len(chosen))
                        for case in found
                        if (chosen := [c for c in case if low <= c[0] < high and c[1] == agrees])
                    ]
                ).reshape(-1, 2)
                n = counts[:, 1].sum()
                if n == 0:
                    cells += ["no case", ""]
                    continue
                share = counts[:, 0].sum() / n
                a, b = bootstrap(lambda i, c=counts: c[i, 0].sum() / c[i, 1].sum(), len(counts))
                cells += [f"{share:.1%} of {n}", f"{a:.1%} to {b:.1%}"]
            lines.append(f"| {family} | [{low}, {high}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help='checkpoint folder, or "tiny"')
    parser.add_argument("--problems", type=int, default=300, help="of each family")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = leap_kernels.load(args.model), leap_kernels.load_tokenizer(args.model)
    by_problem: dict[str, list[list[Case]]] = defaultdict(list)
    tasks = dict.fromkeys(problem.task for problem in problems())
    for problem in track([p for task in tasks for p in problems(task)[: args.problems]], "decoding"):
        by_problem[problem.task].append(cases(model, tokenizer, problem))
    for family, found in by_problem.items():
        print(f"{family}: {sum(map(bool, found))} of {len(found)} texts right")
    print(table(by_problem))


if __name__ == "__main__":
    main()
