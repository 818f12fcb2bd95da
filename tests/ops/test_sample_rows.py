# SPDX-License-Identifier: Apache-2.0
"""`sample_rows`: the documented draw against Python integers and float64, frequencies, independence, extremes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpret.checks import close, same, unchanged
from noise import check_draws
from noise import uniform as python_uniform
from torch import Tensor

from leap_kernels.ops import Sampled, sample_rows
from leap_kernels.ops.sampling.reference import uniform

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INF, NAN = float("inf"), float("nan")
SEEDS = (0, 1, -1, 2**32, 2**40 + 5, -(2**50), 2**63 - 1, -(2**63))


def random_logits(n: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows from nearly uniform to nearly certain."""
    g = torch.Generator().manual_seed(1000 * seed + vocab)
    spread = torch.logspace(-1, 1, max(n, 1), dtype=torch.float64)[:n, None]
    return (torch.randn(n, vocab, generator=g, dtype=torch.float64) * spread).to(dtype)


def words(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """n different (seed, step, position)."""
    return torch.tensor(SEEDS)[torch.arange(n) % len(SEEDS)], torch.arange(n) % 5 + 1, 3 * torch.arange(n) + 2


def uniforms(n: int, vocab: int) -> Tensor:
    return uniform(*(t[:, None] for t in words(n)), torch.arange(vocab))


def draw_many(logits: list[float], temperature: float, n: int, **options: Any) -> Tensor:
    """Tokens of n rows alike that stand at different positions."""
    ones = torch.ones(n, dtype=torch.int64)
    x = torch.tensor(logits).expand(n, len(logits))
    return sample_rows(x, 0 * ones, ones, torch.arange(n), temperature=temperature, **options).token


def both(a: Sampled, b: Sampled) -> None:
    for x, y in zip(a, b, strict=True):
        same(x, y)


def check(x: Tensor, temperature: float, out: Sampled, suppress: tuple[int, ...] = ()) -> None:
    """`out` is what the definition gives for the rows of x and `words`."""
    n, vocab = x.shape
    assert [(tuple(t.shape), t.dtype) for t in out] == [((n,), torch.int64), ((n,), torch.float32)]
    x = x.float().index_fill(1, torch.tensor(suppress, dtype=torch.int64), -INF)
    if not n:
        return
    check_draws(out.token, x, uniforms(n, vocab), temperature)
    naive, truth = (t.softmax(1).gather(1, out.token[:, None])[:, 0] for t in (x, x.double()))
    close(out.prob, naive, truth, 1.0)


# --- the uniforms ----------------------------------------------------------------------------------------------------


def test_uniforms_in_python_integers() -> None:
    """Bit for bit, at every kind of seed, step, position and token id."""
    for seed in SEEDS:
        for step, position in ((1, 0), (7, 5), (2**31 - 1, 2**31 + 3), (-4, -9)):
            tokens = torch.tensor([0, 1, 2, 126463, 157183, 2**31 - 1])
            got = uniform(torch.tensor(seed), torch.tensor(step), torch.tensor(position), tokens)
            assert got.double().tolist() == [python_uniform(seed, step, position, v) for v in tokens.tolist()]


def test_uniforms_stay_inside_the_open_interval_and_are_uniform() -> None:
    one = torch.tensor(1)
    u = uniform(one, one, torch.arange(1000)[:, None], torch.arange(1000))
    assert u.dtype == torch.float32
    assert u.min() > 0
    assert u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert u.var().item() == pytest.approx(1 / 12, abs=1e-3)
    assert torch.histc(u, 20).sub(50_000).abs().max() < 1200  # 5.5 standard deviations


@pytest.mark.parametrize("name", ["seed", "step", "position", "token"])
def test_each_word_changes_the_noise_without_correlation(name: str) -> None:
    words = {
        "seed": torch.tensor(11),
        "step": torch.tensor(4),
        "position": torch.arange(200)[:, None],
        "token": torch.arange(200),
    }
    a = uniform(**words)
    b = uniform(**{**words, name: words[name] + 1})
    if name in ("position", "token"):  # a shift along this axis: compare rows that are not each other's neighbours
        assert torch.equal(a[1:] if name == "position" else a[:, 1:], b[:-1] if name == "position" else b[:, :-1])
    assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.02


def test_seeds_beyond_32_bits_and_negative_ones_differ() -> None:
    position, token, step = torch.arange(50)[:, None], torch.arange(50), torch.tensor(1)
    noise = [uniform(torch.tensor(seed), step, position, token) for seed in (0, 1, -1, 2**32, 2**33, -(2**40))]
    for i, a in enumerate(noise):
        for b in noise[i + 1 :]:
            assert (a == b).float().mean() < 0.01


# --- the draws -------------------------------------------------------------------------------------------------------


def test_draws_stay_what_they_were() -> None:
    """Recorded before this was an op: another value changes the answers of everybody who decodes with a temperature."""
    x = (((torch.arange(40) * 37) % 11).float() / 4).expand(24, 40)
    seeds = torch.tensor([0, 1, -1, 2**32, 2**40 + 5, -(2**50)]).repeat(4)
    steps, positions = torch.full((24,), 3), torch.arange(24) * 97
    recorded = {
        0.7: [30, 17, 5, 38, 21, 8, 26, 30, 11, 29, 5, 18, 19, 30, 13, 19, 35, 2, 27, 5, 38, 24, 23, 8],
        3.0: [10, 17, 5, 28, 21, 32, 26, 10, 11, 29, 20, 15, 19, 30, 25, 20, 35, 2, 27, 5, 38, 24, 23, 28],
    }
    for temperature, tokens in recorded.items():
        out = sample_rows(x, seeds, steps, positions, temperature=temperature, suppress=[6])
        assert out.token.tolist() == tokens


@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("vocab", [1, 2, 5, 997, 1009, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(dtype: torch.dtype, vocab: int, n: int) -> None:
    x = random_logits(n, vocab, dtype)
    for temperature in (0.2, 1, 3.0):
        check(x, temperature, sample_rows(x, *words(n), temperature=temperature))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_vocabulary(dtype: torch.dtype) -> None:
    x = random_logits(8, 126464, dtype)
    check(x, 0.7, sample_rows(x, *words(8), temperature=0.7, suppress=[126336]), (126336,))


def test_the_formula_is_gumbel_max() -> None:
    """Written out in Python floats: argmax of x - T ln(-ln u)."""
    logits, temperature = [0.1, 0.9, -0.4, 0.2], 1.7
    for position in range(20):
        noise = [-math.log(-math.log(python_uniform(3, 5, position, v))) for v in range(4)]
        noisy = [x + temperature * g for x, g in zip(logits, noise, strict=True)]
        row = (torch.tensor([3]), torch.tensor([5]), torch.tensor([position]))
        got = sample_rows(torch.tensor([logits]), *row, temperature=temperature)
        assert got.token.item() == noisy.index(max(noisy))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_softmax(temperature: float) -> None:
    """Three tokens, 40,000 draws: within 4.5 standard errors of softmax(logits / T)."""
    logits, n = [0.3, 1.0, -0.5], 40_000
    expected = torch.tensor(logits, dtype=torch.float64).div(temperature).softmax(0)
    counts = torch.bincount(draw_many(logits, temperature, n), minlength=3).double()
    error = (expected * (1 - expected) / n).sqrt()
    assert ((counts / n - expected).abs() < 4.5 * error).all()


def test_chi_square_over_many_tokens() -> None:
    """60 tokens, 60,000 draws: 59 degrees of freedom have a chi-square of 59 +- 11, above 117 once in 100,000."""
    logits, n = random_logits(1, 60)[0] * 10, 60_000
    expected = n * logits.double().div(1.3).softmax(0)
    assert expected.min() > 20
    counts = torch.bincount(draw_many(logits.tolist(), 1.3, n), minlength=60)
    assert ((counts - expected) ** 2 / expected).sum() < 117


@pytest.mark.parametrize("temperature", [1e-6, 1e3, 1e6])
def test_extreme_temperatures_are_finite(temperature: float) -> None:
    tokens = draw_many([1.0, 1.5, 0.0], temperature, 3000)
    counts = torch.bincount(tokens, minlength=3)
    if temperature < 1:
        assert counts.tolist() == [0, 3000, 0]
    else:
        assert (counts > 900).all()


def test_temperature_zero_is_the_argmax() -> None:
    """The first id on a tie, as `top_eta` has it."""
    x = random_logits(33, 97).round()
    ties = (x == x.amax(1, keepdim=True)).sum(1) > 1
    assert ties.any()
    assert torch.equal(sample_rows(x, *words(33), temperature=0).token, x.argmax(1))


def test_prob_ignores_the_temperature() -> None:
    x = random_logits(33, 300)
    p = x.double().softmax(1)
    for temperature in (0.0, 0.5, 20.0):
        out = sample_rows(x, *words(33), temperature=temperature)
        assert (out.prob - p.gather(1, out.token[:, None])[:, 0]).abs().max() < 1e-6


def test_suppressed_tokens_are_never_drawn() -> None:
    """Not where they are the likely ones, nor where they are NaN; every form of the list says the same."""
    for form in ([0, 3], (3, 0, 0), torch.tensor([0, 3]), torch.tensor([3, -1, 0, -1])[::2]):
        assert set(draw_many([9.0, 0.0, 0.0, NAN], 1.0, 500, suppress=form).tolist()) == {1, 2}
    x = random_logits(33, 50)
    check(x, 1.0, sample_rows(x, *words(33), temperature=1.0, suppress=[4, 40]), (4, 40))


def test_tokens_without_probability_are_never_drawn() -> None:
    assert set(draw_many([-INF, 0.0, -INF, 1.0], 1e6, 500).tolist()) == {1, 3}


def test_a_row_depends_on_its_own_words_only() -> None:
    """Alone, in a batch, in another order, with the words as int32 or strided: the same token and probability."""
    x = random_logits(16, 211)
    seeds, steps, positions = words(16)
    seeds = seeds % 1000 - 500
    full = sample_rows(x, seeds, steps, positions, temperature=1.0)
    order = torch.tensor([5, 0, 15, 5, 9])
    picked = Sampled(*(t[order] for t in full))
    both(sample_rows(x[order], seeds[order], steps[order], positions[order], temperature=1.0), picked)
    narrow = [t[order].int() for t in (seeds, steps, positions)]
    both(sample_rows(x, *narrow, temperature=1.0, rows=order.int()), picked)
    spaced = [torch.stack([t, t + 99], 1)[:, 0] for t in (seeds, steps, positions)]
    both(sample_rows(x, *spaced, temperature=1.0), full)
    for row in range(16):
        alone = [t[row : row + 1] for t in (x, seeds, steps, positions)]
        both(sample_rows(*alone, temperature=1.0), Sampled(*(t[row : row + 1] for t in full)))
    for changed in ((seeds + 1, steps, positions), (seeds, steps + 1, positions), (seeds, steps, positions + 1)):
        assert not torch.equal(sample_rows(x, *changed, temperature=1.0).token, full.token)


def test_of_steps_and_positions_32_bits_count() -> None:
    x = random_logits(16, 211)
    seeds, steps, positions = words(16)
    want = sample_rows(x, seeds, steps, positions, temperature=1.0)
    both(sample_rows(x, seeds, steps + 2**32, positions - 2**40, temperature=1.0), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("value", "where"),
    [(NAN, [0]), (NAN, [1008]), (INF, [500]), (INF, [3, 900]), (NAN, range(1009)), (-INF, range(1009))],
)
def test_bad_rows_give_no_token_and_stay_alone(value: float, where: list[int], dtype: torch.dtype) -> None:
    x = random_logits(3, 1009, dtype)
    want = sample_rows(x, *words(3), temperature=1.0)
    x[1, list(where)] = value
    out = sample_rows(x, *words(3), temperature=1.0)
    assert out.token[1] == -1
    assert out.prob[1].isnan()
    both(Sampled(*(t[[0, 2]] for t in out)), Sampled(*(t[[0, 2]] for t in want)))


def test_float64_is_rounded_before_anything_else() -> None:
    """Two float64 logits that are one float32 number tie, and the first id wins; 1e300 is an infinity."""
    x = torch.tensor([[0.0, 1.0, 1.0 + 1e-12], [0.0, 1e300, 0.0]], dtype=torch.float64)
    assert sample_rows(x, *words(2), temperature=0).token.tolist() == [1, -1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_layouts(dtype: torch.dtype) -> None:
    """Row strides above V, row steps, an offset and an expanded row read the same numbers and nothing around them."""
    x = random_logits(7, 101, dtype)
    want = sample_rows(x, *words(7), temperature=1.0, suppress=[5])
    wide = torch.full((7, 130), NAN, dtype=dtype)
    wide[:, 11:112] = x
    spaced = torch.full((21, 101), NAN, dtype=dtype)
    spaced[1::3] = x
    for view in (wide[:, 11:112], spaced[1::3]):
        both(sample_rows(view, *words(7), temperature=1.0, suppress=[5]), want)
    one = x[2:3].expand(7, 101)
    both(sample_rows(one, *words(7), temperature=1.0), sample_rows(one.contiguous(), *words(7), temperature=1.0))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Several threads even where there is one core: torch then splits a single long row between them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_long_rows_alone_equal_the_rows_in_a_batch() -> None:
    x = random_logits(3, 126464, torch.bfloat16)
    full = sample_rows(x, *words(3), temperature=1.0)
    for row in range(3):
        alone = [t[row : row + 1] for t in (x, *words(3))]
        both(sample_rows(*alone, temperature=1.0), Sampled(*(t[row : row + 1] for t in full)))


def test_two_runs_are_equal_leave_inputs_alone_and_draw_no_random_number() -> None:
    x, state = random_logits(5, 1009), torch.random.get_rng_state()
    options = {"temperature": 1.0, "rows": torch.tensor([4, 1, 1, 0, 2]), "suppress": torch.tensor([3, 8])}
    both(*(unchanged(sample_rows, x, *words(5), **options) for _ in range(2)))
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_backends_on_a_cpu(backend: str) -> None:
    x = random_logits(4, 50)
    both(sample_rows(x, *words(4), temperature=1.0, backend=backend), sample_rows(x, *words(4), temperature=1.0))
