# SPDX-License-Identifier: Apache-2.0
"""`superposed_attention` against a loop over rows that decides every pair by the table of method.md section 4."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leap_kernels.ops import Attention, Switches, superposed_attention

PADDING, BASE, COPY, CANDIDATE, BRANCH = -1, 0, 1, 2, 3
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALL_SWITCHES = [Switches(*bits) for bits in itertools.product([True, False], repeat=4)]
INF, NAN = float("inf"), float("nan")


class Row(NamedTuple):
    kind: int
    pos: int
    hide: int = -1


PAD = Row(PADDING, 0)


@dataclass
class Case:
    """One call: for each sample the rows of its key slots, which slots are query rows, and what the query rows are
    where that is not what stands in their slots."""

    keys: list[list[Row]]
    queries: list[list[int]]
    q: Tensor
    k: Tensor
    v: Tensor
    lengths: list[int] | None = None
    options: dict = field(default_factory=dict)
    asking: list[list[Row]] | None = None

    def query_rows(self) -> list[list[Row]]:
        if self.asking is not None:
            return self.asking
        return [[keys[slot] for slot in slots] for keys, slots in zip(self.keys, self.queries, strict=True)]

    def metadata(self) -> dict[str, Tensor]:
        """The int32 tensors of the call."""

        def column(rows: list[list[Row]], name: str, width: int) -> Tensor:
            values = [[getattr(row, name) for row in sample] for sample in rows]
            return torch.tensor(values, dtype=torch.int32).reshape(len(rows), width)

        width = self.q.shape[2]
        made = {f"q_{name}": column(self.query_rows(), name, width) for name in ("pos", "hide", "kind")}
        made |= {f"k_{name}": column(self.keys, name, self.k.shape[2]) for name in ("pos", "hide", "kind")}
        made["q_slot"] = torch.tensor(self.queries, dtype=torch.int32).reshape(len(self.queries), width)
        if self.lengths is not None:
            made["lengths"] = torch.tensor(self.lengths, dtype=torch.int32)
        return made

    def run(self, **tensors: Tensor) -> Attention:
        q, k, v = (tensors.get(name, getattr(self, name)) for name in ("q", "k", "v"))
        return superposed_attention(q, k, v, **self.metadata(), **self.options)


def sees(a: Row, b: Row, itself: bool, switches: Switches, block_causal: int, window: int) -> bool:
    """May query row a see key row b? One `if` for every entry of the table."""
    if PADDING in (a.kind, b.kind):
        return False
    if block_causal and b.pos // block_causal > a.pos // block_causal:
        return False
    if window and not abs(a.pos - b.pos) < window:
        return False
    if itself:
        return True
    if a.kind == BASE:
        return b.kind == BASE
    if a.kind == COPY:
        if b.kind == BASE:
            return switches.copy_sees_original or b.pos != a.pos
        if b.kind == CANDIDATE:
            return b.pos != a.hide
        if b.kind == COPY:
            return switches.copies_see_copies and b.pos != a.pos
    if a.kind == CANDIDATE:
        if b.kind == BASE:
            return True
        if b.kind == CANDIDATE:
            return switches.candidates_see_candidates and b.pos != a.hide
        if b.kind == COPY:
            return switches.candidates_see_copies and b.pos != a.pos
    if a.kind == BRANCH:
        if b.kind == BASE:
            return b.hide == -1
        if b.kind == BRANCH:
            return b.hide == a.hide
    return False


def mask(case: Case) -> list[list[list[int]]]:
    """For each sample and query row the key slots that it sees."""
    switches = case.options.get("switches") or Switches()
    limits = case.options.get("block_causal", 0), case.options.get("window", 0)
    seen = []
    for b, (keys, slots, rows) in enumerate(zip(case.keys, case.queries, case.query_rows(), strict=True)):
        used = len(keys) if case.lengths is None else case.lengths[b]
        seen.append(
            [
                [s for s in range(used) if sees(row, keys[s], slot == s, switches, *limits)]
                for row, slot in zip(rows, slots, strict=True)
            ]
        )
    return seen


def truth(case: Case) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64, one row after another."""
    q, k, v = case.q.double(), case.k.double(), case.v.double()
    batch, heads, rows, size = q.shape
    scale = case.options.get("scale")
    scale = 1 / math.sqrt(size) if scale is None else scale
    out = torch.zeros(batch, heads, rows, size, dtype=torch.float64)
    lse = torch.full((batch, heads, rows), -INF, dtype=torch.float64)
    for b, seen in enumerate(mask(case)):
        for h, a in itertools.product(range(heads), range(rows)):
            if not seen[a]:
                continue
            g = h // (heads // k.shape[1])
            scores = [scale * float(torch.dot(q[b, h, a], k[b, g, s])) for s in seen[a]]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights)
            lse[b, h, a] = top + math.log(total)
            for s, weight in zip(seen[a], weights, strict=True):
                out[b, h, a] += weight / total * v[b, g, s]
    return out, lse


