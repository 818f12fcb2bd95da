# SPDX-License-Identifier: Apache-2.0
"""`python python/parity_table.py`: every run equals the public code's, and one that does not fails it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[1] / "python/parity_table.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parity_table", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_runs_of_public_code_are_reproduced(program, capsys, parity):
    assert set(program.RUNS) == set(parity[0]["runs"])
    assert program.main([]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == list(program.RUNS)
    for name, _, tokens, nfe, _ in rows:
        extra = " (+1 a block that its first forward finishes)" * name.startswith(("prefix", "dual"))
        assert (tokens, nfe) == ("12 / 12", "12 / 12" + extra)


@pytest.mark.parametrize(("what", "counts"), [("ids", "2 / 3 | 3 / 3"), ("nfe", "3 / 3 | 2 / 3")])
def test_one_difference_fails_the_program(program, capsys, parity, tmp_path, what, counts):
    run = parity[1]["runs"]["threshold_0.6"]
    other = {**run, what: [*run["ids"][:-1], 5] if what == "ids" else run["nfe"] + 1}
    cases = [parity[0], {**parity[1], "runs": {"threshold_0.6": other}}, parity[2]]
    (tmp_path / "changed.json").write_text(json.dumps(cases))
    argv = ["--only", "threshold_0.6", "--file", str(tmp_path / "changed.json")]
    assert program.main(argv) == 1
    assert f"| {counts} |" in capsys.readouterr().out
    (tmp_path / "changed.json").write_text("[]")
    with pytest.raises(SystemExit, match="no cases"):
        program.main(argv)
