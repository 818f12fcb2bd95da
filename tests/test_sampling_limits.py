# SPDX-License-Identifier: Apache-2.0
"""Top-p and top-k: hand-worked sets, frequencies of what is drawn, the confidence, and independence of neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from random_models import SPEC, random_llama

from leap_kernels import DecodeConfig, ModelSpec, decode
from leap_kernels.errors import ConfigError
from leap_kernels.likely import keep_likely
from leap_kernels.strategies import STRATEGIES

P = [0.02, 0.4, 0.05, 0.25, 0.2, 0.08]  # by probability: 1, 3, 4, 5, 2, 0; sums .40 .65 .85 .93 .98 1
NONE: list[int] = []


def kept(logits, *, temperature=1.0, top_p=None, top_k=None, suppress=NONE) -> set[int]:
    suppress = torch.tensor(suppress, dtype=torch.int64)
    out = keep_likely(logits[None], temperature=temperature, top_p=top_p, top_k=top_k, suppress=suppress)[0]
    stays = out.isfinite().nonzero()[:, 0]
    assert torch.equal(out[stays], logits[stays].float())
    return set(stays.tolist())


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({"top_p": 0.0}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),  # the first token past p stays
        ({"top_p": 0.64}, {1, 3}),
        ({"top_p": 0.66}, {1, 3, 4}),
        ({"top_p": 0.97}, {1, 3, 4, 5, 2}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 6}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 99}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.86, "top_k": 2}, {1, 3}),
        ({"top_p": 0.41, "top_k": 4}, {1, 3}),
        ({"top_p": 0.3, "top_k": 3}, {1}),
        # p^(1/T) renormalised. T = 0.5: .16 .0625 .04 .0064 .0025 .0004 of .2718, sums .59 .82 .97
        ({"top_p": 0.58, "temperature": 0.5}, {1}),
        ({"top_p": 0.81, "temperature": 0.5}, {1, 3}),
        ({"top_p": 0.83, "temperature": 0.5}, {1, 3, 4}),
        # T = 2: .632 .5 .447 .283 .224 .141 of 2.227, sums .284 .508 .709 .836 .936
        ({"top_p": 0.50, "temperature": 2.0}, {1, 3}),
        ({"top_p": 0.72, "temperature": 2.0}, {1, 3, 4, 5}),
        # Without 1: .25 .2 .08 .05 .02 of .6, sums .417 .75 .883
        ({"top_p": 0.40, "suppress": [1]}, {3}),
        ({"top_p": 0.74, "suppress": [1]}, {3, 4}),
        ({"top_p": 0.76, "suppress": [1]}, {3, 4, 5}),
        ({"top_k": 2, "suppress": [1, 4]}, {3, 5}),
    ],
)
def test_sets_worked_by_hand(options, ids):
    assert kept(torch.tensor(P).log(), **options) == ids
    assert kept(torch.tensor(P, dtype=torch.float64).log() + 300, **options) == ids


def test_equal_probabilities():
    """Top-p counts equal tokens by id; top-k keeps all that equal the last one."""
    logits = torch.tensor([0.1, 0.3, 0.3, 0.3]).log()
    assert kept(logits, top_p=0.5) == {1, 2}
    assert kept(logits, top_k=1) == {1, 2, 3}
    assert kept(torch.zeros(1000), top_p=0.5005) == set(range(501))


def test_the_likeliest_stays_at_any_temperature():
    logits = torch.tensor([3.0, 80.0, -1e30, float("-inf")])
    for temperature in (1e-30, 1e-3, 1.0, 1e6):
        for options in ({"top_p": 0.0}, {"top_k": 1}, {"top_p": 0.5, "top_k": 1}):
            assert kept(logits, temperature=temperature, **options) == {1}


# --- through decode -------------------------------------------------------------------------------------------------


def fixed(row: torch.Tensor):
    return lambda ids, position_ids, attention_mask: row.expand(*ids.shape, -1)


WITH_MASK = torch.tensor([*P, 0.5]).log()  # the mask token, 6, is likely and never predicted
FIXED = ModelSpec(mask_token_id=6, vocab_size=7)


def draw(n: int = 4000, **options):
    prompts = torch.full((n, 1), 3)
    return decode(
        fixed(WITH_MASK), prompts, spec=FIXED, strategy="full", max_new_tokens=1, seed=range(n), **options
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({"temperature": 1.0, "top_p": 0.66}, [1, 3, 4]),
        ({"temperature": 2.0, "top_p": 0.72}, [1, 3, 4, 5]),
        ({"temperature": 0.5, "top_k": 2}, [1, 3]),
        ({"temperature": 1.5, "top_k": 4, "top_p": 0.97}, [1, 3, 4, 5]),
    ],
)
def test_frequencies_are_those_of_the_tempered_softmax_over_what_is_left(options, ids):
    n = 4000
    out = draw(n, **options)
    weights = {i: P[i] ** (1 / options["temperature"]) for i in ids}
    counts = torch.bincount(out.generated[:, 0], minlength=7).tolist()
    assert [i for i in range(7) if counts[i]] == sorted(ids)
    for i in ids:
        p = weights[i] / sum(weights.values())
        assert abs(counts[i] - n * p) < 4.5 * math.sqrt(n * p * (1 - p))


def test_confidence_is_the_softmax_over_all_tokens():
    out = draw(200, temperature=0.7, top_p=0.9, top_k=3)
    expected = torch.tensor(P)[out.generated]
    torch.testing.assert_close(out.history.confidence, expected, rtol=1e-5, atol=0)
    assert len(set(out.generated.flatten().tolist())) == 3


def test_the_noise_is_that_of_unlimited_draws():
    """A draw that top-p leaves in is the draw without it; what is drawn outside of it changes."""
    free = draw(500, temperature=1.0).generated[:, 0]
    limited = draw(500, temperature=1.0, top_p=0.66).generated[:, 0]
    inside = torch.isin(free, torch.tensor([1, 3, 4]))
    assert torch.equal(free[inside], limited[inside])
    assert 0 < int(inside.sum()) < 500
    everything = draw(500, temperature=1.0, top_p=1.0, top_k=7)
    assert torch.equal(everything.generated[:, 0], free)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_likeliest_token_alone_is_greedy_decoding(strategy):
    """Through every way by which a rule gets its predictions."""
    for seed, limit in ((0, {"top_k": 1}), (1, {"top_p": 0.0})):
        options = {"spec": SPEC, "strategy": strategy, "max_new_tokens": 12, "block_length": 5}
        model, prompt = random_llama(seed, sharpness=5.0), torch.tensor([4, 9, 11])
        greedy = decode(model, prompt, **options)
        limited = decode(model, prompt, temperature=4.0, **limit, **options)
        free = decode(model, prompt, temperature=4.0, **options)
        assert torch.equal(limited.sequences, greedy.sequences)
        assert torch.equal(limited.history.step, greedy.history.step)
        assert not torch.equal(free.sequences, greedy.sequences)


@pytest.mark.parametrize("strategy", ["leap", "threshold", "credit"])
def test_a_sample_draws_the_same_among_any_neighbours(strategy):
    model, seeds = random_llama(3, sharpness=5.0), [7, 7, 2**40, -1]
    prompts = [torch.tensor(ids) for ids in ([4, 9], [4, 9], [5], [4, 9, 20, 3])]
    options = {"spec": SPEC, "strategy": strategy, "max_new_tokens": 12, "block_length": 5, "temperature": 1.0}
    options |= {"top_p": 0.9, "top_k": 6}
    together = decode(model, prompts, seed=seeds, **options)
    assert torch.equal(together.generated[0], together.generated[1])
    for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        alone = decode(model, prompt, seed=seed, **options)
        assert torch.equal(alone.generated[0], together.generated[i])
        assert torch.equal(alone.history.step[0], together.history.step[i])
    assert not torch.equal(decode(model, prompts[0], seed=8, **options).generated[0], together.generated[0])


@pytest.mark.parametrize("name", ["top_p", "top_k"])
def test_limits_are_refused_where_nothing_is_drawn(name):
    message = rf"{name} limits which tokens are drawn, and temperature 0 draws none.*Pass a temperature above 0"
    with pytest.raises(ConfigError, match=message):
        DecodeConfig(**{name: 1})
    DecodeConfig(temperature=0.2, **{name: 1})
