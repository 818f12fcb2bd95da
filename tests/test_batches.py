# SPDX-License-Identifier: Apache-2.0
"""Eight ragged prompts in a batch give the tokens, steps and counters of eight single runs: each strategy, each cache.

Exactly in float64, and where logits are whole eighths, so that confidences tie and rounding decides nothing. In float32
matrix products round differently at another batch size: there on fixed prompts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from random_models import SPEC, random_llama
from test_invariants import STRATEGIES, same
from torch import Tensor

import leap_kernels.strategies
from leap_kernels import ModelSpec, decode
from leap_kernels.caches import CACHES
from leap_kernels.strategies.base import CANVAS, FULL_ATTENTION, NO_SHIFT


def combinations() -> Iterator[tuple[str, str]]:
    """Every rule on every cache that it runs on."""
    for name in STRATEGIES:
        for cache in CACHES:
            refusing = set() if cache == "none" else {CANVAS, FULL_ATTENTION} if cache == "block" else {CANVAS}
            if not refusing & needs_of(name):
                yield name, cache


def needs_of(name: str) -> frozenset[str]:
    return leap_kernels.strategies.STRATEGIES[STRATEGIES[name]["strategy"]].needs


ALL = list(combinations())
# Each cache with four rules at least, LEAP and its baseline among them, and each rule with one cache at least.
SOME = [(name, cache) for i, (name, cache) in enumerate(ALL) if name in ("leap", "threshold") or i % 4 == 0]


def prompts_of(seed: int) -> list[Tensor]:
    """One to eleven tokens: a canvas of masks alone has the same logits everywhere, and rounding would rank them."""
    rng = random.Random(seed)
    return [torch.tensor([rng.randint(2, 22) for _ in range(rng.randint(1, 11))]) for _ in range(8)]


def spec_of(cache: str, shift: int) -> ModelSpec:
    causal = 4 if cache == "block" else 0
    return ModelSpec(
        mask_token_id=0, eos_token_ids=(1, 9), pad_token_id=2, vocab_size=23, shift=shift, block_causal_length=causal
    )


def in_eighths(model: Any) -> Any:
    """`model` with its logits rounded to whole eighths."""
    model.lm_head.register_forward_hook(lambda module, args, logits: (logits * 8).round() / 8)
    return model


def scripted(input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, R, V) logits in eighths from whole numbers alone: a hash of position and of what a row sees, in any order."""
    seen = ((input_ids * 7919 + position_ids * 104729) % 10007)[:, None, :].expand(attention_mask[:, 0].shape)
    context = seen.masked_fill(~attention_mask[:, 0], 0).sum(-1)
    token = torch.arange(23)
    # The hash of the token weighs most, so that predictions mostly outlive a change of context.
    mixed = (context[..., None] * (token * token + 3) % 53) + (position_ids[..., None] * (token + 5) * 31 % 97)
    return mixed / 8


def compare(model: Any, prompts: list[Tensor], **options: Any) -> Any:
    together = decode(model, prompts, seed=[*range(len(prompts))], **options)
    for i, prompt in enumerate(prompts):
        same(together, i, decode(model, prompt, seed=i, **options))
    return together


def compare_in_float64(name: str, cache: str, shift: int) -> None:
    options = {"cache": cache, "max_new_tokens": 11, "block_length": 4} | STRATEGIES[name]
    options["spec"] = spec_of(cache, 0 if NO_SHIFT in needs_of(name) else shift)
    for model in (random_llama(5, sharpness=6.0), in_eighths(random_llama(6, sharpness=8.0))):
        compare(model, prompts_of(5), **options)


@pytest.mark.parametrize(("name", "cache"), SOME)
def test_in_float64(name, cache):
    compare_in_float64(name, cache, shift=0)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("name", "cache"), ALL)
def test_every_strategy_and_cache_in_float64(name, cache, shift):
    compare_in_float64(name, cache, shift)


@pytest.mark.parametrize("name", STRATEGIES)
def test_scripted(name):
    out = compare(scripted, prompts_of(3), spec=SPEC, max_new_tokens=11, block_length=4, **STRATEGIES[name])
    assert len(set(out.generated.flatten().tolist())) > 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cache"), [(name, cache) for name, cache in ALL if cache != "block"])
def test_every_strategy_and_cache_on_the_bundled_model_in_float32(tiny, tiny_prompts, name, cache):
    """`full` commits confidences of all but 1 in an order that is rounding; its tokens and forwards are not."""
    turns = zip(*tiny_prompts.values(), strict=True)
    prompts = [torch.tensor(prompt) for turn in turns for prompt in turn][:8]
    options = {"cache": cache, "max_new_tokens": 32, "block_length": 16} | STRATEGIES[name]
    together = decode(tiny, prompts, **options)
    for i, prompt in enumerate(prompts):
        alone = decode(tiny, prompt, **options)
        assert torch.equal(together.generated[i], alone.generated[0])
        assert together.nfe[i] == alone.nfe[0]
        if options["strategy"] not in ("full", "prophet"):
            assert torch.equal(together.history.step[i], alone.history.step[0])
