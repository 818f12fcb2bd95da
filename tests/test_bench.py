# SPDX-License-Identifier: Apache-2.0
"""What is timed is what is claimed: cases, baselines, arithmetic of the rows, the command, the ratio gate, the plot."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ratios
import torch

from leap_kernels.bench import calls, timing
from leap_kernels.bench.cases import CASES, Baseline, Case, Cost
from leap_kernels.bench.cases.superposed_attention import dense_mask, flex_mask
from leap_kernels.bench.device import Cpu, Times, summarise
from leap_kernels.bench.session import COLUMNS, Ceilings, Session, commit
from leap_kernels.cli import main
from leap_kernels.errors import ConfigError
from leap_kernels.ops.library import SCHEMAS

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def small(op: str, seed: int = 0, fill: float = 1.0, **changes: int) -> tuple[Case, dict[str, Any]]:
    case = CASES[op]
    return case, case.make({**case.small, **changes}, case.dtypes[-1], CPU, seed, fill)


# --- cases ----------------------------------------------------------------------------------------------------------


def test_every_op_has_a_case() -> None:
    """An op that is registered is checked and timed: one file in bench/cases and one name in its table."""
    assert set(CASES) == set(SCHEMAS)


@pytest.mark.parametrize("op", CASES)
def test_shapes_are_complete(op: str) -> None:
    """Changes name dimensions that exist, and every shape names all of them."""
    case = CASES[op]
    for change in (case.tiny, *case.odd):
        assert set(change) <= set(case.small)
    for shape in case.shapes.values():
        assert set(shape) == set(case.small)
    for baseline in case.baselines:
        assert set(baseline.compiled) <= set(case.shapes)


@pytest.mark.parametrize("op", CASES)
def test_inputs_repeat_and_shapes_stay(op: str) -> None:
    """The same seed gives the same tensors; another share in use gives the same shapes and dtypes, and padding that
    would show: NaN in floats."""
    _, first = small(op)
    _, second = small(op)
    _, part = small(op, seed=4, fill=0.3)
    assert set(first) == set(part)
    for name, x in first.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, second[name])
            assert (x.shape, x.dtype) == (part[name].shape, part[name].dtype)
        else:
            assert x == second[name] == part[name]
    floats = [x for x in part.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    assert all(x.isnan().any() for x in floats)
    assert not any(x.isnan().any() for x in first.values() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("op", CASES)
def test_options_differ_between_the_seeds_of_check(op: str) -> None:
    """Seeds 0 to 2 reach both sides of each option; those of graph replays, 0 mod 4, do not differ."""
    settings = [{k: v for k, v in small(op, seed)[1].items() if not isinstance(v, torch.Tensor)} for seed in range(9)]
    assert settings[0] == settings[4] == settings[8]
    for name in settings[0]:
        if isinstance(settings[0][name], bool) or name == "shift":
            assert len({str(s[name]) for s in settings[:3]}) == 2


def test_top_eta_inputs_have_what_they_promise() -> None:
    """Rows with 0 to 4 tokens above eta, none of them near it, and ties; below fill 1 also a suppressed token above all
    and two bad rows."""
    case, inputs = small("top_eta", rows=10)
    result = case.call(inputs)
    assert result.counts.tolist() == [0, 1, 2, 3, 4] * 2
    p = inputs["logits"].double().index_fill(1, inputs["suppress"], -math.inf).softmax(-1)
    assert ((p - inputs["eta"]).abs() > 1e-3).all()
    distinct = [len(set(row[row > 17].tolist())) for row in inputs["logits"]]
    assert distinct == [0, 1, 1, 3, 1, 0, 1, 2, 1, 4]
    case, inputs = small("top_eta", fill=0.6)
    named = inputs["logits"][inputs["rows"]]
    assert named[:-2].argmax(-1).eq(inputs["suppress"]).all()
    lse = case.call(inputs).lse
    assert lse.isnan().sum() == 1
    assert (lse == math.inf).sum() == 1


def test_work_is_counted_by_hand() -> None:
    """LLaDA-8B's shapes: 32 x 126464 bf16 logits; q, k, v, out, metadata and lse of 192 rows over 1184 slots."""
    case = CASES["top_eta"]
    inputs = case.make({"rows": 2, "vocab": 100, "k": 5}, torch.bfloat16, CPU, 0, 1.0)
    assert case.cost(inputs) == Cost(2 * 100 * 2 + 2 * (12 * 5 + 28), 6 * 200)
    case = CASES["superposed_attention"]
    inputs = case.make(case.small, torch.float16, CPU, 0, 1.0)
    b, h, g, d, n, s = 2, 2, 1, 32, 37, 97
    memory = 2 * (2 * b * h * n * d + 2 * b * g * s * d) + b * (16 * n + 12 * s + 4) + 4 * b * h * n
    assert case.cost(inputs) == Cost(memory, 4 * b * h * n * s * d)


