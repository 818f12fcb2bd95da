# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/wall_time.py` at small sizes: equal work is timed, figures are what was measured; no time is judged."""

from __future__ import annotations

import csv

import pytest
import torch
import wall_time

SMALL = ["--vocab", "300", "--layers", "1", "--hidden", "32", "--canvas", "24", "--new", "6", "--problems", "1",
         "--threads", "1"]  # fmt: skip


def test_all_decode_alike_and_every_figure_is_written(capsys, tmp_path):
    file = tmp_path / "out" / "wall.csv"
    assert wall_time.main([*SMALL, "--runs", "3", "--csv", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("tokens and forwards equal") == 2
    rows = list(csv.DictReader(file.open()))
    assert [(row["model"], row["contender"]) for row in rows] == [
        (model, name) for model in ("random weights", "bundled") for name in wall_time.CONTENDERS
    ]
    for row in rows:
        runs = sorted(map(float, row["runs_s"].split()))
        assert len(runs) == 3
        assert float(row["median_s"]) == pytest.approx(runs[1], abs=1e-4)
        assert int(row["forwards"]) > 0
        assert row["vocab"] == "300"
        assert row["torch"] == torch.__version__


def test_a_contender_that_decodes_otherwise_fails_the_program(monkeypatch, capsys):
    def hasty(work, prompt):
        tokens, nfe = wall_time.plain(work, prompt, sliced=True)
        return tokens, nfe - 1

    monkeypatch.setitem(wall_time.CONTENDERS, "plain", hasty)
    assert wall_time.main([*SMALL, "--runs", "1"]) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_ratios_are_those_of_the_medians(monkeypatch, capsys, tmp_path):
    seconds = {"leap_kernels": [2.0, 9.0, 1.0], "plain": [9.0, 8.0, 1.0], "plain, rows sliced": [1.8, 1.9, 99.0]}
    monkeypatch.setattr(wall_time, "measure", lambda work, runs: (seconds, 10, True))
    file = tmp_path / "wall.csv"
    assert wall_time.main([*SMALL, "--csv", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "random weights: 4.00 times as fast as plain, aim 4.0: reached" in printed
    assert "bundled: 0.95 times as fast as plain, rows sliced, aim 0.95: reached" in printed
    assert "200.00 ms a forward" in printed
    assert [row["ratio"] for row in csv.DictReader(file.open())][:3] == ["1.0", "4.0", "0.95"]


def test_the_plain_decoder_on_a_model_whose_tokens_are_known():
    """Block 32, prompt 3, 40 new tokens; sure of everything in the first block, and then of one token a forward."""

    class Head(torch.nn.Module):
        def forward(self, hidden):
            return hidden.clone()

    class Body(torch.nn.Module):
        def forward(self, input_ids, **_):
            logits = torch.zeros(1, input_ids.shape[1], 9)
            logits[0, :35, 5] = 20.0
            logits[0, 35:, 4] = torch.arange(1, input_ids.shape[1] - 34) / 10
            self.last_hidden_state = logits
            return self

    class Model:
        model, lm_head = Body(), Head()

    spec = wall_time.ModelSpec(mask_token_id=8, eos_token_ids=(4,), vocab_size=9)
    work = wall_time.Work("", Model, spec, [], 40)
    for sliced in (False, True):
        tokens, nfe = wall_time.plain(work, torch.tensor([1, 2, 3]), sliced=sliced)
        assert tokens == [5] * 32 + [4]
        assert nfe == 1 + 8
