# SPDX-License-Identifier: Apache-2.0
"""The trace says what observers saw, and what it draws says the same."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import torch
from rich.console import Console

import leap_kernels
from leap_kernels import trace
from leap_kernels.errors import InputError
from leap_kernels.models.tiny import problems
from leap_kernels.output import DecodeOutput, History, StepEvent, Timing

STRATEGIES = [{"strategy": "full", "max_new_tokens": 24}, {"strategy": "threshold"}, {"strategy": "leap"}]


@pytest.fixture(scope="module", params=STRATEGIES, ids=lambda options: options["strategy"])
def decoded(request: pytest.FixtureRequest, tiny: Any, tiny_tokenizer: Any) -> tuple[DecodeOutput, list[StepEvent]]:
    """Two problems of unlike length, without brackets in their answers, and what an observer saw."""
    events: list[StepEvent] = []
    found = sorted(problems("story"), key=lambda problem: len(problem.reference))
    inputs = tiny_tokenizer([found[0].prompt, found[-1].prompt], padding=True, return_tensors="pt")
    return leap_kernels.decode(tiny, **inputs, observers=[events.append], **request.param), events


class Words:
    """A tokenizer whose id i is the i-th letter; 0 is padding and 9 the EOS."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join({0: "[PAD]", 8: "\n", 9: "[EOS]"}.get(i, chr(96 + i)) for i in ids)

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [self.decode([i for i in row if i not in (0, 9)]) for row in rows]


def by_hand() -> DecodeOutput:
    """a b \\n c [EOS], then two positions committed before the EOS was, then one that never was."""
    return DecodeOutput(
        sequences=torch.tensor([[5, 1, 2, 8, 3, 9, 0, 0, 0]]),
        prompt_length=1,
        nfe=torch.tensor([4]),
        token_forwards=torch.tensor([40]),
        new_tokens=torch.tensor([5]),
        history=History(
            step=torch.tensor([[2, 1, 1, 4, 3, 1, 2, 0]], dtype=torch.int32),
            reason=torch.tensor([[2, 1, 1, 3, 7, 1, 1, 0]], dtype=torch.int32),
            confidence=torch.tensor([[0.75, 1.0, 1.0, 0.25, 0.5, 1.0, 1.0, 0.0]]),
        ),
        timing=Timing(1.0, 0.5, 0.25),
        max_new_tokens=torch.tensor([8]),
    )


def draw(renderable: Any, **options: Any) -> str:
    """What lands in a file or a pipe, without the padding at line ends."""
    console = Console(file=io.StringIO(), width=options.pop("width", 4000), **options)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_every_committed_token_appears_at_its_step(decoded: tuple[DecodeOutput, list[StepEvent]]) -> None:
    out, _ = decoded
    for sample in range(2):
        found = trace.steps(out, sample)
        assert [step.step for step in found] == list(range(1, int(out.nfe[sample]) + 1))
        committed = [i for step in found for i in step.index]
        assert sorted(committed) == (out.history.step[sample] > 0).nonzero()[:, 0].tolist()
        for step in found:
            assert step.index == sorted(step.index)
            assert out.history.step[sample, step.index].tolist() == [step.step] * len(step.index)
            assert out.generated[sample, step.index].tolist() == step.token
            assert out.history.confidence[sample, step.index].tolist() == step.confidence
            assert [trace.REASONS[r] for r in out.history.reason[sample, step.index].tolist()] == step.reason


def test_the_trace_says_what_an_observer_saw(decoded: tuple[DecodeOutput, list[StepEvent]]) -> None:
    out, events = decoded
    for sample in range(2):
        found = trace.steps(out, sample)
        left = out.generated.shape[1]
        for step, event in zip(found, events, strict=False):
            seen = [i for i, member in enumerate(event.sample) if member == sample]
            left -= len(seen)
            assert step.step == event.step
            assert step.left == left
            assert step.index == [event.index[i] for i in seen]
            assert step.confidence == [event.confidence[i] for i in seen]
            assert step.reason == [trace.REASONS[event.reason[i]] for i in seen]
            texts = zip(step.token, (event.token[i] for i in seen), step.behind_eos, strict=True)
            assert all(behind or token == was for token, was, behind in texts)


