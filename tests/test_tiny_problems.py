# SPDX-License-Identifier: Apache-2.0
"""The bundled problems: readable, checkable, and solvable within what the bundled model can hold."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from leap_kernels.errors import ConfigError
from leap_kernels.models.tiny import Problem, answer_of, is_right, problems


def test_every_problem_is_whole_and_has_an_id_of_its_own() -> None:
    found = problems()
    assert found
    assert all(isinstance(p, Problem) and p.id and p.task and p.prompt and p.reference and p.answer for p in found)
    assert len({p.id for p in found}) == len(found)


def test_the_tasks_share_out_the_problems_in_the_order_of_the_file() -> None:
    found = problems()
    tasks = dict.fromkeys(p.task for p in found)
    assert sorted((p for task in tasks for p in problems(task)), key=found.index) == found
    assert all({p.task for p in problems(task)} == {task} for task in tasks)


def test_an_unknown_task_is_refused_with_the_names_of_the_tasks() -> None:
    with pytest.raises(ConfigError, match="task must be one of") as caught:
        problems("no such task")
    assert all(p.task in str(caught.value) for p in problems())


def test_callers_cannot_change_the_problems() -> None:
    problems().clear()
    assert problems()


def test_every_reference_is_right_and_its_answer_is_the_one_on_file() -> None:
    for problem in problems():
        assert answer_of(problem.reference) == problem.answer
        assert is_right(problem, problem.reference)


def test_another_problems_reference_is_wrong() -> None:
    first, *rest = problems()
    other = next(p for p in rest if p.answer != first.answer)
    assert not is_right(first, other.reference)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4 + 3 = 7 . #### 7", "7"),
        ("#### 1 2", "1 2"),
        ("so ####  b  a\n", "b a"),
        ("4 + 3 = 7", None),
        ("4 + 3 = 7 . ####", None),
        ("4 + 3 = 7 . #### \n", None),
        ("", None),
        ("#### 7 #### 8", "7 #### 8"),
    ],
)
def test_the_answer_stands_behind_the_marker(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


def test_a_text_that_says_more_or_less_than_the_answer_is_wrong() -> None:
    problem = Problem("x", "t", "p", "#### 1 2", "1 2")
    assert is_right(problem, "anything at all #### 1  2 ")
    assert not any(is_right(problem, text) for text in ("#### 1", "#### 1 2 3", "1 2", "", "####", "#### 1 2 #### 1 2"))


def test_the_tokenizer_knows_every_word_and_the_model_has_room_for_every_problem(
    tiny: Any, tiny_tokenizer: Any
) -> None:
    spec = tiny.leap_spec
    room = spec.defaults["max_new_tokens"]
    for problem in problems():
        prompt, reference = (len(tiny_tokenizer(text)["input_ids"]) for text in (problem.prompt, problem.reference))
        assert reference + 1 <= room, f"{problem.id}: the reference and its EOS need {reference + 1} tokens"
        assert spec.max_positions is None or prompt + room <= spec.max_positions, problem.id


def test_reading_the_problems_imports_no_torch() -> None:
    code = (
        "import sys; from leap_kernels.models.tiny import problems; problems(); "
        "print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
