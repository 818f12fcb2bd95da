# SPDX-License-Identifier: Apache-2.0
"""What `decode` refuses, before the first forward, and what it says then."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from random_models import SPEC, random_llama

from leap_kernels import DecodeConfig, ModelSpec, Strategy, decode
from leap_kernels.errors import BackendError, ConfigError, InputError, LeapError, ModelError
from leap_kernels.strategies import BaseRule, Decision, Dream, Leap, Threshold

IDS = torch.tensor([[5, 6, 7]])


def never(input_ids, position_ids, attention_mask):
    raise AssertionError("a forward ran although the input is bad")


def refused(error, match, *args, model=never, spec=SPEC, **options):
    with pytest.raises(error, match=match):
        decode(model, *(args or (IDS,)), spec=spec, **options)


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        (
            "max_new_tokens",
            [0, -1, 2.5, True, "8", [4, 0], [True], None],
            "max_new_tokens must be a whole number of at least 1, or one a sample, got",
        ),
        ("top_p", [-0.1, 1.1, "1", float("nan")], "top_p must be a number in"),
        ("top_k", [0, -1, 2.5, True], "top_k must be a whole number of at least 1, or None, got"),
        ("block_length", [0, -32, 1.5, True], "block_length must be a whole number of at least 1, or None, got"),
        ("strategy", ["magic", 7], "strategy must be one of full, threshold, .*leap.* or a Strategy object, got"),
        ("cache", ["paged", None], "cache must be one of none, prefix, dual, delayed, block, got"),
        ("temperature", [-0.1, float("nan"), float("inf"), "hot"], r"temperature must be a number in \[0, 1e\+06\]"),
        ("seed", [1.5, "a", [0, 1.5]], "seed must be a whole number, or one a sample"),
        ("eta", [0.0, 1 / 65, 1.01, float("nan"), "x"], r"eta must be a number in \[0.015625, 1\], got"),
        ("tau", [-0.1, 1.1, float("nan")], r"tau must be a number in \[0, 1\], got"),
        ("threshold", [-0.1, 1.1, float("nan")], r"threshold must be a number in \[0, 1\], got"),
        ("copy_threshold", [2], r"copy_threshold must be a number in \[0, 1\], got"),
        ("suppress_tokens", [[-1], [1.5], 3.0], "suppress_tokens must be token ids of at least 0"),
        ("eos_token_id", [-1, ["a"]], "eos_token_id must be token ids of at least 0"),
    ],
)
def test_settings_out_of_range(name, values, match):
    for value in values:
        refused(ConfigError, match, **{name: value})


def test_unknown_backends_and_backends_that_cannot_run():
    refused(ConfigError, "backend must be one of auto, reference, triton, cuda", backend="cublas")
    refused(BackendError, "optional CUDA extension", backend="cuda")
    refused(BackendError, r'backend="triton" needs a CUDA GPU.*TRITON_INTERPRET=1.*Use backend=', backend="triton")


def test_unknown_arguments_are_refused_by_name():
    refused(ConfigError, "unknown argument steps for strategy 'leap'", steps=4)
    refused(
        ConfigError,
        "unknown argument tau for strategy 'threshold', which has the options edit_forwards, edit_threshold, parity, t",
        strategy="threshold",
        tau=0.5,
    )
    refused(
        ConfigError,
        "unknown argument threshold for strategy 'full', which has the options defer_tokens, parity, remasking, steps",
        strategy="full",
        threshold=0.5,
    )
    refused(ConfigError, "return_token_type_ids=False", token_type_ids=torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (torch.tensor([[5.0]]), "input_ids.dtype must be int64, got torch.float32"),
        (torch.tensor([[True]]), "input_ids.dtype must be int64, got torch.bool"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), r"input_ids.shape must be \(B, P\)"),
        (torch.zeros(0, 3, dtype=torch.int64), r"input_ids.shape must be \(B, P\) with B >= 1"),
        (torch.tensor(5), r"input_ids.shape must be \(B, P\)"),
        ([], "input_ids must be at least one prompt, got an empty list"),
        ("a text", "input_ids must be a tensor or a list of 1-D tensors, got str. Tokenize"),
        (None, "input_ids must be a tensor or a list of 1-D tensors, got NoneType"),
        ([[5, 6]], r"input_ids\[0\] must be a 1-D int64 tensor, got list"),
        ([torch.tensor([5]), torch.tensor([0.5])], r"input_ids\[1\] must be a 1-D int64 tensor"),
        (torch.tensor([[5, 23]]), r"ids of sample 0 must be in \[0, 23\), got values from 5 to 23"),
        (torch.tensor([[5, 6], [-1, 6]]), r"ids of sample 1 must be in \[0, 23\), got values from -1"),
    ],
)
def test_prompts_that_are_none(ids, match):
    refused(InputError, match, ids)


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (torch.ones(1, 4, dtype=torch.int64), r"attention_mask.shape must be that of input_ids \(1, 3\), got \(1, 4\)"),
        (torch.ones(3, dtype=torch.int64), "attention_mask.shape"),
        ([1, 1, 1], "attention_mask.shape must be that of input_ids .* got list"),
        (torch.tensor([[1, 2, 1]]), "attention_mask must be 1 on tokens and 0 on padding"),
        (torch.tensor([[1.0, 0.5, 1.0]]), "attention_mask must be 1 on tokens and 0 on padding"),
        (torch.tensor([[1, 0, 1]]), "attention_mask of sample 0 has padding on both sides or inside"),
        (torch.tensor([[0, 1, 0]]), "attention_mask of sample 0 has padding on both sides or inside"),
    ],
)
def test_attention_masks_that_are_none(mask, match):
    refused(InputError, match, IDS, mask)


def test_a_list_takes_no_attention_mask():
    refused(InputError, "a list of prompts needs none", [IDS[0]], torch.ones(1, 3))


def test_devices_must_agree():
    model = random_llama().to("meta")
    refused(InputError, r"input_ids are on cpu, the model is on meta. Move them", model=model)


def test_position_limit():
    spec = ModelSpec(mask_token_id=0, max_positions=10, vocab_size=23)
    refused(InputError, "sample 1 needs 3 . max_new_tokens 8 = 11 positions, the model has 10",
            [IDS[0, :2], IDS[0]], spec=spec, max_new_tokens=8)  # fmt: skip


def test_seeds_and_suppressed_ids_must_fit():
    refused(InputError, "one for each of the 1 samples, got 2 numbers", seed=[1, 2])
    refused(InputError, r"suppress_tokens must be in \[0, 23\)", suppress_tokens=[23])


def test_models_without_a_mask_token():
    refused(ModelError, "no mask token known for function: leap_kernels decodes masked-diffusion", spec=None)
    refused(ModelError, "no mask token known for LlamaForCausalLM", model=random_llama(), spec=None)
    out = decode(random_llama(), IDS, mask_token_id=0, max_new_tokens=2)
    assert not (out.sequences == 0).any()


def test_specs_that_contradict_themselves():
    for options, match in [
        ({"mask_token_id": -1}, "mask_token_id must be in"),
        ({"mask_token_id": 30, "vocab_size": 23}, r"mask_token_id must be in \[0, 23\), got 30"),
        ({"mask_token_id": 3, "eos_token_ids": (3,)}, "mask_token_id 3 is also the pad or an EOS id"),
        ({"mask_token_id": 3, "pad_token_id": 3}, "mask_token_id 3 is also the pad or an EOS id"),
        ({"mask_token_id": 3, "eos_token_ids": (99,), "vocab_size": 23}, r"eos_token_ids\[0\] must be in"),
        ({"mask_token_id": 3, "shift": 2}, "shift must be 0 or 1"),
        ({"mask_token_id": 3, "block_causal_length": -4}, "block_causal_length must be at least 0"),
    ]:
        with pytest.raises(ModelError, match=match):
            ModelSpec(**options)


def test_blocks_must_divide_block_causal_ones():
    spec = ModelSpec(mask_token_id=0, block_causal_length=8, vocab_size=23)
    refused(ConfigError, "block_length 3 must divide the model's block-causal length 8", spec=spec, block_length=3)


def test_things_that_are_no_model():
    refused(
        ModelError, "model must be a transformers model or a callable .* got str", model="GSAI-ML/LLaDA-8B-Instruct"
    )
    headless = random_llama().model
    refused(ModelError, "has no language-model head", model=headless)
    training = random_llama().train()
    refused(ModelError, "training mode.*Call model.eval", model=training, max_new_tokens=4)
    refused(ModelError, "no model", model=max)


class Wrapper(torch.nn.Module):
    """What people put around a model: forwards the call, and attributes it does not have."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, position_ids, attention_mask):
        return self.inner(input_ids, position_ids=position_ids, attention_mask=attention_mask).logits


