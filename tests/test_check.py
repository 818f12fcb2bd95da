# SPDX-License-Identifier: Apache-2.0
"""`leap-kernels check` says ok of what is right, and exits 1 over one wrong number in one output of one op."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from leap_kernels import check, ops
from leap_kernels.bench.cases import CASES
from leap_kernels.cli import main

OUTPUTS = [
    (op, field)
    for op, result in {
        "top_eta": ops.TopEta,
        "superpose": ops.Superposed,
        "superposed_attention": ops.Attention,
        "check_consistency": ops.Consistency,
        "sample_rows": ops.Sampled,
    }.items()
    for field in result._fields
] + [("row_kl", "row_kl")]


def spoil(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[[Any], Any]) -> None:
    """Have `ops.<op>` return `change(result)` on the reference backend."""
    right = getattr(ops, op)
    monkeypatch.setattr(ops, op, lambda **inputs: change(right(**inputs)))


def test_everything_here_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    """References in this process, kernels in one that interprets them."""
    assert main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for op in CASES:
        assert any(line.split()[:4] == [op, "reference", "cpu", "ok"] for line in lines)
        assert any(line.split()[:5] == [op, "triton", "cpu", "(interpreter)", "ok"] for line in lines)
    assert any(line.split()[:5] == ["check_consistency", "cuda", "cpu", "not", "available"] for line in lines)
    assert lines[-1] == f"{2 * len(CASES)} ok, 1 not available"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--backend", "reference", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert [(c["op"], c["backend"], c["device"], c["status"]) for c in said["checks"]] == [
        (op, "reference", "cpu", "ok") for op in CASES
    ]
    assert 0 < max(c["share"] for c in said["checks"]) < 1


@pytest.mark.parametrize(("op", "field"), OUTPUTS, ids=lambda x: x)
def test_one_wrong_number_is_found(
    op: str, field: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One element of one output, off by one or by a percent: exit code 1, and the op and the output are named."""

    def change(result: Any) -> Any:
        t = (result if op == "row_kl" else getattr(result, field)).clone()
        place = tuple(n // 2 for n in t.shape)
        t[place] = t[place] + 1 if not t.is_floating_point() else t[place] * 1.01 + 0.01
        return t if op == "row_kl" else result._replace(**{field: t})

    spoil(monkeypatch, op, change)
    assert main(["check", "--backend", "reference"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (wrong,) = (line for line in lines[1:-1] if line.split()[3] != "ok")
    assert wrong.split()[:4] == [op, "reference", "cpu", "mismatch"]
    assert f" {field}, " in wrong
    assert set(lines[-1].split(", ")) == {f"{len(CASES) - 1} ok", "1 mismatch"}


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:-1],
        lambda t: t.double(),
        lambda t: torch.where(torch.arange(len(t)) == 0, float("nan"), t),
        lambda t: torch.where(torch.arange(len(t)) == 0, float("inf"), t),
    ],
    ids=["shape", "dtype", "NaN", "inf"],
)
def test_wrong_form_and_stray_nan_are_found(change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "top_eta", lambda result: result._replace(lse=change(result.lse)))
    assert [f.status for f in check.check_all(("reference",)) if f.op == "top_eta"] == ["mismatch"]


def test_nan_that_belongs_there_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs have bad rows: a finite log-sum-exp for one of them is a mismatch."""
    spoil(monkeypatch, "top_eta", lambda result: result._replace(lse=result.lse.nan_to_num(nan=18.0)))
    (found,) = (f for f in check.check_all(("reference",)) if f.op == "top_eta")
    assert found.status == "mismatch"
    assert "NaN or infinity" in found.why


def test_what_an_op_raises_is_an_error_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(result: Any) -> Any:
        raise OSError("libfoo.so: cannot\nopen")

    spoil(monkeypatch, "superpose", broken)
    assert main(["check", "--backend", "reference"]) == 1
    said = capsys.readouterr().out
    assert "OSError: libfoo.so: cannot open" in said
    assert set(said.splitlines()[-1].split(", ")) == {f"{len(CASES) - 1} ok", "1 error"}


def interpreter_says(monkeypatch: pytest.MonkeyPatch, stdout: str) -> list[list[str]]:
    """Put `stdout` in place of what the interpreting process prints; the commands that were started."""
    started: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        started.append(command)
        assert options["env"]["TRITON_INTERPRET"] == "1"
        return subprocess.CompletedProcess(command, 0, stdout=stdout, stderr="")

    monkeypatch.setattr(check.subprocess, "run", run)
    return started


def test_a_mismatch_in_the_interpreter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"op": "top_eta", "backend": "triton", "device": "cpu (interpreter)", "status": "mismatch", "why": "ids"}
    started = interpreter_says(monkeypatch, json.dumps({"ok": False, "checks": [wrong]}))
    assert main(["check"]) == 1
    assert len(started) == 1


@pytest.mark.parametrize("stdout", ["", "Traceback (most recent call last):", "{}"])
def test_an_interpreter_that_breaks_is_an_error(stdout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter_says(monkeypatch, stdout)
    found = check.check_all(("reference", "triton"))
    assert {f.status for f in found if f.backend == "triton"} == {"error"}
    assert main(["check", "--backend", "triton"]) == 1


def test_without_triton_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "the triton package is not installed (it exists for Linux only)"
    monkeypatch.setattr("leap_kernels.ops.backends.why_no_triton", lambda device: reason)
    started = interpreter_says(monkeypatch, "")
    assert main(["check"]) == 0
    assert started == []
    assert capsys.readouterr().out.count(reason) == len(CASES)


def test_an_unknown_backend_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--backend", "auto"]) == 2
    assert "--backend must be one of reference, triton" in capsys.readouterr().err
