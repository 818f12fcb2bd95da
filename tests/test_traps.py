# SPDX-License-Identifier: Apache-2.0
"""Traps of transformers 5 that have no other test: each would give other logits, or random weights, without a word."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write
from plain import Plain
from random_models import random_llama
from torch import nn

import leap_kernels
from leap_kernels import ModelSpec, Rows, attention, decode
from leap_kernels.errors import ModelError
from leap_kernels.models.registry import REGISTRY

SPEC = ModelSpec(mask_token_id=0, vocab_size=23)
IDS = torch.tensor([[5, 6, 7, 0, 8, 0, 9]])
REPEATED = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])


def test_the_name_of_the_backend_is_none_that_transformers_reads_something_into() -> None:
    """It looks for "flash", "sdpa" and "flex_attention" in names, and takes "owner/name" for a kernel to download."""
    from transformers import AttentionInterface, AttentionMaskInterface

    attention.register()
    assert not re.search(r"flash|sdpa|flex|eager|/|\|", attention.NAME)
    for interface in (AttentionInterface, AttentionMaskInterface):
        assert attention.NAME in interface()
    model = random_llama()
    model.set_attn_implementation(attention.NAME)
    assert model.config._attn_implementation == attention.NAME


def test_repeated_positions_without_a_mask_are_not_packed_sequences(tmp_path: Path) -> None:
    """transformers takes 0 1 2 0 1 2 3 for two sequences, where a model is causal and there is no mask."""
    folder = write(tmp_path, "LLaDA")
    model, plain = leap_kernels.load(folder, dtype="float64"), Plain.from_folder(folder, torch.float64)
    with torch.inference_mode():
        logits = model(IDS, position_ids=REPEATED).logits
        rows = Rows.plain(IDS, model.leap_spec)
        rows.pos = REPEATED.int()
        with_rows = model(rows.token, position_ids=rows.pos, leap=rows).logits
    truth = plain(IDS, REPEATED, None)
    assert (logits - truth).abs().max() < 1e-5
    assert (with_rows - truth).abs().max() < 1e-5


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("where", ["nowhere", "modules", "config"])
def test_wherever_a_model_says_that_it_is_not_causal_decode_sees_everything(where: str, padded: bool) -> None:
    """With is_causal=False on the modules alone, stock attention is causal again as soon as there is padding."""
    model, truth = random_llama(3), random_llama(3)
    for module in model.modules():
        if where == "modules" and hasattr(module, "is_causal"):
            module.is_causal = False
    if where == "config":
        model.config.is_causal = False
    prompts = [torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10])] if padded else [torch.tensor([5, 6, 7, 8])]

    def slow(input_ids: Any, position_ids: Any, attention_mask: Any) -> Any:
        return truth(input_ids, position_ids=position_ids, attention_mask=attention_mask, is_causal=False).logits

    options: dict[str, Any] = {"spec": SPEC, "max_new_tokens": 9, "block_length": 3, "tau": 0.1, "threshold": 0.5}
    expected = decode(slow, prompts, **options)
    out = decode(model, prompts, **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(out.nfe, expected.nfe)


def test_code_that_asks_no_interface_for_its_attention_is_refused() -> None:
    """set_attn_implementation is a warning and no more on files that do not call get_interface."""
    model = random_llama()
    kind = type(model)
    model.__class__ = type(
        "OtherForCausalLM", (kind,), {"_can_set_attn_implementation": classmethod(lambda cls: False)}
    )
    with pytest.raises(ModelError, match="OtherForCausalLM does not use transformers' attention interface"):
        decode(model, IDS, spec=SPEC)


def test_patterns_of_names_are_anchored_and_have_one_group() -> None:
    """transformers fills in the first group only, and leaves \\2 as text; an unanchored ff_out matches two weights."""
    for entry in REGISTRY.values():
        for pattern, name in entry.names.items():
            assert pattern.startswith("^"), pattern
            assert re.compile(pattern).groups <= 1, pattern
            assert not re.search(r"\\[2-9]", name), name


@pytest.mark.parametrize("family", FAMILIES)
def test_each_weight_of_a_file_matches_one_pattern_at_most(tmp_path: Path, family: str) -> None:
    from checkpoints import stored_weights

    entry = REGISTRY[FAMILIES[family]["architectures"][0]]
    for key in stored_weights(write(tmp_path, family)):
        assert sum(bool(re.search(pattern, key)) for pattern in entry.names) <= 1, key


def test_decode_hands_over_no_cache_under_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument is past_key_values in some releases and cache in others; we pass neither, and use_cache=False."""
    model, seen = random_llama(), []
    forward = model.model.forward

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(options)
        return forward(*args, **options)

    spy.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(model.model, "forward", spy)
    decode(model, IDS[:, :3], spec=SPEC, max_new_tokens=4, block_length=2, cache="prefix")
    assert seen
    for options in seen:
        assert not {"past_key_values", "cache"} & options.keys()
        assert options["use_cache"] is False


def test_tables_and_modules_of_a_model_survive_a_decode(tmp_path: Path) -> None:
    """Float32 tables in a half-precision LLaDA, and no forward of ours left on a stock model."""
    model = leap_kernels.load(write(tmp_path, "LLaDA"), dtype="bfloat16")
    decode(model, torch.tensor([[5, 6]]), max_new_tokens=4, block_length=2)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    stock = random_llama()
    decode(stock, IDS[:, :3], spec=ModelSpec(mask_token_id=0, rope_fp32=True), max_new_tokens=4, block_length=2)
    assert all("forward" not in vars(module) for module in stock.modules() if isinstance(module, nn.Module))