def test_wrapped_models():
    inner = random_llama(4)
    options = {"spec": SPEC, "max_new_tokens": 6, "block_length": 3}
    expected = decode(inner, IDS, **options)
    assert torch.equal(decode(Wrapper(inner).eval(), IDS, **options).sequences, expected.sequences)
    refused(ModelError, "training mode", model=Wrapper(inner).train())
    inner.eval().set_attn_implementation("eager")
    refused(ModelError, "eager attention.*set_attn_implementation", model=Wrapper(inner).eval())

    peft = Wrapper(inner).eval()
    peft.get_base_model = lambda: inner
    assert torch.equal(decode(peft, IDS, **options).sequences, expected.sequences)


@pytest.mark.parametrize(("setting", "value"), [("logits_scaling", 8.0), ("logit_scale", 0.25)])
def test_models_whose_head_alone_is_not_their_logits(setting, value):
    model = random_llama()
    setattr(model.config, setting, value)
    refused(ModelError, f"computes its logits with {setting} of its config", model=model)


def test_masked_lms_with_layers_before_their_output_embeddings():
    """Of those that the table of checkpoints does not know; it says what the head of the others is made of."""
    from transformers import ElectraConfig, ElectraForMaskedLM

    config = ElectraConfig(
        vocab_size=23, hidden_size=16, embedding_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    refused(ModelError, "layers before its output embeddings", model=ElectraForMaskedLM(config).eval())


def test_limits_of_the_model_hold_without_a_full_spec():
    model, bare = random_llama(), ModelSpec(mask_token_id=0)
    refused(InputError, "positions, the model has 128", model=model, spec=bare, max_new_tokens=126)
    refused(InputError, r"ids of sample 0 must be in \[0, 23\)", torch.tensor([[5, 400]]), model=model, spec=bare)
    for spec in (ModelSpec(mask_token_id=30), ModelSpec(mask_token_id=30, vocab_size=50)):
        refused(ModelError, r"mask_token_id must be in \[0, 23\), got 30", model=model, spec=spec)
    refused(ModelError, r"pad_token_id must be in \[0, 23\)", model=model, spec=bare, pad_token_id=99)


def flat(width):
    return lambda input_ids, position_ids, attention_mask: torch.zeros(*input_ids.shape, width)


def test_callables_are_checked_at_their_first_logits():
    for spec, options, match in [
        (ModelSpec(mask_token_id=7), {}, r"mask_token_id must be in \[0, 5\), the width of the logits, got 7"),
        (ModelSpec(mask_token_id=0, eos_token_ids=(9,)), {}, r"eos_token_ids must be in \[0, 5\)"),
        (ModelSpec(mask_token_id=0), {"suppress_tokens": [6]}, r"suppress_tokens must be in \[0, 5\)"),
    ]:
        refused(ModelError, match, torch.tensor([[1]]), model=flat(5), spec=spec, max_new_tokens=2, **options)
    for out, match in [(torch.zeros(1, 1, 5), r"got \(1, 1, 5\)"), ((1, 2), "got tuple"), (None, "got NoneType")]:
        refused(ModelError, f"the model's logits must be a tensor of shape \\(1, 5, V\\), {match}",
                model=lambda input_ids, position_ids, attention_mask, out=out: out, max_new_tokens=2)  # fmt: skip


def test_a_callable_without_positions_takes_no_padding():
    def columns(input_ids, attention_mask):
        return torch.zeros(*input_ids.shape, 23)

    options = {"spec": SPEC, "strategy": "full", "max_new_tokens": 2}
    refused(ModelError, "takes no position_ids", [IDS[0], IDS[0, :1]], model=columns, **options)
    assert decode(columns, IDS, **options).nfe[0] == 2


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"spec": {"mask_token_id": 0}}, ModelError, "spec must be a ModelSpec, got"),
        ({"observers": [3]}, InputError, "observers must be callables"),
        ({"observers": 3}, InputError, "observers must be callables"),
        ({"suppress_tokens": None}, ConfigError, "suppress_tokens must be token ids"),
        ({"suppress_tokens": 5}, ConfigError, "suppress_tokens must be token ids"),
        ({"mask_token_id": [3]}, ConfigError, "mask_token_id must be a token id"),
        ({"cache": ["none"]}, ConfigError, "cache must be one of"),
        ({"strategy": ["leap"]}, ConfigError, "strategy must be one of"),
        ({"seed": 2**63}, ConfigError, "seed must be a whole number"),
        ({"early_stop": "no"}, ConfigError, "early_stop must be True or False"),
        ({"temperature": True}, ConfigError, "temperature must be a number"),
        ({"keep_confident": "no"}, ConfigError, "keep_confident must be True or False"),
        ({"require_lookahead": 1}, ConfigError, "require_lookahead must be True or False"),
        ({"copies_see_copies": 2}, ConfigError, "copies_see_copies must be True or False"),
    ],
)
def test_wrong_types_are_named(options, error, match):
    refused(error, match, **options)


