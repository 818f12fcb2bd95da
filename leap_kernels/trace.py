# SPDX-License-Identifier: Apache-2.0
"""What happened at each step of a decode: which tokens were committed when, and why.

>>> import leap_kernels, rich
>>> from leap_kernels import trace
>>> model, tokenizer = leap_kernels.load("tiny"), leap_kernels.load_tokenizer("tiny")
>>> prompt = "Ben has 16 books. He buys 7. He sells 3. How many books does Ben have?"
>>> out = leap_kernels.decode(model, **tokenizer(prompt, return_tensors="pt"))
>>> len(trace.steps(out)) == int(out.nfe)
True
>>> rich.print(trace.render(out, tokenizer))  # doctest: +SKIP

Everything is read from `DecodeOutput.history`, so nothing has to be switched on before decoding. What the history
does not hold is the token committed behind the first EOS, which padding overwrites at the end: such positions are
marked as behind the EOS, and no token is claimed for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import InputError, expected
from .ops import CONFIDENT, CONVERGED, FORCED

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from .output import DecodeOutput

__all__ = ["REASONS", "Step", "render", "steps", "to_json"]

REASONS = {CONFIDENT: "confident", CONVERGED: "converged", FORCED: "forced"}


@dataclass(frozen=True)
class Step:
    """One forward of one sample; the lists have one entry a committed token, from left to right."""

    step: int
    """1-based."""
    index: list[int]
    """Which generated token, counted from 0."""
    token: list[int]
    """The id the output holds there."""
    reason: list[str]
    """confident, converged or forced."""
    confidence: list[float]
    """The token's probability when it was committed."""
    behind_eos: list[bool]
    """Whether it stands behind the first EOS: no part of the text, and `token` is the padding that replaced it."""
    left: int
    """Masks left on the canvas after this forward, later blocks included."""


def steps(out: DecodeOutput, sample: int = 0) -> list[Step]:
    """The forwards of one sample, in order, as many as its `nfe`."""
    _check_sample(out, sample)
    history = out.history
    when, why = history.step[sample].tolist(), history.reason[sample].tolist()
    confidence, token = history.confidence[sample].tolist(), out.generated[sample].tolist()
    text_ends = int(out.new_tokens[sample])
    left, result = int(out.max_new_tokens[sample]), []
    for now in range(1, int(out.nfe[sample]) + 1):
        index = [i for i, step in enumerate(when) if step == now]
        left -= len(index)
        result.append(
            Step(
                step=now,
                index=index,
                token=[token[i] for i in index],
                reason=[_reason(why[i]) for i in index],
                confidence=[confidence[i] for i in index],
                behind_eos=[i >= text_ends for i in index],
                left=left,
            )
        )
    return result


def to_json(out: DecodeOutput, tokenizer: Any, sample: int = 0) -> dict[str, Any]:
    """The trace of one sample as plain numbers, strings, lists and dicts, ready for `json.dumps`."""
    found = steps(out, sample)
    return {
        "text": out.text(tokenizer)[sample],
        "nfe": int(out.nfe[sample]),
        "new_tokens": int(out.new_tokens[sample]),
        "token_forwards": int(out.token_forwards[sample]),
        "steps": [
            {
                "step": step.step,
                "left": step.left,
                "committed": [
                    {
                        "index": step.index[i],
                        "token": step.token[i],
                        "text": tokenizer.decode([step.token[i]]),
                        "reason": step.reason[i],
                        "confidence": step.confidence[i],
                        "behind_eos": step.behind_eos[i],
                    }
                    for i in range(len(step.index))
                ],
            }
            for step in found
        ],
    }


def render(out: DecodeOutput, tokenizer: Any, sample: int = 0, *, context: int | None = 12) -> Any:
    """A rich renderable: one line a step, new tokens highlighted by reason, and a legend.

    `context` is how many tokens of the finished beginning a line repeats; None repeats all. On a console without
    colours, brackets mark what colours would.
    """
    found = steps(out, sample)
    pieces: dict[int, str] = {}

    def piece(token: int) -> str:
        if token not in pieces:
            pieces[token] = _visible(tokenizer.decode([token]))
        return pieces[token]

    return _Rendered(found, piece, context)


class _Look(NamedTuple):
    style: str
    brackets: tuple[str, str]
    meaning: str


