# SPDX-License-Identifier: Apache-2.0
"""The command line says what `decode` says, fails in one line, and works in a pipe."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import leap_kernels
from leap_kernels import demo, trace
from leap_kernels.cli import main
from leap_kernels.models.tiny import answer_of, is_right, problems

FIRST, LAST = problems()[0], problems()[-1]
SHORT = ["--max-new-tokens", "16"]
# A transformers newer than what the tests have seen is warned of, rightly; here and in processes of their own.
pytestmark = pytest.mark.filterwarnings("ignore:transformers")
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:transformers"}

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must succeed and say nothing on stderr; its output."""

    def call(*argv: str) -> str:
        assert main(argv) == 0
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    return call


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must fail with code 2 and one line on stderr; that line."""

    def call(*argv: str) -> str:
        assert main(argv) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("leap-kernels: error: ")
        assert said.err.count("\n") == 1
        return said.err

    return call


def tiny_decode(*argv: str) -> list[str]:
    return ["decode", "--model", "tiny", "--device", "cpu", *argv]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of every `decode` call that a command makes."""
    made: list[dict[str, Any]] = []
    decode = leap_kernels.decode

    @functools.wraps(decode)
    def spy(model: Any, input_ids: Any, **options: Any) -> Any:
        made.append({"prompts": [row.tolist() for row in input_ids], **options})
        return decode(model, input_ids, **options)

    monkeypatch.setattr("leap_kernels.decoding.decode", spy)
    monkeypatch.setattr(demo, "decode", spy)
    return made


# --- decode ---------------------------------------------------------------------------------------------------------


def test_decode_prints_what_decode_returns(run: Run, tiny: Any, tiny_tokenizer: Any) -> None:
    out = leap_kernels.decode(tiny, **tiny_tokenizer(FIRST.prompt, return_tensors="pt"))
    text, numbers = run(*tiny_decode("--prompt", FIRST.prompt)).splitlines()
    assert text == out.text(tiny_tokenizer)[0]
    per_forward = int(out.new_tokens) / int(out.nfe)
    assert re.sub(r"seconds \d+\.\d\d$", "", numbers) == (
        f"NFE {int(out.nfe)}, tokens per forward {per_forward:.2f}, token forwards {int(out.token_forwards)}, "
    )
    assert re.search(r"seconds \d+\.\d\d$", numbers)


def test_decode_as_json_agrees_with_decode(run: Run, tiny: Any, tiny_tokenizer: Any) -> None:
    options: dict[str, Any] = {"strategy": "threshold", "threshold": 0.5, "max_new_tokens": 24, "block_length": 8}
    inputs = tiny_tokenizer([FIRST.prompt, LAST.prompt], padding=True, return_tensors="pt")
    out = leap_kernels.decode(tiny, **inputs, **options)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    said = json.loads(run(*tiny_decode("--json", "--trace", "--prompt", FIRST.prompt, "--prompt", LAST.prompt, *flags)))
    assert said["options"] == options
    assert (said["model"], said["device"], said["dtype"]) == ("tiny", "cpu", "torch.float32")
    assert 0 < said["seconds"] < 600
    for i, (sample, problem) in enumerate(zip(said["samples"], (FIRST, LAST), strict=True)):
        assert sample.pop("prompt") == problem.prompt
        assert sample.pop("tokens") == out.generated[i, : out.new_tokens[i]].tolist()
        expected = trace.to_json(out, tiny_tokenizer, i)
        for step, wanted in zip(sample["steps"], expected["steps"], strict=True):
            for token, other in zip(step["committed"], wanted["committed"], strict=True):
                assert token.pop("confidence") == pytest.approx(other.pop("confidence"), abs=1e-5)
        assert sample == expected


def test_json_without_trace_has_no_steps(run: Run) -> None:
    (sample,) = json.loads(run(*tiny_decode("--json", "--prompt", FIRST.prompt, *SHORT)))["samples"]
    assert "steps" not in sample
    assert sample["nfe"] > 0