def test_misspelt_recommendations_are_found():
    spec = ModelSpec(mask_token_id=0, vocab_size=23, defaults={"treshold": 0.5})
    refused(ConfigError, "recommends settings that nobody knows: treshold", spec=spec)


def test_settings_cannot_change_once_they_are_checked():
    ids = [1]
    config = DecodeConfig(suppress_tokens=ids, seed=[1, 2], eos_token_id=[3])
    ids[0] = -7
    assert config.suppress_tokens == (1,)
    assert config == DecodeConfig(suppress_tokens=(1,), seed=(1, 2), eos_token_id=(3,))
    assert len({config, DecodeConfig(suppress_tokens=(1,), seed=(1, 2), eos_token_id=(3,))}) == 1
    assert hash(ModelSpec(mask_token_id=0, defaults={"tau": 0.5})) is not None


def test_a_mask_of_zeros_is_not_taken_for_a_batch_of_empty_prompts():
    refused(InputError, "0 everywhere", IDS, torch.zeros_like(IDS))


def test_a_callable_without_masks_runs_everything_but_leap():
    inner = random_llama(4)

    def plain(input_ids):
        with torch.inference_mode():
            return inner(input_ids, attention_mask=torch.ones(1, 1, *[input_ids.shape[1]] * 2, dtype=torch.bool)).logits

    refused(ModelError, "strategy 'leap' needs a model that takes position_ids and a 4-D attention_mask", model=plain)
    options = {"spec": SPEC, "max_new_tokens": 6, "block_length": 3}
    for strategy in ("full", "threshold"):
        a = decode(plain, IDS, strategy=strategy, **options)
        b = decode(inner, IDS, strategy=strategy, **options)
        assert torch.equal(a.sequences, b.sequences)
    with pytest.raises(ModelError, match="takes no attention_mask"):
        decode(plain, [IDS[0], IDS[0, :1]], strategy="full", **options)


