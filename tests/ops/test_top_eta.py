# SPDX-License-Identifier: Apache-2.0
"""`top_eta` against float64 and a sort written here, on every kind of row that a model can produce.

Two rules of the specification shape the checks. Probabilities within BAND of eta may be listed or not, but equal
logits share one fate; everything else about ids, order and counts is exact. Floats may be off by twice what the
same formula costs when torch evaluates it naively in float32, plus one rounding: all statistics are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leap_kernels.ops import TopEta, max_candidates, top_eta

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INF, NAN = float("inf"), float("nan")
BAND = 1e-6
EPS = torch.finfo(torch.float32).eps


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_logits(n: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows from nearly uniform to nearly certain, so that each eta lists none, some and many tokens."""
    spread = torch.logspace(-1, 1, max(n, 1), dtype=torch.float64)[:n, None]
    return (torch.randn(n, vocab, generator=generator(seed), dtype=torch.float64) * spread).to(dtype)


def same(a: TopEta, b: TopEta) -> None:
    """Bit for bit, NaN equal to NaN."""
    for name, x, y in zip(TopEta._fields, a, b, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        integer = {torch.float32: torch.int32}.get(x.dtype, x.dtype)
        assert torch.equal(x.view(integer), y.view(integer)), f"{name}: {x.tolist()} and {y.tolist()}"


def pick(out: TopEta, rows: list[int]) -> TopEta:
    return TopEta(*(t[rows] for t in out))


def budget(naive: Tensor, truth: Tensor, scale: Tensor | None = None) -> float:
    """What an output may be off by (kernels.md, test contract 1); `scale` where the truth is a sum that cancels."""
    largest = truth.abs().max() if scale is None else torch.maximum(truth.abs().max(), scale.abs().max())
    return 2 * ((naive.double() - truth).abs().max().item() + EPS * largest.item())


def check(x: Tensor, eta: float, out: TopEta, suppress: tuple[int, ...] = ()) -> None:
    """Compare `out` with what the definition gives for the rows of x."""
    n, vocab = x.shape
    k = max_candidates(eta, vocab)
    x = x.float().clone()
    x[:, list(suppress)] = -INF
    assert [(tuple(t.shape), t.dtype) for t in out] == [
        ((n, k), torch.int64),
        ((n, k), torch.float32),
        ((n,), torch.int32),
        ((n,), torch.int64),
        *[((n,), torch.float32)] * 4,
    ]

    exact = x.double()
    top = exact.amax(1)
    good = top.isfinite()
    z = (exact - top[:, None]).exp().sum(1)
    lse = top + z.log()
    p = (exact - lse[:, None]).exp()
    entropy = -torch.where(p > 0, p * (exact - lse[:, None]), 0.0).sum(1)
    if good.any():
        e = (x - x.amax(1, keepdim=True)).exp()
        plain = e / e.sum(1, keepdim=True)
        plain_lse = x.amax(1) + e.sum(1).log()
        plain_entropy = -torch.where(plain > 0, plain * plain.log(), 0.0).sum(1)
        for name, got, allowed, want in (
            ("lse", out.lse, budget(plain_lse[good], lse[good], scale=top[good]), lse),
            ("prob1", out.prob1, budget(plain.amax(1)[good], p.amax(1)[good]), p.amax(1)),
            ("entropy", out.entropy, budget(plain_entropy[good], entropy[good]), entropy),
        ):
            error = (got.double() - want)[good].abs().max().item()
            assert error <= allowed, f"{name} is off by {error}, allowed {allowed}"
        probability_budget = budget(plain[good], p[good])

    bad_lse = out.lse[~good]
    assert torch.equal(bad_lse.isfinite(), torch.zeros_like(bad_lse, dtype=torch.bool))
    for row in range(n):
        count, ids, probs = int(out.counts[row]), out.ids[row].tolist(), out.probs[row].tolist()
        assert ids[count:] == [-1] * (k - count)
        assert probs[count:] == [0.0] * (k - count)
        if not good[row]:
            assert count == 0
            assert out.top1[row] == -1
            assert [math.isnan(t[row]) for t in (out.prob1, out.entropy, out.gap)] == [True] * 3
            continue
        values, truth = x[row].tolist(), p[row].tolist()
        likely = [v for v in range(vocab) if truth[v] >= eta - BAND]
        ranked = sorted(likely, key=lambda v: (-values[v], v))
        assert ids[:count] == ranked[:count]
        assert count >= sum(truth[v] > eta + BAND for v in ranked)
        if 0 < count < len(ranked):
            assert values[ranked[count - 1]] > values[ranked[count]], "equal logits, one listed and one not"
        for v, got in zip(ids[:count], probs[:count], strict=True):
            assert abs(got - truth[v]) <= probability_budget
        largest = max(values)
        assert out.top1[row] == values.index(largest)
        rest = values[:]
        rest.remove(largest)
        gap = largest - max(rest) if rest else INF
        assert out.gap[row].item() == torch.tensor(gap, dtype=torch.float32).item()


@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("vocab", [1, 2, 5, 997, 1009, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_and_candidates(dtype: torch.dtype, vocab: int, n: int) -> None:
    """Every output, every dtype, vocabularies on and off powers of two, from no row to many."""
    x = random_logits(n, vocab, dtype, seed=vocab)
    for eta in (0.2, 1 / 64):
        check(x, eta, top_eta(x, eta))


@pytest.mark.parametrize("vocab", [126464, 157184])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_vocabularies(dtype: torch.dtype, vocab: int) -> None:
    """LLaDA's and LLaDA2's sizes: a sum over that many float32 numbers must not drift, least of all on a likely
    token before a long tail, which is what models produce."""
    x = 0.125 + 0.1 * torch.randn(8, vocab, generator=generator(11))
    x[:6, 77] = math.log(vocab) + torch.linspace(-1, 3, 6)  # probability 0.25 to 0.95, the rest spread evenly
    x[6] *= 40
    x = x.to(dtype)
    check(x, 0.2, top_eta(x, 0.2))


@pytest.mark.parametrize("eta", [1.0, 0.75, 0.5, 1 / 3, 0.2, 0.200001, 0.07, 1 / 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_eta(dtype: torch.dtype, eta: float) -> None:
    """Which tokens reach eta, over the whole permitted range, on rows with few and with many of them."""
    check(random_logits(33, 97, dtype, seed=1), eta, top_eta(random_logits(33, 97, dtype, seed=1), eta))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.lists(
        st.lists(st.sampled_from([-INF, -1e4, -2.0, 0.0, 0.5, 0.5, 1.0, 2.0, 2.0, 1e4]), min_size=7, max_size=7),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([1.0, 0.6, 0.5, 0.34, 0.2, 0.1, 1 / 64]),
    st.sets(st.integers(0, 6)),
)
def test_ties_everywhere(rows: list[list[float]], eta: float, suppress: set[int]) -> None:
    """Rows made of equal logits: first id wins, candidates come by logit and then by id, suppressed or not."""
    x = torch.tensor(rows)
    ids = tuple(sorted(suppress))
    check(x, eta, top_eta(x, eta, suppress=ids), ids)


def test_hand_worked_example() -> None:
    """p = (1, 4, 4, 1) / 10 by construction: the two fours in id order, entropy and lse on paper."""
    x = torch.tensor([[0.0, math.log(4), math.log(4), 0.0]], dtype=torch.float64)
    out = top_eta(x, 0.2)
    assert out.ids.tolist() == [[1, 2, -1, -1]]
    assert out.counts.tolist() == [2]
    assert out.top1.tolist() == [1]
    assert out.gap.tolist() == [0.0]
    torch.testing.assert_close(out.probs, torch.tensor([[0.4, 0.4, 0.0, 0.0]]))
    torch.testing.assert_close(out.prob1, torch.tensor([0.4]))
    torch.testing.assert_close(out.lse, torch.tensor([math.log(10)], dtype=torch.float32))
    entropy = -(0.8 * math.log(0.4) + 0.2 * math.log(0.1))
    torch.testing.assert_close(out.entropy, torch.tensor([entropy], dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_maxima_far_apart(dtype: torch.dtype) -> None:
    """Equal maxima at both ends and in the middle of a long row: vector lanes and splits must not reorder them."""
    x = torch.full((1, 9001), -20.0, dtype=dtype)
    for where in ([9000, 3], [8999, 8191, 8192], [4096, 17, 4095]):
        y = x.clone()
        y[0, where] = 5.0
        out = top_eta(y, 0.2)
        assert out.top1.tolist() == [min(where)]
        assert out.ids[0, : len(where)].tolist() == sorted(where)
        assert out.counts.tolist() == [len(where)]
        assert out.gap.tolist() == [0.0]


@pytest.mark.parametrize(("vocab", "k"), [(8, 1), (8, 5), (40, 3), (5000, 2)])
def test_ties_at_the_boundary_of_k(vocab: int, k: int) -> None:
    """The raw operator with fewer places than tokens that reach eta keeps the lowest ids of the tied ones."""
    x = torch.zeros(2, vocab)
    x[1, vocab - 1] = 1.0
    ids, _, counts, top1, *_ = torch.ops.leap.top_eta(x, torch.tensor([0, 1]), 1e-6, k, None)
    assert top1.tolist() == [0, vocab - 1]
    assert counts.tolist() == [k, k]
    assert ids.tolist() == [list(range(k)), [vocab - 1, *range(k - 1)]]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 10, 16, 33, 49, 63, 64])
@pytest.mark.parametrize("level", [0.0, 3.25, 1e4, -1e4])
def test_uniform_rows(n: int, level: float) -> None:
    """n equal tokens: eta = 1/n lists exactly n (both round to one float32 number, and K has room for them), so does
    an eta just below, and one just above lists none."""
    x = torch.full((1, 4 * n), -INF)
    x[0, 1::4] = level
    below, above = 1 / n * (1 - 2e-6) - BAND, 1 / n * (1 + 2e-6) + BAND
    out = top_eta(x, max(below, 1 / 64))
    if below >= 1 / 64:
        assert out.ids[0].tolist() == list(range(1, 4 * n, 4))
        assert out.counts.tolist() == [n]
    check(x, max(below, 1 / 64), out)
    at = top_eta(x, 1 / n)
    check(x, 1 / n, at)
    assert at.counts.tolist() == [n]
    if above <= 1:
        assert top_eta(x, above).counts.tolist() == [0]


def test_eta_is_inclusive() -> None:
    """A certain token has probability exactly 1 and reaches eta = 1."""
    out = top_eta(torch.tensor([[-INF, 3.0, -INF]]), 1.0)
    assert (out.ids.tolist(), out.probs.tolist(), out.counts.tolist()) == ([[1]], [[1.0]], [1])


@pytest.mark.parametrize("eta", [1 / 64, 0.2, 1 / 3, 0.5, 0.9])
def test_near_ties_at_eta(eta: float) -> None:
    """Outside the band the decision is exact on both sides; inside it either outcome is consistent."""
    offsets = (4e-6, -4e-6, 5e-7, 1e-8, 0.0, -1e-8, -5e-7)
    x = torch.empty(len(offsets), 201, dtype=torch.float64)
    for row, off in enumerate(offsets):
        # The rest of the mass is split so thinly that nothing else comes near eta.
        x[row] = math.log((1 - eta - off) / 200)
        x[row, 150] = math.log(eta + off)
    out = top_eta(x.float(), eta)
    assert out.ids[:2, 0].tolist() == [150, -1]
    check(x.float(), eta, out)


def test_max_candidates_by_hand() -> None:
    """K where 1/eta is an integer, just above one, just below one, and above the vocabulary."""
    table = {1.0: 1, 0.5: 2, 1 / 3: 3, 0.3: 3, 0.2: 5, 0.200001: 5, 0.20001: 4, 0.1: 10, 1 / 49: 49, 1 / 64: 64}
    assert {eta: max_candidates(eta, 10**6) for eta in table} == table
    assert [max_candidates(0.2, v) for v in (1, 2, 4, 5, 6)] == [1, 2, 4, 5, 5]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.floats(1 / 64, 1))
def test_max_candidates_is_the_largest_possible_count(eta: float) -> None:
    """No fewer (a row could list K tokens) and no more (K + 1 of them would exceed all rounding)."""
    k = max_candidates(eta, 10**6)
    limit, slack = Fraction(100001, 100000), Fraction(1, 10**12)
    assert k * Fraction(eta) <= limit * (1 + slack)
    assert (k + 1) * Fraction(eta) > limit * (1 - slack)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_in_any_order_with_repeats(dtype: torch.dtype) -> None:
    """`rows` selects without changing a bit, and results come in its order."""
    x = random_logits(9, 101, seed=2)
    full = top_eta(x, 0.2)
    for rows in ([], [8], [4, 0, 4, 4, 2, 8], list(range(8, -1, -1))):
        same(top_eta(x, 0.2, rows=torch.tensor(rows, dtype=dtype)), pick(full, rows))
    strided = torch.arange(18, dtype=dtype)[::4]
    same(top_eta(x, 0.2, rows=strided[:3]), pick(full, [0, 4, 8]))


def test_suppress_forms() -> None:
    """Tensor, list, tuple, repeated and unsorted ids say the same; nothing to suppress changes nothing."""
    x = random_logits(33, 11, seed=3)
    ids = (7, 0, 3)
    want = top_eta(x, 0.2, suppress=ids)
    check(x, 0.2, want, ids)
    for form in (list(ids), torch.tensor(ids), [3, 7, 0, 7, 7], torch.tensor([7, -1, 0, -1, 3])[::2]):
        same(top_eta(x, 0.2, suppress=form), want)
    plain = top_eta(x, 0.2)
    for empty in ([], torch.tensor([], dtype=torch.int64)):
        same(top_eta(x, 0.2, suppress=empty), plain)


def test_suppressing_the_argmax_moves_everything() -> None:
    """A suppressed token has no probability: it is neither argmax nor candidate, and the others share its mass."""
    x = random_logits(33, 50, seed=4)
    best = top_eta(x, 0.2).top1.tolist()
    for row, token in enumerate(best):
        out = top_eta(x, 0.2, rows=torch.tensor([row]), suppress=[token])
        check(x[row : row + 1], 0.2, out, (token,))
        assert out.top1.item() != token


def test_suppressing_everything_is_a_bad_row() -> None:
    """Nothing finite is left: reported through lse, never a token."""
    out = top_eta(random_logits(3, 6), 0.2, suppress=range(6))
    assert out.lse.tolist() == [-INF] * 3
    assert (out.top1.tolist(), out.counts.tolist(), out.ids.unique().tolist()) == ([-1] * 3, [0] * 3, [-1])


def bad_rows() -> dict[str, tuple[Tensor, float]]:
    """Rows that no token may come from, and the lse that tells of them."""
    rows = {}
    for name, value in (("NaN", NAN), ("+inf", INF)):
        for where in (0, 500, 1008):
            x = random_logits(1, 1009, seed=where)[0]
            x[where] = value
            rows[f"{name} at {where}"] = (x, value)
    rows["all NaN"] = (torch.full((1009,), NAN), NAN)
    rows["all +inf"] = (torch.full((1009,), INF), INF)
    rows["all -inf"] = (torch.full((1009,), -INF), -INF)
    rows["NaN among -inf"] = (torch.full((1009,), -INF).index_fill(0, torch.tensor([77]), NAN), NAN)
    rows["NaN and +inf"] = (torch.zeros(1009).index_fill(0, torch.tensor([77]), INF), INF)
    rows["NaN and +inf"][0][900] = NAN
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(bad_rows()))
def test_bad_rows_are_reported_and_stay_alone(name: str, dtype: torch.dtype) -> None:
    """A bad row has its NaN or infinity as lse, no token and NaN statistics; its neighbours do not notice."""
    row, lse = bad_rows()[name]
    x = random_logits(3, 1009, dtype, seed=5)
    x[1] = row.to(dtype)
    out = top_eta(x, 0.2)
    check(x, 0.2, out)
    if name != "NaN and +inf":
        assert str(out.lse[1].item()) == str(lse)
    same(pick(out, [0, 2]), top_eta(x[[0, 2]], 0.2))


@pytest.mark.parametrize("value", [NAN, INF, 1e4])
def test_suppressed_ids_are_never_looked_at(value: float) -> None:
    """Whatever stands at the mask token's logit, NaN included, the result is that of -inf there."""
    x = random_logits(5, 33, seed=6)
    want = top_eta(x, 0.2, suppress=[9])
    x[:, 9] = value
    same(top_eta(x, 0.2, suppress=[9]), want)
    assert want.lse.isfinite().all()


def test_one_finite_logit() -> None:
    """Certainty: probability 1, no entropy, an infinite gap, the logit itself as lse; also with V = 1."""
    for x in (torch.tensor([[-INF, -INF, -2.5]]), torch.tensor([[-2.5]])):
        out = top_eta(x, 0.2)
        assert out.top1.tolist() == [x.shape[1] - 1]
        assert out.ids[0].tolist() == [x.shape[1] - 1] + [-1] * (x.shape[1] - 1)
        assert (out.prob1.item(), out.entropy.item(), out.lse.item(), out.gap.item()) == (1.0, 0.0, -2.5, INF)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_and_constant_logits(dtype: torch.dtype) -> None:
    """1e4 overflows exp and -1e4 underflows it; constant rows tie everything."""
    x = torch.stack(
        [
            torch.full((67,), 1e4),
            torch.full((67,), -1e4),
            torch.zeros(67),
            torch.linspace(-1e4, 1e4, 67),
            torch.cat([torch.full((3,), 1e4), torch.full((64,), -1e4)]),
            torch.cat([torch.full((64,), -INF), torch.full((3,), -1e4)]),
            1e4 + torch.arange(67.0) % 5 * 8,
        ]
    ).to(dtype)
    for eta in (0.2, 1 / 3, 1 / 64):
        check(x, eta, top_eta(x, eta))


def test_float64_is_rounded_before_anything_else() -> None:
    """Two float64 logits that are one float32 number tie, and the first id wins; 1e300 is an infinity."""
    x = torch.tensor([[0.0, 1.0, 1.0 + 1e-12, 0.5], [0.0, 1e300, 0.0, 0.0]], dtype=torch.float64)
    out = top_eta(x, 0.2)
    assert out.top1.tolist() == [1, -1]
    assert out.ids[0, :2].tolist() == [1, 2]
    assert out.gap[0] == 0
    assert out.lse[1] == INF


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_layouts(dtype: torch.dtype) -> None:
    """Row strides above V, row steps, an offset and an expanded row read the same numbers and nothing around them."""
    x = random_logits(7, 101, dtype, seed=7)
    want = top_eta(x, 0.2, suppress=[5])

    wide = torch.full((7, 130), NAN, dtype=dtype)
    wide[:, 11:112] = x
    spaced = torch.full((21, 101), NAN, dtype=dtype)
    spaced[1::3] = x
    flat = torch.full((7 * 101 + 40,), NAN, dtype=dtype)
    flat[13 : 13 + 7 * 101] = x.flatten()
    views = (wide[:, 11:112], spaced[1::3], flat[13 : 13 + 7 * 101].view(7, 101))
    for view in views:
        assert view.storage_offset() > 0
        same(top_eta(view, 0.2, suppress=[5]), want)
    same(top_eta(x[2:3].expand(6, 101), 0.2, suppress=[5]), pick(want, [2] * 6))
    same(top_eta(x.as_strided((4, 50), (3, 1)), 0.2), top_eta(x.as_strided((4, 50), (3, 1)).contiguous(), 0.2))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Several threads even where there is one core: torch then splits a single long row between them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [1, 2, 5, 997, 1009, 4096, 65537, 126464])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_alone_equals_the_row_in_a_batch(dtype: torch.dtype, vocab: int) -> None:
    """Bit for bit: a sample must not notice its neighbours."""
    x = random_logits(6, vocab, dtype, seed=8)
    full = top_eta(x, 0.2)
    for row in range(6):
        same(top_eta(x[row : row + 1], 0.2), pick(full, [row]))
        same(top_eta(x, 0.2, rows=torch.tensor([row])), pick(full, [row]))


def test_two_runs_are_equal_and_leave_their_inputs_alone() -> None:
    """Deterministic, and functional: logits, rows and suppress are only read."""
    x, rows, suppress = random_logits(5, 1009, seed=9), torch.tensor([4, 1, 1], dtype=torch.int32), torch.tensor([3, 8])
    x[2, 4] = NAN
    before = (x.clone(), rows.clone(), suppress.clone())
    first = top_eta(x, 0.2, rows=rows, suppress=suppress)
    same(top_eta(x, 0.2, rows=rows, suppress=suppress), first)
    assert torch.equal(x.view(torch.int32), before[0].view(torch.int32))
    assert torch.equal(rows, before[1])
    assert torch.equal(suppress, before[2])


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_backends_on_a_cpu(backend: str) -> None:
    """Both names mean the reference here."""
    x = random_logits(4, 50, seed=10)
    out = top_eta(x, 0.2, backend=backend)
    check(x, 0.2, out)
    same(out, top_eta(x, 0.2))