# --- baselines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"heads": 6, "kv_heads": 2}, {"rows": 97}], ids=str)
def test_flex_mask_is_the_rule(changes: dict[str, int]) -> None:
    """FlexAttention is given the visibility of the specification."""
    _, inputs = small("superposed_attention", **changes)
    mask = dense_mask(inputs)
    b, _, n, s = mask.shape
    index = torch.meshgrid(torch.arange(b), torch.arange(n), torch.arange(s), indexing="ij")
    assert torch.equal(flex_mask(inputs)(index[0], torch.tensor(0), index[1], index[2]), mask[:, 0])
    assert 0 < mask.float().mean() < 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("op", "baseline"),
    [(c.op, b) for c in CASES.values() for b in c.baselines if not b.gpu],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_baselines_compute_what_they_say(op: str, baseline: Baseline) -> None:
    case, inputs = small(op)
    result = baseline.build(inputs)()
    timing.check_baseline(case, baseline, inputs, result)
    if baseline.field:
        wrong = {k: (-v if k in ("v", "cand_ids", "logits") else v) for k, v in inputs.items()}
        wrong |= {"prob1": 1 - inputs["prob1"]} if "prob1" in inputs else {}
        with pytest.raises(ValueError, match="does not compute the same"):
            timing.check_baseline(case, baseline, wrong, result)


def test_row_kl_inputs_have_what_they_promise() -> None:
    """Row 0 did not move, some did a little and some a lot; below fill 1 a lost token and bad rows."""
    case, inputs = small("row_kl", rows=9)
    kl = case.call(inputs)
    assert kl[0] == 0
    assert kl[1:].min() > 1e-3
    assert kl.max() > 1
    case, inputs = small("row_kl", fill=0.6)
    kl = case.call(inputs)
    assert (kl == math.inf).any()
    assert kl.isnan().sum() == 2


def test_draws_lead_by_enough() -> None:
    """Noise that is rounded anew draws the same: 1e-4 on a noisy logit changes no token."""
    case, inputs = small("sample_rows", rows=200)
    token = case.call(inputs).token
    assert len(set(token.tolist())) > 20
    moved = inputs | {"logits": inputs["logits"] + 1e-4 * torch.randn(inputs["logits"].shape)}
    assert torch.equal(case.call(moved).token, token)


def test_a_baseline_that_fails_is_told_and_the_rest_is_timed() -> None:
    case = CASES["check_consistency"]
    broken = Baseline("broken", lambda inputs: lambda: 1 / 0)
    session = Session(Cpu(seconds=0.0), "test")
    problems = timing.baseline_rows(session, case, case.small, torch.float32, [broken, *case.baselines])
    assert problems == ["broken: ZeroDivisionError: division by zero"]
    assert [row["what"] for row in session.rows] == ["torch eager"]


# --- the ways to call an op -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", CASES)
def test_three_ways_to_one_result(op: str) -> None:
    case, inputs = small(op)
    public = case.call(inputs)
    for way in (calls.registered, calls.body):
        for a, b in zip(way(case, inputs)(), public, strict=True):
            assert torch.equal(a, b)
    operator, args = calls.raw(case, inputs)
    assert operator is getattr(torch.ops.leap, op).default
    assert len(args) == len(operator._schema.arguments)


# --- arithmetic of the rows -----------------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert summarise([float(i) for i in range(11)]) == Times(5.0, 2.0, 8.0)
    assert summarise([3.0]) == Times(3.0, 3.0, 3.0)


def test_rates_and_roofline() -> None:
    """8 MB and 4 GFLOP in 10 us under 1000 GB/s and 500 TFLOP/s: 800 GB/s, 400 TFLOP/s, 8 us at best."""
    session = Session(Cpu(), "test", ceilings=Ceilings(1000.0, 500.0), commit_text="abc")
    cost = Cost(8_000_000, 4_000_000_000)
    row = session.add("op", "it", {"rows": 3}, torch.bfloat16, "clock", Times(10.0, 9.0, 11.0), cost)
    assert (row["gb_s"], row["tflop_s"], row["percent_of_roofline"]) == (800.0, 400.0, 80.0)
    assert (row["dtype"], row["shape"], row["commit"], row["simulated"]) == ("bfloat16", "rows=3", "abc", 0)
    assert session.ceilings.microseconds(Cost(1, 4_000_000_000)) == 8.0
    session.device.simulated["graphs"] = "not really"
    assert session.add("op", "it", {}, "x", "clock", Times(1.0, 1.0, 1.0))["simulated"] == 1


