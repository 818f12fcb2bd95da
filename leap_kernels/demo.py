# SPDX-License-Identifier: Apache-2.0
"""`leap-kernels demo`: the bundled problems by full, threshold and LEAP, on the same prompts, in one interleaved run.

Interleaved, problem by problem, because a machine is not equally fast all the time: what slows one strategy down
slows the others down as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import trace
from .commands import encode
from .decoding import decode
from .errors import ConfigError, expected
from .models.load import load, load_tokenizer
from .models.tiny import Problem, answer_of, is_right, problems

__all__ = ["BASELINE", "Record", "Row", "closing", "compare", "main", "markdown", "summarise", "table"]

BASELINE = "threshold 0.9"
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {"strategy": "full"},
    BASELINE: {"strategy": "threshold", "threshold": 0.9},
    "leap": {"strategy": "leap"},
}
MORE_STRATEGIES = {"threshold 0.7": {"strategy": "threshold", "threshold": 0.7}}

TRIES = 5  # problems that are tried for one to show

TOTAL = "all"  # the task of rows that sum up all tasks
FEW = 100  # problems below which a difference in right answers is mostly chance


@dataclass(frozen=True)
class Record:
    """What one strategy made of one problem."""

    id: str
    task: str
    strategy: str
    text: str
    answer: str | None
    expected: str
    right: bool
    new_tokens: int
    nfe: int
    token_forwards: int
    seconds: float
    """Wall time of its decode call, shared equally by the problems decoded together."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    task: str
    strategy: str
    problems: int
    right: int
    nfe: float
    """Mean per problem."""
    tokens_per_forward: float
    """All new tokens / all forwards."""
    token_forwards: float
    """Mean per problem."""
    seconds: float
    """Mean per problem."""


