# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_check.py without a GPU: its time limits, exit codes and floors, its decode step, and its dry run.

What its steps find is tested where kernels can be broken: tests/interpret/test_check.py.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_steps import floors
from gpu_steps.llada_step import SMALL, Steps
from gpu_steps.steps import steps
from torch.utils._python_dispatch import TorchDispatchMode

from leap_kernels import Rows
from leap_kernels.bench.cases import CASES
from leap_kernels.bench.session import shape_text

ROOT = Path(__file__).parents[1]
NAMES = [step.name for step in steps()]


# --- limits, order, exit codes --------------------------------------------------------------------------------------


def test_the_list_of_steps() -> None:
    """Names differ as file names too, every op is timed, and what is expected of all leaves room in the ten minutes."""
    assert len({gpu_check._slug(name) for name in NAMES}) == len(NAMES)
    assert NAMES[0] == "environment"
    assert NAMES[-1] == "decode step"
    assert {f"time {op}" for op in CASES} < set(NAMES)
    assert sum(step.expected for step in steps()) < gpu_check.SECONDS * 0.8
    assert all(step.expected <= step.limit for step in steps())
    assert [step.name for step in steps() if step.proves] == NAMES[:6]


def test_a_step_that_hangs_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    child = f"""
import subprocess, time
process = subprocess.Popen(['sleep', '60'])
open({str(file)!r}, 'w').write(str(process.pid))
time.sleep(60)
"""
    began = time.monotonic()
    assert gpu_check.run_limited([sys.executable, "-c", child], 3.0) is None
    assert time.monotonic() - began < 20
    assert_ended(int(file.read_text()))
    assert gpu_check.run_limited([sys.executable, "-c", "raise SystemExit(7)"], 30.0) == 7


def test_what_a_step_leaves_running_is_stopped(tmp_path: Path) -> None:
    """A sanitizer that is stopped for its time leaves the process behind that it examined."""
    file = tmp_path / "pid"
    child = f"import subprocess; open({str(file)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))"
    assert gpu_check.run_limited([sys.executable, "-c", child], 30.0) == 0
    assert_ended(int(file.read_text()))


def assert_ended(process: int) -> None:
    state = Path(f"/proc/{process}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().split(") ")[1][0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {process} is still running")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run the check with made-up steps: name -> [status, note, simulated], an exit code without an answer, or None for
    one that was stopped. Returns exit code and report; `limits` holds the seconds each was given."""

    def run(answers: dict[str, Any], *flags: str) -> tuple[int, dict[str, Any]]:
        run.limits = {}

        def step(command: list[str], limit: float) -> int | None:
            name, state = (command[command.index(flag) + 1] for flag in ("--step", "--state"))
            run.limits[name] = limit
            answer = answers.get(name, ["ok", "", {}])
            if name == "environment":
                (Path(state) / "gpu").write_text("NVIDIA H200")
            if isinstance(answer, list):
                (Path(state) / f"{gpu_check._slug(name)}.answer").write_text(json.dumps(answer))
                return 0
            return answer

        monkeypatch.setattr(gpu_check, "run_limited", step)
        code = gpu_check.main(["--out", str(tmp_path), *flags])
        (report,) = tmp_path.glob("gpu_check-nvidia-h200*.json")
        return code, json.loads(report.read_text())

    return run


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ({}, 0),
        ({"sanitizer": ["not here", "not installed", {}]}, 0),
        ({"graphs": ["failed", "superpose differs", {}]}, 1),
        ({"graphs": -11}, 1),  # the process crashed
        ({"against float64": None}, 1),
        ({"time top_eta": ["failed", "out of memory", {}]}, 3),
        ({"decode step": None}, 3),
        ({"decode step": None, "registration": ["failed", "", {}]}, 1),
    ],
    ids=str,
)
def test_exit_codes(check: Any, answers: dict[str, Any], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """One bad step changes the exit code and stops no other one."""
    got, report = check(answers)
    assert got == code
    assert [outcome["step"] for outcome in report["outcomes"]] == NAMES
    told = {outcome["step"]: outcome["status"] for outcome in report["outcomes"]}
    for name, answer in answers.items():
        assert told.pop(name) == (answer[0] if isinstance(answer, list) else "stopped" if answer is None else "failed")
    assert set(told.values()) == {"ok"}
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in NAMES)
    assert {floor["verdict"] for floor in report["floors"]} == {"not measured"}


def test_without_a_gpu_the_rest_is_not_tried(check: Any) -> None:
    code, report = check({"environment": ["failed", "torch.cuda.is_available() is False", {}]})
    assert code == 1
    assert len(report["outcomes"]) == 1


def test_only(check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some steps alone do not write over the results of all."""
    _, report = check({}, "--only", "graphs", "decode step")
    assert (tmp_path / "gpu_check-nvidia-h200-graphs-decode-step.json").exists()
    assert [outcome["step"] for outcome in report["outcomes"]] == ["environment", "graphs", "decode step"]
    assert gpu_check.main(["--only", "nonsense"]) == 2
    assert "no such step: nonsense" in capsys.readouterr().err


