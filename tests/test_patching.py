# SPDX-License-Identifier: Apache-2.0
"""`patch`: the authors' own forwards with rows of ours, per object, reversible, one thread not noticing another."""

from __future__ import annotations

import doctest
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from live_models import LLaDAModelLM, live
from torch import nn

from leap_kernels import ModelSpec, Rows, decode, ops, patch
from leap_kernels.errors import InputError, ModelError
from leap_kernels.models.live import adopted

KINDS = [
    ("LLaDA", "hub"),
    ("LLaDA", "fast"),
    ("Dream", "hub"),
    ("Dream", "fast"),
    ("Dream", "eager"),
    ("LLaDA2", "hub"),
]
IDS = torch.tensor([[5, 6, 7, 43, 43, 8, 43], [9, 43, 11, 43, 43, 12, 13]])


def plain(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def superposed(spec: ModelSpec, padding: bool = False) -> Rows:
    """Lookahead rows of IDS with two candidates a masked position."""
    masked = IDS == 43
    logits = torch.randn(int(masked.sum()), 48, generator=torch.Generator().manual_seed(1)) * 3
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]) if padding else None
    return Rows.superpose(IDS, masked, ops.top_eta(logits, 0.1, suppress=[43]), spec, attention_mask=mask)


def stock_logits(model, rows):
    """The same rows through the stock class on the same weights, by transformers' own forward."""
    stock = adopted(model)
    with torch.no_grad():
        return stock(rows.token, position_ids=rows.pos, leap=rows, use_cache=False).logits


@pytest.mark.parametrize("padding", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(("family", "flavour"), KINDS)
def test_rows_give_what_the_stock_class_gives(family, flavour, padding):
    model = live(family, flavour=flavour, **({"n_kv_heads": 2} if family == "LLaDA" else {}))
    twin = live("SDAR") if family == "LLaDA2" else model  # the same weights in a class that can be adopted
    rows = superposed(ModelSpec(mask_token_id=43), padding)
    with patch(model) as patched, torch.no_grad():
        logits = patched(rows)
        by_arguments = patched(rows.token, position_ids=rows.pos, attention_mask=rows.dense_mask)
    real = rows.kind >= 0
    assert rows.base < rows.token.shape[1]
    assert bool(real.all()) != padding
    expected = stock_logits(twin, rows)
    assert (logits - expected)[real].abs().max() <= 1e-5
    assert (by_arguments - expected)[real].abs().max() <= 1e-5
    assert logits.isfinite().all()
    base, copies = rows.split(logits)
    assert base.shape == (2, 7, 48)
    assert copies.shape == (6, 48)
    if not padding:
        assert (base - plain(model)).abs().max() <= 1e-5


@pytest.mark.parametrize(("family", "flavour"), KINDS)
@pytest.mark.parametrize("strategy", ["leap", "threshold"])
def test_decode_runs_on_the_authors_forward(family, flavour, strategy):
    """Ragged prompts and LEAP, on code that takes neither positions nor masks: the tokens of the stock class."""
    model = live(family, flavour=flavour)
    twin = live("SDAR") if family == "LLaDA2" else model
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([9, 11, 12, 13, 14, 15])]
    options = {"max_new_tokens": 16, "block_length": 4, "strategy": strategy, "threshold": 0.4, "early_stop": False}
    with patch(model) as patched:
        out = decode(patched, prompts, **options)
    expected = decode(twin, prompts, **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(out.nfe, expected.nfe)
    assert torch.equal(out.token_forwards, expected.token_forwards)


def state(model):
    return [(name, sorted(vars(module))) for name, module in model.named_modules()]


@pytest.mark.parametrize(("family", "flavour"), KINDS)
def test_the_model_is_itself_inside_and_afterwards(family, flavour):
    """Bit for bit, and attribute for attribute; another object of the class is never touched."""
    model, other = live(family, flavour=flavour), live(family, flavour=flavour, seed=1)
    before, logits, logits_of_other = state(model), plain(model), plain(other)
    with patch(model) as patched:
        if family != "LLaDA2":
            assert state(model) != before
        assert state(other) == state(live(family, flavour=flavour))
        patched(superposed(ModelSpec(mask_token_id=43)))
        assert torch.equal(plain(model), logits)
        assert torch.equal(plain(other), logits_of_other)
    assert state(model) == before
    assert torch.equal(plain(model), logits)
    with pytest.raises(KeyError), patch(model):
        raise KeyError
    assert state(model) == before
    with pytest.raises(InputError, match="this patch is over"):
        patched(IDS)


def test_llada_s_own_cache_works_inside():
    """Fast-dLLM's loops on a patched model: keys are cached before they are rotated."""
    model = live("LLaDA", flavour="fast")
    with patch(model), torch.no_grad():
        whole = model(IDS, use_cache=True)
        past = [(k[:, :, :4], v[:, :, :4]) for k, v in whole.past_key_values]
        rest = model(IDS[:, 4:], past_key_values=past, use_cache=False).logits
    assert (rest - whole.logits[:, 4:]).abs().max() <= 1e-5
    assert torch.equal(rest, model(IDS[:, 4:], past_key_values=past, use_cache=False).logits)


def test_what_stood_on_the_object_comes_back():
    """A method that somebody bound on the object before, and one bound while the patch is in place."""
    model = live("LLaDA")
    block, calls = model.model.transformer["blocks"][0], []
    own = block._scaled_dot_product_attention

    def counting(*args, **options):
        calls.append(1)
        return own(*args, **options)

    block._scaled_dot_product_attention = counting
    with patch(model) as patched:
        patched(Rows.plain(IDS))
        calls.clear()
        plain(model)
        assert calls == [1]
    assert vars(block)["_scaled_dot_product_attention"] is counting
    rotary = block.rotary_emb
    with patch(model):
        inner = rotary.forward
        rotary.forward = lambda *args: inner(*args)
        theirs = rotary.forward
    assert rotary.forward is theirs
    assert torch.equal(plain(model), plain(live("LLaDA")))


@pytest.mark.parametrize("family", ["LLaDA", "Dream"])
def test_threads(family):
    """Two threads patch one object and leave at different times, a third uses it as it is."""
    model = live(family, flavour="fast")
    before, logits = state(model), plain(model)
    rows = [superposed(ModelSpec(mask_token_id=43)), Rows.plain(IDS.flip(1))]
    expected = [stock_logits(model, r) for r in rows]
    gate, done = threading.Barrier(3), threading.Event()

    def patcher(which, times):
        gate.wait()
        try:
            for _ in range(times):
                with patch(model) as patched, torch.no_grad():
                    for _ in range(5):
                        assert (patched(rows[which]) - expected[which]).abs().max() <= 1e-5
        finally:
            done.set()

    def bystander():
        gate.wait()
        while not done.is_set():
            assert torch.equal(plain(model), logits)

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(patcher, 0, 12), pool.submit(patcher, 1, 7), pool.submit(bystander)]
    for future in futures:
        future.result()
    assert state(model) == before


