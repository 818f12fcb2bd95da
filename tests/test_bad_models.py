# SPDX-License-Identifier: Apache-2.0
"""Models and checkpoints that cannot be decoded, or not as they are given: refused before the first forward."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import edit_config, stored_weights
from families import FAMILIES, MASKED_LMS, write
from random_models import SPEC, random_llama
from torch import nn

import leap_kernels
from leap_kernels import ModelSpec, decode
from leap_kernels.errors import CheckpointError, ModelError

IDS = torch.tensor([[5, 6, 7]])
EVERY = {**FAMILIES, **MASKED_LMS}


def refused(model: Any, match: str, **options: Any) -> None:
    """ModelError with this text, and no layer of the model has run."""
    ran: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _: ran.append(type(module).__name__))
        for module in (model.modules() if isinstance(model, nn.Module) else ())
    ]
    with pytest.raises(ModelError, match=match):
        decode(model, IDS, **options)
    for hook in hooks:
        hook.remove()
    assert ran == []


# --- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", EVERY)
def test_weights_of_another_architecture_are_refused(tmp_path: Path, config: str) -> None:
    """Every config over the weights of the next family in the list: an error that names both, and no model."""
    names = list(EVERY)
    other = names[(names.index(config) + 1) % len(names)]
    folder, foreign = write(tmp_path / "case", config), write(tmp_path / "other", other)
    shutil.copy(foreign / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        leap_kernels.load(folder)
    assert str(folder) in str(caught.value)
    assert any(what in str(caught.value) for what in ("missing", "unexpected", "misshapen", "mismatched"))


CONTRADICTIONS: list[tuple[str, dict[str, Any]]] = [
    *((family, {"vocab_size": 50}) for family in EVERY if family != "LLaDA"),
    *((family, {"vocab_size": 46}) for family in EVERY if family != "LLaDA"),
    *((family, {"num_hidden_layers": 4}) for family in EVERY if family != "LLaDA"),
    *((family, {"num_hidden_layers": 1, "moe_layer_freq": [1]}) for family in EVERY if family != "LLaDA"),
    *((family, {"num_attention_heads": 8}) for family in ("LLaDA-MoE", "LLaDA2", "SDAR", "SDAR-MoE")),
    *((family, {"num_key_value_heads": 1}) for family in ("Dream", "LLaDA2", "SDAR", "SDAR-MoE", "Fast-dLLM")),
    *((family, {"head_dim": 8}) for family in ("LLaDA2", "SDAR", "SDAR-MoE")),
    *((family, {"num_experts": 12}) for family in ("LLaDA-MoE", "LLaDA2", "SDAR-MoE")),
    *((family, {"tie_word_embeddings": True}) for family in FAMILIES if family != "LLaDA"),
    ("LLaDA-MoE", {"moe_layer_freq": [1, 1, 1]}),
    ("LLaDA2", {"first_k_dense_replace": 0}),
    ("LLaDA2", {"num_shared_experts": 2}),
    ("RoBERTa", {"max_position_embeddings": 64}),
    ("BERT", {"type_vocab_size": 3}),
    ("ESM", {"position_embedding_type": "absolute"}),
    ("ModernBERT", {"decoder_bias": False}),
]


@pytest.mark.parametrize(("family", "changes"), CONTRADICTIONS, ids=lambda value: str(value))
def test_a_config_that_contradicts_the_weights_is_refused(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Vocabulary, layers, heads, experts, tied heads: changed behind the weights' back."""
    folder = write(tmp_path, family)
    edit_config(folder, **{key: value for key, value in changes.items() if key in EVERY[family]})
    with pytest.raises(CheckpointError) as caught:
        leap_kernels.load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("family", "key"), [("SDAR", "block_size"), ("LLaDA2", "block_size"), ("Fast-dLLM", "bd_size")]
)
@pytest.mark.parametrize("size", [0, -4, "4", 4.0, True])
def test_a_block_size_that_is_none_is_refused(tmp_path: Path, family: str, key: str, size: Any) -> None:
    """0 would make it another model without a word."""
    with pytest.raises(CheckpointError, match=f"{key} in config.json must be a whole number of at least 1"):
        leap_kernels.load(write(tmp_path, family, **{key: size}))


