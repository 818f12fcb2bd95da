# SPDX-License-Identifier: Apache-2.0
"""`top_eta` kernels against the reference (ids, counts, order: exactly) and float64 (statistics: within the budget)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from interpret.checks import close, same, unchanged
from torch import Tensor

from leap_kernels.ops import TopEta, max_candidates, top_eta
from leap_kernels.ops.candidates.kernel import BLOCK, SPLIT

pytestmark = pytest.mark.interpret

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INF, NAN = float("inf"), float("nan")
BAND = 1e-6
ETA_OF_K = {1: 0.6, 2: 0.5, 5: 0.2, 10: 0.1, 16: 1 / 16}


def logits(n: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows from nearly uniform to nearly certain, so that each eta lists none, some and many tokens."""
    generator = torch.Generator().manual_seed(1000 * seed + vocab)
    spread = torch.logspace(0, 1, max(n, 1), dtype=torch.float64)[:n, None]
    return (torch.randn(n, vocab, generator=generator, dtype=torch.float64) * spread).to(dtype)


def prepared(x: Tensor, rows: Tensor | None, suppress: list[int] | None) -> Tensor:
    """The selected rows in float64, suppressed ids at -inf."""
    x = (x if rows is None else x[rows.long()]).float().double()
    return x if suppress is None else x.index_fill(1, torch.tensor(suppress, dtype=torch.int64), -INF)


def check(x: Tensor, eta: float, rows: Tensor | None = None, suppress: list[int] | None = None) -> TopEta:
    out = unchanged(top_eta, x, eta, rows=rows, suppress=suppress, backend="triton")
    reference = top_eta(x, eta, rows=rows, suppress=suppress, backend="reference")
    for field in ("ids", "counts", "top1", "gap"):
        same(getattr(out, field), getattr(reference, field))

    exact = prepared(x, rows, suppress)
    good = exact.amax(-1).isfinite()
    logp = exact.log_softmax(-1)
    assert not ((logp.exp() - eta).abs() < BAND).any(), "either outcome would be right: choose another eta"
    probs = logp.exp().gather(1, reference.ids.clamp(min=0)).masked_fill(reference.ids < 0, 0)
    # One rounding of ln S or of a probability near 1 is eps, however small the result.
    close(out.probs, reference.probs, probs, 1.0)
    close(out.prob1, reference.prob1, logp.amax(-1).exp().masked_fill(~good, NAN), 1.0)
    close(out.lse, reference.lse, torch.where(good, exact.logsumexp(-1), exact.amax(-1)), 1.0)
    close(out.entropy, reference.entropy, torch.special.entr(logp.exp()).sum(-1).masked_fill(~good, NAN), 1.0)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 5, 997, 1009, BLOCK, SPLIT + 13])
