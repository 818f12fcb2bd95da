# SPDX-License-Identifier: Apache-2.0
"""Registers and shared memory of every compiled kernel, and the table of them in docs/kernels.md.

    python -m pytest tests/aot -p no:xdist --write-figures      # a few minutes; the slow tests are part of it

Every test compares what it compiled with the table, so a kernel that changes makes the table stale, which fails.
Figures are those of one Triton release; under another one only the ceilings are checked.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

import triton

TABLE = Path(__file__).parents[2] / "docs/kernels.md"
COLUMNS = (80, 90, 100, 120)

HEAD = """# What the kernels compile to

Registers a thread, and shared memory a block, of every kernel in every form that the tests compile; no kernel has any
stack, so none spills. The ceiling is the number of registers above which the tests fail. Compiled ahead of time, not
run on a GPU. Full blocks of logits, and keys and values of half precision from head size 32 on, are loaded 16 bytes at
a time (asserted in the PTX); products of half precision run on tensor cores (`wgmma` on sm_90, `tcgen05` on sm_100,
`mma` elsewhere).

The same tests pass with triton 3.6, which needs other registers but spills none either.

Written by `python -m pytest tests/aot -p no:xdist --write-figures` with triton {version}; the tests fail when it is
stale.

| kernel | form | ceiling | {columns} |
| --- | --- | ---: | {rules} |
"""


class Figure(NamedTuple):
    registers: int
    shared: int

    def __str__(self) -> str:
        size = f"{self.shared} B" if self.shared < 1024 else f"{self.shared / 1024:.1f} KB"
        return f"{self.registers}, {size}" if self.shared else str(self.registers)


measured: dict[tuple[str, str, int], dict[int, Figure]] = {}


def note(kernel: str, form: str, ceiling: int, architecture: int, figure: Figure) -> None:
    """Remember a figure for the table; what has one name must have one figure."""
    known = measured.setdefault((kernel, form, ceiling), {}).setdefault(architecture, figure)
    assert known == figure, f"two figures for {kernel}, {form}, sm_{architecture}: {known} and {figure}"


def check(kernel: str, form: str, ceiling: int, architecture: int, figure: Figure) -> None:
    """Compare a figure with the table, where that is of this Triton."""
    version, rows = _table()
    if version == triton.__version__:
        found = rows.get((kernel, form, str(ceiling)), {}).get(architecture)
        where = f"{kernel}, {form}, ceiling {ceiling}, sm_{architecture}"
        assert found == str(figure), f"docs/kernels.md has {found} for {where}, compiled: {figure}; write it again"


@functools.cache
def _table() -> tuple[str, dict[tuple[str, str, str], dict[int, str]]]:
    text = TABLE.read_text()
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            rows[cells[0].strip("`"), cells[1], cells[2]] = dict(zip(COLUMNS, cells[3:], strict=True))
    (version,) = re.findall(r"with triton (\S+);", text)
    return version, rows


def write() -> None:
    """Write the table of everything that was compiled."""
    lines = [HEAD.format(
        version=triton.__version__,
        columns=" | ".join(f"sm_{arch}" for arch in COLUMNS), rules=" | ".join(["---:"] * len(COLUMNS)),
    )]  # fmt: skip
    for (kernel, form, ceiling), figures in sorted(measured.items()):
        cells = [str(figures[arch]) if arch in figures else "" for arch in COLUMNS]
        lines.append(f"| `{kernel}` | {form} | {ceiling} | {' | '.join(cells)} |\n")
    TABLE.write_text("".join(lines))