@pytest.mark.parametrize(
    ("strategy", "options", "match"),
    [
        ("full", {"steps": 0}, "steps must be a whole number of at least 1, or None, got 0"),
        ("full", {"steps": True}, "steps must be a whole number"),
        ("full", {"steps": 7, "max_new_tokens": 8, "block_length": 3}, "steps must be a multiple of the 3 blocks"),
        ("full", {"remasking": "worst"}, "remasking must be one of low_confidence, random, got 'worst'"),
        ("full", {"defer_tokens": 5}, "defer_tokens must be token ids of at least 0, got 5"),
        ("full", {"defer_tokens": (-1,)}, "defer_tokens must be token ids"),
        ("full", {"parity": "klass"}, "parity must be one of None, llada, got 'klass'"),
        ("threshold", {"steps": 8}, "unknown argument steps for strategy 'threshold'"),
        ("threshold", {"parity": "llada"}, "parity must be one of None, fast_dllm, got 'llada'"),
        ("factor", {"factor": -0.1}, r"factor must be a number in \[0, 1e\+06\], got -0.1"),
        (
            "factor",
            {"threshold": 0.9},
            "unknown argument threshold for strategy 'factor', which has the options factor",
        ),
        ("entropy", {"gamma": float("nan")}, r"gamma must be a number in \[0, 1e\+06\], got nan"),
        ("entropy_threshold", {"threshold": "low"}, r"threshold must be a number in \[0, 1e\+06\], got 'low'"),
        ("klass", {"history": 0}, "history must be a whole number of at least 1, got 0"),
        ("klass", {"select": "best"}, "select must be one of all, confident, kl, random"),
        ("klass", {"conf_threshold": 2}, r"conf_threshold must be a number in \[0, 1\], got 2"),
        ("klass", {"kl_threshold": -1}, r"kl_threshold must be a number in \[0, 1e\+06\], got -1"),
        ("prophet", {"answer_start": -1}, "answer_start must be a whole number of at least 0, or None"),
        (
            "prophet",
            {"answer_start": 4, "max_new_tokens": 8},
            "answer_start must be at most max_new_tokens 8 - window 5",
        ),
        ("prophet", {"limits": (1, 2)}, r"limits must be three numbers, got \(1, 2\)"),
        ("prophet", {"limits": (1, 2, float("nan"))}, "limits must be three numbers"),
        ("prophet", {"constraints": {"3": 4}}, "constraints must be a dictionary from generated index to token id"),
        ("prophet", {"constraints": [3]}, "constraints must be a dictionary"),
        (
            "prophet",
            {"constraints": {300: 4}},
            "constraints must be fewer than max_new_tokens 256, at indices below it",
        ),
        ("prophet", {"constraints": {3: 0}}, "not the mask token"),
        ("prophet", {"constraints": {3: 23}}, "ids of the vocabulary"),
        ("prophet", {"window": 4, "parity": "prophet"}, 'window must be the 5 of parity="prophet"'),
        ("prophet", {"spec": ModelSpec(mask_token_id=0, block_causal_length=32)}, "which block-causal models do not"),
        ("credit", {"beta": 1.5}, r"beta must be a number in \[0, 1\], got 1.5"),
        ("dream", {"alg": "random"}, "alg must be one of origin, maskgit_plus, topk_margin, entropy, got 'random'"),
        ("dream", {"eps": 1.0}, "eps must be a number in"),
        ("dream", {"alg_temp": -1}, "alg_temp must be a number in"),
        ("wino", {"threshold_back": 2}, "threshold_back must be a number in"),
        ("wino", {"spec": ModelSpec(mask_token_id=0, shift=1)}, "'wino' does not run on models with shifted logits"),
        ("lopa", {"branches": 0}, "branches must be a whole number of at least 1"),
        ("lopa", {"alpha": 1.5}, "alpha must be a number in"),
        (
            "lopa",
            {"confidence": "entropy"},
            "confidence must be one of probability, margin, neg_entropy, got 'entropy'",
        ),
        ("lopa", {"spec": ModelSpec(mask_token_id=0, block_causal_length=32)}, "does not run on models that are block"),
        ("credit", {"steps": 3}, "unknown argument steps for strategy 'credit'"),
        ("leap", {"base": "full"}, "base must be one of threshold, factor, entropy, entropy_threshold, or an object"),
        ("leap", {"base": "entropy", "threshold": 0.5}, 'threshold belongs to base="threshold"'),
        ("leap", {"parity": "llada"}, "unknown argument parity for strategy 'leap'"),
    ],
)
def test_options_of_strategies(strategy, options, match):
    refused(ConfigError, match, strategy=strategy, **options)