def test_rows_reach_the_file_at_once_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    for n in (1, 2):
        Session(Cpu(), "test", file).add("op", "it", {"n": n}, "x", "clock", Times(1.0, 1.0, 1.0))
        with file.open(newline="") as source:
            read = list(csv.DictReader(source))
        assert [row["shape"] for row in read] == ["n=1", "n=2"][:n]
    assert tuple(read[0]) == COLUMNS
    for name in ("torch", "triton", "gpu", "commit", "date", "python", "leap_kernels"):
        assert read[0][name]
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="new, or one that this version wrote"):
        Session(Cpu(), "test", file).add("op", "it", {}, "x", "clock", Times(1.0, 1.0, 1.0))
    assert file.read_text() == "a,b\n1,2\n"


def test_commit_is_that_of_this_tree() -> None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        assert done.stdout.startswith(commit().rstrip("+"))
    else:
        assert commit() == "unknown"


def test_the_stand_in_for_a_graph_replays_on_new_contents() -> None:
    device, x = Cpu(), torch.tensor([1.0, 2.0])
    graph = device.graph(lambda: (2 * x, "text"))
    assert "CUDA graphs" in device.simulated
    x.fill_(5.0)
    graph.output[0].fill_(math.nan)
    graph.replay()
    assert graph.output[0].tolist() == [10.0, 10.0]


