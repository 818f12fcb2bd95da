# SPDX-License-Identifier: Apache-2.0
"""The bundled model's problems: what it was trained to solve, held out from its training, with answers to check."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

from ...errors import ConfigError, expected

__all__ = ["Problem", "answer_of", "is_right", "problems"]

_MARKER = "####"  # stands between the working and the answer, as in GSM8K


@dataclass(frozen=True)
class Problem:
    """One prompt with a known answer."""

    id: str
    task: str
    """Which kind of problem it is; the tasks are those of problems.jsonl."""
    prompt: str
    reference: str
    """A right text: working, marker, answer."""
    answer: str
    """What must stand behind the marker."""


def problems(task: str | None = None) -> list[Problem]:
    """The problems of one task, or of all tasks, in the order of the file; ConfigError for an unknown task."""
    found = _all_problems()
    if task is None:
        return list(found)
    chosen = [problem for problem in found if problem.task == task]
    if not chosen:
        tasks = ", ".join(dict.fromkeys(problem.task for problem in found))
        raise ConfigError(expected("task", f"one of {tasks}", repr(task)))
    return chosen


def answer_of(text: str) -> str | None:
    """What stands behind the first `####` of a decoded text, single spaces between words; None when nothing does.

    >>> answer_of("4 7 + 2 5 = 7 2 . #### 7 2")
    '7 2'
    """
    return _words(text.partition(_MARKER)[2]) or None


def is_right(problem: Problem, text: str) -> bool:
    """Whether a decoded text ends in the problem's answer; the working is not judged."""
    return answer_of(text) == _words(problem.answer)


@functools.cache
def _all_problems() -> tuple[Problem, ...]:
    lines = resources.files(__name__).joinpath("problems.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return tuple(Problem(**{name: row[name] for name in Problem.__dataclass_fields__}) for row in rows)


def _words(text: str) -> str:
    return " ".join(text.split())
