# SPDX-License-Identifier: Apache-2.0
"""`row_kl` against float64, torch's own divergence, and numbers worked out by hand.

Floats may be off by twice what the textbook formula costs in float32, plus one rounding of the largest term in its sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from interpret.checks import close, same, unchanged
from torch import Tensor

from leap_kernels.ops import row_kl

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INF, NAN = float("inf"), float("nan")


def pair(n: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0, moved: float = 0.3):
    """Rows from nearly uniform to nearly certain, and the same rows a step earlier, from hardly to much different."""
    g = torch.Generator().manual_seed(1000 * seed + vocab)
    spread = torch.logspace(-1, 1, max(n, 1), dtype=torch.float64)[:n, None]
    now, step = (torch.randn(n, vocab, generator=g, dtype=torch.float64) for _ in range(2))
    return (now * spread).to(dtype), (now * spread + step * moved * spread).to(dtype)


def selected(x: Tensor, rows: Tensor | None, suppress: tuple[int, ...]) -> Tensor:
    x = (x if rows is None else x[rows.long()]).float()
    return x.index_fill(1, torch.tensor(suppress, dtype=torch.int64), -INF)


def textbook(x: Tensor, y: Tensor) -> Tensor:
    """sum p (ln p - ln q) over the tokens that x gives a probability, in the dtype of x and y."""
    log_p, log_q = x.log_softmax(-1), y.log_softmax(-1)
    return torch.where(x > -INF, log_p.exp() * (log_p - log_q), 0.0).sum(-1)


def check(got: Tensor, now: Tensor, before: Tensor, rows=None, previous_rows=None, suppress=()) -> None:
    x, y = selected(now, rows, suppress), selected(before, rows if previous_rows is None else previous_rows, suppress)
    truth = textbook(x.double(), y.double())
    terms = (x.double().softmax(-1) * (x - y).double().nan_to_num(0, 0, 0)).abs().sum(-1)
    scale = max([1.0, *terms.tolist()])
    assert (got[~got.isnan()] >= 0).all()
    close(got, textbook(x, y), truth, scale)


@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("vocab", [1, 2, 5, 997, 1009, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(dtype: torch.dtype, vocab: int, n: int) -> None:
    now, before = pair(n, vocab, dtype)
    check(row_kl(now, before), now, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("moved", [0.01, 0.1, 1.0])
def test_real_vocabulary_near_the_thresholds_of_klass(moved: float, dtype: torch.dtype) -> None:
    """V of LLaDA, from settled rows to a KL of about one: thresholds are 0.001 to 0.015, the error is some 1e-6."""
    now, before = pair(6, 126464, dtype, moved=moved)
    got = row_kl(now, before)
    check(got, now, before)
    truth = textbook(now.double(), before.double())
    settled = truth < 0.1
    assert settled.any()
    assert (got.double() - truth)[settled].abs().max() < 2e-6


def test_equals_torch_distributions() -> None:
    """The formula that this file compares with is torch's kl_divergence, tokens without probability included."""
    now, before = pair(20, 40, torch.float64)
    now[3, :7] = -INF
    before[4, 9] = -INF
    now[5, 8], before[5, 8] = -INF, -INF
    p, q = (torch.distributions.Categorical(logits=t) for t in (now.float().double(), before.float().double()))
    truth = torch.distributions.kl_divergence(p, q)
    assert truth.isinf().nonzero().tolist() == [[4]]
    torch.testing.assert_close(textbook(now.float().double(), before.float().double()), truth, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(row_kl(now, before).double(), truth, rtol=1e-5, atol=1e-6)


def test_hand_worked_and_not_symmetric() -> None:
    """(1/2, 1/2) against (1/4, 3/4) on paper, both ways; logits may carry any constant."""
    halves, quarters = torch.tensor([[0.5, 0.5]]).log() + 3, torch.tensor([[0.25, 0.75]]).log() - 40
    assert row_kl(halves, quarters).item() == pytest.approx(math.log(2) / 2 + math.log(2 / 3) / 2, abs=1e-6)
    assert row_kl(quarters, halves).item() == pytest.approx(math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4, abs=1e-6)


def test_what_klass_computes() -> None:
    """Its public code, sum p (ln(p + 1e-12) - ln(q + 1e-12)) in float64, over three forwards of one block."""
    forwards = [pair(8, 500, seed=3)[0]]
    for seed in (4, 5):
        forwards.append(forwards[-1] + 0.05 * pair(8, 500, seed=seed)[0])
    masked = torch.tensor([1, 2, 5, 7])  # the rest of the block is committed
    for before, now in itertools.pairwise(forwards):
        p, q = now.double().softmax(-1), before.double().softmax(-1)
        theirs = (p * ((p + 1e-12).log() - (q + 1e-12).log())).sum(-1)
        ours = row_kl(now[masked], before, previous_rows=masked)
        assert (ours - theirs[masked]).abs().max() < 2e-6
        assert torch.equal(ours < 0.01, theirs[masked] < 0.01)
        same(row_kl(now, before, rows=masked), ours)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_distributions_are_exactly_zero(dtype: torch.dtype) -> None:
    """A row against itself, and against itself plus a constant that rounds nowhere."""
    now = (pair(9, 1009, dtype)[0] * 16).round().clamp(-80, 80) / 16
    assert row_kl(now, now).tolist() == [0.0] * 9
    assert row_kl(now, now + 1).tolist() == [0.0] * 9


def test_never_negative() -> None:
    """Rounding exceeds the divergence here by far."""
    now = pair(200, 300)[0]
    assert (row_kl(now, now + 1e-7 * pair(200, 300, seed=1)[0]) >= 0).all()


def test_tokens_without_probability() -> None:
    """0 ln 0 = 0; what q rules out and p does not is infinitely far, however small p is."""
    now = torch.tensor([[0.0, -INF, 0.0], [0.0, 1.0, 0.0], [0.0, -INF, 0.0], [0.0, -500.0, 0.0], [-INF, 2.0, -INF]])
    before = torch.tensor([[0.0, 0.0, 0.0], [0.0, -INF, 0.0], [1.0, -INF, 1.0], [0.0, -INF, 0.0], [-INF, 7.0, 7.0]])
    got = row_kl(now, before)
    torch.testing.assert_close(got, torch.tensor([math.log(1.5), INF, 0.0, INF, math.log(2)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits(dtype: torch.dtype) -> None:
    """1e4 overflows exp, -1e4 underflows it, and both may be on either side."""
    rows = [
        torch.full((67,), 1e4),
        torch.full((67,), -1e4),
        torch.zeros(67),
        torch.linspace(-1e4, 1e4, 67),
        torch.cat([torch.full((3,), 1e4), torch.full((64,), -1e4)]),
    ]
    for x in rows:
        for y in rows:
            now, before = x[None].to(dtype), y[None].to(dtype)
            check(row_kl(now, before), now, before)


def bad_rows() -> dict[str, Tensor]:
    rows = {}
    for name, value in (("NaN", NAN), ("+inf", INF)):
        for where in (0, 500, 1008):
            rows[f"{name} at {where}"] = pair(1, 1009, seed=where)[0][0].index_fill(0, torch.tensor(where), value)
    rows["all NaN"] = torch.full((1009,), NAN)
    rows["all -inf"] = torch.full((1009,), -INF)
    rows["NaN among -inf"] = torch.full((1009,), -INF).index_fill(0, torch.tensor([77]), NAN)
    rows["+inf among -inf"] = torch.full((1009,), -INF).index_fill(0, torch.tensor([77]), INF)
    return rows


@pytest.mark.parametrize("side", ["now", "before", "both"])
@pytest.mark.parametrize("name", list(bad_rows()))
def test_bad_rows_give_nan_and_stay_alone(name: str, side: str) -> None:
    now, before = pair(3, 1009)
    want = row_kl(now, before)
    for x in {"now": [now], "before": [before], "both": [now, before]}[side]:
        x[1] = bad_rows()[name]
    got = row_kl(now, before)
    assert got.isnan().tolist() == [False, True, False]
    same(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("value", [NAN, INF, 1e4])
def test_suppressed_ids_are_never_looked_at(value: float) -> None:
    """Neither p nor q has them, whatever stands there; every form of the list says the same."""
    now, before = pair(33, 50)
    want = row_kl(now, before, suppress=[9, 2])
    check(want, now, before, suppress=(9, 2))
    now[:, 9], before[:, 2] = value, value
    for form in ([9, 2], (2, 9, 9), torch.tensor([2, 9]), torch.tensor([2, -1, 9, -1])[::2]):
        same(row_kl(now, before, suppress=form), want)
    assert row_kl(now, before, suppress=range(50)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_in_any_order_with_repeats(dtype: torch.dtype) -> None:
    """Each side has an index of its own and no gather; None means all rows, or the same ones."""
    now, before = pair(9, 101)
    before = torch.cat([torch.full((4, 101), NAN), before])  # M = 13: row i stands at i + 4
    full = row_kl(now, before[4:])
    check(full, now, before[4:])
    for rows in ([], [8], [4, 0, 4, 4, 2, 8], list(range(8, -1, -1))):
        index = torch.tensor(rows, dtype=dtype)
        same(row_kl(now, before, rows=index, previous_rows=index + 4), full[rows])
        same(row_kl(now, before[4:], rows=index), full[rows])
        same(row_kl(now[rows], before, previous_rows=index + 4), full[rows])
    strided = torch.arange(18, dtype=dtype)[::4][:3]
    same(row_kl(now, before, rows=strided, previous_rows=(torch.arange(26, dtype=dtype) + 4)[::4][:3]), full[[0, 4, 8]])
    crossed = row_kl(now, now, rows=torch.tensor([0, 3]), previous_rows=torch.tensor([3, 0]))
    check(crossed, now, now, torch.tensor([0, 3]), torch.tensor([3, 0]))


def test_the_two_sides_may_have_different_dtypes() -> None:
    now, before = pair(5, 300)
    for a, b in ((now.bfloat16(), before), (now, before.half()), (now.double(), before.bfloat16())):
        got = row_kl(a, b)
        check(got, a, b)
        same(got, row_kl(a.float(), b.float()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_layouts(dtype: torch.dtype) -> None:
    """Row strides above V, row steps, an offset and an expanded row read the same numbers and nothing around them."""
    now, before = pair(7, 101, dtype)
    want = row_kl(now, before, suppress=[5])

    def views(x: Tensor) -> Iterator[Tensor]:
        wide = torch.full((7, 130), NAN, dtype=dtype)
        wide[:, 11:112] = x
        spaced = torch.full((21, 101), NAN, dtype=dtype)
        spaced[1::3] = x
        yield from (wide[:, 11:112], spaced[1::3])

    for a in (now, *views(now)):
        for b in (before, *views(before)):
            same(row_kl(a, b, suppress=[5]), want)
    same(row_kl(now, before[2:3].expand(7, 101)), row_kl(now, before, rows=None, previous_rows=torch.full((7,), 2)))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Several threads even where there is one core: torch then splits a single long row between them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [5, 1009, 65537, 126464])
def test_a_row_alone_equals_the_row_in_a_batch(vocab: int) -> None:
    now, before = pair(6, vocab, torch.bfloat16)
    full = row_kl(now, before)
    for row in range(6):
        same(row_kl(now[row : row + 1], before[row : row + 1]), full[row : row + 1])
        same(row_kl(now, before, rows=torch.tensor([row])), full[row : row + 1])


def test_two_runs_are_equal_and_leave_their_inputs_alone() -> None:
    now, before = pair(5, 1009)
    rows, suppress = torch.tensor([4, 1, 1], dtype=torch.int32), torch.tensor([3, 8])
    options = {"rows": rows, "previous_rows": rows.clone(), "suppress": suppress}
    same(unchanged(row_kl, now, before, **options), unchanged(row_kl, now, before, **options))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_backends_on_a_cpu(backend: str) -> None:
    now, before = pair(4, 50)
    same(row_kl(now, before, backend=backend), row_kl(now, before))