def test_trace_shows_the_steps_before_the_text(run: Run) -> None:
    lines = run(*tiny_decode("--trace", "--prompt", FIRST.prompt, "--prompt", LAST.prompt)).splitlines()
    assert "\x1b" not in "".join(lines)
    second = lines.index(f"--- prompt 2: {LAST.prompt}")
    for part in (lines[1:second], lines[second + 1 :]):
        nfe = int(re.match(r"NFE (\d+)", part[-1])[1])  # type: ignore[index]
        assert part[0].split() == ["step", "new", "left", "canvas"]
        steps = [line.split()[0] for line in part if re.match(r" +\d+ +\+\d+ +\d+ ", line)]
        assert steps == [str(i + 1) for i in range(nfe)]


def test_streaming_prints_the_same_text_in_pieces(run: Run, fails: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = tiny_decode("--prompt", LAST.prompt)
    plain = run(*argv).partition("seconds")[0]
    assert run(*argv, "--stream").partition("seconds")[0] == plain
    text, lines = plain.splitlines()[0], run(*argv, "--stream", "--trace").splitlines()
    assert (lines[0], lines.count(text)) == (text, 1)
    written: list[str] = []
    monkeypatch.setattr("sys.stdout.write", written.append)
    assert main([*argv, "--stream"]) == 0
    pieces = "".join(written).partition(text)[0], [piece for piece in written if piece.strip() and piece in text]
    assert pieces[0] == ""
    assert len(pieces[1]) > 2
    monkeypatch.undo()
    for other in (["--json"], ["--prompt", FIRST.prompt]):
        assert "--stream prints one text" in fails(*argv, "--stream", *other)


def test_several_prompts_are_one_batch_and_come_back_in_order(run: Run, calls: list[dict[str, Any]]) -> None:
    options = [*SHORT, "--dtype", "float64"]  # so that no rounding depends on the size of the batch
    alone = [run(*tiny_decode("--prompt", p.prompt, *options)).splitlines() for p in (FIRST, LAST)]
    calls.clear()
    lines = run(*tiny_decode("--prompt", FIRST.prompt, "--prompt", LAST.prompt, *options)).splitlines()
    assert len(calls) == 1
    assert lines[0] == f"--- prompt 1: {FIRST.prompt}"
    assert lines[3] == f"--- prompt 2: {LAST.prompt}"
    assert [lines[1], lines[4]] == [text for text, _ in alone]
    until = ", seconds"
    assert [lines[i].partition(until)[0] for i in (2, 5)] == [numbers.partition(until)[0] for _, numbers in alone]
    assert lines[5].endswith("(all 2 prompts together)")


def test_a_prompt_from_stdin(
    run: Run, fails: Run, monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(FIRST.prompt + "\n"))
    assert json.loads(run(*tiny_decode("--prompt", "-", "--json", *SHORT)))["samples"][0]["prompt"] == FIRST.prompt
    run(*tiny_decode("--prompt", FIRST.prompt, *SHORT))
    assert calls[0]["prompts"] == calls[1]["prompts"]
    assert "--prompt - can be given once" in fails(*tiny_decode("--prompt", "-", "--prompt", "-"))


def test_every_flag_reaches_decode_and_nothing_else_does(run: Run, calls: list[dict[str, Any]]) -> None:
    run(*tiny_decode("--prompt", FIRST.prompt, *SHORT))
    run(*tiny_decode(
        "--prompt", FIRST.prompt, "--strategy", "leap", "--max-new-tokens", "8", "--block-length", "4", "--threshold",
        "0.8", "--tau", "0.6", "--eta", "0.3", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "4", "--seed", "7",
        "--cache", "none",
        "--set", "keep_confident=false", "--set", "suppress-tokens=[5, 6]", "--set", "backend=reference",
    ))  # fmt: skip
    plain, full = ({k: v for k, v in call.items() if k != "prompts"} for call in calls)
    assert plain == {"max_new_tokens": 16}
    assert full == {
        "strategy": "leap", "max_new_tokens": 8, "block_length": 4, "threshold": 0.8, "tau": 0.6, "eta": 0.3,
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 7, "cache": "none",
        "keep_confident": False, "suppress_tokens": [5, 6], "backend": "reference",
    }  # fmt: skip


def test_dtype_and_device_reach_the_model(run: Run) -> None:
    said = json.loads(run(*tiny_decode("--prompt", FIRST.prompt, *SHORT, "--json", "--dtype", "float64")))
    assert said["dtype"] == "torch.float64"


def test_a_chat_template_is_applied_on_request(
    run: Run, fails: Run, monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]], tiny_tokenizer: Any
) -> None:
    assert "has no chat template" in fails(*tiny_decode("--chat", "--prompt", FIRST.prompt))
    tokenizer = leap_kernels.load_tokenizer("tiny")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role == 'user' and '. ' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} ?{% endif %}"
    )
    monkeypatch.setattr("leap_kernels.models.load.load_tokenizer", lambda path: tokenizer)
    run(*tiny_decode("--chat", "--prompt", FIRST.prompt, *SHORT))
    assert calls[0]["prompts"] == [tiny_tokenizer(f". {FIRST.prompt} ?")["input_ids"]]


