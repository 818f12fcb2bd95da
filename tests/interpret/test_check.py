# SPDX-License-Identifier: Apache-2.0
"""A wrong kernel is found: by `leap-kernels check`, and by the steps of benchmarks/gpu_check.py."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_steps import correctness
from gpu_steps.context import Context, Failed

from leap_kernels.bench.cases import CASES
from leap_kernels.cli import main

pytestmark = pytest.mark.interpret

FOLDERS = {
    "top_eta": "candidates",
    "superpose": "superposition",
    "superposed_attention": "attention",
    "check_consistency": "consistency",
    "row_kl": "divergence",
    "sample_rows": "sampling",
}


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """What a step gets in a dry run, with one op: the quickest."""
    monkeypatch.setattr(correctness, "CASES", {"check_consistency": CASES["check_consistency"]})
    return Context(dry=True, csv=tmp_path / "rows.csv", state=tmp_path, commit="abc")


def break_kernel(monkeypatch: pytest.MonkeyPatch, op: str, change: Any) -> None:
    kernel = importlib.import_module(f"leap_kernels.ops.{FOLDERS[op]}.kernel")
    right = kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda *args: change(right, *args))


@pytest.mark.parametrize("op", FOLDERS)
def test_check_finds_the_wrong_kernel(
    op: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One element of the first output is off by one."""

    def change(right: Any, *args: Any) -> Any:
        result = right(*args)
        first = result if isinstance(result, torch.Tensor) else result[0]
        first[(0,) * first.dim()] += 1
        return result

    break_kernel(monkeypatch, op, change)
    monkeypatch.setattr("leap_kernels.check.CASES", {op: CASES[op]})
    assert main(["check", "--backend", "triton", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["checks"]
    assert (found["op"], found["backend"], found["device"]) == (op, "triton", "cpu (interpreter)")
    assert found["status"] == "mismatch"


def test_the_steps_pass_what_is_right(dry: Context) -> None:
    assert "within the budget" in correctness.against_float64(dry)
    assert "6 replays" in correctness.graphs(dry)
    assert dry.device.simulated


def test_a_wrong_result_fails_the_step(dry: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(right: Any, *args: Any) -> Any:
        reason, left = right(*args)
        return reason, left + 1

    break_kernel(monkeypatch, "check_consistency", change)
    with pytest.raises(Failed, match=r"check_consistency triton .* left"):
        correctness.against_float64(dry)


def test_results_that_differ_between_runs_fail_the_step(dry: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def change(right: Any, *args: Any) -> Any:
        calls.append(args)
        reason, left = right(*args)
        return (reason, left + 1) if len(calls) % 5 == 0 else (reason, left)  # 3 inputs, then twice the same

    break_kernel(monkeypatch, "check_consistency", change)
    with pytest.raises(Failed, match="two runs differ"):
        correctness.against_float64(dry)


def test_a_count_that_the_host_remembers_fails_the_graphs(dry: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that looks at how many targets there are when it is captured is right once and wrong in replays."""
    remembered: list[torch.Tensor] = []

    def change(right: Any, targets: Any, *args: Any) -> Any:
        remembered.append(targets.clone())
        return right(remembered[0], *args)

    break_kernel(monkeypatch, "check_consistency", change)
    with pytest.raises(Failed, match="60% in use"):
        correctness.graphs(dry)