def test_behind_the_eos_is_what_the_text_leaves_out(decoded: tuple[DecodeOutput, list[StepEvent]]) -> None:
    out, _ = decoded
    for sample in range(2):
        kept = [
            i
            for step in trace.steps(out, sample)
            for i, behind in zip(step.index, step.behind_eos, strict=True)
            if not behind
        ]
        assert sorted(kept) == list(range(int(out.new_tokens[sample])))


def test_by_hand() -> None:
    found = trace.steps(by_hand())
    assert found[0] == trace.Step(
        1, [1, 2, 5], [2, 8, 0], ["confident"] * 3, [1.0, 1.0, 1.0], [False, False, True], left=5
    )
    assert found[2] == trace.Step(3, [4], [9], ["reason 7"], [0.5], [False], left=2)
    assert [step.left for step in found] == [5, 3, 2, 1]


def test_a_step_that_committed_nothing_is_listed() -> None:
    out = by_hand()
    out.history.step[out.history.step == 3] = 4
    assert [len(step.index) for step in trace.steps(out)] == [3, 2, 0, 2]


def test_json_holds_the_same_and_survives_json(
    decoded: tuple[DecodeOutput, list[StepEvent]], tiny_tokenizer: Any
) -> None:
    out, _ = decoded
    for sample in range(2):
        exported = trace.to_json(out, tiny_tokenizer, sample)
        assert json.loads(json.dumps(exported)) == exported
        assert exported["text"] == out.text(tiny_tokenizer)[sample]
        assert exported["nfe"] == int(out.nfe[sample]) == len(exported["steps"])
        assert exported["new_tokens"] == int(out.new_tokens[sample])
        assert exported["token_forwards"] == int(out.token_forwards[sample])
        for step, entry in zip(trace.steps(out, sample), exported["steps"], strict=True):
            assert (entry["step"], entry["left"]) == (step.step, step.left)
            names = ("index", "token", "reason", "confidence", "behind_eos")
            for name in names:
                assert [token[name] for token in entry["committed"]] == getattr(step, name)
            assert [token["text"] for token in entry["committed"]] == [tiny_tokenizer.decode([i]) for i in step.token]


def test_the_drawing_by_hand() -> None:
    assert draw(trace.render(by_hand(), Words())).splitlines() == [
        "step  new  left  canvas",
        "   1   +3     5  · <b ↵> ·· <×> ·",  # noqa: RUF001
        "   2   +2     3  {a} b ↵ ·· × <×>",  # noqa: RUF001
        "   3   +1     2  a b ↵ · |[EOS]| ××",  # noqa: RUF001
        "   4   +1     1  a b ↵ (c) [EOS] ××",  # noqa: RUF001
        "<confident> 4 tokens: its probability was above the threshold",
        "{converged} 1 token: a look ahead (a mask copy; a branch of lopa) predicted it too",
        "(forced) 1 token: nothing qualified, so the most probable one was taken",
        "|reason 7| 1 token: for a reason of the strategy's own",
        "· masked   × behind the EOS, no part of the text (2)",  # noqa: RUF001
    ]


def test_colours_take_the_place_of_brackets() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200, no_color=False)
    segments = list(console.render(trace.render(by_hand(), Words())))
    shown = {(s.text.strip(), s.style.color.name) for s in segments if s.style and s.style.color}
    assert {("b ↵", "green"), ("a", "magenta"), ("c", "yellow"), ("[EOS]", "cyan")} <= shown
    assert {("confident", "green"), ("converged", "magenta"), ("forced", "yellow"), ("reason 7", "cyan")} <= shown
    assert not re.search(r"[<>{}]", "".join(s.text for s in segments))
    dim = "".join(s.text for s in segments if s.style and s.style.dim)
    assert "·" in dim
    assert "b" not in dim.partition("masked")[0]


