# SPDX-License-Identifier: Apache-2.0
"""One `max_new_tokens` a sample: every sample is decoded as it would be alone, and padding stands behind it."""

from __future__ import annotations

import random

import pytest
import torch
from random_models import SPEC, random_llama

from leap_kernels import ModelSpec, decode, trace
from leap_kernels.caches import CACHES
from leap_kernels.errors import InputError
from leap_kernels.strategies import STRATEGIES
from leap_kernels.strategies.base import CANVAS, FULL_ATTENTION, NO_SHIFT

LENGTHS = [9, 1, 20, 4, 13, 8]
OPTIONS = {
    "full": {"steps": 60},  # a multiple of the blocks of every sample
    "prophet": {"limits": (0.5, 3.0, 2.0)},
    "klass": {"steps": 60, "conf_threshold": 0.5},
}


def ragged_prompts(seed: int) -> list[torch.Tensor]:
    rng = random.Random(seed)
    return [torch.tensor([rng.randint(2, 22) for _ in range(rng.randint(0, 9))]).long() for _ in LENGTHS]


def compare_with_single_runs(model, prompts, fill: int, **options) -> None:
    together = decode(model, prompts, max_new_tokens=LENGTHS, **options)
    assert together.max_new_tokens.tolist() == LENGTHS
    assert together.generated.shape == (len(LENGTHS), max(LENGTHS))
    for i, (prompt, length) in enumerate(zip(prompts, LENGTHS, strict=True)):
        alone = decode(model, prompt, max_new_tokens=length, **options)
        assert together.generated[i, :length].tolist() == alone.generated[0].tolist()
        assert together.generated[i, length:].tolist() == [fill] * (max(LENGTHS) - length)
        for name in ("nfe", "token_forwards", "new_tokens"):
            assert getattr(together, name)[i] == getattr(alone, name)[0]
        for name in ("step", "reason"):
            assert getattr(together.history, name)[i, :length].tolist() == getattr(alone.history, name)[0].tolist()
            assert not getattr(together.history, name)[i, length:].any()
        torch.testing.assert_close(together.history.confidence[i, :length], alone.history.confidence[0])
        assert trace.steps(together, i)[-1].left == trace.steps(alone)[-1].left


# Rules that read the whole canvas do not run on caches.
COMBINATIONS = [
    (name, cache)
    for name, rule in STRATEGIES.items()
    for cache in CACHES
    if (cache == "none" or CANVAS not in rule.needs) and (cache != "block" or FULL_ATTENTION not in rule.needs)
]


@pytest.mark.parametrize(("strategy", "cache"), COMBINATIONS)
def test_a_batch_is_its_single_runs(strategy, cache):
    for seed in range(3):
        causal = 4 if cache == "block" else 0
        spec = ModelSpec(
            mask_token_id=0, eos_token_ids=(1,), pad_token_id=2, vocab_size=23,
            shift=0 if NO_SHIFT in STRATEGIES[strategy].needs else seed % 2, block_causal_length=causal,
        )  # fmt: skip
        compare_with_single_runs(
            random_llama(seed, sharpness=6.0), ragged_prompts(seed), 2, spec=spec, cache=cache, strategy=strategy,
            block_length=4, **OPTIONS.get(strategy, {}),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fill"),
    [({}, 2), ({"pad_token_id": None}, 1), ({"pad_token_id": None, "eos_token_ids": ()}, 0)],
)
@pytest.mark.parametrize("early_stop", [True, False])
def test_what_stands_behind_a_sample(changes, fill, early_stop):
    """Mask 3 here, so that 0 is free; and where 0 is the mask, 1 stands behind."""
    spec = ModelSpec(**{"mask_token_id": 3, "eos_token_ids": (1, 9), "pad_token_id": 2, "vocab_size": 23, **changes})
    prompts = [p.where(p != 3, torch.tensor(4)) for p in ragged_prompts(7)]
    compare_with_single_runs(random_llama(7), prompts, fill, spec=spec, block_length=4, early_stop=early_stop)
    if not spec.eos_token_ids:
        spec = ModelSpec(mask_token_id=0, vocab_size=23)
        compare_with_single_runs(random_llama(7), prompts, 1, spec=spec, block_length=4, early_stop=early_stop)


def test_a_sampled_batch_is_its_single_runs():
    options = {"spec": SPEC, "temperature": 0.8, "seed": 3, "block_length": 4}
    compare_with_single_runs(random_llama(2), ragged_prompts(2), 2, **options)


def test_padding_counts_no_tokens_and_no_rows(tiny, tiny_tokenizer, tiny_prompts):
    prompts = [torch.tensor(ids[0]) for ids in tiny_prompts.values()][:2]
    out = decode(tiny, prompts, max_new_tokens=[8, 40], strategy="full", early_stop=False)
    assert out.nfe.tolist() == [8, 40]
    assert out.token_forwards.tolist() == [8 * (len(prompts[0]) + 8), 40 * (len(prompts[1]) + 40)]
    assert out.new_tokens[0] <= 8
    assert out.text(tiny_tokenizer)[0] == tiny_tokenizer.decode(out.generated[0, : out.new_tokens[0]].tolist(),
                                                                skip_special_tokens=True)  # fmt: skip


def test_as_many_numbers_as_samples_and_each_within_the_model():
    prompts = ragged_prompts(1)[:2]
    with pytest.raises(InputError, match=r"max_new_tokens must be one number, or one for each of the 2 samples, got 3"):
        decode(random_llama(), prompts, spec=SPEC, max_new_tokens=[4, 4, 4])
    with pytest.raises(InputError, match=r"sample 1 needs \d \+ max_new_tokens 128 = \d+ positions, the model has 128"):
        decode(random_llama(), [prompts[0], torch.tensor([3])], spec=SPEC, max_new_tokens=[4, 128])
