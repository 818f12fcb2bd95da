# SPDX-License-Identifier: Apache-2.0
"""`decode` against a slow, independent decoder that builds dense masks and calls the model's plain forward."""

from __future__ import annotations

import random

import pytest
import torch
from checkpoints import DATA
from oracle import decode_one
from plain import Plain
from random_models import plain_forward, random_llama

import leap_kernels
from leap_kernels import ModelSpec, decode
from leap_kernels.models.load import TINY
from leap_kernels.strategies import EntropyThreshold

REASONS = ["", "confident", "converged", "forced"]


def assert_same(out, oracle, *, steps: bool = True, sample: int = 0) -> None:
    assert out.generated[sample].tolist() == oracle.tokens
    assert out.nfe[sample].item() == oracle.nfe
    assert out.token_forwards[sample].item() == oracle.token_forwards
    if steps:
        assert out.history.step[sample].tolist() == oracle.steps
        assert [REASONS[r] for r in out.history.reason[sample].tolist()] == oracle.reasons


@pytest.fixture(scope="module")
def original():
    """The bundled checkpoint, read by the plain-torch implementation of LLaDA."""
    return Plain.from_folder(TINY)


@pytest.mark.parametrize("strategy", ["leap", "threshold", "full"])
@pytest.mark.parametrize("source", ["plain torch", "transformers"])
def test_bundled_model_gives_the_oracles_tokens(tiny, tiny_prompts, original, strategy, source):
    forward = original if source == "plain torch" else plain_forward(tiny)
    count = {"full": 1, "threshold": 2, "leap": 3}[strategy]
    for prompts in tiny_prompts.values():
        for prompt in prompts[10 : 10 + count]:
            check_trained(tiny, forward, prompt, strategy)


@pytest.mark.parametrize("strategy", ["leap", "threshold", "full"])
def test_a_trained_shifted_model_gives_the_oracles_tokens(tiny_prompts, strategy):
    """Dream's form, trained on the same problems: row i - 1 predicts token i."""
    dream = leap_kernels.load(DATA / "tiny_dream")
    assert dream.leap_spec.shift == 1
    forward = Plain.from_folder(DATA / "tiny_dream")
    for prompts in tiny_prompts.values():
        for prompt in prompts[: {"full": 1, "threshold": 2, "leap": 3}[strategy]]:
            check_trained(dream, forward, prompt, strategy, shift=1)


def check_trained(model, forward, prompt, strategy, **shift) -> None:
    settings = {"mask_id": 1, "eos_ids": (2,), "pad_id": 0, "max_new_tokens": 96, "strategy": strategy}
    oracle = decode_one(forward, prompt, **settings, **shift)
    out = decode(model, torch.tensor(prompt), strategy=strategy)
    # `full` orders tokens whose float32 confidences are all but 1; that order is rounding, the tokens are not.
    assert_same(out, oracle, steps=strategy != "full")


def test_public_code_gives_the_same_tokens(tiny_v0, parity):
    """Tokens and forwards of the authors' LLaDA, Fast-dLLM and KLASS code, in batches of ragged prompts."""
    prompts = [torch.tensor(case["prompt_ids"]) for case in parity]
    settings = {
        "full": {"steps": 64, "parity": "llada"},
        "klass_0.9_0.01": {"conf_threshold": 0.9, "kl_threshold": 0.01, "parity": "klass"},
        "threshold_0.9": {"threshold": 0.9, "parity": "fast_dllm"},
        "threshold_0.6": {"threshold": 0.6, "parity": "fast_dllm"},
    }
    for name, options in settings.items():
        out = decode(tiny_v0, prompts, strategy=name.split("_")[0], early_stop=False, **options)
        assert out.generated.tolist() == [case["runs"][name]["ids"] for case in parity]
        assert out.nfe.tolist() == [case["runs"][name]["nfe"] for case in parity]


@pytest.mark.parametrize("limit", [0.5, 0.2])
def test_leap_on_the_entropy_rule_gives_the_oracles_tokens(tiny, tiny_prompts, limit):
    """LEAP over dParallel's rule, whose set is { entropy <= limit }."""
    for prompts in tiny_prompts.values():
        prompt = prompts[11]
        oracle = decode_one(
            plain_forward(tiny), prompt, mask_id=1, eos_ids=(2,), pad_id=0, max_new_tokens=48, base_entropy=limit
        )
        out = decode(tiny, torch.tensor(prompt), max_new_tokens=48, base=EntropyThreshold(limit))
        assert_same(out, oracle)
        if limit == 0.5:
            by_name = decode(tiny, torch.tensor(prompt), max_new_tokens=48, base="entropy_threshold")
            assert torch.equal(by_name.history.step, out.history.step)


