# SPDX-License-Identifier: Apache-2.0
"""python/loading_memory.py on checkpoints of some megabytes: loading takes one copy, and two would show."""

from __future__ import annotations

import importlib.util
import mmap
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "python" / "loading_memory.py"

# Merged experts and split queries change their dtype as well: nothing of the file is used where it lies, and reading
# ahead of the merging would cost half as much again.
MERGED = ["--stored", "bfloat16", "--megabytes", "40", "--limit", "1.25"]


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("loading_memory", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("family", ["LLaDA2", pytest.param("LLaDA-MoE", marks=pytest.mark.slow)])
def test_no_second_copy_of_the_weights(program, family, capsys):
    code = program.main([family, *MERGED])
    assert code == 0, capsys.readouterr().out


def test_a_ratio_above_the_limit_fails(program, monkeypatch, capsys):
    monkeypatch.setattr(program, "row", lambda family, *_: (f"| {family} | 1 | 2 | 2.000 |", 2.0))
    assert program.main(["LLaDA"]) == 1
    assert "highest ratio 2.000, limit 1.15: FAILED" in capsys.readouterr().out
    assert program.main(["LLaDA", "--limit", "2"]) == 0


def test_it_counts_what_a_process_makes(program):
    """40 MB that are written to show in the measure. New pages: what malloc gives may have been in use before."""
    before = program.anonymous()
    with mmap.mmap(-1, 40_000_000, flags=mmap.MAP_PRIVATE) as block:
        for _ in range(40):
            block.write(b"x" * 1_000_000)
        assert 35e6 < program.anonymous() - before < 60e6


@pytest.mark.parametrize("family", ["LLaDA", "Dream", "LLaDA-MoE", "LLaDA2", "SDAR", "SDAR-MoE", "Fast-dLLM"])
def test_checkpoints_have_the_size_that_was_asked_for(program, family):
    config = program.sized(family, 40, "float32")
    size = sum(value.numel() * 4 for value in program.weights_of(config).values())
    assert 20e6 < size < 60e6


def test_an_unknown_family_is_refused(program, capsys):
    with pytest.raises(SystemExit, match="2"):
        program.main(["GPT"])
    assert "unknown family GPT; one of LLaDA" in capsys.readouterr().err
