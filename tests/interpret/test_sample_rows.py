# SPDX-License-Identifier: Apache-2.0
"""`sample_rows` kernels: the reference's uniforms bit for bit, and the exact draw wherever rounding cannot decide."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from interpret.checks import close, same, unchanged
from noise import check_draws
from torch import Tensor

from leap_kernels.ops import Sampled, sample_rows
from leap_kernels.ops.sampling import kernel
from leap_kernels.ops.sampling.kernel import BLOCK
from leap_kernels.ops.sampling.reference import uniform

pytestmark = pytest.mark.interpret

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INF, NAN = float("inf"), float("nan")
LIMITS = (0, 1, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**32, 2**40 + 5, -(2**50), 2**63 - 1, -(2**63))


def logits(n: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows from nearly uniform to nearly certain."""
    generator = torch.Generator().manual_seed(1000 * seed + vocab)
    spread = torch.logspace(-1, 1, max(n, 1), dtype=torch.float64)[:n, None]
    return (torch.randn(n, vocab, generator=generator, dtype=torch.float64) * spread).to(dtype)


def words(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """n different (seed, step, position)."""
    return torch.tensor(LIMITS)[torch.arange(n) % len(LIMITS)], torch.arange(n) % 5 + 1, 3 * torch.arange(n) + 2


def check(
    x: Tensor,
    temperature: float = 1.0,
    rows: Tensor | None = None,
    suppress: tuple[int, ...] | list[int] = (),
    given_words: tuple[Tensor, Tensor, Tensor] | None = None,
    clear: float = 0.9,
) -> Sampled:
    n = len(x) if rows is None else len(rows)
    given_words = words(n) if given_words is None else given_words
    options = {"temperature": temperature, "rows": rows, "suppress": list(suppress)}
    out = unchanged(sample_rows, x, *given_words, **options, backend="triton")
    reference = sample_rows(x, *given_words, **options, backend="reference")
    assert [(t.shape, t.dtype) for t in out] == [(t.shape, t.dtype) for t in reference]

    x = (x if rows is None else x[rows.long()]).float()
    x = x.index_fill(1, torch.tensor(list(suppress), dtype=torch.int64), -INF)
    good = x.amax(-1).isfinite()
    assert torch.equal(out.token == -1, ~good)
    assert torch.equal(out.prob.isnan(), ~good)
    x, token, prob = x[good], out.token[good], out.prob[good]
    if len(x):
        u = uniform(*(t.long()[good, None] for t in given_words), torch.arange(x.shape[1]))
        check_draws(token, x, u, temperature, clear=clear)
        plain, truth = (t.softmax(-1).gather(1, token[:, None])[:, 0] for t in (x, x.double()))
        close(prob, plain, truth, 1.0)
    return out


@triton.jit
def _uniforms_kernel(seeds_ptr, steps_ptr, positions_ptr, tokens_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    key = kernel.row_key(tl.load(seeds_ptr + row), tl.load(steps_ptr + row), tl.load(positions_ptr + row))
    lane = tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + lane, mask=lane < n, other=0)
    tl.store(out_ptr + row * n + lane, kernel.uniform(key, token), mask=lane < n)


def test_uniforms_are_the_references_bit_for_bit():
    """Products that wrap many times, negative words, words beyond 32 bits; token ids as int32, as the kernel counts."""
    many = torch.cartesian_prod(*(torch.tensor(LIMITS[i :: 3 if i else 1]) for i in range(3)))
    tokens = torch.tensor([0, 1, 2, 4095, 4096, 126_463, 157_183, 2**31 - 1], dtype=torch.int32)
    out = torch.empty(len(many), len(tokens))
    seeds, steps, positions = (t.contiguous() for t in many.T)
    _uniforms_kernel[(len(many),)](seeds, steps, positions, tokens, out, len(tokens), BLOCK=8)
    same(out, uniform(*(t[:, None] for t in (seeds, steps, positions)), tokens.long()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 5, 997, 1009, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 13])
def test_any_vocabulary(vocab, dtype):
    for temperature in (0.3, 1, 3.0):
        check(logits(12, vocab, dtype), temperature, suppress=[vocab // 2] if vocab > 1 else [])


def test_a_real_vocabulary():
    check(logits(2, 126_464, torch.bfloat16), clear=1)


@pytest.mark.parametrize("n", [0, 1, 33])
def test_any_number_of_rows(n):
    check(logits(max(n, 1), 997), rows=torch.arange(n).clamp(max=max(n, 1) - 1))


def test_many_draws_are_the_references():
    """Where rounding cannot decide, which is nearly everywhere, the tokens are equal to those of the reference."""
    n = 200
    x = logits(4, 300)[torch.arange(n) % 4]
    ones = torch.ones(n, dtype=torch.int64)
    out = check(x, 1.0, given_words=(7 * ones, ones, torch.arange(n)), clear=0.99)
    assert torch.equal(out.token, sample_rows(x, 7 * ones, ones, torch.arange(n), temperature=1.0).token)
    assert len(out.token.unique()) > 50


def test_rows_and_words_in_any_order_with_repeats_and_strides():
    x = logits(5, 300)
    check(x, rows=torch.tensor([4, 0, 0, 3, 4], dtype=torch.int32))
    spaced = [torch.stack([t, t + 99], 1)[:, 0] for t in words(3)]
    check(x, rows=torch.tensor([4, 9, 0, 9, 2, 9])[::2], given_words=spaced)
    check(x, rows=torch.tensor([1, 2]), given_words=tuple((t % 1000 - 500).int() for t in words(2)))
    check(x, given_words=tuple(t[:1].expand(5) for t in words(1)))


def test_suppressed_ids_are_never_drawn():
    x = logits(6, 100)
    best = x.argmax(-1).tolist()
    x[0, 7] = NAN  # a suppressed NaN is no NaN
    for suppress in ([*best, 7], [7, 99, 7]):
        out = check(x, 0.5, suppress=suppress)
        assert not set(out.token.tolist()) & set(suppress)
    assert check(x, suppress=range(100)).token.tolist() == [-1] * 6
    strided = torch.tensor([[id_, 99] for id_ in (*best, 7)]).T[0]
    same(
        sample_rows(x, *words(6), temperature=0.5, suppress=strided, backend="triton").token,
        sample_rows(x, *words(6), temperature=0.5, suppress=[*best, 7], backend="triton").token,
    )


def test_temperature_zero_takes_the_lowest_of_equal_ids():
    """Maxima equal within a split and in different splits."""
    x = torch.zeros(5, 2 * BLOCK + 100)
    x[0, [700, 5]] = 30.0
    x[1, [BLOCK + 1, 9]] = 30.0
    x[2, [2 * BLOCK + 50, 2 * BLOCK + 2]] = 30.0
    x[3, [BLOCK - 1, BLOCK, 3]] = torch.tensor([30.0, 30.0, 29.5])
    out = sample_rows(x, *words(5), temperature=0, backend="triton")
    assert out.token.tolist() == [5, 9, 2 * BLOCK + 2, BLOCK - 1, 0]


@pytest.mark.parametrize("at", [0, BLOCK + 3, 2 * BLOCK + 8])
def test_bad_rows_show_and_leave_the_others_alone(at):
    x = logits(6, 2 * BLOCK + 9)
    want = sample_rows(x, *words(6), temperature=1.0, backend="triton")
    x[0, at] = NAN
    x[1, at] = INF
    x[2] = -INF
    x[3] = -INF
    x[3, at] = 4.0  # one finite logit: certain
    x[4, at], x[4, at - 1] = INF, NAN
    out = check(x)
    assert out.token[:5].tolist() == [-1, -1, -1, at, -1]
    assert out.prob[3] == 1
    for a, b in zip(out, want, strict=True):
        same(a[5:], b[5:])


@pytest.mark.parametrize("scale", [1e4, 1e30, 3e38])
def test_logits_of_any_size(scale):
    x = torch.tensor([[0.0, scale, -scale], [scale, scale, -scale], [-scale, -scale, -scale]])
    check(x, 1.0, clear=0)
    check(x, 1e6, clear=0)
    check(torch.full((2, BLOCK + 5), -scale), 0.5, clear=0)


@pytest.mark.parametrize("vocab", [1009, BLOCK - 1, BLOCK, BLOCK + 1])
def test_strided_rows_with_neighbours_and_storage_offset(vocab):
    """A mask that reaches too far would find the neighbours' 1e30 and NaN."""
    storage = torch.full((4, vocab + 190), NAN)
    storage[:, ::2] = 1e30
    check(storage[1:, 3 : 3 + vocab].copy_(logits(3, vocab)))


def test_offsets_beyond_32_bits():
    """Row 2 starts at element 2^31. The memory is reserved, but only three of its rows are ever touched."""
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    check(storage.as_strided((3, 50), (2**30, 1)).copy_(logits(3, 50)))


def test_deterministic_and_blind_to_other_rows():
    x = logits(4, 2 * BLOCK + 77, torch.bfloat16)
    first, second = (sample_rows(x, *words(4), temperature=1.0, backend="triton") for _ in range(2))
    alone = [t[2:3] for t in words(4)]
    third = sample_rows(x, *alone, temperature=1.0, rows=torch.tensor([2]), backend="triton")
    for a, b, c in zip(first, second, third, strict=True):
        same(a, b)
        same(a[2:3], c)


VALUES = st.sampled_from([-INF, -1e4, -3.0, 0.0, 0.25, 2.0, 2.0, 2.5, 7.0, 1e4, INF, NAN])


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.data())
def test_small_rows_of_awkward_values_and_strides(data):
    n, vocab, gap = (data.draw(st.integers(low, high)) for low, high in ((1, 3), (1, 9), (0, 3)))
    size = n * (vocab + gap)
    x = torch.tensor(data.draw(st.lists(VALUES, min_size=size, max_size=size))).view(n, vocab + gap)[:, gap:]
    numbers = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=n, max_size=n)
    given_words = tuple(torch.tensor(data.draw(numbers)) for _ in range(3))
    temperature = data.draw(st.sampled_from([0.0, 1e-3, 0.7, 5.0, 1e6]))
    suppress = data.draw(st.lists(st.integers(0, vocab - 1), max_size=2))
    check(x, temperature, suppress=suppress, given_words=given_words, clear=0)