def test_any_vocabulary(vocab, dtype):
    check(logits(3, vocab, dtype), 0.2, suppress=[vocab // 2] if vocab > 1 else None)


@pytest.mark.parametrize("k", ETA_OF_K)
def test_every_k_over_three_splits(k):
    x = logits(2, 20_000)
    x[1, [3, 9_000, 9_001, 12_000, 19_999]] += torch.tensor([60.0, 60.5, 59.5, 58.0, 59.9])
    assert max_candidates(ETA_OF_K[k], x.shape[1]) == k
    check(x, ETA_OF_K[k])


@pytest.mark.parametrize("n", [0, 1, 33])
def test_any_number_of_rows(n):
    check(logits(max(n, 1), 997), 0.2, rows=torch.arange(n))


def test_rows_in_any_order_with_repeats_and_strides():
    x = logits(5, 300)
    check(x, 0.1, rows=torch.tensor([4, 0, 0, 3, 4], dtype=torch.int32))
    check(x, 0.1, rows=torch.tensor([4, 9, 0, 9, 2, 9])[::2])


def test_suppressed_ids_have_no_probability():
    x = logits(2, 600)
    best = x.argmax(-1).tolist()
    x[0, 7] = NAN  # a suppressed NaN is no NaN
    strided = torch.tensor([[id_, 599] for id_ in (*best, 7)]).T[0]
    for suppress in ([], [*best, 7, 599]):
        check(x, 0.2, suppress=suppress)
    same(top_eta(x, 0.2, suppress=strided, backend="triton").top1, top_eta(x, 0.2, suppress=strided).top1)
    out = check(x, 0.2, suppress=list(range(600)))
    assert out.top1.tolist() == [-1, -1]
    assert out.lse.tolist() == [-INF, -INF]


@pytest.mark.parametrize("eta", [0.6, 0.2, 1 / 16])
def test_of_equal_logits_the_lowest_ids_win(eta):
    """Maxima equal within a block, in the two blocks of a split, and in different splits."""
    x = torch.zeros(5, 2 * SPLIT + 100)
    x[0, [700, 5]] = 30.0
    x[1, [BLOCK + 1, 9]] = 30.0
    x[2, [SPLIT + 2, 17]] = 30.0
    x[3, [2 * SPLIT + 50, 2 * SPLIT + 2, BLOCK + 2, 6]] = 30.0
    x[4, [SPLIT - 1, SPLIT, 3]] = torch.tensor([30.0, 30.0, 29.5])
    out = check(x, eta)
    assert out.top1.tolist() == [5, 9, 17, 6, SPLIT - 1]


def test_eta_is_inclusive():
    """The probability of a lone finite logit is exactly 1."""
    out = top_eta(torch.tensor([[-INF, 3.0, -INF], [0.0, 3.0, -INF]]), 1.0, backend="triton")
    assert out.counts.tolist() == [1, 0]
    assert out.ids.tolist() == [[1], [-1]]


def test_constant_rows_and_logits_of_1e4():
    x = torch.full((3, 4), 2.5)
    x[1] = 1e4
    x[2] = torch.tensor([1e4, 1e4 - 1, -1e4, 1e4])
    check(x, 0.2)
    check(torch.full((1, SPLIT + 5), -1e4), 1 / 16)


@pytest.mark.parametrize("at", [0, BLOCK + 3, SPLIT + 8])
def test_bad_rows_show_and_leave_the_others_alone(at):
    x = logits(6, SPLIT + 9)
    x[0, at] = NAN
    x[1, at] = INF
    x[2] = -INF
    x[3] = -INF
    x[3, at] = 4.0  # one finite logit: certain, with an infinite gap
    x[4, at], x[4, at - 1] = INF, NAN
    out = check(x, 0.2)
    assert out.top1[:5].tolist() == [-1, -1, -1, at, -1]
    assert out.gap[3].item() == INF
    same(out.ids[5:], top_eta(x[5:], 0.2, backend="triton").ids)


def test_whole_splits_of_minus_infinity():
    x = torch.full((2, 2 * SPLIT + 30), -INF)
    x[0, SPLIT + 5] = 1.0
    x[1, [2 * SPLIT + 1, 2 * SPLIT + 7]] = torch.tensor([3.0, 3.0])
    check(x, 0.2)


@pytest.mark.parametrize("vocab", [1009, BLOCK - 1, BLOCK, BLOCK + 1])
def test_strided_rows_with_neighbours_and_storage_offset(vocab):
    """A mask that reaches too far would find the neighbours' 1e30 and NaN."""
    storage = torch.full((4, vocab + 190), NAN)
    storage[:, ::2] = 1e30
    x = storage[1:, 3 : 3 + vocab]
    x.copy_(logits(3, vocab))
    check(x, 0.2)


def test_offsets_beyond_32_bits():
    """Row 2 starts at element 2^31. The memory is reserved, but only three of its rows are ever touched."""
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    x = storage.as_strided((3, 50), (2**30, 1))
    x.copy_(logits(3, 50))
    check(x, 0.2)


def test_deterministic_and_blind_to_other_rows():
    x = logits(4, SPLIT + 77, torch.bfloat16)
    first, second = (top_eta(x, 0.1, backend="triton") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        same(a, b)
    alone = top_eta(x, 0.1, rows=torch.tensor([2]), backend="triton")
    for a, b in zip(first, alone, strict=True):
        same(a[2:3], b)


VALUES = st.sampled_from([-INF, -1e4, -3.0, 0.0, 0.25, 2.0, 2.0, 2.5, 7.0, 1e4, INF, NAN])


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.data())
def test_small_rows_of_awkward_values(data):
    vocab = data.draw(st.integers(1, 12))
    n = data.draw(st.integers(1, 3))
    x = torch.tensor(data.draw(st.lists(VALUES, min_size=n * vocab, max_size=n * vocab))).view(n, vocab)
    eta = data.draw(st.sampled_from([1.0, 0.5, 0.3, 0.2, 1 / 16]))
    suppress = data.draw(st.lists(st.integers(0, vocab - 1), max_size=2))
    p = prepared(x, None, suppress).softmax(-1)
    assume(not ((p - eta).abs() < BAND).any())
    check(x, eta, suppress=suppress)
