# SPDX-License-Identifier: Apache-2.0
"""`python/cache_table.py`: counts are those of single decodes, and the page shows what the CSV holds."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from leap_kernels import decode
from leap_kernels.models.tiny import is_right, problems

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cache_table", ROOT / "python/cache_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_means_of_single_decodes(program, tiny, tiny_tokenizer, capsys, tmp_path):
    file = tmp_path / "caches.csv"
    assert program.main(["--only", "leap dual", "--problems", "2", "--csv", str(file), "--threads", "1"]) == 0
    rows = list(csv.DictReader(file.open()))
    assert [(r["cache"], r["family"]) for r in rows] == [
        (cache, family) for cache in ("none", "dual") for family in ("story", "code", "bill", "all")
    ]
    own = problems("code")[:2]
    for row in rows:
        if row["family"] != "code":
            continue
        outs = [
            decode(tiny, torch.tensor(tiny_tokenizer(problem.prompt)["input_ids"]), cache=row["cache"])
            for problem in own
        ]
        assert float(row["nfe"]) == sum(int(out.nfe) for out in outs) / 2
        assert float(row["token_forwards"]) == sum(int(out.token_forwards) for out in outs) / 2
        right = [is_right(problem, out.text(tiny_tokenizer)[0]) for problem, out in zip(own, outs, strict=True)]
        assert int(row["right"]) == sum(right)
    assert capsys.readouterr().out.rstrip().endswith(program.markdown(rows))


def test_the_table_compares_with_no_cache(program):
    common = {"strategy": "leap", "block": "32", "family": "all", "problems": "4"}
    rows = [
        {**common, "cache": "none", "refresh": "", "right": "4", "gained": "0", "lost": "0", "nfe": "8.0",
         "token_forwards": "1000", "appended": "100"},
        {**common, "cache": "dual", "refresh": "2", "right": "3", "gained": "1", "lost": "2", "nfe": "10.0",
         "token_forwards": "500.0", "appended": "125"},
    ]  # fmt: skip
    assert program.markdown(rows).splitlines()[2:] == [
        "| 32 | leap | none | 4/4 |  | 8.00 | 1.00 | 1000 | 1.00 | 10% |",
        "| 32 | leap | dual, refresh 2 | 3/4 | 1, 2 | 10.00 | 1.25 | 500 | 0.50 | 25% |",
    ]


def test_the_page_shows_the_stored_results(program):
    rows = list(csv.DictReader(program.RESULTS.open()))
    assert program.markdown(rows) in (ROOT / "docs/caches.md").read_text()
    assert {(r["strategy"], r["cache"]) for r in rows} >= {
        (s, c) for s in program.STRATEGIES for c, _ in program.CACHES
    }