def test_an_empty_prompt_decodes(run: Run) -> None:
    assert "NFE" in run(*tiny_decode("--prompt", "", "--max-new-tokens", "4"))


def test_a_warning_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tiny_decode("--prompt", "[MASK] . ", "--max-new-tokens", "4")) == 0
    said = capsys.readouterr()
    assert said.err.startswith("leap-kernels: warning: the prompt holds mask tokens")
    assert said.err.count("\n") == 1


def test_help_names_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    from leap_kernels.strategies import STRATEGIES

    with pytest.raises(SystemExit):
        main(["decode", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    names = re.search(r"decoding rule: (.*?);", said)[1].replace(" (default)", "").split(", ")
    assert sorted(names) == sorted(STRATEGIES)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_unknown_words_are_named_with_a_prompt_that_works(fails: Run) -> None:
    said = fails(*tiny_decode("--prompt", f"{FIRST.prompt} xylophone quux", "--prompt", "quux . zyzzyva"))
    assert "does not know 'xylophone', 'quux', 'zyzzyva' and" in said
    assert FIRST.prompt in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategy", "nonsense"], "strategy must be one of full, threshold, factor"),
        (["--threshold", "1.5"], r"threshold must be a number in \[0, 1\], got 1.5"),
        (["--strategy", "full", "--tau", "0.5"], "unknown argument tau for strategy 'full'"),
        (["--set", "nonsense=1"], "unknown argument nonsense"),
        (["--set", "nonsense"], "--set must be KEY=VALUE.* got 'nonsense'"),
        (["--set", "observers=[]"], "--set must be KEY=VALUE.* got 'observers="),
        (["--set", "model=1"], "--set must be KEY=VALUE.* got 'model=1'"),
        (["--max-new-tokens", "0"], "max_new_tokens must be a whole number of at least 1, or one a sample, got 0"),
        (["--max-new-tokens", "100000"], "positions, the model has"),
        (["--temperature", "nan"], "temperature must be a number in"),
        (["--cache", "nonsense"], "cache must be one of"),
        (["--dtype", "int8"], "dtype must be"),
        (["--device", "nonsense"], "device must be a torch device"),
        (["--device", "cuda:99"], "--device must be one of auto, cpu"),
    ],
)
def test_what_cannot_be_decoded_is_refused_in_one_line(flags: list[str], message: str, fails: Run) -> None:
    assert re.search(message, fails("decode", "--model", "tiny", "--prompt", FIRST.prompt, *flags))