def test_later_steps_keep_their_time(check: Any) -> None:
    """With little time left a step gets what the ones behind it do not need, but never so little as to be in vain."""
    code, _ = check({})
    assert code == 0
    listed = {step.name: step for step in steps()}
    assert check.limits["against float64"] == listed["against float64"].limit
    expected = sum(step.expected for step in steps())
    check({}, "--seconds", str(expected))
    assert check.limits["against float64"] == pytest.approx(listed["against float64"].expected + 10, abs=3)
    check({}, "--seconds", "6")
    assert set(list(check.limits.values())[:-1]) == {5}
    outcome = gpu_check._run(gpu_check._arguments([]), steps()[-1], Path(), Path(), 4.9)
    assert (outcome.status, outcome.bad) == ("no time", True)


# --- floors ---------------------------------------------------------------------------------------------------------


def row(op: str, name: str, what: str, how: str, us: float, **more: Any) -> dict[str, str]:
    shape = shape_text(CASES[op].shapes[name]) if name else "tiny"
    return {"op": op, "what": what, "shape": shape, "how": how, "median_us": str(us), **more}


def good_rows(factor: float = 1.0) -> list[dict[str, str]]:
    """Everything just good enough, or by `factor` too slow."""
    own, cold, hot = "leap_kernels", "events, cold L2", "graph, hot L2"
    rows = [
        row("top_eta", "llada", own, cold, 12.0 * factor),
        row("top_eta", "llada", "torch softmax + topk", cold, 48.0),
        row("top_eta", "llada-1024", own, cold, 80.0, gb_s=str(3000 / factor), copy_gb_s="4000"),
        row("superpose", "llada", own, hot, 6.0 * factor),
        row("check_consistency", "llada", own, hot, 6.0 * factor),
    ]
    for name in ("block", "full"):
        rows += [
            row("superposed_attention", name, own, cold, 100.0 * factor),
            row("superposed_attention", name, "SDPA, dense mask", cold, 200.0),
            row("superposed_attention", name, "FlexAttention, cached BlockMask", cold, 100.0),
            row("superposed_attention", name, "SDPA flash, unmasked (other results)", cold, 60.0),
        ]
    return rows + [row(op, "", "registering", "host", 5.0 * factor) for op in CASES]


def test_floors_at_their_edge() -> None:
    assert {floor.text: floor.verdict for floor in floors.judge(good_rows()) if floor.verdict != "pass"} == {}
    missed = floors.judge(good_rows(1.01))
    assert {floor.text: floor.verdict for floor in missed if floor.verdict != "MISS"} == {}
    assert len(missed) == 3 + 6 + 2 + len(CASES)
    assert next(f for f in missed if "75 %" in f.text).figures == "2970 of 4000 GB/s = 74%"


def test_a_floor_without_its_baseline_is_not_measured() -> None:
    rows = [r for r in good_rows() if r["what"] != "FlexAttention, cached BlockMask"]
    assert [f.text for f in floors.judge(rows) if f.verdict == "not measured"] == [
        "superposed_attention, block: faster than compiled FlexAttention",
        "superposed_attention, full: faster than compiled FlexAttention",
    ]


def test_the_floors_name_baselines_that_exist() -> None:
    names = {baseline.name for case in CASES.values() for baseline in case.baselines}
    assert {floors.DENSE, floors.FLASH, floors.FLEX, "torch softmax + topk"} <= names


# --- the decode step ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_steps() -> Any:
    with torch.inference_mode(), Steps(SMALL, torch.device("cpu"), torch.float32, "reference", 40, 4) as made:
        yield made


def test_the_three_forwards_agree(small_steps: Steps) -> None:
    """Base rows superposed as plain; the block over a filled store as the full forward; the copies see candidates."""
    with torch.inference_mode():
        plain, superposed, block = (forward() for forward in small_steps.forwards().values())
    assert plain.shape == (4, 211)
    assert superposed.shape == block.shape == (8, 211)
    assert torch.allclose(superposed[:4], plain, atol=1e-5)
    assert torch.allclose(block, superposed, atol=1e-5)
    assert not torch.allclose(superposed[4:], plain, atol=1e-3)


