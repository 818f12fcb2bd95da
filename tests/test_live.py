# SPDX-License-Identifier: Apache-2.0
"""Live objects of the authors' classes: the stock model shares their memory, gives their logits, changes nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from live_models import live
from random_models import plain_forward
from torch import nn

import leap_kernels
from leap_kernels import decode
from leap_kernels.errors import InputError, ModelError
from leap_kernels.models.live import adopted

FAMILIES = ("LLaDA", "Dream", "SDAR", "Fast-dLLM")
VARIANTS = [
    ("LLaDA", {"n_kv_heads": 2}),
    ("LLaDA", {"weight_tying": True}),
    ("LLaDA", {"rope_theta": 10000.0}),
    ("Dream", {"tie_word_embeddings": True}),
    ("SDAR", {"head_dim": 8}),
]
IDS = torch.tensor([[5, 6, 7, 43, 43, 8, 43], [9, 43, 11, 43, 43, 12, 13]])


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize(("family", "changes"), [*((f, {}) for f in FAMILIES), *VARIANTS], ids=str)
def test_same_memory_same_logits(family, changes, fused):
    model = live(family, fused=fused, **changes)
    stock = adopted(model)
    assert type(stock).__module__.startswith("transformers.")
    spans = [(p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in model.parameters()]
    for name, parameter in stock.named_parameters():
        assert any(start <= parameter.data_ptr() < stop for start, stop in spans), name
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {p.untyped_storage().data_ptr() for p in stock.parameters()} == storages
    with torch.no_grad():
        theirs = model(IDS, use_cache=False).logits
    position_ids = torch.arange(7)[None].expand(2, -1)
    ours = plain_forward(stock)(IDS, position_ids, torch.ones(2, 1, 7, 7, dtype=torch.bool))
    assert (ours - theirs).abs().max() <= 1e-5
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_transformers_own_class_says_the_same(family):
    """As objects of hub code have it; it keeps and renames keys of its own."""
    from transformers import PretrainedConfig

    model = live(family)
    raw = {k: v for k, v in vars(model.config).items() if k not in ("architectures", "model_type", "torch_dtype")}
    with_class = live(family)
    with_class.config = PretrainedConfig(**raw)
    one, other = adopted(model), adopted(with_class)
    assert one.leap_spec == other.leap_spec
    for key in ("rope_parameters", "rms_norm_eps", "num_key_value_heads", "mask_token_id", "eos_token_id"):
        assert getattr(one.config, key) == getattr(other.config, key), key
    assert torch.equal(one(IDS).logits, other(IDS).logits)


def test_rotation_in_bfloat16_is_llada_s():
    """Its own code rotates in float32; without that rule logits differ by some 0.05."""
    model = live("LLaDA", torch_dtype="bfloat16").to(torch.bfloat16)
    rows = leap_kernels.Rows.plain(IDS)
    out = {}

    def look(spec):
        from leap_kernels.models.backbone import backbone_for

        with backbone_for(adopted(model), spec) as backbone, torch.inference_mode():
            return backbone.head(backbone.body(rows)).float()

    import dataclasses

    spec = adopted(model).leap_spec
    assert spec.rope_fp32
    for fp32 in (True, False):
        out[fp32] = (look(dataclasses.replace(spec, rope_fp32=fp32)) - model(IDS, use_cache=False).logits.float()).abs()
    assert out[True].mean() < 0.5 * out[False].mean()


def snapshot(model) -> tuple:
    """All that could be changed in a model: attributes, parameters by identity and value, hooks."""
    modules = [(name, sorted(vars(m)), len(m._forward_hooks)) for name, m in model.named_modules()]
    parameters = [(name, id(p), p.data_ptr(), p.requires_grad, p.tolist()) for name, p in model.named_parameters()]
    return modules, parameters, dict(vars(model.config)), model.training


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", ["leap", "threshold"])
def test_decode_gives_the_tokens_of_the_objects_own_forward(family, fused, strategy):
    """Compared with a decode through the object's forward, as far as that goes (LLaDA's takes no positions)."""
    model = live(family, fused=fused)
    before = snapshot(model)
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([9, 11, 12, 13, 14, 15])]
    spec = adopted(model).leap_spec
    options = {"max_new_tokens": 16, "block_length": 4, "strategy": strategy, "threshold": 0.4, "early_stop": False}
    if family == "LLaDA":
        options["strategy"] = "threshold"
        for prompt in prompts:
            out = decode(model, prompt, **options)
            own = decode(lambda input_ids: model(input_ids, use_cache=False), prompt, spec=spec, **options)
            assert torch.equal(out.sequences, own.sequences)
            assert torch.equal(out.nfe, own.nfe)
    else:

        def own_forward(input_ids, position_ids, attention_mask):
            return model(input_ids, attention_mask, position_ids)

        out, own = decode(model, prompts, **options), decode(own_forward, prompts, spec=spec, **options)
        assert torch.equal(out.sequences, own.sequences)
        assert torch.equal(out.nfe, own.nfe)
    assert snapshot(model) == before


def test_leap_and_caches_run_on_a_live_llada():
    """What its own forward could not do. The same as with the checkpoint loaded from disk is tested by equal logits."""
    model = live("LLaDA")
    options = {"max_new_tokens": 16, "block_length": 4, "early_stop": False}
    ids = torch.tensor([[5, 6, 7]])
    plain = decode(model, ids, strategy="leap", threshold=0.4, tau=0.2, **options)
    assert torch.equal(
        decode(adopted(model), ids, strategy="leap", threshold=0.4, tau=0.2, **options).sequences, plain.sequences
    )
    assert decode(model, ids, cache="dual", **options).token_forwards < plain.token_forwards


def test_what_is_done_to_the_object_shows_in_the_next_decode():
    """The stock model is made once; and again when a weight was replaced, moved or converted."""
    for fused in (False, True):
        model = live("Dream", fused=fused)
        first = adopted(model)
        assert adopted(model) is first
        with torch.no_grad():
            model.lm_head.weight.mul_(2)  # in place
        assert adopted(model) is first
        assert torch.equal(first.lm_head.weight, model.lm_head.weight)
        model.double()
        assert adopted(model).dtype == torch.float64
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        again = adopted(model)
        storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
        assert {p.untyped_storage().data_ptr() for p in again.parameters()} == storages
        theirs = model(IDS).logits
        position_ids = torch.arange(7)[None].expand(2, -1)
        ours = plain_forward(again)(IDS, position_ids, torch.ones(2, 1, 7, 7, dtype=torch.bool))
        assert (ours - theirs).abs().max() <= 1e-5
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None, "decoding keeps the object alive"


def test_training_mode_and_a_spec_of_ones_own():
    model = live("Dream")
    model.train()
    with pytest.raises(ModelError, match="training mode"):
        decode(model, torch.tensor([[5]]), max_new_tokens=4)
    model.eval()
    assert decode(model, torch.tensor([[5]]), max_new_tokens=4).sequences.shape == (1, 5)
    spec = leap_kernels.ModelSpec(mask_token_id=42, vocab_size=48)
    model.leap_spec = spec
    assert adopted(model).leap_spec is spec
    with pytest.raises(InputError, match="the model has 64"):
        decode(model, torch.tensor([[5]]), max_new_tokens=80)


@pytest.mark.parametrize("name", ["LLaDAMoEModelLM", "LLaDA2MoeModelLM", "SDARMoeForCausalLM"])
def test_experts_kept_apart_are_refused(name):
    model = type(name, (nn.Module,), {})()
    with pytest.raises(ModelError, match=r"each expert apart.*leap_kernels.load\(path\)"):
        decode(model, torch.tensor([[5]]), max_new_tokens=4)


def test_objects_that_are_not_what_they_claim_are_refused():
    ids = torch.tensor([[5]])

    def refused(model, message):
        with pytest.raises(ModelError, match=message):
            decode(model, ids, max_new_tokens=4)

    model = live("Dream")
    del model.model.layers[1].mlp.up_proj
    refused(model, r"'missing': \['model.layers.1.mlp.up_proj.weight'\]")
    model = live("Dream")
    model.model.extra = nn.Linear(3, 3)
    refused(model, r"'unexpected': \['model.extra.bias', 'model.extra.weight'\]")
    model = live("Dream")
    model.config.intermediate_size = 81
    refused(model, r"'other shapes': .*mlp.down_proj.weight")
    model = live("LLaDA")
    del model.config.d_model
    refused(model, "the config of this LLaDAModelLM has no 'd_model'")
    model = live("LLaDA")
    model.config.block_type = "sequential"
    refused(model, "not Llama-shaped: {'block_type': 'sequential'}")
    model = live("LLaDA")
    del model.config
    refused(model, "has no config")
    model = live("Dream")
    model.lm_head.register_forward_hook(lambda *args: None)
    refused(model, "DreamModel.lm_head has hooks")
    model = live("Dream")
    adapter = nn.Module()
    adapter.base_layer = model.lm_head
    model.lm_head = adapter
    refused(model, r"adapter's layer \(Module\). Call merge_and_unload")
    model = live("Dream")
    model.lm_head.weight = nn.Parameter(torch.zeros(48, 32, dtype=torch.int8), requires_grad=False)
    refused(model, "DreamModel.lm_head has quantised weights")
    refused(live("Dream").to("meta"), "meta device")


def test_stock_models_and_callables_stay_what_they_are(tiny):
    assert adopted(tiny) is tiny
    assert adopted(test_stock_models_and_callables_stay_what_they_are) is not None
    linear = nn.Linear(2, 2)
    assert adopted(linear) is linear


def test_a_changed_config_is_not_overlooked():
    """As a changed weight is not: the second call gives what a fresh object with that config gives."""
    ids = torch.tensor([[5, 6, 7, 8]])
    model, changed = live("Dream"), live("Dream")
    before = decode(model, ids, max_new_tokens=12).sequences
    for one in (model, changed):
        one.config.rope_theta = 7.0
    after = decode(model, ids, max_new_tokens=12).sequences
    assert torch.equal(after, decode(changed, ids, max_new_tokens=12).sequences)
    assert not torch.equal(after, before)