def test_a_strategy_that_breaks_its_own_bound():
    class Slow(Strategy):
        def max_forwards(self, canvas):
            return 2

        def accept(self, stats, view, state):
            return Decision(stats.top1, torch.where(view.targets == view.targets[:, :1], 3, 0))

    options = {"spec": SPEC, "strategy": Slow()}
    assert decode(random_llama(), IDS, max_new_tokens=2, **options).nfe.tolist() == [2]
    with pytest.raises(LeapError, match="strategy 'custom' needs more than the 2 forwards it promised"):
        decode(random_llama(), IDS, max_new_tokens=3, **options)


def test_strategies_that_do_nothing():
    class Lazy(Strategy):
        def accept(self, stats, view, state):
            return Decision(stats.top1, torch.zeros_like(view.targets))

    class Unfinished(Strategy):
        pass

    class HalfARule(BaseRule):
        pass

    options = {"spec": SPEC, "max_new_tokens": 2}
    with pytest.raises(LeapError, match="strategy 'custom' committed no token of sample 0 at step 1"):
        decode(random_llama(), IDS, strategy=Lazy(), **options)

    class Foreign(Strategy):
        def __init__(self, token):
            self.token = token

        def accept(self, stats, view, state):
            return Decision(torch.full_like(stats.top1, self.token), (view.targets >= 0).long())

    class Stateful(Foreign):
        def start(self, canvas):
            return {}

    for token in (-1, 23):
        with pytest.raises(LeapError, match="committed a token outside the vocabulary of 23"):
            decode(random_llama(), IDS, strategy=Foreign(token), **options)
    assert decode(random_llama(), IDS, strategy=Foreign(7), **options).generated.tolist() == [[7, 7]]
    with pytest.raises(LeapError, match=r"start\(\) of strategy 'custom' must be an object with select"):
        decode(random_llama(), IDS, strategy=Stateful(7), **options)
    with pytest.raises(TypeError, match="Unfinished is a Strategy without an accept"):
        decode(random_llama(), IDS, strategy=Unfinished(), **options)
    with pytest.raises(TypeError, match="HalfARule is a BaseRule without a qualifies"):
        decode(random_llama(), IDS, strategy=HalfARule(), **options)