def main(
    console: Any,
    *,
    tasks: Sequence[str] | None = None,
    per_task: int | None = 5,
    path: str = "tiny",
    device: str = "cpu",
    batch: int = 1,
    more_strategies: bool = False,
    show_trace: bool = True,
    as_markdown: bool = False,
    json_file: str | None = None,
) -> int:
    """Decode, compare, print; `per_task=None` takes all problems."""
    chosen = choose(tasks, per_task)
    if json_file is not None and not Path(json_file).absolute().parent.is_dir():
        raise ConfigError(expected("--json", "a file in a folder that exists", repr(json_file)))
    tokenizer, model = load_tokenizer(path), load(path, device=device)
    about = describe(path, model, chosen, batch)
    strategies = STRATEGIES | (MORE_STRATEGIES if more_strategies else {})
    if not as_markdown:
        console.print(about, style="dim", markup=False)
    if show_trace and not as_markdown:
        one_step_by_step(console, model, tokenizer, chosen, path)

    for options in strategies.values():  # untimed: whoever comes first would pay for what is set up only once
        decode(model, _prompts(model, tokenizer, chosen[:batch], path), **options)
    with _Progress(console, len(chosen) * len(strategies)) as advance:
        records = compare(model, tokenizer, chosen, strategies, batch=batch, path=path, advance=advance)
    rows = summarise(records)
    end = closing(rows, on_cpu=model.device.type == "cpu")
    if as_markdown:
        print(f"{about}\n\n{markdown(rows)}\n\n{end}")
    else:
        console.print(table(rows))
        console.print(end, markup=False)
    if json_file is not None:
        content = {"about": about, "rows": [asdict(row) for row in rows], "records": [asdict(r) for r in records]}
        Path(json_file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def choose(tasks: Sequence[str] | None, per_task: int | None) -> list[Problem]:
    """The first `per_task` problems of each task."""
    names = tasks or [problem.task for problem in problems()]
    return [problem for task in dict.fromkeys(names) for problem in problems(task)[:per_task]]


def describe(path: str, model: Any, chosen: Sequence[Problem], batch: int) -> str:
    """Under which conditions the numbers came about."""
    tasks = [problem.task for problem in chosen]
    counts = ", ".join(f"{tasks.count(task)} {task}" for task in dict.fromkeys(tasks))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    where = "CPU" if model.device.type == "cpu" else torch.cuda.get_device_name(model.device)
    threads = torch.get_num_threads()
    return (
        f"model {path} ({millions:.1f} M parameters, {str(model.dtype).removeprefix('torch.')}), "
        f"{len(chosen)} problems ({counts}), batch {batch}, {where}, torch {torch.__version__}, "
        f"{threads} thread{'s' if threads > 1 else ''}"
    )


def one_step_by_step(console: Any, model: Any, tokenizer: Any, chosen: Sequence[Problem], path: str) -> None:
    """A single decode by LEAP: which tokens appeared when, and why. The table says how often it is right."""
    for problem in (*chosen[:TRIES], chosen[0]):
        out = decode(model, _prompts(model, tokenizer, [problem], path), **STRATEGIES["leap"])
        text = out.text(tokenizer)[0]
        if is_right(problem, text):
            break
    answer = answer_of(problem, text)
    console.print("\nOne problem by LEAP, step by step (the first it gets right, if it gets one right at once):")
    console.print(f"\nprompt:   {problem.prompt}\n", markup=False)
    console.print(trace.render(out, tokenizer))
    console.print(f"\n{text}\n", markup=False)
    verdict = "right" if is_right(problem, text) else "wrong"
    console.print(f"answer:   {answer or 'none'} ({verdict})\nexpected: {problem.answer}", markup=False)


def compare(
    model: Any,
    tokenizer: Any,
    chosen: Sequence[Problem],
    strategies: dict[str, dict[str, Any]],
    *,
    batch: int = 1,
    path: str = "tiny",
    advance: Callable[[int], None] = lambda n: None,
) -> list[Record]:
    """Every strategy on every problem, `batch` problems a call; the strategies take turns."""
    records = []
    for start in range(0, len(chosen), batch):
        together = chosen[start : start + batch]
        prompts = _prompts(model, tokenizer, together, path)
        for name, options in strategies.items():
            out = decode(model, prompts, **options)
            for i, (problem, text) in enumerate(zip(together, out.text(tokenizer), strict=True)):
                records.append(
                    Record(
                        id=problem.id,
                        task=problem.task,
                        strategy=name,
                        text=text,
                        answer=answer_of(problem, text),
                        expected=problem.answer,
                        right=is_right(problem, text),
                        new_tokens=int(out.new_tokens[i]),
                        nfe=int(out.nfe[i]),
                        token_forwards=int(out.token_forwards[i]),
                        seconds=out.timing.total / len(together),
                    )
                )
            advance(len(together))
    return records


def summarise(records: Sequence[Record]) -> list[Row]:
    """A row for each strategy on each task, and on all tasks together where there are several."""
    tasks = list(dict.fromkeys(record.task for record in records))
    strategies = list(dict.fromkeys(record.strategy for record in records))
    rows = []
    for task in [*tasks, TOTAL] if len(tasks) > 1 else tasks:
        for strategy in strategies:
            of = [r for r in records if r.strategy == strategy and task in (r.task, TOTAL)]
            n, nfe = len(of), sum(r.nfe for r in of)
            rows.append(
                Row(
                    task=task,
                    strategy=strategy,
                    problems=n,
                    right=sum(r.right for r in of),
                    nfe=nfe / n,
                    tokens_per_forward=sum(r.new_tokens for r in of) / nfe,
                    token_forwards=sum(r.token_forwards for r in of) / n,
                    seconds=sum(r.seconds for r in of) / n,
                )
            )
    return rows


# --- what is shown --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    title: str
    value: Callable[[Row], float]
    show: Callable[[Row], str]
    more_is_better: bool = False


_COLUMNS = (
    _Column("right", lambda r: r.right, lambda r: f"{r.right}/{r.problems}", more_is_better=True),
    _Column("NFE", lambda r: r.nfe, lambda r: f"{r.nfe:.2f}"),
    _Column("tokens per forward", lambda r: r.tokens_per_forward, lambda r: f"{r.tokens_per_forward:.2f}", True),
    _Column("token forwards", lambda r: r.token_forwards, lambda r: f"{r.token_forwards:.0f}"),
    _Column("seconds", lambda r: r.seconds, lambda r: f"{r.seconds:.3f}"),
)


def _cells(row: Row, rows: Sequence[Row]) -> list[tuple[str, bool | None]]:
    """Each column's text, and whether it is better (True) or worse (False) than the baseline on the same task."""
    base = next(other for other in rows if (other.task, other.strategy) == (row.task, BASELINE))
    cells: list[tuple[str, bool | None]] = []
    for column in _COLUMNS:
        value, reference = column.value(row), column.value(base)
        ratio = f"{value / reference:.2f}x" if reference else "-"
        better = None if value == reference else (value > reference) == column.more_is_better
        cells.append((f"{column.show(row)} ({ratio})", better))
    return cells


def table(rows: Sequence[Row]) -> Any:
    """A rich table, a section for each task; green is better than the baseline, red is worse."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    made = Table(box=SIMPLE, caption=f"mean per problem; in brackets relative to {BASELINE} on the same problems")
    for title in ("task", "strategy"):
        made.add_column(title)
    for column in _COLUMNS:
        made.add_column(column.title, justify="right")
    colours = {None: "", True: "green", False: "red"}
    previous = rows[0].task
    for row in rows:
        if row.task != previous:
            made.add_section()
        cells = [Text(text, style=colours[better]) for text, better in _cells(row, rows)]
        made.add_row(row.task, row.strategy, *cells, style="bold" if row.strategy == "leap" else None)
        previous = row.task
    return made


def markdown(rows: Sequence[Row]) -> str:
    """The table for a README."""
    head = ["task", "strategy", *(column.title for column in _COLUMNS)]
    lines = [head, ["---", "---", *("---:" for _ in _COLUMNS)]]
    lines += [[row.task, row.strategy, *(text for text, _ in _cells(row, rows))] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def closing(rows: Sequence[Row], *, on_cpu: bool) -> str:
    """What the numbers say about LEAP, whichever way they fall."""
    last = {row.strategy: row for row in rows if row.task == rows[-1].task}
    leap, base = last["leap"], last[BASELINE]
    forwards = _versus(leap.nfe, base.nfe, "forwards", f"{leap.nfe:.2f} against {base.nfe:.2f} a problem")
    right = f"{leap.right} against {base.right} right answers of {leap.problems}"
    if leap.problems >= FEW:
        right = _versus(
            leap.right, base.right, "right answers", f"{leap.right} against {base.right} of {leap.problems}"
        )
    seconds = f"{leap.seconds / base.seconds:.2f} times the seconds ({leap.seconds:.3f} against {base.seconds:.3f})"
    text = f"On a {'CPU' if on_cpu else 'GPU'}, LEAP against {BASELINE}: {forwards}, {right}, {seconds}."
    if on_cpu:
        text += " On a CPU every appended row costs time; compare the token forwards."
    if leap.problems < FEW:
        text += f" {leap.problems} problems say little about right answers; --all decodes {len(problems())}."
    return text


def _versus(new: float, old: float, what: str, numbers: str) -> str:
    if new == old:
        return f"as many {what} ({numbers})"
    share = f"{abs(new / old - 1):.0%} " if old else ""
    return f"{share}{'fewer' if new < old else 'more'} {what} ({numbers})"


class _Progress:
    """A progress bar on terminals. It draws between decodes only, so that it does not run while one is timed."""

    def __init__(self, console: Any, total: int) -> None:
        from rich.progress import Progress

        self.bar = Progress(console=console, disable=not console.is_terminal, transient=True, auto_refresh=False)
        self.task = self.bar.add_task("decoding", total=total)

    def __enter__(self) -> Callable[[int], None]:
        self.bar.start()
        return self._advance

    def _advance(self, n: int) -> None:
        self.bar.advance(self.task, n)
        self.bar.refresh()

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def _prompts(model: Any, tokenizer: Any, chosen: Iterable[Problem], path: str) -> list[torch.Tensor]:
    rows = encode(tokenizer, [problem.prompt for problem in chosen], path)
    return [row.to(model.device) for row in rows]
