# SPDX-License-Identifier: Apache-2.0
"""`row_kl` kernels against float64, within the budget that the reference sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpret.checks import close, same, unchanged
from torch import Tensor

from leap_kernels.ops import row_kl
from leap_kernels.ops.divergence.kernel import BLOCK

pytestmark = pytest.mark.interpret

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INF, NAN = float("inf"), float("nan")


def pair(n: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows from nearly uniform to nearly certain, and the same rows a step earlier."""
    generator = torch.Generator().manual_seed(1000 * seed + vocab)
    spread = torch.logspace(-1, 1, max(n, 1), dtype=torch.float64)[:n, None]
    now, step = (torch.randn(n, vocab, generator=generator, dtype=torch.float64) * spread for _ in range(2))
    return now.to(dtype), (now + 0.2 * step).to(dtype)


def prepared(x: Tensor, rows: Tensor | None, suppress: list[int]) -> Tensor:
    """The selected rows in float64, suppressed ids at -inf, bad rows all NaN."""
    x = (x if rows is None else x[rows.long()]).float().double()
    x = x.index_fill(1, torch.tensor(suppress, dtype=torch.int64), -INF)
    return x.masked_fill(~x.amax(-1, keepdim=True).isfinite(), NAN)


def check(
    now: Tensor,
    before: Tensor,
    rows: Tensor | None = None,
    previous_rows: Tensor | None = None,
    suppress: tuple[int, ...] | list[int] = (),
) -> Tensor:
    options = {"rows": rows, "previous_rows": previous_rows, "suppress": list(suppress)}
    got = unchanged(row_kl, now, before, **options, backend="triton")
    reference = row_kl(now, before, **options, backend="reference")
    x = prepared(now, rows, list(suppress))
    y = prepared(before, rows if previous_rows is None else previous_rows, list(suppress))
    log_p, log_q = x.log_softmax(-1), y.log_softmax(-1)
    truth = torch.where(x != -INF, log_p.exp() * (log_p - log_q), 0.0).sum(-1)
    assert (got[~got.isnan()] >= 0).all()
    for row in range(len(truth)):
        # What is summed has both signs and the size of the logits' differences; ln(S / T) is one rounding of a log.
        terms = (log_p[row].exp() * (x - y)[row].nan_to_num(0, 0, 0)).abs().sum().item()
        close(got[row], reference[row], truth[row], max(1.0, terms))
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 5, 997, 1009, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 13])
def test_any_vocabulary(vocab, dtype):
    check(*pair(3, vocab, dtype), suppress=[vocab // 2] if vocab > 1 else [])


def test_a_real_vocabulary():
    check(*pair(1, 126_464, torch.bfloat16))


@pytest.mark.parametrize("n", [0, 1, 33])
def test_any_number_of_rows(n):
    check(*pair(max(n, 1), 997), rows=torch.arange(n))


def test_rows_in_any_order_with_repeats_and_strides():
    now, before = pair(5, 300)
    rows = torch.tensor([4, 0, 0, 3, 4], dtype=torch.int32)
    check(now, before, rows=rows)
    check(
        now, before[:4], rows=torch.tensor([4, 9, 0, 9, 2, 9])[::2], previous_rows=torch.tensor([0, 9, 3, 9, 3, 9])[::2]
    )


def test_dtypes_of_the_two_sides_may_differ():
    now, before = pair(3, BLOCK + 300)
    check(now.bfloat16(), before)
    check(now, before.half())


def test_suppressed_ids_have_no_probability():
    now, before = pair(2, 100)
    now[0, 7] = NAN  # a suppressed NaN is no NaN
    before[1, 9] = INF
    for suppress in ([7, 9], [99, 9, 7, 7], list(range(1, 100))):
        check(now, before, suppress=suppress)
    assert check(now, before, suppress=range(100)).isnan().all()
    strided = torch.tensor([[7, 0], [9, 0]]).T[0]
    same(
        row_kl(now, before, suppress=strided, backend="triton"), row_kl(now, before, suppress=[7, 9], backend="triton")
    )


def test_equal_rows_are_exactly_zero():
    now = pair(4, BLOCK + 77)[0]
    assert row_kl(now, now, backend="triton").tolist() == [0.0] * 4
    steps = (now * 16).round() / 16
    assert row_kl(steps, steps + 1, backend="triton").tolist() == [0.0] * 4


@pytest.mark.parametrize("at", [0, 700, BLOCK + 3, 2 * BLOCK + 8])
def test_tokens_that_lost_all_probability(at):
    """+inf where a finite logit stands over -inf, however unlikely it is and whatever else its split holds."""
    now, before = pair(6, 2 * BLOCK + 9)
    now[0, at] = -INF  # nothing to lose
    before[1, at] = -INF
    now[2, at], before[2, at] = -500.0, -INF  # a probability that underflows
    now[3, at], before[3, at] = -INF, -INF
    now[4], before[4] = -INF, -INF
    now[4, at], before[4, at] = 1.0, 2.0  # certain both times
    now[5, at], before[5, at] = -INF, 40.0
    got = check(now, before)
    assert got.isinf().tolist() == [False, True, True, False, False, False]
    assert got[4] == 0


@pytest.mark.parametrize("at", [0, BLOCK + 3, 2 * BLOCK + 8])
@pytest.mark.parametrize("value", [NAN, INF])
def test_bad_rows_show_and_leave_the_others_alone(value, at):
    now, before = pair(7, 2 * BLOCK + 9)
    want = row_kl(now, before, backend="triton")
    now[0, at] = value
    before[1, at] = value
    now[2] = -INF
    before[3] = -INF
    now[4], before[4, at] = -INF, value
    now[5, at], before[5, at - 1] = value, -INF
    got = check(now, before)
    assert got.isnan().tolist() == [True] * 6 + [False]
    same(got[6:], want[6:])


def test_whole_splits_of_minus_infinity():
    now, before = (torch.full((3, 2 * BLOCK + 30), -INF) for _ in range(2))
    for x in (now, before):
        x[0, BLOCK + 5] = 1.0
        x[1, [3, 2 * BLOCK + 1]] = torch.tensor([3.0, 2.0])
    before[0, 7] = 1.0  # only q reaches the first split
    before[1, 3] = 2.5
    now[2, 2 * BLOCK + 1], before[2, 7] = 1.0, 1.0
    assert check(now, before).isinf().tolist() == [False, False, True]


def test_a_token_lost_in_a_split_without_weight():
    """All of the second split is e^-500 as likely as the first, which float32 cannot hold; it still counts."""
    now, before = torch.zeros(1, 2 * BLOCK), torch.zeros(1, 2 * BLOCK)
    now[0, BLOCK:] = -500.0
    before[0, BLOCK + 7] = -INF
    assert check(now, before).item() == INF


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_logits_of_any_size(scale):
    """Certain rows that agree, and rows that swap their likely token, over one split and over two."""
    for vocab in (7, BLOCK + 7):
        now, before = torch.zeros(3, vocab), torch.zeros(3, vocab)
        now[:, 3], before[:, 3] = scale, scale
        now[1, 3], now[1, vocab - 1] = 0.0, scale
        before[2] = -scale
        before[2, 3] = -scale / 2
        check(now, before)


@pytest.mark.parametrize("vocab", [1009, BLOCK - 1, BLOCK, BLOCK + 1])
def test_strided_rows_with_neighbours_and_storage_offset(vocab):
    """A mask that reaches too far would find the neighbours' 1e30 and NaN."""
    views = []
    for value in pair(3, vocab):
        storage = torch.full((4, vocab + 190), NAN)
        storage[:, ::2] = 1e30
        views.append(storage[1:, 3 : 3 + vocab].copy_(value))
    check(*views)


def test_offsets_beyond_32_bits():
    """Row 2 starts at element 2^31. The memory is reserved, but only three of its rows are ever touched."""
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    far = storage.as_strided((3, 50), (2**30, 1))
    now, before = pair(3, 50, torch.bfloat16)
    check(far.copy_(now), before)
    check(now, far.copy_(before))


def test_deterministic_and_blind_to_other_rows():
    now, before = pair(4, 2 * BLOCK + 77, torch.bfloat16)
    first, second = (row_kl(now, before, backend="triton") for _ in range(2))
    same(first, second)
    same(row_kl(now, before, rows=torch.tensor([2]), backend="triton"), first[2:3])


VALUES = st.sampled_from([-INF, -1e4, -3.0, 0.0, 0.25, 2.0, 2.0, 2.5, 7.0, 1e4, INF, NAN])


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.data())
def test_small_rows_of_awkward_values_and_strides(data):
    n, m, vocab, gap = (data.draw(st.integers(low, high)) for low, high in ((1, 3), (1, 3), (1, 9), (0, 3)))
    sides = []
    for rows in (n, m):
        size = rows * (vocab + gap)
        values = torch.tensor(data.draw(st.lists(VALUES, min_size=size, max_size=size)))
        sides.append(values.view(rows, vocab + gap)[:, gap:])
    index = [torch.tensor(data.draw(st.lists(st.integers(0, k - 1), min_size=2, max_size=2))) for k in (n, m)]
    check(*sides, *index, suppress=data.draw(st.lists(st.integers(0, vocab - 1), max_size=2)))