def plain(case: Case) -> tuple[Tensor, Tensor]:
    """The same with a dense mask and softmax: float32 (float64 for float64), rounded to the dtype of q at the end."""
    exact = torch.float64 if case.q.dtype == torch.float64 else torch.float32
    batch, heads, rows, size = case.q.shape
    visible = torch.zeros(batch, 1, rows, case.k.shape[2], dtype=torch.bool)
    for b, seen in enumerate(mask(case)):
        for a, slots in enumerate(seen):
            visible[b, 0, a, slots] = True
    scale = case.options.get("scale")
    scale = 1 / math.sqrt(size) if scale is None else scale
    repeats = heads // case.k.shape[1]
    k, v = (t.to(exact).nan_to_num().repeat_interleave(repeats, 1) for t in (case.k, case.v))
    scores = (scale * case.q.to(exact).nan_to_num() @ k.mT).masked_fill(~visible, -INF)
    weights = torch.softmax(scores, -1).nan_to_num()
    return (weights @ v).to(case.q.dtype), torch.logsumexp(scores, -1).float()


def compare(case: Case, got: Attention) -> None:
    """Within twice the error of `plain` plus one rounding (kernels.md, test contract 1); blind rows exactly."""
    assert got.out.dtype == case.q.dtype
    assert got.out.shape == case.q.shape
    assert (got.lse.dtype, got.lse.shape) == (torch.float32, case.q.shape[:3])
    out, lse = truth(case)
    blind = lse == -INF
    assert torch.equal(got.lse == -INF, blind)
    assert torch.equal(got.out[blind], torch.zeros_like(got.out[blind]))
    if blind.all():
        return
    naive_out, naive_lse = plain(case)
    for name, x, naive, want in (("out", got.out, naive_out, out), ("lse", got.lse, naive_lse, lse)):
        x, naive, want = x[~blind].double(), naive[~blind], want[~blind]
        error = (x - want).abs().max().item()
        allowed = 2 * (naive.double() - want).abs().max().item()
        allowed += 2 * torch.finfo(naive.dtype).eps * want.abs().max().item()
        assert error <= allowed, f"{name} is off by {error}, allowed {allowed}"


def superposed_rows(shift: int, length: int = 8) -> list[Row]:
    """Base rows 0 to length - 1, then copies and candidates of the masked targets 2, 4 and 5, padding between."""
    appended = [Row(COPY, i - shift, i) for i in (2, 4, 5)]
    appended += [Row(CANDIDATE, i, i) for i in (2, 2, 4, 5, 5)]
    return [*(Row(BASE, j) for j in range(length)), *appended[:4], PAD, *appended[4:], PAD]


def random_qkv(
    batch: int,
    heads: int,
    kv_heads: int,
    rows: int,
    slots: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, rows, size), (batch, kv_heads, slots, size), (batch, kv_heads, slots, size))
    return tuple(torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)


def case_of(
    keys: list[list[Row]],
    queries: list[list[int]] | None = None,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    size: int = 8,
    dtype: torch.dtype = torch.float32,
    lengths: list[int] | None = None,
    seed: int = 0,
    **options: object,
) -> Case:
    queries = [list(range(len(rows))) for rows in keys] if queries is None else queries
    qkv = random_qkv(len(keys), heads, kv_heads, len(queries[0]), len(keys[0]), size, dtype, seed)
    return Case(keys, queries, *qkv, lengths, options)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("switches", ALL_SWITCHES, ids=lambda s: f"{s.bits:04b}")
def test_every_switch_setting(switches: Switches, shift: int) -> None:
    """All sixteen readings of the rule, for models with and without shifted logits."""
    case = case_of([superposed_rows(shift)], switches=switches)
    compare(case, case.run())