def test_the_block_reads_the_store_and_writes_its_own_rows(small_steps: Steps) -> None:
    with torch.inference_mode():
        before = small_steps.forward_block()
        keys = small_steps.stored.store._layers[1][0]
        kept, used = keys.clone(), small_steps.block_rows.keys[0].shape[1]
        try:
            keys[..., small_steps.first : used, :] = 7.0  # its own slots: overwritten
            assert torch.equal(small_steps.forward_block(), before)
            assert torch.equal(keys[..., :used, :], kept[..., :used, :])
            keys[..., :5, :] = 7.0  # slots of the context: read
            assert not torch.allclose(small_steps.forward_block(), before, atol=1e-3)
        finally:
            keys.copy_(kept)


class NoLookAtValues(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU: reading a value, sizes that depend on values, copies to it."""

    WAIT = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal", "lift_fresh")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        assert not {name, name.lstrip("_")} & set(self.WAIT), name
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            assert not any(t is not None and t.dtype == torch.bool for t in args[1]), "a mask as an index"
        return func(*args, **(kwargs or {}))


def test_steps_do_not_look_at_values(small_steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """What "no syncs" and the graphs need of a step on a GPU, where rows are never dense, as far as a CPU can tell."""
    monkeypatch.setattr(Rows, "dense", False)
    steps = {"torch only": small_steps.torch_only, **small_steps.all()}
    for step in steps.values():
        step()
        with NoLookAtValues(), torch.inference_mode():
            step()
    with pytest.raises(AssertionError, match="is_nonzero"), NoLookAtValues():
        bool(torch.ones(1))


def test_a_step_commits_and_counts(small_steps: Steps) -> None:
    with torch.inference_mode():
        for name, step in small_steps.all().items():
            tokens, verdict = step()
            committed = int((verdict.reason > 0).sum())
            assert committed >= 1
            assert int(verdict.left) == 4 - committed
            canvas = tokens[:, :40]
            assert int((canvas == small_steps.spec.mask_token_id).sum()) == 4 - committed
            assert tokens.shape[1] == (40 if name == "plain" else 60)
        token_ids = small_steps.torch_only()
    assert int((token_ids == small_steps.spec.mask_token_id).sum()) < 4


def test_the_work_of_a_step(small_steps: Steps) -> None:
    d, mlp, layers, vocab = 32, 48, 2, 211
    body = layers * (4 * d * d + 3 * d * mlp + 2 * d) + d
    assert (small_steps.body_weights, small_steps.head_weights) == (body, vocab * d)
    shape, cost = small_steps.work("superposed, block over a filled store")
    assert shape == {"rows": 24, "slots": 60}
    assert cost.flops == 2 * body * 24 + 2 * vocab * d * 8 + 4 * layers * d * 24 * 60
    assert cost.bytes == 4 * (body + vocab * d + 2 * layers * 60 * d)
    assert small_steps.work("plain")[0] == {"rows": 40, "slots": 40}


# --- all of it ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    """Everything in the interpreter, where neither pytest nor rich can be imported: all steps run, each floor has its
    figures or is said to be GPU-only, and what was only simulated is listed."""
    for name in ("pytest", "rich", "matplotlib"):
        (tmp_path / "blocked" / name).mkdir(parents=True)
        (tmp_path / "blocked" / name / "__init__.py").write_text(f"raise ImportError('no {name} here')\n")
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path / "blocked"),
        "OMP_NUM_THREADS": "1",
    }
    out = tmp_path / "out"
    command = [str(ROOT / "benchmarks/gpu_check.sh"), "--dry-run", "--out", str(out), "--commit", "abc"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]

    report = json.loads((out / "gpu_check-dry-run.json").read_text())
    told = {outcome["step"]: outcome["status"] for outcome in report["outcomes"]}
    gpu_only = {"sanitizer", *(name for name in NAMES if "FlashInfer" in name)}
    assert told == {name: "not here" if name in gpu_only else "ok" for name in NAMES}
    assert "NOT MEASURED" not in done.stdout
    for floor in report["floors"]:
        assert floor["verdict"] == "(dry run)"
        assert bool(floor["figures"]) == ("flash" not in floor["text"])
    wanted = ("CUDA graphs", "set_sync_debug_mode", "compute-sanitizer", "opcheck on CUDA", "torch.compile")
    assert all(any(what in line for line in report["simulated"]) for what in wanted)
    closing = done.stdout.partition("=== simulated, and so not shown")[2]
    assert all(what in closing for what in (*wanted, "bf16 kernels", "every timing"))

    with (out / "gpu_check-dry-run.csv").open(newline="") as source:
        rows = list(csv.DictReader(source))
    assert {row["op"] for row in rows} >= set(CASES)
    assert {row["commit"] for row in rows} == {"abc"}
    steps_timed = {row["what"] for row in rows if row["op"].startswith("decode step")}
    assert {"plain", "superposed", "superposed, block over a filled store", "plain: forward alone"} <= steps_timed