_LOOKS = {
    "confident": _Look("bold green", ("<", ">"), "its probability was above the threshold"),
    "converged": _Look("bold magenta", ("{", "}"), "a look ahead (a mask copy; a branch of lopa) predicted it too"),
    "forced": _Look("bold yellow", ("(", ")"), "nothing qualified, so the most probable one was taken"),
}
_OTHER = _Look("bold cyan", ("|", "|"), "for a reason of the strategy's own")


class _Place(NamedTuple):
    """One generated position as a line shows it."""

    word: str
    reason: str = ""
    """Why it was committed at this step; empty when it was not."""
    glyph: bool = False
    """Whether the word stands for no token."""


_LONG = 8  # glyphs in a row that are still drawn one by one
_MASK, _BEHIND, _SKIPPED = (_Place(word, glyph=True) for word in "·×…")  # noqa: RUF001


@dataclass(frozen=True)
class _Rendered:
    steps: list[Step]
    piece: Callable[[int], str]
    context: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        colours = console.color_system is not None and not console.no_color
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        for name in ("step", "new", "left"):
            table.add_column(name, justify="right", vertical="top", no_wrap=True)
        table.add_column("canvas", overflow="fold", ratio=1)
        for step, line in zip(self.steps, self._lines(), strict=True):
            table.add_row(str(step.step), f"+{len(step.index)}", str(step.left), _draw(line, colours))
        yield table
        yield from self._legend(colours)

    def _lines(self) -> Iterator[list[_Place]]:
        """The canvas after each step, up to the last position that was ever committed."""
        width = 1 + max((i for step in self.steps for i in step.index), default=-1)
        places = [_MASK] * width
        for step in self.steps:
            finished = next((i for i, place in enumerate(places) if place == _MASK), width)
            for i, token, reason, behind in zip(step.index, step.token, step.reason, step.behind_eos, strict=True):
                places[i] = _BEHIND._replace(reason=reason) if behind else _Place(self.piece(token), reason)
            skip = 0 if self.context is None else max(finished - self.context, 0)
            yield ([_SKIPPED] if skip else []) + places[skip:]
            places = [place._replace(reason="") for place in places]

    def _legend(self, colours: bool) -> Iterator[Text]:
        from rich.text import Text

        reasons = [reason for step in self.steps for reason in step.reason]
        for reason in dict.fromkeys([*_LOOKS, *reasons]):
            count = reasons.count(reason)
            if count:
                look = _LOOKS.get(reason, _OTHER)
                name = reason if colours else reason.join(look.brackets)
                yield Text.assemble((name, look.style), f" {count} token{'s' * (count > 1)}: {look.meaning}")
        behind = sum(sum(step.behind_eos) for step in self.steps)
        glyphs = f"{_MASK.word} masked"
        if sum(len(step.index) for step in self.steps) > _LONG:
            glyphs += f" ({_short([_MASK.word] * 40)}: 40 in a row)"
        if behind:
            glyphs += f"   {_BEHIND.word} behind the EOS, no part of the text ({behind})"
        yield Text(glyphs, style="dim")


def _draw(line: list[_Place], colours: bool) -> Text:
    """Runs of one kind as one span; words are set apart by spaces, masks are not."""
    from rich.text import Text

    text = Text()
    for (reason, glyph), run in itertools.groupby(line, lambda place: (place.reason, place.glyph and place.word)):
        words = [place.word for place in run]
        joined = _short(words) if glyph else " ".join(words)
        look = _LOOKS.get(reason, _OTHER)
        if reason and not colours:
            joined = joined.join(look.brackets)
        text.append(" " if text else "")
        text.append(joined, style=look.style if reason else "dim" if glyph else "")
    return text


def _short(glyphs: list[str]) -> str:
    """Long runs say how long they are, so that a step fits on few lines."""
    end = "".join(glyphs[:2])
    return "".join(glyphs) if len(glyphs) <= _LONG else f"{end}{len(glyphs)}{end}"


def _visible(piece: str) -> str:
    return piece.strip(" ").replace("\n", "↵").replace("\t", "⇥") or "␣"


def _reason(code: int) -> str:
    return REASONS.get(code, f"reason {code}")


def _check_sample(out: DecodeOutput, sample: int) -> None:
    batch = out.sequences.shape[0]
    if not 0 <= sample < batch:
        raise InputError(expected("sample", f"in [0, {batch})", sample))