def test_switches_default_to_the_literal_reading() -> None:
    """No switches, `Switches()` and all four on are one thing; bits follow the order of method.md."""
    case = case_of([superposed_rows(0)])
    outs = [replace(case, options={"switches": s}).run().out for s in (None, Switches(), Switches(*[True] * 4))]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    names = ("copy_sees_original", "copies_see_copies", "candidates_see_candidates", "candidates_see_copies")
    assert [Switches(**{n: n == name for n in names}).bits for name in names] == [1, 2, 4, 8]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    "limits",
    [{"block_causal": 4}, {"block_causal": 3}, {"window": 1}, {"window": 3}, {"block_causal": 2, "window": 2}],
    ids=str,
)
def test_block_causal_and_window(limits: dict[str, int], shift: int) -> None:
    """Both limits hold for base and appended rows alike, alone and together."""
    for switches in (Switches(), Switches(False, False, False, False)):
        case = case_of([superposed_rows(shift)], switches=switches, **limits)
        compare(case, case.run())


def test_branches() -> None:
    """Kind 3: base rows outside active blocks (hide -1) and rows of the same branch; nobody else sees it."""
    rows = [Row(BASE, 0), Row(BASE, 1), Row(BASE, 2, 1), Row(BASE, 3, 1)]
    rows += [Row(BRANCH, pos, branch) for branch in (0, 1) for pos in (2, 3)]
    rows += [Row(COPY, 3, 3), Row(CANDIDATE, 2, 2), PAD]
    for limits in ({}, {"block_causal": 2}, {"window": 2}):
        case = case_of([rows], **limits)
        compare(case, case.run())
    assert mask(case_of([rows]))[0][4] == [0, 1, 4, 5]
    assert mask(case_of([rows]))[0][0] == [0, 1, 2, 3]


@st.composite
def tables(draw: st.DrawFn) -> Case:
    """Arbitrary kinds, positions and hidden positions. Query rows are any slots in any order, or rows that match no
    slot: padding often points at slot 0, and a row that is not stored at no slot."""
    batch, slots = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    width = draw(st.integers(1, slots))
    row = st.builds(Row, st.sampled_from([-1, 0, 0, 1, 1, 2, 2, 3]), st.integers(0, 5), st.integers(-1, 5))
    keys = [draw(st.lists(row, min_size=slots, max_size=slots)) for _ in range(batch)]
    queries = [draw(st.permutations(range(slots)))[:width] for _ in range(batch)]
    asking = None
    if draw(st.booleans()):
        asking = [draw(st.lists(row, min_size=width, max_size=width)) for _ in range(batch)]
        somewhere = st.lists(st.integers(-1, slots), min_size=width, max_size=width)
        queries = [draw(somewhere) for _ in range(batch)]
    lengths = draw(st.none() | st.lists(st.integers(0, slots), min_size=batch, max_size=batch))
    case = case_of(
        keys,
        queries,
        size=4,
        lengths=lengths,
        seed=draw(st.integers(0, 9)),
        switches=draw(st.sampled_from(ALL_SWITCHES)),
        block_causal=draw(st.sampled_from([0, 0, 1, 2, 3])),
        window=draw(st.sampled_from([0, 0, 1, 2, 4])),
    )
    return replace(case, asking=asking)


@settings(derandomize=True, deadline=None, max_examples=250)
@given(tables())
def test_any_metadata(case: Case) -> None:
    """Metadata that no loop produces obeys the same table."""
    compare(case, case.run())


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (8, 2), (7, 1), (14, 2)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    """Query head h reads key head h // (H / Hkv), for groups of 1, 4 and 7."""
    case = case_of([superposed_rows(0)], [[0, 5, 8, 13]], heads=heads, kv_heads=kv_heads)
    compare(case, case.run())