@pytest.mark.slow
def test_measured_figures_are_reproduced(tiny_v0, tiny_v0_problems, measured):
    """Right answers, steps and token forwards of the independent implementation, within 1 %."""
    tokenizer = leap_kernels.load_tokenizer(DATA / "tiny_v0")
    for figures in measured:
        chosen = [problem for problem in tiny_v0_problems if problem["task"] == figures["task"]][:60]
        prompts = [torch.tensor(problem["prompt_ids"]) for problem in chosen]
        options = {"strategy": figures["strategy"], "threshold": figures["threshold"]}
        parts = [decode(tiny_v0, prompts[i : i + 10], **options) for i in range(0, 60, 10)]
        answers = [text.partition("####")[2].split() for part in parts for text in part.text(tokenizer)]
        right = sum(problem["answer"].split() == answer for problem, answer in zip(chosen, answers, strict=True))
        assert right == pytest.approx(figures["right"], rel=0.01)
        for name in ("nfe", "token_forwards"):
            mean = torch.cat([getattr(part, name) for part in parts]).double().mean().item()
            assert mean == pytest.approx(figures[name], rel=0.01), (name, figures)


def random_case(rng: random.Random) -> tuple[dict, ModelSpec, list[list[int]]]:
    """Settings of one random decode: oracle keywords, spec, and three prompts of different lengths."""
    block_causal = rng.choice([0, 0, 0, 4, 8])
    block = rng.choice([1, 2, 4] if block_causal == 4 else [2, 4, 8]) if block_causal else rng.randint(1, 9)
    shift = rng.choice([0, 1])
    options = {
        "max_new_tokens": rng.randint(1, 20),
        "block_length": block,
        "strategy": rng.choice(["leap", "leap", "leap", "leap", "threshold", "full"]),
        "threshold": rng.choice([0.5, 0.9, 0.99]),
        "tau": rng.choice([0.0, 0.3, 0.7]),
        "eta": rng.choice([0.05, 0.2, 0.5, 0.95]),
        "keep_confident": rng.random() < 0.7,
        "copy_threshold": rng.choice([0.0, 0.0, 0.6]),
        "require_lookahead": rng.random() < 0.3,
        "early_stop": rng.random() < 0.7,
        "base_entropy": rng.choice([None, None, 0.3, 1.0]),
    } | {
        name: rng.random() < 0.6
        for name in (
            "copy_sees_original", "copies_see_copies", "candidates_see_candidates", "candidates_see_copies",
        )
    }  # fmt: skip
    spec = ModelSpec(
        mask_token_id=0,
        eos_token_ids=rng.choice([(), (1,), (1, 5)]),
        pad_token_id=rng.choice([None, 2]),
        shift=shift,
        block_causal_length=block_causal,
        vocab_size=23,
    )
    if shift and block_causal:
        options["free_first_token"] = rng.random() < 0.5
    # A mask token in a prompt stays what it is.
    prompts = [[rng.choice([0, *range(3, 23)]) for _ in range(rng.randint(0, 9))] for _ in range(3)]
    return options, spec, prompts


def check_random_case(seed: int) -> tuple[dict, ModelSpec, set[int]]:
    """Decode three ragged prompts in one batch and compare each with the oracle; returns what the case exercised."""
    rng = random.Random(seed)
    options, spec, prompts = random_case(rng)
    suppress = tuple(rng.sample(range(3, 23), rng.randint(0, 2)))
    # Sharper models saturate: confidences that are all 1 in float32 are then ranked by rounding.
    sharpness = 3.0 if options["strategy"] == "full" else rng.choice([3.0, 6.0, 10.0])
    model = random_llama(seed, kv_heads=rng.choice([1, 2, 4]), sharpness=sharpness)
    kept = ("max_new_tokens", "block_length", "strategy", "early_stop")
    if "free_first_token" in options:
        kept += ("free_first_token",)
    if options["strategy"] == "threshold":
        kept += ("threshold",)
    ours = dict(options) if options["strategy"] == "leap" else {name: options[name] for name in kept}
    limit = ours.pop("base_entropy", None)
    if limit is not None:
        ours |= {"threshold": 0.9, "base": EntropyThreshold(limit)}
    elif options["strategy"] != "leap":
        options["base_entropy"] = None
    out = decode(
        model, [torch.tensor(p, dtype=torch.int64) for p in prompts], spec=spec, suppress_tokens=suppress, **ours
    )
    for i, prompt in enumerate(prompts):
        oracle = decode_one(
            plain_forward(model), prompt, mask_id=0, eos_ids=spec.eos_token_ids, pad_id=spec.pad_token_id,
            shift=spec.shift, block_causal=spec.block_causal_length, suppress=suppress, **options,
        )  # fmt: skip
        assert_same(out, oracle, sample=i)
    return options, spec, set(out.history.reason.flatten().tolist())


@pytest.mark.filterwarnings("ignore:the prompt holds mask tokens")
def test_random_configurations_give_the_oracles_tokens():
    """Ragged batches over strategies, blocks, shift, block-causal masks, GQA, switches and options, in float64."""
    seen: set = set()
    for seed in range(60):
        options, spec, reasons = check_random_case(seed)
        seen |= {options["strategy"], ("shift", spec.shift), ("block causal", spec.block_causal_length), *reasons}
    wanted = {
        "leap",
        "threshold",
        "full",
        ("shift", 0),
        ("shift", 1),
        ("block causal", 0),
        ("block causal", 4),
        0,
        1,
        2,
        3,
    }
    assert wanted <= seen, "the cases no longer exercise everything they are there for"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the prompt holds mask tokens")
def test_a_thousand_random_configurations():
    for seed in range(1000, 2000):
        check_random_case(seed)