def test_two_patches_of_one_object_are_one():
    model = live("LLaDA")
    before = state(model)
    with patch(model) as outer:
        with patch(model) as inner:
            assert torch.equal(inner(Rows.plain(IDS)), outer(Rows.plain(IDS)))
        assert (outer(superposed(ModelSpec(mask_token_id=43)))[:, :7] - plain(model)).abs().max() <= 1e-5
    assert state(model) == before


def refused(model, message, error=ModelError):
    before = state(model)
    with pytest.raises(error, match=message), patch(model):
        raise AssertionError("nothing of the body may run")
    assert state(model) == before


def test_unknown_classes_are_refused(tiny):
    refused(nn.Linear(2, 2), "patch knows no seams in Linear. It knows LLaDAModelLM, DreamModel, LLaDA2MoeModelLM")
    refused(tiny, "patch knows no seams in LlamaForCausalLM")
    refused(type("LLaDAMoEModelLM", (nn.Module,), {})(), "refuses 4-D masks")
    refused(live("SDAR"), "decode.model, ids. uses SDAR's weights")
    refused(live("Dream").train(), "training mode")


def test_objects_that_do_not_react_as_their_class_are_refused():
    """A class of the right name is no proof: the probe finds forwards that drop masks or make up positions."""
    model = live("Dream")
    for layer in model.model.layers:
        layer.self_attn.attend = lambda q, k, v, mask, a=layer.self_attn: type(a).attend(a, q, k, v, None)
    refused(model, r"does not react as its class should: .*the mask is not used")

    model = live("LLaDA2", flavour="fast")  # keeps counting positions itself
    refused(model, r"a copy of a token differs from the token \(positions or masks are not used\)")

    model = live("LLaDA")
    model.config.rope_theta = 10000.0  # of the tables that the model does not use: its own were made before
    for block in model.model.transformer["blocks"]:
        block.rotary_emb.config = SimpleNamespace(rope_theta=500000.0)
    refused(model, "its plain forward gives other logits")

    model = live("LLaDA")
    for block in model.model.transformer["blocks"]:
        del block.rotary_emb
    refused(model, "has no rotary_emb")
    refused(
        LLaDAModelLM(SimpleNamespace(**{**vars(model.config), "n_layers": 0}), "hub", False).eval(), "none of the meth"
    )


def test_a_table_that_is_not_initialised_is_refused():
    model = live("Dream")
    model.model.rotary_emb.inv_freq = torch.full((4,), 3.0e-12)
    refused(model, r"DreamModel's RoPE table does not match rope_theta \(known under transformers 5\)")
    model = live("Dream").bfloat16()
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    with patch(model) as patched:
        assert patched(IDS).dtype == torch.bfloat16


def test_wrong_arguments_are_refused():
    model = live("LLaDA")
    with patch(model) as patched:
        with pytest.raises(InputError, match=r"attention_mask must be a \(B, 1, R, R\) bool tensor"):
            patched(IDS, attention_mask=torch.ones_like(IDS))
        past, whole = [(torch.zeros(2, 4, 4, 8), torch.zeros(2, 4, 4, 8))] * 2, model.forward
        model.forward = lambda ids, use_cache=False: whole(ids, past_key_values=past, use_cache=False)
        with pytest.raises(InputError, match="7 queries and 11 keys in a forward of 7 rows"):
            patched(IDS)


def test_documented_example():
    result = doctest.testmod(importlib.import_module("leap_kernels.patching"))
    assert result.attempted >= 2
    assert result.failed == 0
