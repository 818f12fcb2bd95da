# SPDX-License-Identifier: Apache-2.0
"""The gate of `pytest benchmarks/`: how many times as long as torch each thing takes, against what is stored.

Seconds differ between machines and hours; the ratio to a torch baseline timed in the same run differs much less.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

__all__ = ["BASELINE", "SLACK", "STORED", "compare", "read", "relative", "write"]

Groups = Mapping[str, Mapping[str, float]]

BASELINE = "torch"  # the name, in every group, of what the others are divided by
SLACK = 1.5  # a ratio may grow by this factor before the gate closes: two runs on one idle machine differ by less
STORED = Path(__file__).parent / "results" / "micro_ratios.json"


def relative(medians: Groups) -> dict[str, dict[str, float]]:
    """Each median over that of its group's baseline; groups without one, as in a run of a selection, are left out."""
    return {
        group: {name: median / times[BASELINE] for name, median in times.items() if name != BASELINE}
        for group, times in medians.items()
        if BASELINE in times
    }


def compare(found: Groups, stored: Groups, slack: float = SLACK) -> list[str]:
    """One line for each ratio that has grown by more than `slack`, or that nothing is stored for."""
    lines = []
    for group, ratios in found.items():
        for name, ratio in ratios.items():
            before = stored.get(group, {}).get(name)
            if before is None:
                lines.append(f"{group}: {name}: {ratio:.3g} times {BASELINE}, nothing stored")
            elif ratio > slack * before:
                lines.append(f"{group}: {name}: {ratio:.3g} times {BASELINE}, was {before:.3g}")
    return lines


def read(file: Path) -> dict[str, dict[str, float]]:
    stored: dict[str, dict[str, float]] = json.loads(file.read_text())["ratios"]
    return stored


def write(file: Path, ratios: Groups, setting: Mapping[str, str]) -> None:
    rounded = {group: {name: float(f"{x:.4g}") for name, x in entries.items()} for group, entries in ratios.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"setting": setting, "ratios": rounded}, indent=2) + "\n")
