# SPDX-License-Identifier: Apache-2.0
"""`python python/examples/fill_antibodies.py`: on random weights in the wheel's layout, and on the wheel's own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

PROGRAM = Path(__file__).parents[1] / "python/examples/fill_antibodies.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fill_antibodies", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two narrow layers, with the further heads and config keys that the wheel's has."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIKLMNPQRSTVWY"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForMaskedLM(config)
    inner = tmp_path / "AntiBERTy_md_smooth"
    inner.mkdir()
    weights = {**model.state_dict(), "cls.species.weight": torch.zeros(6, 16)}
    torch.save(weights, inner / "pytorch_model.bin")
    (inner / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["A"], "num_species": 6}))
    return tmp_path


def test_every_mask_is_filled_and_counted(program, folder, capsys):
    rows = program.main(["--folder", str(folder), "--shares", "0.2", "0.4", "--seeds", "1"])
    assert [(row["masked"], row["strategy"]) for row in rows] == [
        (s, n) for s in (0.2, 0.4) for n in program.STRATEGIES
    ]
    for row in rows:
        masks = sum(round(row["masked"] * len(chain)) for chain in program.CHAINS.values())
        assert row["of"] == masks
        assert row["forwards"] * len(program.CHAINS) * row["residues a forward"] == pytest.approx(masks)
        if row["strategy"] == "one by one":
            assert row["residues a forward"] == 1
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


def test_foreign_weights_are_refused(program, folder):
    torch.save({}, folder / "AntiBERTy_md_smooth/pytorch_model.bin")
    with pytest.raises(SystemExit, match="not AntiBERTy's"):
        program.main(["--folder", str(folder)])


@pytest.mark.download
def test_the_published_model_recovers_most_residues(program):
    """LEAP and the threshold rule as often as one by one, within two points, in a third of the forwards."""
    rows = {row["strategy"]: row for row in program.main(["--shares", "0.5", "--seeds", "1"])}
    slow = rows["one by one"]
    assert slow["recovered"] > 0.8
    for name in ("threshold 0.9", "leap"):
        assert abs(rows[name]["recovered"] - slow["recovered"]) < 0.02
        assert rows[name]["forwards"] < slow["forwards"] / 3 + 1
    assert rows["leap"]["forwards"] < rows["threshold 0.9"]["forwards"]