def test_a_folder_without_a_model_is_refused(fails: Run, tmp_path: Path) -> None:
    assert "no tokenizer in" in fails("decode", "--model", str(tmp_path), "--prompt", "x")


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from leap_kernels.commands import device_of

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of(name) for name in ("auto", "cpu", "cuda", "cuda:1")] == ["cuda:0", "cpu", "cuda", "cuda:1"]
    with pytest.raises(leap_kernels.errors.ConfigError, match="auto, cpu, cuda:0, cuda:1"):
        device_of("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of("auto") == "cpu"
    with pytest.raises(leap_kernels.errors.ConfigError, match="got 'cuda'"):
        device_of("cuda")


# --- demo -----------------------------------------------------------------------------------------------------------


def record(task: str, strategy: str, **values: Any) -> demo.Record:
    made = {"right": True, "new_tokens": 30, "nfe": 10, "token_forwards": 1000, "seconds": 0.5} | values
    return demo.Record(id="x", task=task, strategy=strategy, text="", answer=None, expected="", **made)


RECORDS = [
    record("sum", "full", nfe=64, token_forwards=6400, seconds=2.0),
    record("sum", "full", nfe=64, token_forwards=6400, seconds=3.0, right=False),
    record("sum", "threshold 0.9", nfe=10, new_tokens=40),
    record("sum", "threshold 0.9", nfe=10, new_tokens=20, right=False),
    record("sum", "leap", nfe=5, new_tokens=40, token_forwards=900),
    record("sum", "leap", nfe=3, new_tokens=20, token_forwards=700, seconds=1.0),
    record("tale", "full", nfe=64, token_forwards=6400, seconds=2.0),
    record("tale", "threshold 0.9", nfe=8),
    record("tale", "leap", nfe=9, token_forwards=1400, right=False),
]


def test_rows_sum_up_records() -> None:
    rows = {(row.task, row.strategy): row for row in demo.summarise(RECORDS)}
    assert list(rows) == [(t, s) for t in ("sum", "tale", "all") for s in ("full", "threshold 0.9", "leap")]
    assert rows["sum", "leap"] == demo.Row("sum", "leap", 2, 2, 4.0, 60 / 8, 800.0, 0.75)
    assert rows["all", "leap"] == demo.Row("all", "leap", 3, 2, 17 / 3, 90 / 17, 1000.0, 2.0 / 3)
    assert rows["all", "threshold 0.9"].right == 2
    assert {row.task for row in demo.summarise(RECORDS[:6])} == {"sum"}


def test_the_table_sets_every_number_beside_the_baselines() -> None:
    lines = demo.markdown(demo.summarise(RECORDS)).splitlines()
    assert lines[0] == "| task | strategy | right | NFE | tokens per forward | token forwards | seconds |"
    assert lines[1] == "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    assert lines[2] == ("| sum | full | 1/2 (1.00x) | 64.00 (6.40x) | 0.47 (0.16x) | 6400 (6.40x) | 2.500 (5.00x) |")
    assert lines[4] == "| sum | leap | 2/2 (2.00x) | 4.00 (0.40x) | 7.50 (2.50x) | 800 (0.80x) | 0.750 (1.50x) |"
    assert lines[10] == "| all | leap | 2/3 (1.00x) | 5.67 (0.61x) | 5.29 (1.65x) | 1000 (1.00x) | 0.667 (1.33x) |"
    assert len(lines) == 11


def test_the_drawn_table_holds_the_same_cells_and_shows_losses_in_red() -> None:
    rows = demo.summarise(RECORDS)
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="truecolor")
    segments = list(console.render(demo.table(rows)))
    drawn = "".join(s.text for s in segments)
    for line in demo.markdown(rows).splitlines()[2:]:
        assert all(cell in drawn for cell in line.strip("| ").split(" | "))
    colours = {s.text.strip(): s.style.color.name for s in segments if s.style and s.style.color}
    assert colours["0.750 (1.50x)"] == "red"
    assert colours["0/1 (0.00x)"] == "red"
    assert colours["2/2 (2.00x)"] == colours["4.00 (0.40x)"] == colours["7.50 (2.50x)"] == "green"
    assert "10.00 (1.00x)" in drawn
    assert "10.00 (1.00x)" not in colours


