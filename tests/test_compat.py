# SPDX-License-Identifier: Apache-2.0
"""Drop-in functions give what the public ones gave, and refuse what they cannot do."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import itertools
import types

import plain_decoders
import pytest
import torch
from plain_decoders import Sample
from random_models import SPEC, plain_forward, random_llama

from leap_kernels import compat, decode
from leap_kernels.errors import ConfigError, InputError, ModelError
from leap_kernels.strategies import Full

FAST = (
    compat.fast_dllm.generate, compat.fast_dllm.generate_with_prefix_cache, compat.fast_dllm.generate_with_dual_cache
)  # fmt: skip
LENGTHS = {"gen_length": 64, "block_length": 32, "mask_id": 1}
RUNS = {
    "full": (compat.fast_dllm.generate, {"steps": 64}),
    "threshold_0.9": (compat.fast_dllm.generate, {"threshold": 0.9}),
    "threshold_0.6": (compat.fast_dllm.generate, {"threshold": 0.6}),
    "prefix_0.9": (compat.fast_dllm.generate_with_prefix_cache, {"threshold": 0.9}),
    "dual_0.9": (compat.fast_dllm.generate_with_dual_cache, {"threshold": 0.9}),
}


@pytest.fixture(scope="module")
def model():
    """A random model that declares its ids."""
    model = random_llama(3, sharpness=6.0)
    model.leap_spec = SPEC
    return model


@pytest.mark.parametrize("name", RUNS)
def test_fast_dllm_gives_what_the_public_code_gave(tiny_v0, parity, name):
    function, options = RUNS[name]
    for case in parity:
        prompt = torch.tensor([case["prompt_ids"]])
        x, nfe = function(tiny_v0, prompt, **LENGTHS, **options)
        assert x[0].tolist() == case["prompt_ids"] + case["runs"][name]["ids"]
        assert nfe == case["runs"][name]["nfe"]
        assert type(nfe) is int


def test_llada_gives_what_the_public_code_gave(tiny_v0, parity):
    """Alone, and as one batch padded on the left."""
    theirs = [case["runs"]["full"]["ids"] for case in parity]
    for case, ids in zip(parity[:4], theirs, strict=False):
        x = compat.llada.generate(tiny_v0, torch.tensor([case["prompt_ids"]]), steps=64, **LENGTHS)
        assert x[0].tolist() == case["prompt_ids"] + ids
    width = max(len(case["prompt_ids"]) for case in parity)
    assert width > min(len(case["prompt_ids"]) for case in parity)
    rows = [[0] * (width - len(case["prompt_ids"])) + case["prompt_ids"] for case in parity]
    mask = torch.tensor([[0] * (width - len(case["prompt_ids"])) + [1] * len(case["prompt_ids"]) for case in parity])
    x = compat.llada.generate(tiny_v0, torch.tensor(rows), mask, steps=64, **LENGTHS)
    assert x[:, width:].tolist() == theirs
    assert x[:, :width].tolist() == rows


def test_signatures_are_the_public_ones():
    """Names, order and defaults; both repositories call these positionally."""
    shared = "steps=128, gen_length=128, block_length=128, temperature=0.0, "
    tail = "remasking='low_confidence', mask_id=126336, threshold=None, factor=None"
    for function in FAST:
        assert plain(function) == "model, prompt, " + shared + tail
    assert plain(compat.llada.generate) == (
        f"model, prompt, attention_mask=None, {shared}cfg_scale=0.0, remasking='low_confidence', mask_id=126336, "
        "logits_eos_inf=False, confidence_eos_eot_inf=False"
    )


def plain(function) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


@pytest.mark.parametrize("function", FAST)
@pytest.mark.parametrize("rule", [{"threshold": 0.3}, {"factor": 1.5}, {"steps": 6}], ids=str)
def test_the_forwards_of_a_batch_are_those_of_its_slowest_sample(model, function, rule):
    """Block by block: the public loop leaves a block when no sample has a mask in it, and with a cache after two
    forwards at the earliest. Each sample alone is watched forward by forward."""
    prompts = torch.arange(3, 21).view(6, 3)
    together, nfe = function(model, prompts, **{"steps": 12, **rule}, gen_length=12, block_length=4, mask_id=0)
    cache = {FAST[0]: "none", FAST[1]: "prefix", FAST[2]: "dual"}[function]
    settings = (
        {"strategy": Full(6)} if "steps" in rule else {"parity": "fast_dllm", "strategy": next(iter(rule)), **rule}
    )
    slowest = [1 if cache == "none" else 2] * 3
    for i in range(6):
        blocks = []
        alone = decode(
            model, prompts[i], observers=[lambda event, blocks=blocks: blocks.append(event.index[0] // 4)],
            early_stop=False, max_new_tokens=12, block_length=4, cache=cache, **settings,
        )  # fmt: skip
        assert torch.equal(alone.sequences[0], together[i])
        slowest = [max(most, blocks.count(block)) for block, most in enumerate(slowest)]
    assert nfe == sum(slowest)


def test_nothing_stops_at_an_eos(model):
    """Behind an EOS (here every token but one) stand predictions, and no padding."""
    flood = torch.nn.Module()
    flood.forward = lambda ids: torch.eye(23)[torch.where(ids == 0, 1, ids)] * 9  # masks are predicted to be EOS
    x, nfe = compat.fast_dllm.generate(flood.eval(), torch.tensor([[5, 6]]), 8, 8, 4, mask_id=0)
    assert x.tolist() == [[5, 6] + [1] * 8]
    assert nfe == 8


def test_draws_follow_torchs_generator(model):
    prompt = torch.tensor([[5, 6, 7]])
    for function in (*FAST, compat.llada.generate):
        draws = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            x = function(model, prompt, steps=12, gen_length=12, block_length=12, temperature=2.0, mask_id=0)
            draws.append(x[0] if isinstance(x, tuple) else x)
        again = function(model, prompt, steps=12, gen_length=12, block_length=12, temperature=2.0, mask_id=0)
        draws.append(again[0] if isinstance(again, tuple) else again)
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
        assert not torch.equal(draws[2], draws[3])


def test_random_order_follows_torchs_generator(model):
    """The tokens of a fully random order are those of LLaDA's rule on the same seed."""
    prompt = torch.tensor([[5, 6, 7]])
    torch.manual_seed(3)
    x = compat.llada.generate(model, prompt, None, 12, 12, 12, remasking="random", mask_id=0)
    torch.manual_seed(3)
    rule = Full(12, remasking="random", parity="llada")
    out = decode(model, prompt, strategy=rule, max_new_tokens=12, block_length=12, early_stop=False)
    assert torch.equal(x, out.sequences)
    orders = set()
    for seed in range(4):
        torch.manual_seed(seed)
        x, _ = compat.fast_dllm.generate(model, prompt, 12, 12, 12, remasking="random", mask_id=0)
        orders.add(tuple(x[0].tolist()))
    assert len(orders) > 1


