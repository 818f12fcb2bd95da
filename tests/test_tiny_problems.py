# SPDX-License-Identifier: Apache-2.0
"""The bundled problems: readable, checkable, and solvable within what the bundled model can hold."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from leap_kernels.errors import ConfigError
from leap_kernels.models.tiny import Problem, answer_of, is_right, problems
from leap_kernels.models.tiny.checks import bill, code, story


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
        assert answer_of(problem, problem.reference) == problem.answer
        assert is_right(problem, problem.reference)


def test_another_problems_reference_is_wrong() -> None:
    for task in dict.fromkeys(p.task for p in problems()):
        first, *rest = problems(task)
        other = next(p for p in rest if p.answer != first.answer)
        assert not is_right(first, other.reference)
    assert not any(is_right(p, "") for p in problems())


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Then he buys 2, so 3 + 2 = 5. Answer: 5 books.", "5 books"),
        ("Answer : 5  books .", "5 books"),
        ("Answer: 5 books", None),
        ("Answer: .", None),
        ("Answer: 5 books. Answer: 6 books.", "6 books"),
        ("Answer: 5 books. And more", None),
        ("so 3 + 2 = 5.", None),
        ("", None),
    ],
)
def test_a_story_comes_to_what_it_answers(text: str, answer: str | None) -> None:
    assert story(text) == answer


F = "def f(x):\n    x = x + 3\n    x = x * 2\n    return x\n"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (F + "# 2 -> 5 -> 10\nassert f(2) == 10", "8 10 12 14 16 18 20 22 24"),
        (F + "assert f(2) == 10\nassert f(1) == 8", "8 10 12 14 16 18 20 22 24"),
        (F.replace("+ 3", "+ x") + "assert f(2) == 8", "4 8 12 16 20 24 28 32 36"),
        (F + "assert f(2) == 11", None),
        (F + "# 2 -> 5 -> 10", None),
        (F + "assert f(2) == 10\nassert f(1) ==", None),
        (F + "assert g(2) == 10", None),
        (F + "assert True", None),
        (F.replace("x + 3", "y + 3") + "assert f(2) == 10", None),
        (F.replace("x + 3", "f(x)") + "assert f(2) == 10", None),
        (F.replace("x + 3", "x ** 99") + "assert f(2) == 10", None),
        (F.replace("x = x + 3", "import os") + "assert f(2) == 10", None),
        (F.replace("x + 3", "x . real") + "assert f(2) == 4", None),
        ("assert 1 == 1", None),
        ("", None),
        ("def f(x) :", None),
        ("assert " + "(" * 500 + ")" * 500, None),
    ],
)
def test_a_function_comes_to_what_it_returns(text: str, answer: str | None) -> None:
    assert code(text) == answer


LINE = '{"item": "pens", "count": 2, "price": 3, "cost": 6, "sum": 6}'
MORE = '{"item": "maps", "count": 4, "price": 2, "cost": 8, "sum": 14}'


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f'{{"items": [{LINE}], "total": 6}}', "2 pens at 3, 6 in all"),
        (f'{{"items": [{LINE}, {MORE}], "total": 14}}', "4 maps at 2, 2 pens at 3, 14 in all"),
        (f'{{"items": [{LINE}, {MORE}], "total": 15}}', None),
        (f'{{"items": [{MORE}, {LINE}], "total": 14}}', None),
        (f'{{"items": [{LINE}]}}', None),
        (f'{{"items": [{LINE}], "total": 6, "tip": 1}}', None),
        (f'{{"items": [{LINE}], "total": 6', None),
        (f'{{"items": [{LINE.replace(": 6,", ": 5,")}], "total": 6}}', None),
        ('{"items": [], "total": 0}', None),
        ('{"items": [7], "total": 0}', None),
        ('{"items": [{"item": "pens"}], "total": 0}', None),
        ("[1, 2]", None),
        ("7", None),
        ("", None),
    ],
)
def test_a_bill_comes_to_its_lines_and_total(text: str, answer: str | None) -> None:
    assert bill(text) == answer


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