def test_configs_are_checked_when_made_and_keywords_win():
    with pytest.raises(ConfigError, match="block_length"):
        DecodeConfig(block_length=0)
    refused(ConfigError, "config must be a DecodeConfig, got dict", config={"block_length": 4})
    config = DecodeConfig(max_new_tokens=5, block_length=2, strategy=Threshold(0.6))
    assert decode(random_llama(), IDS, spec=SPEC, config=config).generated.shape == (1, 5)
    assert decode(random_llama(), IDS, spec=SPEC, config=config, max_new_tokens=3).generated.shape == (1, 3)
    with pytest.raises(ConfigError, match="unknown argument tau"):
        decode(random_llama(), IDS, spec=SPEC, config=config, tau=0.5)


def test_recommended_settings_count_unless_a_config_is_given():
    spec = ModelSpec(mask_token_id=0, vocab_size=23, defaults={"max_new_tokens": 4, "tau": 0.5})
    assert decode(random_llama(), IDS, spec=spec).generated.shape == (1, 4)
    assert decode(random_llama(), IDS, spec=spec, max_new_tokens=3).generated.shape == (1, 3)
    assert decode(random_llama(), IDS, spec=spec, config=DecodeConfig(max_new_tokens=6)).generated.shape == (1, 6)


def test_recommended_options_of_another_strategy_do_not_get_in_the_way():
    """A checkpoint that recommends a tau for LEAP can still be decoded by threshold."""
    spec = ModelSpec(mask_token_id=0, vocab_size=23, defaults={"max_new_tokens": 4, "tau": 0.5})
    assert decode(random_llama(), IDS, spec=spec, strategy="threshold").generated.shape == (1, 4)
    assert decode(random_llama(), IDS, spec=spec, strategy=Leap(tau=0.6)).generated.shape == (1, 4)


