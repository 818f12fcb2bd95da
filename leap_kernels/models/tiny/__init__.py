# SPDX-License-Identifier: Apache-2.0
"""The bundled model's problems: what it was trained to solve, held out from its training, with answers to check."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

from ...errors import ConfigError, expected
from .checks import CHECKS

__all__ = ["Problem", "answer_of", "is_right", "problems"]


@dataclass(frozen=True)
class Problem:
    """One prompt with a known answer."""

    id: str
    task: str
    """Which family it belongs to: story, code or bill."""
    prompt: str
    reference: str
    """A right text; for code and bills one of several."""
    answer: str
    """What any right text comes to, as `answer_of` says it."""


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


def answer_of(problem: Problem, text: str) -> str | None:
    """What a decoded text comes to; None when it comes to nothing.

    A story: what stands behind "Answer:". A function: what it returns for 1 to 9, once its own asserts have held. A
    bill: its lines in alphabetical order and its total, once every cost and running sum has been added up again.

    >>> answer_of(problems("story")[0], "Then he buys 2, so 3 + 2 = 5. Answer: 5 books.")
    '5 books'
    """
    return CHECKS[problem.task](text)


def is_right(problem: Problem, text: str) -> bool:
    """Whether a decoded text comes to the problem's answer; the working of a story and of a function is not judged."""
    return answer_of(problem, text) == problem.answer


@functools.cache
def _all_problems() -> tuple[Problem, ...]:
    lines = resources.files(__name__).joinpath("problems.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Problem(**json.loads(line)) for line in lines if line.strip())