def test_a_console_that_wants_no_colour_gets_brackets() -> None:
    drawn = draw(trace.render(by_hand(), Words()), force_terminal=True, color_system="truecolor", no_color=True)
    assert "<b ↵>" in drawn


def test_the_drawing_shows_each_new_token_once(
    decoded: tuple[DecodeOutput, list[StepEvent]], tiny_tokenizer: Any
) -> None:
    out, _ = decoded
    brackets = {"confident": "<>", "converged": "{}", "forced": "()"}
    lines = draw(trace.render(out, tiny_tokenizer, 1, context=None)).splitlines()
    for step, line in zip(trace.steps(out, 1), lines[1:], strict=False):
        number, new, left, canvas = line.split(maxsplit=3)
        assert (int(number), int(new), int(left)) == (step.step, len(step.index), step.left)
        for reason, (opening, closing) in brackets.items():
            drawn = re.findall(rf"\{opening}([^{opening}]*)\{closing}", canvas)
            words = " ".join(drawn).split()
            text = zip(step.token, step.reason, step.behind_eos, strict=True)
            want = [tiny_tokenizer.decode([token]) for token, why, behind in text if why == reason and not behind]
            assert [word for word in words if not word.startswith("×")] == want  # noqa: RUF001
    last = re.sub(r"(··|××)\d+\1|[<>{}()·×]", "", lines[len(trace.steps(out, 1))]).split()[3:]  # noqa: RUF001
    assert last == [tiny_tokenizer.decode([i]) for i in out.generated[1, : int(out.new_tokens[1])].tolist()]


def test_context_shortens_the_finished_beginning() -> None:
    out = by_hand()
    lines = draw(trace.render(out, Words(), context=2)).splitlines()
    assert lines[3].endswith("  … b ↵ · |[EOS]| ××")  # noqa: RUF001
    assert lines[2].endswith("  {a} b ↵ ·· × <×>")  # noqa: RUF001
    assert draw(trace.render(out, Words(), context=None)) == draw(trace.render(out, Words()))


def test_long_runs_of_masks_say_how_long_they_are() -> None:
    step = torch.ones(1, 40, dtype=torch.int32)
    step[0, 0], step[0, 30] = 2, 3
    out = DecodeOutput(
        torch.ones(1, 40, dtype=torch.int64), 0, torch.tensor([3]), torch.tensor([9]), torch.tensor([40]),
        History(torch.where(step == 1, 3, step), torch.ones_like(step), torch.ones(1, 40)), Timing(1, 1, 1),
        torch.tensor([40]),
    )  # fmt: skip
    lines = draw(trace.render(out, Words())).splitlines()
    assert lines[1].split() == ["1", "+0", "40", "··40··"]
    assert lines[2].split() == ["2", "+1", "39", "<a>", "··39··"]


def test_narrow_consoles_lose_nothing(decoded: tuple[DecodeOutput, list[StepEvent]], tiny_tokenizer: Any) -> None:
    out, _ = decoded
    rendered = trace.render(out, tiny_tokenizer, 0)
    narrow, wide = draw(rendered, width=40), draw(rendered)
    assert max(map(len, narrow.splitlines())) <= 40
    assert sorted(re.sub(r"\s", "", narrow)) == sorted(re.sub(r"\s", "", wide))


@pytest.mark.parametrize("sample", [-1, 1])
def test_a_sample_that_does_not_exist_is_refused(sample: int) -> None:
    for call in (lambda: trace.steps(by_hand(), sample), lambda: trace.render(by_hand(), Words(), sample),
                 lambda: trace.to_json(by_hand(), Words(), sample)):  # fmt: skip
        with pytest.raises(InputError, match=r"sample must be in \[0, 1\)"):
            call()
