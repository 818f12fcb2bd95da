# SPDX-License-Identifier: Apache-2.0
"""`superpose` against loops that append one row after another, as method.md section 3 tells it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leap_kernels.ops import Superposed, superpose

MASK = 99


class Case(NamedTuple):
    """The tensors of one call; positions rise by one behind `pad` columns of left padding."""

    ids: Tensor
    pos: Tensor
    targets: Tensor
    cand_ids: Tensor
    counts: Tensor


class Row(NamedTuple):
    token: int
    pos: int
    kind: int
    hide: int


def case(ids: list, targets: list, candidates: list, pads: list[int] | None = None, k: int = 2) -> Case:
    """Tensors from lists; `candidates` has a list of ids for every target, the rest is filled with junk."""
    batch, length, width = len(ids), len(ids[0]), len(targets[0])
    pads = pads or [0] * batch
    pos = [[max(0, column - pad) for column in range(length)] for pad in pads]
    full = [[[*tokens, *[-7] * (k - len(tokens))] for tokens in sample] for sample in candidates]
    counts = [[len(tokens) for tokens in sample] for sample in candidates]
    return Case(
        torch.tensor(ids, dtype=torch.int64).reshape(batch, length),
        torch.tensor(pos, dtype=torch.int32).reshape(batch, length),
        torch.tensor(targets, dtype=torch.int32).reshape(batch, width),
        torch.tensor(full, dtype=torch.int64).reshape(batch, width, k),
        torch.tensor(counts, dtype=torch.int32).reshape(batch, width),
    )


def append_one_by_one(c: Case, shift: int) -> tuple[list[list[Row]], list[list[int]]]:
    """The appended rows of every sample in order, and for each target the index of its copy."""
    appended, copy_rows = [], []
    for b in range(c.ids.shape[0]):
        rows: list[Row] = []
        copy_row = [-1] * c.targets.shape[1]
        masked = [(t, column) for t, column in enumerate(c.targets[b].tolist()) if column >= 0]
        candidates = {t: c.cand_ids[b, t].tolist()[: int(c.counts[b, t])] for t, _ in masked}
        if len(masked) >= 2 and any(candidates.values()):  # 2.3
            for t, column in masked:
                target = int(c.pos[b, column])
                if target - shift < 0 or column - shift < 0:
                    continue  # read at row 0: no row stands before it
                copy_row[t] = len(rows)
                rows.append(Row(int(c.ids[b, column - shift]), int(c.pos[b, column - shift]), 1, target))
            for t, column in masked:
                target = int(c.pos[b, column])
                rows.extend(Row(token, target, 2, target) for token in candidates[t])
        appended.append(rows)
        copy_rows.append(copy_row)
    return appended, copy_rows


def check(out: Superposed, c: Case, shift: int, capacity: int) -> None:
    batch, width = c.targets.shape
    appended, copy_rows = append_one_by_one(c, shift)
    padding = Row(MASK, 0, -1, -1)
    table = [rows + [padding] * (capacity - len(rows)) for rows in appended]
    for field, dtype in (("token", torch.int64), ("pos", torch.int32), ("kind", torch.int32), ("hide", torch.int32)):
        got = getattr(out, field)
        assert (got.dtype, tuple(got.shape)) == (dtype, (batch, capacity))
        assert got.tolist() == [[getattr(row, field) for row in rows] for rows in table], field
    assert (out.copy_row.dtype, tuple(out.copy_row.shape)) == (torch.int32, (batch, width))
    assert out.copy_row.tolist() == copy_rows
    assert (out.count.dtype, tuple(out.count.shape)) == (torch.int32, (batch,))
    assert out.count.tolist() == [len(rows) for rows in appended]


@pytest.mark.parametrize("shift", [0, 1])
def test_hand_worked_example(shift: int) -> None:
    """Six columns, masks at 2, 4 and 5, candidates at 2 and 5: every number on paper."""
    c = case([[11, 12, MASK, 13, MASK, MASK]], [[2, 4, 5]], [[[7, 8], [], [9]]])
    out = superpose(*c, mask_id=MASK, shift=shift)
    copies = [[MASK, MASK, MASK], [12, 13, MASK]][shift]
    assert out.token.tolist() == [[*copies, 7, 8, 9, MASK, MASK, MASK]]
    assert out.pos.tolist() == [[*[[2, 4, 5], [1, 3, 4]][shift], 2, 2, 5, 0, 0, 0]]
    assert out.kind.tolist() == [[1, 1, 1, 2, 2, 2, -1, -1, -1]]
    assert out.hide.tolist() == [[2, 4, 5, 2, 2, 5, -1, -1, -1]]
    assert out.copy_row.tolist() == [[0, 1, 2]]
    assert out.count.tolist() == [6]
    check(out, c, shift, 9)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int, int]:
    """Any batch the loop can produce and some it cannot: holes in the middle, candidates behind holes."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    width, k = draw(st.integers(0, length)), draw(st.integers(1, 4))
    ids, targets, candidates, pads = [], [], [], []
    for _ in range(batch):
        ids.append(draw(st.lists(st.sampled_from([*range(10, 20), MASK]), min_size=length, max_size=length)))
        pad = draw(st.integers(0, length - 1))
        columns = sorted(draw(st.sets(st.integers(pad, length - 1), max_size=width)))
        holes = draw(st.permutations([True] * len(columns) + [False] * (width - len(columns))))
        rising = iter(columns)
        targets.append([next(rising) if taken else -1 for taken in holes])
        tokens = st.lists(st.integers(0, 50), max_size=k)
        candidates.append([draw(tokens) if draw(st.booleans()) else [] for _ in range(width)])
        pads.append(pad)
    return case(ids, targets, candidates, pads, k), draw(st.integers(0, 1)), draw(st.integers(0, 5))


