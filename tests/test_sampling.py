# SPDX-License-Identifier: Apache-2.0
"""Drawing with temperature: the documented formula, frequencies against the closed form, extremes, independence."""

from __future__ import annotations

import math

import pytest
import torch

from leap_kernels.sampling import draw, uniform

NONE = torch.tensor([], dtype=torch.int64)


def draw_many(logits, temperature, n, *, seed=0, suppress=NONE):
    x = torch.tensor(logits).expand(n, len(logits))
    return draw(x, temperature, torch.full((n,), seed), 1, torch.arange(n), suppress)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_softmax(temperature):
    """Three tokens, 40,000 draws: within 4.5 standard errors of softmax(logits / T)."""
    logits, n = [0.3, 1.0, -0.5], 40_000
    expected = torch.tensor(logits, dtype=torch.float64).div(temperature).softmax(0)
    counts = torch.bincount(draw_many(logits, temperature, n), minlength=3).double()
    error = (expected * (1 - expected) / n).sqrt()
    assert ((counts / n - expected).abs() < 4.5 * error).all()


def test_the_formula_is_gumbel_max():
    """Written out in Python floats: argmax of x - T ln(-ln u)."""
    logits, temperature = [0.1, 0.9, -0.4, 0.2], 1.7
    for pos in range(20):
        u = uniform(torch.tensor(3), 5, torch.tensor(pos), torch.arange(4)).double().tolist()
        noisy = [x - temperature * math.log(-math.log(v)) for x, v in zip(logits, u, strict=True)]
        got = draw(torch.tensor([logits]), temperature, torch.tensor([3]), 5, torch.tensor([pos]), NONE)
        assert got.item() == noisy.index(max(noisy))


@pytest.mark.parametrize("temperature", [1e-6, 1e3])
def test_extreme_temperatures_are_finite(temperature):
    tokens = draw_many([1.0, 1.5, 0.0], temperature, 3000)
    counts = torch.bincount(tokens, minlength=3)
    if temperature < 1:
        assert counts.tolist() == [0, 3000, 0]
    else:
        assert (counts > 900).all()


def test_suppressed_tokens_are_never_drawn():
    assert set(draw_many([9.0, 0.0, 0.0], 1.0, 500, suppress=torch.tensor([0])).tolist()) == {1, 2}


def test_uniforms_stay_inside_the_open_interval_and_are_uniform():
    u = uniform(torch.tensor(1), 1, torch.arange(1000)[:, None], torch.arange(1000))
    assert u.dtype == torch.float32
    assert u.min() > 0
    assert u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert u.var().item() == pytest.approx(1 / 12, abs=1e-3)
    assert torch.histc(u, 20).sub(50_000).abs().max() < 1200  # 5.5 standard deviations


@pytest.mark.parametrize("name", ["seed", "step", "pos", "token"])
def test_each_word_changes_the_noise_without_correlation(name):
    words = {"seed": torch.tensor(11), "step": 4, "pos": torch.arange(200)[:, None], "token": torch.arange(200)}
    a = uniform(**words)
    b = uniform(**{**words, name: words[name] + 1})
    if name in ("pos", "token"):  # a shift along this axis: compare rows that are not each other's neighbours
        assert torch.equal(a[1:] if name == "pos" else a[:, 1:], b[:-1] if name == "pos" else b[:, :-1])
    assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.02


def test_seeds_beyond_32_bits_and_negative_ones_differ():
    pos, token = torch.arange(50)[:, None], torch.arange(50)
    noise = [uniform(torch.tensor(seed), 1, pos, token) for seed in (0, 1, -1, 2**32, 2**33, -(2**40))]
    for i, a in enumerate(noise):
        for b in noise[i + 1 :]:
            assert (a == b).float().mean() < 0.01
