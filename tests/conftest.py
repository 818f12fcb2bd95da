# SPDX-License-Identifier: Apache-2.0
"""Fixtures and options of all tiers. Imports nothing of the package: its kernels read TRITON_INTERPRET at import."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--min-passed", type=int, default=0, help="fail unless at least this many tests passed")


def pytest_configure(config: pytest.Config) -> None:
    """One thread a process: the models are small, and two test processes share two cores."""
    import torch

    torch.set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A tier that ran nothing has shown nothing; in CI a skipped test has not run either."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly or exitstatus not in (0, 5):
        return
    passed, skipped = (len(reporter.stats.get(what, [])) for what in ("passed", "skipped"))
    least = session.config.getoption("--min-passed")
    if passed < least:
        reporter.write_line(f"ERROR: {passed} tests passed, this tier must run at least {least}", red=True)
        session.exitstatus = 1
    elif skipped and os.environ.get("CI") == "true":
        reporter.write_line(f"ERROR: {skipped} tests were skipped, and CI has every tool they need", red=True)
        session.exitstatus = 1


@pytest.fixture(scope="session")
def tiny():
    """The bundled model."""
    import leap_kernels

    return leap_kernels.load("tiny")


@pytest.fixture(scope="session")
def tiny_tokenizer():
    import leap_kernels

    return leap_kernels.load_tokenizer("tiny")


@pytest.fixture(scope="session")
def tiny_prompts(tiny_tokenizer) -> dict[str, list[list[int]]]:
    """Prompt ids of the bundled problems, by task."""
    from leap_kernels.models.tiny import problems

    prompts: dict[str, list[list[int]]] = {}
    for problem in problems():
        prompts.setdefault(problem.task, []).append(tiny_tokenizer(problem.prompt)["input_ids"])
    return prompts


@pytest.fixture(scope="session")
def tiny_v0():
    """The first bundled model, on which other people's code and an independent implementation were measured."""
    import leap_kernels

    return leap_kernels.load(DATA / "tiny_v0")


@pytest.fixture(scope="session")
def tiny_v0_problems() -> list[dict]:
    """Its problems: task, prompt, prompt_ids, reference, and the answer that must stand behind ####."""
    return [json.loads(line) for line in (DATA / "tiny_v0/problems.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def parity() -> list[dict]:
    """What the authors' public code gave on tiny_v0."""
    return json.loads((DATA / "tiny_v0/parity.json").read_text())


@pytest.fixture(scope="session")
def measured() -> list[dict]:
    """What an independent implementation measured on tiny_v0."""
    return json.loads((DATA / "tiny_v0/measured.json").read_text())