@pytest.mark.parametrize("size", [1, 3, 16, 17, 33, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_head_sizes(dtype: torch.dtype, size: int) -> None:
    """Computed in float32, or float64 where the input is, and rounded once; odd sizes too."""
    for scale in (None, 0.7):
        case = case_of([superposed_rows(0), superposed_rows(1)], size=size, dtype=dtype, scale=scale, seed=size)
        compare(case, case.run())


def test_large_scores_do_not_overflow() -> None:
    """Scores of several thousand need the maximum taken out before exp."""
    case = case_of([superposed_rows(0)], scale=1000.0)
    compare(case, case.run())
    assert case.run().lse[0, :, 0].abs().min() > 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_slots_in_nobodys_sight_cannot_leak(poison: float, dtype: torch.dtype) -> None:
    """Padding slots and slots from `lengths` on may hold anything: the same bits as with zeros there."""
    rows = superposed_rows(0)
    keys = [[*rows, *rows[:4]], [*rows[:12], *rows[:10]]]
    used = [len(rows), 12]
    case = case_of(keys, [[0, 3, 8, 9, 11], [1, 2, 8, 10, 11]], dtype=dtype, lengths=used)
    clean, dirty = {}, {}
    hidden = torch.tensor(
        [[row.kind == PADDING or slot >= n for slot, row in enumerate(r)] for r, n in zip(keys, used, strict=True)]
    )
    assert hidden.sum(1).tolist() == [6, 10]
    for name in ("k", "v"):
        t = getattr(case, name)
        clean[name] = t.masked_fill(hidden[:, None, :, None], 0)
        dirty[name] = t.masked_fill(hidden[:, None, :, None], poison)
    want, got = case.run(**clean), case.run(**dirty)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    compare(replace(case, **clean), got)


def test_padding_queries_give_zero_whatever_they_hold() -> None:
    """A padding row's own numbers, NaN included, reach neither its output nor another row's."""
    rows = superposed_rows(0)
    case = case_of([rows])
    pads = [i for i, row in enumerate(rows) if row.kind == PADDING]
    q = case.q.clone()
    q[:, :, pads] = NAN
    got = case.run(q=q)
    assert torch.equal(got.out[:, :, pads], torch.zeros(1, 2, len(pads), 8))
    assert torch.equal(got.lse[:, :, pads], torch.full((1, 2, len(pads)), -INF))
    compare(case, got)


def test_padding_that_points_at_a_row_in_use() -> None:
    """A padding query with the slot of a base row sees nothing; a query whose slot holds padding does not see it."""
    keys = [Row(BASE, 0), Row(BASE, 1), PAD]
    case = replace(case_of([keys], [[0, 2, 2]]), asking=[[PAD, Row(COPY, 1, 1), PAD]])
    assert mask(case) == [[[], [0, 1], []]]
    compare(case, case.run())


@pytest.mark.parametrize("lengths", [[14, 14], [15, 3], [0, 8], [1, 0]])
def test_lengths(lengths: list[int]) -> None:
    """Slots from the length on do not exist; a sample of length 0 sees nothing at all."""
    case = case_of([superposed_rows(0), superposed_rows(1)], lengths=lengths)
    got = case.run()
    compare(case, got)
    for b, n in enumerate(lengths):
        if n == 0:
            assert got.lse[b].unique().tolist() == [-INF]


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_layouts(dtype: torch.dtype) -> None:
    """q as a model makes it (B, Q, H, D), k and v inside a larger store, shared heads by expansion, offsets."""
    case = case_of([superposed_rows(0)] * 2, heads=4, kv_heads=2, size=16, dtype=dtype)
    q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    store = torch.full((2, 2, 2, 40, 24), NAN, dtype=dtype)
    inside = store[:, :, :, 5 : 5 + 2 * case.k.shape[2] : 2, 4:20]
    inside[0], inside[1] = case.k, case.v
    assert [t.is_contiguous() for t in (q, inside[0])] == [False, False]
    compare(case, case.run(q=q, k=inside[0], v=inside[1]))

    shared = replace(case, k=case.k[:1, :1].expand(2, 4, -1, -1), v=case.v[:1, :1].expand(2, 4, -1, -1))
    compare(shared, shared.run())


def test_metadata_is_read_through_its_strides() -> None:
    """Row metadata may be slices of the loop's wider tables."""
    case = case_of([superposed_rows(0), superposed_rows(1)], lengths=[15, 14])
    metadata = {}
    for name, t in case.metadata().items():
        wide = torch.full([2 * n for n in t.shape], 77, dtype=torch.int32)
        metadata[name] = wide[tuple(slice(None, None, 2) for _ in t.shape)].copy_(t)
    got = superposed_attention(case.q, case.k, case.v, **metadata)
    assert torch.equal(got.out, case.run().out)
    compare(case, got)


@pytest.mark.parametrize(("batch", "rows", "slots"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_inputs(batch: int, rows: int, slots: int) -> None:
    """No sample, no query row, no key: nothing to see is 0 and -inf, not an error and not NaN."""
    q, k, v = random_qkv(batch, 2, 1, rows, slots, 8)
    base = {n: torch.zeros(batch, rows, dtype=torch.int32) for n in ("q_pos", "q_hide", "q_kind", "q_slot")}
    base |= {n: torch.zeros(batch, slots, dtype=torch.int32) for n in ("k_pos", "k_kind", "k_hide")}
    got = superposed_attention(q, k, v, **base)
    assert got.out.shape == (batch, 2, rows, 8)
    assert torch.equal(got.lse, torch.full((batch, 2, rows), -INF))
    assert torch.equal(got.out, torch.zeros(batch, 2, rows, 8))


def test_output_memory_is_what_a_model_wants() -> None:
    """(B, Q, H, D) in memory: the reshape to hidden size that follows copies nothing."""
    out = case_of([superposed_rows(0)] * 2, heads=4).run().out
    assert out.transpose(1, 2).is_contiguous()


def test_deterministic_and_functional() -> None:
    """Two runs agree to the bit, `splits` is only a hint, and no input is written."""
    case = case_of([superposed_rows(0)] * 2)
    inputs = {"q": case.q, "k": case.k, "v": case.v, **case.metadata()}
    before = {name: t.clone() for name, t in inputs.items()}
    first, second = superposed_attention(**inputs), superposed_attention(**inputs)
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)
    compare(case, superposed_attention(**inputs, splits=3))
    for name, t in inputs.items():
        assert torch.equal(t, before[name]), name


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("block_causal", [0, 4])
def test_base_rows_equal_a_plain_forward(shift: int, block_causal: int) -> None:
    """The original sequence is isolated: base rows get what torch's own attention gives without appended rows."""
    rows, length = superposed_rows(shift), 8
    case = case_of([rows], dtype=torch.float64, block_causal=block_causal)
    visible = torch.ones(length, length, dtype=torch.bool)
    if block_causal:
        block = torch.arange(length) // block_causal
        visible = block[None, :] <= block[:, None]
    q, k, v = case.q[:, :, :length], case.k[:, :, :length], case.v[:, :, :length]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    torch.testing.assert_close(case.run().out[:, :, :length], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("switches", ALL_SWITCHES, ids=lambda s: f"{s.bits:04b}")
def test_a_candidate_never_reaches_rows_that_hide_it(switches: Switches, shift: int) -> None:
    """Other tokens as candidates of position 4: the copy that hides 4 and all base rows keep their bits."""
    rows = superposed_rows(shift)
    case = case_of([rows], switches=switches)
    changed = [i for i, row in enumerate(rows) if row.kind == CANDIDATE and row.hide == 4]
    k, v = case.k.clone(), case.v.clone()
    k[:, :, changed] += 1
    v[:, :, changed] -= 2
    before, after = case.run().out, case.run(k=k, v=v).out
    for i, row in enumerate(rows):
        same = torch.equal(before[:, :, i], after[:, :, i])
        if row.kind in (BASE, PADDING) or (row.kind == COPY and row.hide == 4):
            assert same, row
        if row.kind == COPY and row.hide != 4:
            assert not same, row


@pytest.mark.parametrize("shift", [0, 1])
def test_a_copy_that_sees_nothing_new_repeats_its_base_row(shift: int) -> None:
    """Both copy switches off and no visible candidate: a copy gets what its base row gets (method.md section 4)."""
    rows = superposed_rows(shift)
    rows = [PAD if row.kind == CANDIDATE and row.hide != 4 else row for row in rows]  # only the hidden ones stay
    copy = next(i for i, row in enumerate(rows) if row.kind == COPY and row.hide == 4)
    base = 4 - shift
    case = case_of([rows], dtype=torch.float64, switches=Switches(copy_sees_original=False, copies_see_copies=False))
    for t in (case.q, case.k, case.v):  # same token, same position: the same q, k and v in the first layer
        t[:, :, copy] = t[:, :, base]
    got = case.run()
    torch.testing.assert_close(got.out[:, :, copy], got.out[:, :, base], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.lse[:, :, copy], got.lse[:, :, base])
    literal = replace(case, options={}).run()
    assert not torch.allclose(literal.out[:, :, copy], literal.out[:, :, base], rtol=1e-3)


def test_samples_do_not_notice_each_other() -> None:
    """A sample alone and in a batch agree to float64 rounding, whatever its neighbours are."""
    case = case_of([superposed_rows(0), superposed_rows(1), [PAD] * 18], [list(range(18))] * 3, dtype=torch.float64)
    together = case.run()
    for b in range(3):
        alone = Case([case.keys[b]], [case.queries[b]], case.q[b : b + 1], case.k[b : b + 1], case.v[b : b + 1]).run()
        torch.testing.assert_close(together.out[b : b + 1], alone.out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(together.lse[b : b + 1], alone.lse)
