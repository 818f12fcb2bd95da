# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/models.md from the table that `load` uses.

python python/models_page.py           # rewrites what stands between the markers
python python/models_page.py --check   # only says whether it is up to date
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from leap_kernels.models.registry import REGISTRY, Entry

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- made by python/models_page.py: begin -->", "<!-- made by python/models_page.py: end -->"


def published() -> list[Entry]:
    return [entry for entry in REGISTRY.values() if entry.checkpoints]


def table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def code(*values: Any) -> str:
    return ", ".join(f"`{value}`" for value in values)


def facts_of(entry: Entry) -> dict[str, Any]:
    """A config.json of the published checkpoints, as far as ids and settings depend on it."""
    assert entry.ids is not None
    return {"vocab_size": entry.ids.vocabulary[0], "embedding_size": entry.ids.vocabulary[0]}


def visibility(entry: Entry) -> str:
    size = entry.block_causal(facts_of(entry)) if callable(entry.block_causal) else entry.block_causal
    return f"blocks of {size}" if size else "everything"


def settings(entry: Entry) -> str:
    values = entry.defaults(facts_of(entry)) if callable(entry.defaults) else entry.defaults
    return code(*(f"{name}={value!r}" for name, value in values.items())) or "those of `decode`"


def loading() -> str:
    rows = [
        [entry.family, code(*entry.checkpoints), f"`{entry.architecture}`", f"`{entry.model_class}`"]
        for entry in published()
    ]
    return table(["family", "checkpoints", "`architectures[0]`", "loaded as"], rows)


def decoding() -> str:
    rows = []
    for entry in published():
        ids = entry.ids
        assert ids is not None
        end = ", ".join(str(i) for i in dict.fromkeys((ids.eos, ids.turn_end)) if i is not None) or "none"
        rope = "none" if entry.rope_fp32 is None else "float32" if entry.rope_fp32 else "the model's"
        row = "i - 1" if entry.shift == 1 else "i"
        padding = "EOS" if ids.pad is None else ids.pad
        sees, recommended = visibility(entry), settings(entry)
        rows.append([entry.family, row, sees, ids.mask, end, padding, ids.positions, rope, recommended])
    header = ["family", "token i is read at row", "a row sees", "mask", "EOS, end of turn", "padding", "positions"]
    return table([*header, "RoPE in", "recommended settings"], rows)


def sources() -> str:
    return table(
        ["family", "licence", "cite", "note"],
        [[entry.family, entry.licence, entry.citation, entry.note] for entry in published()],
    )


def generated() -> str:
    return f"{BEGIN}\n\n{loading()}\n\n{decoding()}\n\n{sources()}\n\n{END}"


def rewritten(page: str) -> str:
    """The page with what stands between the markers made anew."""
    before, rest = page.split(BEGIN)
    return before + generated() + rest.split(END)[1]


def main() -> int:
    page = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        current = page == rewritten(page)
        print(f"{PAGE} is {'up to date' if current else 'stale: run python python/models_page.py'}")
        return 0 if current else 1
    PAGE.write_text(rewritten(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
