# SPDX-License-Identifier: Apache-2.0
"""The floors: what an H200-class GPU must reach at LLaDA-8B's shapes, judged from the rows of the CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from leap_kernels.bench.cases import CASES
from leap_kernels.bench.session import shape_text
from leap_kernels.bench.timing import COLD, HOST, HOT, OWN

__all__ = ["Floor", "judge"]

Rows = Sequence[Mapping[str, Any]]
DENSE, FLASH, FLEX = "SDPA, dense mask", "SDPA flash, unmasked (other results)", "FlexAttention, cached BlockMask"


class Floor(NamedTuple):
    """One demand, and how it came out."""

    text: str
    verdict: str
    """"pass", "MISS" or "not measured"."""
    figures: str


def judge(rows: Rows, shapes: Callable[[str, str], Mapping[str, int]] | None = None, how: str = COLD) -> list[Floor]:
    """Every floor. `shapes` and `how` say where to look: in a dry run at small shapes timed by the clock."""
    named = shapes or (lambda op, name: CASES[op].shapes[name])

    def time(op: str, name: str, what: str = OWN, way: str = how) -> float | None:
        wanted = {"op": op, "what": what, "shape": shape_text(named(op, name)), "how": way}
        found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
        return float(found[-1]["median_us"]) if found else None

    def at_most(text: str, value: float | None, limit: float, figures: str = "") -> Floor:
        if value is None:
            return Floor(text, "not measured", "")
        return Floor(text, "pass" if value <= limit else "MISS", figures or f"{value:.4g} us")

    def at_least(text: str, over: float | None, under: float | None, limit: float) -> Floor:
        if not over or not under:
            return Floor(text, "not measured", "")
        verdict = "pass" if over / under >= limit else "MISS"
        return Floor(text, verdict, f"{over:.4g} us / {under:.4g} us = {over / under:.3g}")

    own32 = time("top_eta", "llada")
    floors = [
        at_most("top_eta, 32 rows: <= 12 us", own32, 12),
        at_least("top_eta, 32 rows: >= 4x faster than torch softmax + topk",
                 time("top_eta", "llada", "torch softmax + topk"), own32, 4),
        _bandwidth(rows, shape_text(named("top_eta", "llada-1024")), how),
    ]  # fmt: skip
    for name in ("block", "full"):
        own = time("superposed_attention", name)
        for text, what, limit in (
            (f"superposed_attention, {name}: >= 2x faster than SDPA with a dense mask", DENSE, 2.0),
            (f"superposed_attention, {name}: faster than compiled FlexAttention", FLEX, 1.0),
            (f"superposed_attention, {name}: >= 60 % of SDPA flash without a mask", FLASH, 0.6),
        ):
            floors.append(at_least(text, time("superposed_attention", name, what), own, limit))
    for op in ("superpose", "check_consistency"):
        in_graph = time(op, "llada", way=HOT)
        floors.append(at_most(f"{op} inside a graph: <= 6 us", in_graph, 6))
    for op in CASES:
        spent = [
            float(row["median_us"]) for row in rows if (row["op"], row["what"], row["how"]) == (op, "registering", HOST)
        ]
        floors.append(at_most(f"{op}: registering costs <= 5 us a call", spent[-1] if spent else None, 5))
    return floors


def _bandwidth(rows: Rows, shape: str, how: str) -> Floor:
    text = "top_eta, 1024 rows: >= 75 % of the copy bandwidth"
    found = [row for row in rows if (row["op"], row["what"], row["shape"], row["how"]) == ("top_eta", OWN, shape, how)]
    if not found or not found[-1]["copy_gb_s"]:
        return Floor(text, "not measured", "")
    reached, ceiling = (float(found[-1][name]) for name in ("gb_s", "copy_gb_s"))
    verdict = "pass" if reached >= 0.75 * ceiling else "MISS"
    return Floor(text, verdict, f"{reached:.4g} of {ceiling:.4g} GB/s = {reached / ceiling:.0%}")