def test_registering_costs_little() -> None:
    """Pairs of differences: the dispatcher in front of one body, on any machine well below the body of a real op."""
    session = Session(Cpu(), "test")
    found = timing.host_rows(session, CASES["check_consistency"], rounds=20)
    assert list(found) == ["body", "registered op", "public function", "registering", "validating"]
    assert [row["how"] for row in session.rows] == ["host"] * 5
    assert found["registering"].median < found["body"].median
    assert found["public function"].median > found["body"].median


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a measurement."""
    monkeypatch.setattr(timing, "device_for", lambda device: Cpu(device, seconds=0.0))


@pytest.mark.usefixtures("quick")
def test_bench_prints_and_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "times.csv"
    argv = ["bench", "top_eta", "--device", "cpu", "--shape", "rows=3", "vocab=500", "--dtype", "float16"]
    assert main([*argv, "--csv", str(file)]) == 0
    said = capsys.readouterr().out
    with file.open(newline="") as source:
        rows = list(csv.DictReader(source))
    timed = [row for row in rows if row["how"] == "clock"]
    assert [row["what"] for row in timed] == ["leap_kernels", "torch softmax + topk"]
    for row in timed:
        assert (row["shape"], row["dtype"]) == ("rows=3 vocab=500 k=5", "float16")
        assert float(row["gb_s"]) == pytest.approx(3264 / float(row["median_us"]) / 1e3, rel=1e-3)
        assert float(row["copy_gb_s"]) > 0
        assert re.search(rf"{re.escape(row['what'])} \(clock\) +{float(row['median_us']):,.6g} ", said)
    assert [row["what"] for row in rows if row["how"] == "host"][:3] == ["body", "registered op", "public function"]
    assert said.startswith("top_eta, rows=3 vocab=500 k=5, float16, none (")


@pytest.mark.usefixtures("quick")
def test_bench_all_takes_every_op(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def one(session: Session, case: Case, shape: Any, dtype: torch.dtype) -> None:
        session.add(case.op, "leap_kernels", shape, dtype, "clock", Times(1.0, 1.0, 1.0), Cost(1, 1))

    monkeypatch.setattr(timing, "own_rows", one)
    monkeypatch.setattr(timing, "baseline_rows", lambda *args: ["slow: OSError: gone"])
    monkeypatch.setattr(timing, "host_rows", lambda session, case: session.rows.append(session.rows[-1]))
    assert main(["bench", "all", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert re.findall(r"^(\w+), \w+=", said, re.M) == list(CASES)
    assert said.count("failed: slow: OSError: gone") == len(CASES)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nonsense"], f"OP must be one of {', '.join(CASES)}, or all"),
        (["top_eta", "--shape", "width=3"], "--shape must be rows=N, vocab=N, k=N with N >= 1 for top_eta"),
        (["top_eta", "--shape", "rows=0"], "with N >= 1"),
        (["top_eta", "--shape", "rows=x"], "got 'rows=x'"),
        (["top_eta", "--shape", "nonsense"], "--shape must be one of 'llada', "),
        (["top_eta", "--shape", "llada", "dream"], "--shape must be one of 'llada', "),
        (["top_eta", "--dtype", "int8"], "--dtype must be auto, bfloat16, float16, float32, got 'int8'"),
        (["top_eta", "--device", "cuda:99"], "--device must be one of auto, cpu"),
    ],
)
def test_what_bench_cannot_time_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", *argv] if "--device" not in argv else ["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_shapes_by_name_and_by_change() -> None:
    case = CASES["top_eta"]
    assert timing._shapes(case, [], everything=False) == [case.shapes["llada"]]
    assert timing._shapes(case, [], everything=True) == list(case.shapes.values())
    assert timing._shapes(case, ["dream", "rows=7"], everything=True) == [{"rows": 7, "vocab": 152064, "k": 5}]


def test_the_page_names_columns_ways_and_shapes() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    ways = (timing.COLD, timing.HOT, timing.COLD_GRAPH, timing.CLOCK, timing.HOST)
    wanted = {*COLUMNS, *ways, *CASES, "body", "registered op", "public function", "registering", "validating"}
    assert {name for name in wanted if f"`{name}`" not in page} == set()


# --- the ratio gate and the plot ------------------------------------------------------------------------------------


def test_ratios() -> None:
    found = ratios.relative({"a": {"torch": 2.0, "x": 6.0, "y": 1.0}, "b": {"x": 1.0}})
    assert found == {"a": {"x": 3.0, "y": 0.5}}


def test_the_gate_closes_over_a_worse_ratio_only(tmp_path: Path) -> None:
    stored = {"a": {"x": 2.0, "y": 1.0}}
    ratios.write(tmp_path / "r.json", stored, {"commit": "abc"})
    assert ratios.read(tmp_path / "r.json") == stored
    assert ratios.compare({"a": {"x": 2.0 * ratios.SLACK, "y": 0.1}}, stored) == []
    assert ratios.compare({"a": {"x": 3.1, "y": 0.1}}, stored) == ["a: x: 3.1 times torch, was 2"]
    assert ratios.compare({"a": {"z": 1.0}}, stored) == ["a: z: 1 times torch, nothing stored"]


@pytest.mark.slow
def test_microbenchmarks_run_and_gate(tmp_path: Path) -> None:
    """`pytest benchmarks/`: all of them once; then some timed, stored, and failed over a ratio that was better."""

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "benchmarks/", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
        # Not a worker of these tests: pytest-benchmark would not time anything there.
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return subprocess.run(
            [*command, *flags], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=600, check=False
        )

    once = run("--benchmark-disable")
    assert once.returncode == 0, once.stdout + once.stderr
    file = tmp_path / "ratios.json"
    timed = ("-k", "check_consistency", "--benchmark-only", "--benchmark-max-time=0.05", f"--ratios={file}")
    first = run(*timed)
    assert first.returncode == 0
    assert "no stored ratios" in first.stdout
    assert run(*timed, "--store-ratios").returncode == 0
    stored = json.loads(file.read_text())
    assert set(stored["ratios"]) == {"check_consistency: reference", "check_consistency: host"}
    assert all(ratio > 0 for group in stored["ratios"].values() for ratio in group.values())
    stored["ratios"]["check_consistency: host"]["registered op"] /= 1000
    file.write_text(json.dumps(stored))
    second = run(*timed)
    assert second.returncode == 1
    assert "SLOWER: check_consistency: host: registered op" in second.stdout


def test_the_plot_has_a_point_and_a_bar_for_each_row(tmp_path: Path) -> None:
    import plot

    file = tmp_path / "rows.csv"
    session = Session(Cpu(), "test", file, Ceilings(1000.0, 500.0))
    for what, spent in (("leap_kernels", 10.0), ("theirs", 20.0)):
        session.add("op", what, {"n": 1}, "x", "clock", Times(spent, spent, spent), Cost(8_000_000, 4_000_000_000))
    session.add("op", "body", {"n": 1}, "x", "host", Times(1.0, 1.0, 1.0))
    rows = plot.read(file)
    assert [row["what"] for row in rows] == ["leap_kernels", "theirs"]
    roof, times = plot.draw(rows).axes
    assert [c.get_offsets().tolist() for c in roof.collections] == [[[500.0, 400.0]], [[500.0, 200.0]]]
    line = dict(zip(*roof.lines[0].get_data(), strict=True))
    assert line == {125.0: 125.0, 500.0: 500.0, 2000.0: 500.0}
    assert [bar.get_width() for bar in times.patches] == [10.0, 20.0]
    with pytest.raises(SystemExit, match="several devices"):
        plot.draw([rows[0], rows[1] | {"gpu": "another"}])
    with pytest.raises(SystemExit, match="nothing to draw"):
        plot.draw([])
