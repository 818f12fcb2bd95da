# SPDX-License-Identifier: Apache-2.0
"""Draw a CSV of `leap-kernels bench` or benchmarks/gpu_check.sh: the roofline, and times beside the baselines.

    python benchmarks/plot.py benchmarks/results/gpu_check-nvidia-h200.csv [--out FILE.png]

The roofline is made of the ceilings that were measured in the same run and stand in the CSV. Bytes and operations are
those counted for the op (docs/benchmarks.md), the same for every contender.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, str]
OWN = "leap_kernels"


def read(file: Path) -> list[Row]:
    """The rows that have a roofline to stand under."""
    with file.open(newline="") as source:
        return [row for row in csv.DictReader(source) if row["percent_of_roofline"]]


def label(row: Row) -> str:
    return f"{row['op']} {row['shape']}"


def draw(rows: list[Row]) -> Any:
    """A figure: left the rooflines with one point a row, right the times of each op and shape."""
    if not rows:
        raise SystemExit("no row with bytes and ceilings in this file: nothing to draw")
    if len({row["gpu"] for row in rows}) > 1:
        raise SystemExit("rows of several devices in this file: their rooflines are not one")
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["op"], row["shape"], row["how"]].append(row)
    bars = sum(len(group) + 1 for group in groups.values())
    figure, (roof, times) = plt.subplots(1, 2, figsize=(16, max(6, 0.22 * bars)), layout="constrained")
    _roofline(roof, rows)
    _times(times, groups)
    simulated = any(row["simulated"] not in ("", "0") for row in rows)
    figure.suptitle(
        f"{rows[0]['gpu']}, torch {rows[0]['torch']}, triton {rows[0]['triton']}, commit {rows[0]['commit']}"
        + " - DRY RUN, no measurement" * simulated
    )
    return figure


def _roofline(axes: Any, rows: list[Row]) -> None:
    """TFLOP/s over operations a byte; ops without floating-point operations have no place here."""
    counted = [row for row in rows if float(row["flops"]) > 0]
    intensity = [float(row["flops"]) / float(row["bytes"]) for row in counted] or [1.0]
    low, high = min(intensity) / 4, max(intensity) * 4
    for copy, product in sorted({(float(row["copy_gb_s"]), float(row["matmul_tflop_s"])) for row in rows}):
        ridge = 1e3 * product / copy
        x = sorted({low, high, *([ridge] if low < ridge < high else [])})
        axes.plot(x, [min(product, copy * i / 1e3) for i in x], color="black", lw=1)
        axes.annotate(f"{copy:,.0f} GB/s copy, {product:,.3g} TFLOP/s matmul", (x[0], copy * x[0] / 1e3), fontsize=8)
    for own, marker, color, name in ((True, "o", "tab:blue", OWN), (False, "x", "tab:gray", "others")):
        of = [(i, row) for i, row in zip(intensity, counted, strict=False) if (row["what"] == OWN) == own]
        axes.scatter(
            [i for i, _ in of], [float(row["tflop_s"]) for _, row in of], marker=marker, color=color, label=name
        )
    axes.set(xscale="log", yscale="log", xlabel="operations / byte", ylabel="TFLOP/s", title="roofline")
    axes.legend()


def _times(axes: Any, groups: dict[tuple[str, str, str], list[Row]]) -> None:
    """Median with p20 and p80, and the share of the roofline; one block an op, shape and way of timing."""
    at, ticks = 0, []
    for (op, shape, how), rows in groups.items():
        ticks.append((at, f"{op} ({how}) {shape}"))
        for row in rows:
            at += 1
            median, p20, p80 = (float(row[name]) for name in ("median_us", "p20_us", "p80_us"))
            errors = [[max(0.0, median - p20)], [max(0.0, p80 - median)]]
            axes.barh(at, median, xerr=errors, color="tab:blue" if row["what"] == OWN else "lightgray")
            ticks.append((at, row["what"]))
            axes.text(
                median, at, f"  {median:,.4g} us, {float(row['percent_of_roofline']):.3g} %", va="center", fontsize=7
            )
        at += 2
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=7)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="us, and % of the roofline", title="median, p20 to p80")
    axes.margins(x=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, help="picture to write (default: the CSV's name with .png)")
    args = parser.parse_args()
    out = args.out or args.csv.with_suffix(".png")
    draw(read(args.csv)).savefig(out, dpi=130)
    print(f"written: {out}")


if __name__ == "__main__":
    main()