def test_eos_switches_of_llada():
    """One prediction for all: EOS first, then end of turn, then 7."""
    spec = dataclasses.replace(SPEC, eos_token_ids=(1, 4))
    scores = torch.full((23,), -9.0)
    scores[1], scores[4], scores[7] = 3.0, 2.0, 1.0
    flat = torch.nn.Module()
    flat.forward = lambda ids: scores.expand(*ids.shape, 23)
    flat.eval().leap_spec = spec
    prompt, options = torch.tensor([[5]]), {"steps": 4, "gen_length": 4, "block_length": 4, "mask_id": 0}
    assert compat.llada.generate(flat, prompt, **options).tolist() == [[5, 1, 1, 1, 1]]
    assert compat.llada.generate(flat, prompt, logits_eos_inf=True, **options).tolist() == [[5, 4, 4, 4, 4]]
    # EOS where 7 has no chance; with the switch the 7 of position 2 goes first all the same.
    mixed = scores.repeat(5, 1)
    mixed[2, 7] = 3.1
    flat.forward = lambda ids: mixed[None, : ids.shape[1]]
    seen = []
    flat.register_forward_pre_hook(lambda module, ids: seen.append(ids[0][0].tolist()))
    assert compat.llada.generate(flat, prompt, **options).tolist() == [[5, 1, 7, 1, 1]]
    assert seen[1] == [5, 1, 0, 0, 0]
    seen.clear()
    last = compat.llada.generate(flat, prompt, confidence_eos_eot_inf=True, **options)
    assert last.tolist() == [[5, 1, 7, 1, 1]]
    assert seen[1] == [5, 0, 7, 0, 0]
    flat.leap_spec = None
    for name in ("logits_eos_inf", "confidence_eos_eot_inf"):
        with pytest.raises(ModelError, match=f"{name} needs the EOS ids"):
            compat.llada.generate(flat, prompt, **{name: True}, **options)


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (compat.llada.generate, {"cfg_scale": 1.5}, ConfigError, "cfg_scale 1.5 is not supported"),
        (
            compat.llada.generate,
            {"remasking": "entropy"},
            ConfigError,
            "remasking must be one of low_confidence, random",
        ),
        (compat.llada.generate, {"steps": 9}, ConfigError, "steps must be a multiple of the 2 blocks, got 9"),
        *(
            (function, options, ConfigError, message)
            for function in FAST
            for options, message in (
                ({"threshold": 0.9, "factor": 1.0}, "threshold and factor are two rules"),
                ({"threshold": 0.9, "remasking": "random"}, "rank by confidence"),
                ({"factor": 1.0, "remasking": "random"}, "rank by confidence"),
                ({"remasking": "entropy"}, "remasking must be one of"),
                ({"threshold": 1.5}, "threshold must be a number in"),
                ({"gen_length": 9}, "gen_length must be a multiple of block_length 4, got 9"),
                ({"steps": 0}, "steps must be a whole number of at least 1"),
                ({"steps": 9, "threshold": 0.9}, "steps must be a multiple of the 2 blocks, got 9"),
                ({"temperature": -1.0}, "temperature must be"),
            )
        ),
        (FAST[0], {"mask_id": 126336}, ModelError, "mask_token_id must be in"),
        (FAST[0], {"prompt": [[3]]}, InputError, r"prompt must be a \(B, P\) int64 tensor, got list"),
        (FAST[0], {"prompt": torch.tensor([[3, 0]])}, InputError, "prompt holds the mask token 0"),
    ],
)
def test_what_is_not_supported_is_refused_before_the_first_forward(model, function, options, error, message):
    calls = []
    hook = model.register_forward_pre_hook(lambda *args: calls.append(1))
    given = {"prompt": torch.tensor([[3, 4]]), "steps": 8, "gen_length": 8, "block_length": 4, "mask_id": 0}
    with pytest.raises(error, match=message):
        function(model, **{**given, **options})
    hook.remove()
    assert not calls