def test_a_baseline_without_right_answers_has_no_ratio() -> None:
    rows = demo.summarise([record("sum", name, right=False) for name in demo.STRATEGIES])
    assert "| 0/1 (-) |" in demo.markdown(rows)


def test_the_closing_line_says_what_the_numbers_say() -> None:
    rows = demo.summarise(RECORDS)
    said = demo.closing(rows, on_cpu=True)
    assert said.startswith(
        "On a CPU, LEAP against threshold 0.9: 39% fewer forwards (5.67 against 9.33 a problem), 2 against 2 right "
        "answers of 3, 1.33 times the seconds (0.667 against 0.500). On a CPU every appended row costs time"
    )
    assert said.endswith(f"3 problems say little about right answers; --all decodes {len(problems())}.")
    tale = demo.closing(demo.summarise(RECORDS[6:]), on_cpu=False)
    assert "12% more forwards (9.00 against 8.00 a problem)" in tale
    assert "0 against 1 right answers of 1" in tale
    many = demo.closing(demo.summarise(RECORDS[6:] * 100), on_cpu=False)
    assert "100% fewer right answers (0 against 100 of 100)" in many
    assert "CPU" not in tale
    assert "On a GPU" in tale
    assert "say little" not in many


def test_the_demo_decodes_the_same_problems_by_turns_and_counts_right(
    run: Run,
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny: Any,
    tiny_tokenizer: Any,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a test runner's narrow terminal would wrap the table
    monkeypatch.setitem(demo.STRATEGIES, "full", {"strategy": "full", "max_new_tokens": 8})  # to be quick
    task = LAST.task
    file = tmp_path / "out.json"
    said = run("demo", "--problems", "2", "--task", task, "--device", "cpu", "--json", str(file))
    chosen = problems(task)[:2]
    content = json.loads(file.read_text())
    records = content["records"]

    names = list(demo.STRATEGIES)
    assert [(r["id"], r["strategy"]) for r in records] == [(p.id, name) for p in chosen for name in names]
    ids = [tiny_tokenizer(p.prompt)["input_ids"] for p in chosen]
    made = [(call["prompts"], call["strategy"]) for call in calls]
    turn = [demo.STRATEGIES[name]["strategy"] for name in names]
    right = [p.id for p in chosen if next(r for r in records if (r["id"], r["strategy"]) == (p.id, "leap"))["right"]]
    shown = next((i for i, p in enumerate(chosen) if p.id in right), 0)
    tried = ids[: shown + 1] if right else [*ids, ids[0]]
    trace_and_warm_up = [([i], "leap") for i in tried] + [([ids[0]], s) for s in turn]
    assert made == trace_and_warm_up + [([prompt], strategy) for prompt in ids for strategy in turn]

    for entry in records:
        problem = next(p for p in chosen if p.id == entry["id"])
        inputs = tiny_tokenizer(problem.prompt, return_tensors="pt")
        out = leap_kernels.decode(tiny, **inputs, **demo.STRATEGIES[entry["strategy"]])
        text = out.text(tiny_tokenizer)[0]
        assert (entry["text"], entry["answer"], entry["expected"]) == (text, answer_of(problem, text), problem.answer)
        assert entry["right"] == is_right(problem, text)
        counted = (int(out.new_tokens), int(out.nfe), int(out.token_forwards))
        assert (entry["new_tokens"], entry["nfe"], entry["token_forwards"]) == counted

    for row in content["rows"]:
        of = [r for r in records if r["strategy"] == row["strategy"]]
        assert row["seconds"] == pytest.approx(sum(r["seconds"] for r in of) / 2)
        line = next(line for line in said.splitlines() if line.split()[:2] == [task, *row["strategy"].split()[:1]])
        numbers = re.findall(r"([\d./]+) \(", line)
        assert numbers == [
            f"{sum(r['right'] for r in of)}/2",
            f"{sum(r['nfe'] for r in of) / 2:.2f}",
            f"{sum(r['new_tokens'] for r in of) / sum(r['nfe'] for r in of):.2f}",
            f"{sum(r['token_forwards'] for r in of) / 2:.0f}",
            f"{sum(r['seconds'] for r in of) / 2:.3f}",
        ]
    for piece in (
        chosen[shown].prompt,
        f"expected: {chosen[shown].answer}",
        "step  new  left  canvas",
        "2 problems (2 ",
    ):
        assert piece in said
    assert "\x1b" not in said


def test_markdown_prints_the_table_and_nothing_to_skip(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STRATEGIES", {k: demo.STRATEGIES[k] for k in (demo.BASELINE, "leap")})
    about, table, end = run("demo", "--problems", "1", "--batch", "3", "--markdown", "--device", "cpu").split("\n\n")
    tasks = dict.fromkeys(p.task for p in problems())
    threads = torch.get_num_threads()
    assert about.startswith("model tiny (")
    assert about.endswith(
        f"float32), {len(tasks)} problems ({', '.join(f'1 {task}' for task in tasks)}), batch 3, CPU, torch "
        f"{torch.__version__}, {threads} thread{'s' if threads > 1 else ''}"
    )
    assert [line.count("|") for line in table.splitlines()] == [8] * len(table.splitlines())
    assert end.startswith("On a CPU, LEAP against threshold 0.9: ")


def test_all_means_every_problem_and_one_more_strategy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def fake(model: Any, tokenizer: Any, chosen: Any, strategies: Any, **_: Any) -> list[demo.Record]:
        seen.update(chosen=chosen, strategies=list(strategies))
        return [record("sum", name) for name in strategies]

    monkeypatch.setattr(demo, "compare", fake)
    monkeypatch.setattr(demo, "decode", lambda *_, **__: None)
    run("demo", "--all", "--no-trace", "--device", "cpu")
    assert sorted(p.id for p in seen["chosen"]) == sorted(p.id for p in problems())
    assert seen["strategies"] == ["full", "threshold 0.9", "leap", "threshold 0.7"]


def test_what_the_demo_cannot_do_is_refused(fails: Run, tmp_path: Path) -> None:
    assert "task must be one of" in fails("demo", "--task", "nonsense")
    assert "a file in a folder that exists" in fails("demo", "--json", str(tmp_path / "no" / "out.json"))
    for flags in (["--problems", "0"], ["--problems", "-1"], ["--batch", "x"]):
        with pytest.raises(SystemExit) as left:
            main(["demo", *flags])
        assert left.value.code == 2


# --- help, pipes, processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["demo"], ["decode"], ["env"], ["check"], ["bench"]])
def test_help_has_examples_that_parse(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    from leap_kernels.cli import _parser

    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert examples
    for example in examples:
        program, *argv = shlex.split(example.partition(" < ")[0])
        assert program == "leap-kernels"
        assert _parser().parse_args(argv).run is not None


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"leap-kernels {leap_kernels.__version__}\n"


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom leap_kernels.cli import main\ntry: main(['decode', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_as_a_module_on_a_terminal_that_knows_ascii_only(run: Run) -> None:
    argv = tiny_decode("--prompt", LAST.prompt, "--trace")
    environment = os.environ | QUIET | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "leap_kernels", *argv], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stderr == ""
    here = run(*argv).encode("ascii", errors="replace").decode()
    assert done.stdout.rpartition("seconds")[0] == here.rpartition("seconds")[0]


@pytest.mark.parametrize("argv", [["--help"], ["env"], tiny_decode("--prompt", LAST.prompt, "--trace")])
def test_a_reader_that_leaves_early_is_no_error(argv: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-m", "leap_kernels", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment | QUIET,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1