@pytest.mark.parametrize("family", ["SDAR-MoE", "BERT"])
def test_pickle_files_are_refused(tmp_path: Path, family: str) -> None:
    folder = write(tmp_path, family)
    torch.save(stored_weights(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"only pickle files \(pytorch_model.bin\).*save_pretrained"):
        leap_kernels.load(folder)


@pytest.mark.parametrize("key", ["logits_shift", "block_causal_length"])
def test_a_masked_qwen3_must_say_how_its_rows_are_meant(tmp_path: Path, key: str) -> None:
    """Nothing in the weights tells; both keys are in what save_pretrained writes."""
    leap_kernels.load(write(tmp_path / "first", "SDAR")).save_pretrained(tmp_path / "second")
    assert key in json.loads((tmp_path / "second/config.json").read_text())
    edit_config(tmp_path / "second", **{key: ...})
    with pytest.raises(ModelError, match=f"masked Qwen3ForCausalLM declares no {key}"):
        leap_kernels.load(tmp_path / "second")


# --- a spec that contradicts the model ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "spec", "match"),
    [
        ("Dream", {"shift": 0}, "spec.shift is 0, but Qwen2ForCausalLM says 1"),
        ("LLaDA", {"shift": 1}, "spec.shift is 1, but LlamaForCausalLM says 0"),
        ("Fast-dLLM", {"shift": 0}, "spec.shift is 0, but Qwen2ForCausalLM says 1"),
        ("Fast-dLLM", {"block_causal_length": 0}, "spec.block_causal_length is 0, but Qwen2ForCausalLM says 8"),
        ("LLaDA", {"block_causal_length": 32}, "spec.block_causal_length is 32, but LlamaForCausalLM says 0"),
        ("RoBERTa", {"position_offset": 0}, "spec.position_offset is 0, but RobertaForMaskedLM says 2"),
    ],
)
@pytest.mark.parametrize("live", [False, True], ids=["loaded", "live"])
def test_a_spec_that_reads_other_rows_than_the_model_means_is_refused(
    tmp_path: Path, family: str, spec: dict[str, int], match: str, live: bool
) -> None:
    """By the ModelSpec that `load` attached, or by the config of a model that transformers itself loaded."""
    model = leap_kernels.load(write(tmp_path, family))
    right = model.leap_spec
    if live:
        model.save_pretrained(tmp_path / "saved")
        model = type(model).from_pretrained(tmp_path / "saved").eval()
    wrong = dataclasses.replace(right, defaults={}, **spec)
    refused(model, match + ": its predictions would be read from wrong rows", spec=wrong)
    same = decode(model, torch.full((1, 4), 43), spec=dataclasses.replace(right, eos_token_ids=()), infill=True)
    assert not (same.sequences == 43).any()


def test_a_spec_may_name_another_block_size() -> None:
    """Variants of SDAR share their config but for it."""
    model = random_llama()
    model.leap_spec = ModelSpec(mask_token_id=0, block_causal_length=4, vocab_size=23)
    spec = dataclasses.replace(model.leap_spec, block_causal_length=16)
    assert decode(model, IDS, spec=spec, block_length=16, max_new_tokens=5).generated.shape == (1, 5)


# --- objects -------------------------------------------------------------------------------------------------------


def test_a_model_that_takes_no_positions_is_refused() -> None:
    """BLOOM's ALiBi counts rows; appended ones would stand at wrong places."""
    config = transformers.BloomConfig(vocab_size=23, hidden_size=16, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM(config).eval()
    refused(model, "BloomForCausalLM takes no position_ids.*callable", spec=SPEC)


@pytest.mark.parametrize("value", [0.0, 1e30, float("nan")])
def test_a_rope_table_that_is_not_its_configs_is_refused(value: float) -> None:
    """What code for transformers 4 leaves behind under 5: uninitialised memory, and wrong logits without a word."""
    model = random_llama()
    decode(model, IDS, spec=SPEC, max_new_tokens=2)
    model.model.rotary_emb.inv_freq[2] = value
    refused(model, "LlamaForCausalLM's RoPE table does not match rope_theta.*reset_rope_parameters", spec=SPEC)


def test_rounded_and_scaled_rope_tables_are_not_taken_for_broken_ones() -> None:
    """bfloat16 keeps 8 bits (and is repaired with a warning); other kinds of RoPE have other formulas."""
    model = random_llama().to(torch.bfloat16)
    with pytest.warns(UserWarning, match="inv_freq"):
        decode(model, IDS, spec=SPEC, max_new_tokens=2)
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=128, rope_parameters=rope,
    )  # fmt: skip
    decode(transformers.LlamaForCausalLM(config).eval(), IDS, spec=SPEC, max_new_tokens=2)