def test_one_dimensional_prompts_and_int32():
    a = decode(random_llama(), IDS[0], spec=SPEC, max_new_tokens=4)
    b = decode(random_llama(), IDS.int(), torch.ones_like(IDS), spec=SPEC, max_new_tokens=4)
    c = decode(random_llama(), IDS[0], torch.ones(3), spec=SPEC, max_new_tokens=4)
    assert torch.equal(a.sequences, b.sequences)
    assert torch.equal(a.sequences, c.sequences)


def test_an_empty_prompt_is_legal():
    for ids in (torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)):
        out = decode(random_llama(), ids, spec=SPEC, max_new_tokens=5, block_length=2)
        assert out.sequences.shape == (1, 5)


def test_strategies_that_know_no_blocks_take_the_whole_canvas_unless_told_otherwise():
    model, options = random_llama(), {"spec": dataclasses.replace(SPEC, defaults={"block_length": 2}), "steps": 1}
    for given in ({"strategy": "dream"}, {"strategy": "dream", "block_length": None}, {"strategy": Dream(steps=1)}):
        given = options | given if isinstance(given["strategy"], str) else {"spec": SPEC} | given
        assert decode(model, IDS, max_new_tokens=40, early_stop=False, **given).nfe.tolist() == [1]
    ragged = decode(model, [IDS[0], IDS[0]], max_new_tokens=[3, 40], early_stop=False, strategy="dream", **options)
    assert ragged.nfe.tolist() == [1, 1]
    refused(ConfigError, "steps must be a multiple of the 2 blocks", model=model, strategy="dream", block_length=20,
            max_new_tokens=40, steps=1)  # fmt: skip
    config = DecodeConfig(max_new_tokens=40, block_length=20, strategy=Dream(steps=2), early_stop=False)
    assert decode(model, IDS, spec=SPEC, config=config).nfe.tolist() == [2]
    whole = DecodeConfig(max_new_tokens=40, strategy=Dream(steps=1), early_stop=False)
    assert decode(model, IDS, spec=SPEC, config=whole).nfe.tolist() == [1]


def test_a_block_far_longer_than_the_canvas_costs_nothing():
    options = {"spec": SPEC, "max_new_tokens": 6}
    for strategy in ("leap", "klass", "credit", "lopa", "wino"):
        a, b = (
            decode(random_llama(), torch.tensor([[5, 6]]), strategy=strategy, block_length=n, **options)
            for n in (6, 10**12)
        )
        assert torch.equal(a.sequences, b.sequences)
        assert torch.equal(a.history.step, b.history.step)


def test_empty_lists_of_settings():
    for strategy in ("leap", "dream"):
        refused(ConfigError, "max_new_tokens must be", max_new_tokens=[], strategy=strategy)
    refused(ConfigError, "seed must be", seed=[])


def test_dream_takes_the_models_block_where_a_canvas_cannot_be_one():
    spec = ModelSpec(mask_token_id=0, vocab_size=23, block_causal_length=4, defaults={"block_length": 4})
    model = random_llama()
    options = {"spec": spec, "strategy": "dream", "max_new_tokens": 8, "seed": 3}
    a, b = (decode(model, torch.tensor([[5, 6]]), **options, **more) for more in ({}, {"block_length": 4}))
    assert torch.equal(a.sequences, b.sequences)
