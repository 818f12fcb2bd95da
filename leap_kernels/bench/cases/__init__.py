# SPDX-License-Identifier: Apache-2.0
"""The table of what is checked and timed: adding an op is a file here and a name in this list."""

from __future__ import annotations

from . import check_consistency, row_kl, sample_rows, superpose, superposed_attention, top_eta
from .case import Baseline, Case, Cost, Inputs, Shape

__all__ = ["CASES", "Baseline", "Case", "Cost", "Inputs", "Shape"]

CASES: dict[str, Case] = {
    module.CASE.op: module.CASE
    for module in (top_eta, superpose, superposed_attention, check_consistency, row_kl, sample_rows)
}
