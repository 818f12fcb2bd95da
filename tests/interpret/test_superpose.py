# SPDX-License-Identifier: Apache-2.0
"""`superpose` kernel against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpret.checks import same, unchanged
from torch import Tensor

from leap_kernels.ops import Superposed, superpose

pytestmark = pytest.mark.interpret

MASK = 999


def case(widths: list[int], k: int, length: int = 100, seed: int = 0) -> dict[str, Tensor]:
    """A sample for each width, with that many targets at rising columns, and 0 to k candidates each."""
    g = torch.Generator().manual_seed(seed)
    b, t = len(widths), max(widths, default=0)
    targets = torch.full((b, t), -1, dtype=torch.int32)
    for row, width in zip(targets, widths, strict=True):
        row[:width] = torch.randperm(length, generator=g)[:width].sort().values
    return {
        "ids": torch.randint(0, MASK, (b, length), generator=g),
        "pos": torch.arange(length, dtype=torch.int32).repeat(b, 1),
        "targets": targets,
        "cand_ids": torch.randint(0, MASK, (b, t, k), generator=g),
        "counts": torch.randint(0, k + 1, (b, t), generator=g, dtype=torch.int32),
    }


def check(c: dict[str, Tensor], **options) -> Superposed:
    options = {"mask_id": MASK} | options
    out = unchanged(superpose, **c, **options, backend="triton")
    for a, b in zip(out, superpose(**c, **options, backend="reference"), strict=True):
        same(a, b)
    return out


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    ("widths", "k"),
    [([32, 7, 1, 0], 5), ([64], 8), ([65, 2], 3), ([90, 64, 33], 17), ([2], 1), ([3, 2], 0), ([0, 0], 5), ([], 5)],
)
def test_ragged_samples(widths, k, shift):
    check(case(widths, k), shift=shift)


def test_more_capacity_than_needed_is_padding():
    out = check(case([5, 3], 2), capacity=700)
    assert (out.kind[:, 15:] == -1).all()


def test_targets_with_holes():
    c = case([70, 9], 4)
    c["targets"][:, ::3] = -1
    check(c, shift=1)


def test_no_candidates_and_single_targets_append_nothing():
    c = case([6, 6, 6], 3)
    c["counts"][0] = 0
    c["targets"][1, 1:] = -1
    out = check(c)
    assert out.count.tolist()[:2] == [0, 0]
    assert out.count[2] > 0


def test_counts_beyond_their_range_are_cut():
    c = case([8], 3)
    c["counts"][0] = torch.tensor([-2, 9, 3, 0, 1, 4, -1, 2])
    check(c)


def test_rows_without_a_row_before_them_have_no_copy_in_shifted_models():
    c = case([4, 4, 4], 2)
    c["targets"][:] = torch.tensor([0, 1, 2, 3])
    c["counts"][:] = 1
    c["pos"][1] = (c["pos"][1] - 1).clamp(min=0)  # left padding: column 1 is position 0
    c["pos"][2] += 3  # a canvas that starts at position 3
    out = check(c, shift=1)
    assert out.copy_row.tolist() == [[-1, 0, 1, 2], [-1, -1, 0, 1], [-1, 0, 1, 2]]


def test_strided_inputs():
    c = case([40, 12, 3], 6)
    strided = {}
    for name, t in c.items():
        big = torch.full([2 * n + 1 for n in t.shape], -5, dtype=t.dtype)
        view = big[tuple(slice(1, None, 2) for _ in t.shape)]
        strided[name] = view.copy_(t)
    check(strided, shift=1)
    strided["cand_ids"] = c["cand_ids"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["pos"] = c["pos"][:1].expand(3, -1)
    check(strided)


def test_deterministic_and_blind_to_other_samples():
    c = case([20, 31, 5], 4)
    first, second = check(c), check(c)
    alone = check({name: t[1:2] for name, t in c.items()})
    for a, b, one in zip(first, second, alone, strict=True):
        same(a, b)
        same(a[1:2], one)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.data())
def test_any_small_case(data):
    b, t, k, length = (data.draw(st.integers(lo, hi)) for lo, hi in ((1, 3), (0, 6), (0, 4), (1, 9)))

    def ints(low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        n = torch.Size(shape).numel()
        return torch.tensor(data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n)), dtype=dtype).view(
            shape
        )

    c = {
        "ids": ints(0, 50, b, length, dtype=torch.int64),
        "pos": ints(0, 12, b, length, dtype=torch.int32),
        "targets": ints(-1, length - 1, b, t, dtype=torch.int32),
        "cand_ids": ints(0, 50, b, t, k, dtype=torch.int64),
        "counts": ints(-1, k + 1, b, t, dtype=torch.int32),
    }
    check(c, shift=data.draw(st.integers(0, 1)), capacity=t * (1 + k) + data.draw(st.integers(0, 3)))
