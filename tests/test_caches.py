# SPDX-License-Identifier: Apache-2.0
"""Caches: which rows are recomputed, and that decoding on them is the published algorithm."""

from __future__ import annotations

import random

import pytest
import torch
from caching_oracle import CachingForward
from oracle import decode_one
from random_models import SPEC, random_llama

from leap_kernels import ModelSpec, decode
from leap_kernels.errors import ConfigError, ModelError

APPROXIMATE = ("prefix", "dual", "delayed")
STRATEGIES = ("leap", "threshold", "full")


def test_public_code_gives_the_same_tokens(tiny_v0, parity):
    """The authors' Fast-dLLM on the prefix and the dual cache. It looks for masks after the forward that follows a
    refresh, so a block that the refresh finished costs it one forward more (decoders.md 2.12)."""
    prompts = [torch.tensor(case["prompt_ids"]) for case in parity]
    for cache in ("prefix", "dual"):
        out = decode(tiny_v0, prompts, strategy="threshold", cache=cache, early_stop=False)
        theirs = [case["runs"][f"{cache}_0.9"] for case in parity]
        assert out.generated.tolist() == [run["ids"] for run in theirs]
        steps = out.history.step.unflatten(1, (-1, 32))
        at_once = (steps.amin(2) == steps.amax(2)).sum(1)
        assert (out.nfe + at_once).tolist() == [run["nfe"] for run in theirs]
        assert at_once.any()


def random_case(rng: random.Random) -> tuple[str, dict, ModelSpec, list[list[int]]]:
    block_causal = rng.choice([0, 0, 0, 4, 8])
    cache = "block" if block_causal else rng.choice(APPROXIMATE)
    options = {
        "max_new_tokens": rng.randint(1, 20),
        "block_length": rng.choice([2, 4]) if block_causal else rng.randint(1, 9),
        "strategy": rng.choice(["leap", "leap", "threshold", "full"]),
        "threshold": rng.choice([0.5, 0.9]),
        "tau": rng.choice([0.0, 0.4]),
        "eta": rng.choice([0.05, 0.2]),
    }
    spec = ModelSpec(
        mask_token_id=0, eos_token_ids=(1,), shift=rng.choice([0, 1]), block_causal_length=block_causal, vocab_size=23
    )
    prompts = [[rng.randint(2, 22) for _ in range(rng.randint(0, 9))] for _ in range(3)]
    return cache, options, spec, prompts


def check_random_case(seed: int) -> set:
    """A ragged batch of three against the oracle, which recomputes row by row what decoders.md says."""
    rng = random.Random(seed)
    cache, options, spec, prompts = random_case(rng)
    refresh = rng.choice([None, None, 1, 2, 3]) if cache in APPROXIMATE else None
    model = random_llama(seed, kv_heads=rng.choice([1, 2, 4]), sharpness=rng.choice([3.0, 6.0]))
    kept = ("max_new_tokens", "block_length", "strategy")
    kept += {"leap": ("threshold", "tau", "eta"), "threshold": ("threshold",), "full": ()}[options["strategy"]]
    out = decode(
        model, [torch.tensor(p, dtype=torch.int64) for p in prompts], spec=spec, cache=cache, cache_refresh=refresh,
        **{name: options[name] for name in kept},
    )  # fmt: skip
    for i, prompt in enumerate(prompts):
        forward = CachingForward(
            model, cache, n_prompt=len(prompt), block_length=options["block_length"], shift=spec.shift,
            block_causal=spec.block_causal_length, refresh=refresh,
        )  # fmt: skip
        oracle = decode_one(
            forward, prompt, mask_id=0, eos_ids=(1,), shift=spec.shift, block_causal=spec.block_causal_length, **options
        )
        assert out.generated[i].tolist() == oracle.tokens
        assert out.history.step[i].tolist() == oracle.steps
        assert out.nfe[i].item() == oracle.nfe
        assert out.token_forwards[i].item() == sum(forward.computed)
    saved = int(out.token_forwards.sum()) < 3 * out.nfe.sum() * options["max_new_tokens"]
    return {cache, options["strategy"], ("shift", spec.shift), ("refresh", refresh), ("saved", saved)}


def test_random_configurations_give_the_oracles_tokens():
    """Strategies, blocks, shift, block-causal masks, refresh intervals, in float64. In 318, a shifted model on the dual
    cache computes the row that predicts the next block's first token, and yet no candidate crosses the block."""
    seen: set = set()
    for seed in (*range(60), 318):
        seen |= check_random_case(seed)
    assert {*APPROXIMATE, "block", *STRATEGIES, ("shift", 0), ("shift", 1), ("refresh", 2), ("refresh", None)} <= seen


@pytest.mark.slow
def test_five_hundred_random_configurations():
    for seed in range(60, 560):
        check_random_case(seed)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("block_length", [2, 4, 8])
def test_the_block_cache_is_exact(strategy, shift, block_length):
    """Same tokens, steps and forwards as without a cache, and fewer rows."""
    model = random_llama(3, sharpness=6.0)
    spec = ModelSpec(mask_token_id=0, vocab_size=23, block_causal_length=8, shift=shift)
    prompts = [torch.arange(2, 2 + n) for n in (0, 3, 8, 13)]
    options = {"spec": spec, "strategy": strategy, "max_new_tokens": 27, "block_length": block_length}
    plain, cached = decode(model, prompts, **options), decode(model, prompts, cache="block", **options)
    assert torch.equal(plain.sequences, cached.sequences)
    assert torch.equal(plain.history.step, cached.history.step)
    assert torch.equal(plain.nfe, cached.nfe)
    assert (cached.token_forwards < 0.75 * plain.token_forwards).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", APPROXIMATE)
def test_a_refresh_in_every_forward_is_no_cache(cache, strategy):
    """Then every row is computed every time, so that the results are those of cache="none" (dual: without
    candidates from the block before)."""
    model = random_llama(4, sharpness=6.0)
    options = {"spec": SPEC, "strategy": strategy, "max_new_tokens": 17, "block_length": 17 if cache == "dual" else 5}
    prompts = [torch.arange(3, 3 + n) for n in (2, 9)]
    plain, cached = decode(model, prompts, **options), decode(model, prompts, cache=cache, cache_refresh=1, **options)
    assert torch.equal(plain.sequences, cached.sequences)
    assert torch.equal(plain.history.step, cached.history.step)
    assert torch.equal(plain.token_forwards, cached.token_forwards)


def test_settings_that_do_not_fit_are_refused():
    model, ids = random_llama(), torch.tensor([3, 4])
    causal = ModelSpec(mask_token_id=0, vocab_size=23, block_causal_length=4)
    for spec, options, message in (
        (SPEC, {"cache": "block"}, "block-causal"),
        (causal, {"cache": "dual", "block_length": 4}, "block or none"),
        (SPEC, {"cache_refresh": 2}, "exact"),
        (SPEC, {"cache": "dual", "cache_refresh": 0}, "at least 1"),
        (SPEC, {"cache": "paged"}, "one of none"),
    ):
        with pytest.raises(ConfigError, match=message):
            decode(model, ids, spec=spec, max_new_tokens=4, **options)
    with pytest.raises(ModelError, match="callable shows no keys"):
        decode(lambda input_ids, position_ids, attention_mask: None, ids, spec=SPEC, cache="dual")