# --- Dream ------------------------------------------------------------------------------------------------------------

DREAM = {"max_new_tokens": 12, "steps": 8, "mask_token_id": 0}


def test_dream_is_its_published_algorithm(model):
    """The independent decoder of plain_decoders.py, on prompts padded on the left, with shifted logits."""
    shifted = random_llama(5, sharpness=6.0)
    shifted.leap_spec = dataclasses.replace(SPEC, shift=1)
    assert plain(compat.dream.diffusion_generate) == "model, inputs=None, generation_config=None, kwargs"
    prompts = [[5, 6, 7, 8], [9, 10]]
    ids, mask = torch.tensor([[5, 6, 7, 8], [2, 2, 9, 10]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    for alg in ("maskgit_plus", "topk_margin", "entropy"):
        for m in (model, shifted):
            x = compat.dream.diffusion_generate(m, ids, attention_mask=mask, alg=alg, **DREAM)
            assert torch.equal(x[:, :4], ids)
            for i, prompt in enumerate(prompts):
                sample = Sample(
                    plain_forward(m), prompt, mask_id=0, max_new_tokens=12, block_length=12, early_stop=False,
                    shift=m.leap_spec.shift,
                )  # fmt: skip
                plain_decoders.dream(sample, alg=alg, steps=8, parity="dream")
                assert x[i, 4:].tolist() == sample.tokens


def test_dream_takes_settings_from_config_and_keywords(model):
    prompt = torch.tensor([[5, 6, 7]])
    config = types.SimpleNamespace(**DREAM, alg="entropy", temperature=0.0, top_p=None, output_history=True)
    x = compat.dream.diffusion_generate(model, prompt, config)
    assert torch.equal(x, compat.dream.diffusion_generate(model, prompt, alg="entropy", **DREAM))
    out = compat.dream.diffusion_generate(model, prompt, config, return_dict_in_generate=True, steps=4)
    assert torch.equal(
        out.sequences, compat.dream.diffusion_generate(model, prompt, alg="entropy", **DREAM | {"steps": 4})
    )
    # 1 - s/t of 12, 10, 7 and 4 masks at t = 1, .75025, .5005, .25075: int(2.997), int(3.3), int(3.49), all.
    masks = [(y == 0).sum().item() for y in out.history]
    assert masks == [10, 7, 4, 0]
    assert torch.equal(out.history[-1], out.sequences)
    for now, then in itertools.pairwise(out.history):
        assert torch.equal(now[now != 0], then[now != 0])
    assert compat.dream.diffusion_generate(model, prompt, config, return_dict_in_generate=True,
                                           output_history=False).history is None  # fmt: skip
    # Neither a length nor steps: 20 tokens with the prompt, 512 forwards, origin.
    calls = []
    hook = model.register_forward_pre_hook(lambda *args: calls.append(1))
    hooked = model.model.register_forward_pre_hook(lambda *args: calls.append(1))
    assert compat.dream.diffusion_generate(model, prompt).shape == (1, 20)
    hook.remove()
    hooked.remove()
    assert 17 < len(calls) <= 512
    twice = compat.dream.diffusion_generate(model, prompt, config, num_return_sequences=2)
    assert torch.equal(twice, x.expand(2, -1))


@pytest.mark.parametrize("options", [{"alg": "origin"}, {"alg": "entropy", "alg_temp": 5.0},
                                     {"alg": "entropy", "temperature": 2.0, "top_p": 0.95}])  # fmt: skip
def test_dreams_draws_follow_torchs_generator(model, options):
    prompt, draws = torch.tensor([[5, 6, 7]]), []
    for seed in (1, 1, 2, 3, 4):
        torch.manual_seed(seed)
        draws.append(compat.dream.diffusion_generate(model, prompt, **DREAM, **options)[0].tolist())
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) > 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"inputs": None}, InputError, r"inputs must be a \(B, P\) int64 tensor, got NoneType"),
        ({"max_new_tokens": None, "max_length": 2}, ConfigError, "max_length must be more than the 2 tokens"),
        ({"generation_tokens_hook_func": print}, ConfigError, "generation_tokens_hook_func cannot be called"),
        ({"use_cache": True}, ConfigError, "unknown argument use_cache"),
        ({"alg": "random"}, ConfigError, "alg must be one of"),
        ({"steps": 0}, ConfigError, "steps must be a whole number of at least 1"),
        ({"top_p": 0.9}, ConfigError, "top_p limits which tokens are drawn"),
        ({"num_return_sequences": 0}, ConfigError, "num_return_sequences must be"),
    ],
)
def test_what_dream_refuses(model, options, error, message):
    with pytest.raises(error, match=message):
        compat.dream.diffusion_generate(model, **{"inputs": torch.tensor([[3, 4]]), **DREAM, **options})


def test_arguments_of_a_wrong_kind_are_named(model):
    ids = torch.tensor([[5, 6, 7]])
    for attention_mask in ([[1, 1, 1]], "full"):
        with pytest.raises(InputError, match="attention_mask must be a"):
            compat.llada.generate(model, ids, attention_mask, 4, 4, 4, mask_id=0)
        with pytest.raises(InputError, match="attention_mask must be a"):
            compat.dream.diffusion_generate(model, ids, attention_mask=attention_mask, num_return_sequences=2)
    with pytest.raises(ConfigError, match="mask_id must be a token id"):
        compat.llada.generate(model, ids, None, 4, 4, 4, mask_id=None)
    for name in ("max_length", "max_new_tokens"):
        with pytest.raises(ConfigError, match=f"{name} must be a whole number"):
            compat.dream.diffusion_generate(model, ids, **{name: 0.5})
    with pytest.raises(ConfigError, match="generation_config must be an object"):
        compat.dream.diffusion_generate(model, ids, {"max_new_tokens": 8})


@pytest.mark.parametrize(
    "module", ["leap_kernels.compat.fast_dllm", "leap_kernels.compat.llada", "leap_kernels.compat.dream"]
)
def test_documented_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted >= 2
    assert result.failed == 0