@settings(derandomize=True, deadline=None, max_examples=400)
@given(cases())
def test_any_batch(drawn: tuple[Case, int, int]) -> None:
    """Batches, holes, left padding, shift and spare capacity in all combinations."""
    c, shift, spare = drawn
    needed = c.targets.shape[1] * (1 + c.cand_ids.shape[2])
    check(superpose(*c, mask_id=MASK, shift=shift, capacity=needed + spare), c, shift, needed + spare)
    check(superpose(*c, mask_id=MASK, shift=shift), c, shift, needed)


def test_full_block_fills_its_capacity_exactly() -> None:
    """32 targets with K = 5 candidates each make the 192 rows of method.md, without padding."""
    c = case(
        [[3] * 10 + [MASK] * 32], [list(range(10, 42))], [[[t, t + 1, t + 2, t + 3, t + 4] for t in range(32)]], k=5
    )
    out = superpose(*c, mask_id=MASK)
    check(out, c, 0, 192)
    assert out.count.tolist() == [192]
    assert int(out.kind.min()) == 1


@pytest.mark.parametrize("shift", [0, 1])
def test_nothing_is_appended_without_a_use(shift: int) -> None:
    """One masked position, no candidate anywhere, candidates at holes only: a plain forward (2.3)."""
    c = case(
        [[5, MASK, MASK, MASK]] * 4,
        [[1, -1, -1], [1, 2, 3], [-1, 2, -1], [1, 2, -1]],
        [[[7], [8], []], [[], [], []], [[7], [], [8]], [[], [], [8]]],
    )
    out = superpose(*c, mask_id=MASK, shift=shift)
    assert out.count.tolist() == [0] * 4
    assert out.kind.unique().tolist() == [-1]
    assert out.copy_row.unique().tolist() == [-1]
    check(out, c, shift, 9)


def test_two_targets_and_one_candidate_are_enough() -> None:
    """The smallest superposition: both targets get a copy, also the one without candidates."""
    c = case([[MASK, MASK]], [[0, 1]], [[[], [4]]])
    out = superpose(*c, mask_id=MASK)
    assert out.count.tolist() == [3]
    assert out.copy_row.tolist() == [[0, 1]]
    check(out, c, 0, 6)


@pytest.mark.parametrize("pad", [0, 3])
def test_position_zero_of_a_shifted_model(pad: int) -> None:
    """The target at position 0 has no copy, its candidates stay; left padding before it is not a row to read."""
    ids = [[1] * pad + [MASK, MASK, MASK]]
    c = case(ids, [[pad, pad + 1, pad + 2]], [[[7], [], [8]]], [pad])
    out = superpose(*c, mask_id=MASK, shift=1)
    assert out.copy_row.tolist() == [[-1, 0, 1]]
    assert out.count.tolist() == [4]
    assert out.hide[0, :4].tolist() == [1, 2, 0, 2]
    assert out.pos[0, :4].tolist() == [0, 1, 0, 2]
    check(out, c, 1, 9)
    assert superpose(*c, mask_id=MASK, shift=0).copy_row.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("capacity", [0, 4])
@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 3), (2, 0)])
def test_empty_inputs(batch: int, length: int, capacity: int) -> None:
    """No sample, no target or no canvas: padding only, in the shapes that were asked for."""
    ids = torch.full((batch, length), 5)
    c = Case(ids, ids.int(), ids[:, :0].int(), ids.new_empty((batch, 0, 2)), ids[:, :0].int())
    out = superpose(*c, mask_id=MASK, capacity=capacity)
    check(out, c, 0, capacity)


def test_no_room_for_candidates() -> None:
    """K = 0: there is no candidate, so nothing is appended."""
    c = case([[MASK, MASK]], [[0, 1]], [[[], []]], k=0)
    check(superpose(*c, mask_id=MASK), c, 0, 2)


def test_samples_do_not_notice_each_other() -> None:
    """Each row of the batch equals the sample alone."""
    c = case(
        [[5, 6, MASK, MASK], [MASK, MASK, MASK, 8], [5, 6, 7, MASK]],
        [[2, 3, -1], [0, 1, 2], [3, -1, -1]],
        [[[1, 2], [3], []], [[], [9], [4]], [[1], [], []]],
    )
    for shift in (0, 1):
        together = superpose(*c, mask_id=MASK, shift=shift)
        for b in range(3):
            alone = superpose(*(t[b : b + 1] for t in c), mask_id=MASK, shift=shift)
            for x, y in zip(together, alone, strict=True):
                assert torch.equal(x[b : b + 1], y)


def test_inputs_are_read_through_their_strides_and_not_written() -> None:
    """Slices of larger tensors and transposed ones give the same rows; nothing around or in them changes."""
    c = case([[5, 6, MASK, MASK, MASK], [MASK, MASK, MASK, 8, 9]], [[2, 3, 4], [0, 1, 2]], [[[1, 2], [3], []]] * 2)
    views = Case(*(torch.full((*(2 * n for n in t.shape),), -9, dtype=t.dtype) for t in c))
    views = Case(*(v[tuple(slice(None, None, 2) for _ in t.shape)].copy_(t) for v, t in zip(views, c, strict=True)))
    transposed = Case(*(t.transpose(0, -1).contiguous().transpose(0, -1) for t in c))
    for shift in (0, 1):
        want = superpose(*c, mask_id=MASK, shift=shift)
        for given_ in (views, transposed):
            before = [t.clone() for t in given_]
            out = superpose(*given_, mask_id=MASK, shift=shift)
            assert all(torch.equal(x, y) for x, y in zip(out, want, strict=True))
            assert all(torch.equal(x, y) for x, y in zip(given_, before, strict=True))
