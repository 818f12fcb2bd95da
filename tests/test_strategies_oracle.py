# SPDX-License-Identifier: Apache-2.0
"""Every strategy against an independent decoder: the same tokens and the same number of forwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import plain_decoders
import pytest
import torch
from plain_decoders import Sample
from random_models import plain_forward, random_llama

from leap_kernels import ModelSpec, decode
from leap_kernels.strategies import STRATEGIES
from leap_kernels.strategies.base import NO_SHIFT

# What is compared on the bundled model: a name, the strategy's options, and settings of the canvas.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full, 2 a step": ("full", {"steps": 24}),
    "full, uneven": ("full", {"steps": 15}),
    "full, random": ("full", {"remasking": "random", "steps": 24}),
    "full, deferring": ("full", {"steps": 24, "defer_tokens": (2,)}),
    "full, llada": ("full", {"steps": 24, "defer_tokens": (2,), "parity": "llada"}),
}
CASES |= {
    "threshold": ("threshold", {"threshold": 0.8}),
    "threshold, fast_dllm": ("threshold", {"parity": "fast_dllm"}),
    "factor": ("factor", {"factor": 1.0}),
    "factor 0.3": ("factor", {"factor": 0.3}),
    "factor, fast_dllm": ("factor", {"parity": "fast_dllm"}),
    "entropy": ("entropy", {"gamma": 0.1}),
    "entropy 0.01": ("entropy", {"gamma": 0.01}),
    "entropy_threshold": ("entropy_threshold", {}),
    "entropy_threshold 0.1": ("entropy_threshold", {"threshold": 0.1}),
}
CASES |= {
    "klass": ("klass", {}),
    "klass, loose": ("klass", {"conf_threshold": 0.6, "kl_threshold": 0.1}),
    "klass, klass": ("klass", {"conf_threshold": 0.8, "steps": 24, "parity": "klass"}),
    "prophet": ("prophet", {"answer_start": 20, "limits": (9.0, 7.0, 5.0), "steps": 24}),
    "prophet, everywhere": ("prophet", {"limits": (12.0, 11.0, 10.0), "steps": 24, "constraints": {30: 9, 31: 10}}),
    "credit": ("credit", {}),
    "credit 0.7": ("credit", {"threshold": 0.7, "alpha": 1.5}),
}
CASES |= {
    "dream": ("dream", {"steps": 24}),
    "dream, maskgit_plus": ("dream", {"alg": "maskgit_plus", "steps": 24}),
    "dream, topk_margin": ("dream", {"alg": "topk_margin", "steps": 24}),
    "dream, entropy": ("dream", {"alg": "entropy", "steps": 24, "block_length": 48}),
    "dream, entropy at random": ("dream", {"alg": "entropy", "alg_temp": 0.5, "steps": 24}),
    "dream, dream": ("dream", {"alg": "topk_margin", "steps": 30, "parity": "dream"}),
}
CASES |= {
    "wino": ("wino", {}),
    "wino, bold": ("wino", {"threshold": 0.3, "threshold_back": 0.95, "block_length": 24}),
}
CASES |= {
    "lopa": ("lopa", {}),
    "lopa, wide": ("lopa", {"branches": 4, "confidence": "margin", "alpha": 0.3, "branch_top_p": 0.5}),
    "lopa, lopa": ("lopa", {"skip_threshold": 0.8, "confidence": "probability", "parity": "lopa", "block_length": 8}),
}
SHORT = {"max_new_tokens": 48, "block_length": 16}
PROMPTS = 40


def chosen(tiny_prompts: dict[str, list[list[int]]], count: int) -> list[list[int]]:
    """Prompts of all tasks in turn."""
    turns = zip(*tiny_prompts.values(), strict=True)
    return [prompt for turn in turns for prompt in turn][20 : 20 + count]


def compare(model: Any, prompt: list[int], strategy: str, options: dict[str, Any], seed: int = 0, **canvas: Any) -> Any:
    """Decode one prompt by both; tokens and NFE must be equal."""
    options = dict(options)
    canvas["block_length"] = options.pop("block_length", canvas["block_length"])
    out = decode(model, torch.tensor(prompt), strategy=strategy, seed=seed, **options, **canvas)
    sample = Sample(plain_forward(model), prompt, mask_id=1, eos_ids=(2,), pad_id=0, seed=seed, **canvas)
    getattr(plain_decoders, strategy)(sample, **options)
    assert out.generated[0].tolist() == sample.tokens
    assert out.nfe[0].item() == sample.nfe
    return out


@pytest.mark.parametrize("name", CASES)
def test_bundled_model_cross_section(tiny, tiny_prompts, name):
    strategy, options = CASES[name]
    for seed, prompt in enumerate(chosen(tiny_prompts, 3)):
        compare(tiny, prompt, strategy, options, seed, **SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bundled_model_forty_prompts(tiny, tiny_prompts, name):
    strategy, options = CASES[name]
    for seed, prompt in enumerate(chosen(tiny_prompts, PROMPTS)):
        compare(tiny, prompt, strategy, options, seed, **SHORT)


# --- ragged batches of random models, in float64 ----------------------------------------------------------------------


def prophet_options(rng: random.Random, blocks: int, new: int) -> dict[str, Any]:
    window = rng.randint(1, 3)
    some = rng.sample(range(new), min(rng.choice([0, 0, 1, 3, 6]), new - 1))
    return {
        "answer_start": rng.choice([None, rng.randint(0, new - window)]) if window <= new else None,
        "window": window,
        "limits": [rng.choice([0.5, 2.0, 5.0, 9.0]) for _ in range(3)],
        "constraints": {i: rng.randrange(3, 23) for i in some},
        "steps": rng.choice([None, rng.randint(1, 7) * blocks]),
    }


def full_options(rng: random.Random, blocks: int, new: int) -> dict[str, Any]:
    return {
        "steps": rng.choice([None, rng.randint(1, 7) * blocks]),
        "remasking": rng.choice(["low_confidence", "low_confidence", "random"]),
        "defer_tokens": rng.choice([(), (1,), (4, 7)]),
        # Its random ranks come from one stream for the whole batch.
        "parity": rng.choice([None, "llada"]),
    }


OPTIONS: dict[str, Callable[[random.Random, int, int], dict[str, Any]]] = {
    "full": full_options,
    "threshold": lambda rng, blocks, new: {
        "threshold": rng.choice([0.3, 0.6, 0.9]),
        "parity": rng.choice([None, "fast_dllm"]),
    },
    "threshold, edited": lambda rng, blocks, new: {
        "threshold": rng.choice([0.3, 0.6]),
        "edit_threshold": rng.choice([0.0, 0.2, 0.4, 0.6]),
        "edit_forwards": rng.choice([0, 1, 3, 16]),
    },
    "factor": lambda rng, blocks, new: {
        "factor": rng.choice([0.5, 1.0, 2.5]),
        "parity": rng.choice([None, "fast_dllm"]),
    },
    "entropy": lambda rng, blocks, new: {"gamma": rng.choice([0.0, 0.5, 2.0])},
    "klass": lambda rng, blocks, new: {
        "conf_threshold": rng.choice([0.3, 0.6]),
        "kl_threshold": rng.choice([0.01, 0.1, 0.5]),
        "history": rng.choice([1, 2, 3]),
        "steps": rng.choice([None, rng.randint(1, 5) * blocks]),
        "select": rng.choice(["all", "all", "confident", "kl", "random"]),
        "parity": rng.choice([None, "klass"]),
    },
    "prophet": prophet_options,
    "credit": lambda rng, blocks, new: {
        "threshold": rng.choice([0.4, 0.7]),
        "alpha": rng.choice([0.7, 3.0]),
        "beta": rng.choice([0.8, 0.0, 1.0]),
        "gamma": rng.choice([0.2, 2.0]),
    },
    "dream": lambda rng, blocks, new: {
        "alg": rng.choice(["origin", "maskgit_plus", "topk_margin", "entropy"]),
        "steps": rng.choice([None, rng.randint(1, 7) * blocks]),
        "eps": rng.choice([1e-3, 0.2]),
        "alg_temp": rng.choice([None, 0, 0.3]),
        "parity": rng.choice([None, "dream"]),
    },
    "wino": lambda rng, blocks, new: {
        "threshold": rng.choice([0.1, 0.3, 0.6]),
        "threshold_back": rng.choice([0.2, 0.6, 0.9]),
    },
    "lopa": lambda rng, blocks, new: {
        "add_threshold": rng.choice([0.1, 0.5, 1.0]),
        "done_threshold": rng.choice([0.3, 0.95]),
        "skip_threshold": rng.choice([0.3, 0.6, 0.9]),
        "confidence": rng.choice(["probability", "margin", "neg_entropy"]),
        "branches": rng.choice([1, 2, 3, 5]),
        "branch_top_p": rng.choice([0.0, 0.5, 1.0]),
        "alpha": rng.choice([0.0, 0.5, 1.0]),
        "parity": rng.choice([None, "lopa"]),
    },
    "entropy_threshold": lambda rng, blocks, new: {"threshold": rng.choice([0.1, 0.8, 1.5])},
}


def check_random_case(strategy: str, seed: int) -> Any:
    """Decode three ragged prompts in one batch, and compare each with the independent decoder."""
    rng = random.Random(seed)
    new, block = rng.randint(1, 16), rng.randint(1, 9)
    options = OPTIONS[strategy](rng, -(-new // block), new)
    strategy = strategy.split(",")[0]
    if options.get("remasking") == "random":
        options["parity"] = None
    canvas = {"max_new_tokens": new, "block_length": block, "early_stop": rng.random() < 0.7}
    spec = ModelSpec(
        mask_token_id=0,
        eos_token_ids=rng.choice([(), (1,), (1, 5)]),
        pad_token_id=rng.choice([None, 2]),
        shift=0 if NO_SHIFT in STRATEGIES[strategy].needs else rng.choice([0, 1]),
        vocab_size=23,
    )
    suppress = tuple(rng.sample(range(3, 23), rng.randint(0, 2)))
    # Without a prompt all masks are alike, and which goes first is a matter of rounding.
    prompts = [[rng.randrange(3, 23) for _ in range(rng.randint(1, 9))] for _ in range(3)]
    model = random_llama(seed, sharpness=rng.choice([3.0, 5.0]))
    out = decode(
        model, [torch.tensor(p, dtype=torch.int64) for p in prompts], spec=spec, suppress_tokens=suppress,
        strategy=strategy, seed=[7, 8, 9], **canvas, **options,
    )  # fmt: skip
    for i, prompt in enumerate(prompts):
        sample = Sample(
            plain_forward(model), prompt, mask_id=0, eos_ids=spec.eos_token_ids, pad_id=spec.pad_token_id,
            shift=spec.shift, suppress=suppress, seed=7 + i, **canvas,
        )  # fmt: skip
        getattr(plain_decoders, strategy)(sample, **options)
        assert out.generated[i].tolist() == sample.tokens, options
        assert out.nfe[i].item() == sample.nfe, options
        assert out.history.step[i].tolist() == sample.steps[sample.start :], options
    return options


@pytest.mark.parametrize("strategy", OPTIONS)
def test_random_configurations(strategy):
    for seed in range(10):
        check_random_case(strategy, seed)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", OPTIONS)
def test_a_hundred_random_configurations(strategy):
    for seed in range(1000, 1100):
        check_random_case(strategy, seed)
