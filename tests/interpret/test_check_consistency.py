# SPDX-License-Identifier: Apache-2.0
"""`check_consistency` kernel against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpret.checks import same, unchanged
from torch import Tensor

from leap_kernels.ops import CONFIDENT, CONVERGED, FORCED, Consistency, check_consistency

pytestmark = pytest.mark.interpret

NAN = float("nan")
EDGES = (0.9, 0.7, 0.3, 0.0, 1.0)  # float32 of the thresholds, and their neighbours


def case(b: int, t: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    edge = torch.tensor(EDGES)
    edge = torch.cat([edge, edge.nextafter(torch.tensor(2.0)), edge.nextafter(torch.tensor(-1.0)), torch.tensor([NAN])])

    def probs() -> Tensor:
        return edge[torch.randint(0, len(edge), (b, t), generator=g)]

    return {
        "targets": torch.randint(-1, 3, (b, t), generator=g, dtype=torch.int32),
        "top1": torch.randint(0, 3, (b, t), generator=g),
        "prob1": probs(),
        "copy_top1": torch.randint(-1, 3, (b, t), generator=g),
        "copy_prob1": probs(),
    }


def check(c: dict[str, Tensor], **options) -> Consistency:
    out = unchanged(check_consistency, **c, **options, backend="triton")
    for a, b in zip(out, check_consistency(**c, **options, backend="reference"), strict=True):
        same(a, b)
    return out


@pytest.mark.parametrize("t", [0, 1, 32, 256, 257, 600])
@pytest.mark.parametrize(("kappa", "keep_confident"), [(0.0, True), (0.0, False), (0.3, True), (0.3, False)])
def test_thresholds_and_their_neighbours(t, kappa, keep_confident):
    for seed in range(2):
        c = case(3, t, seed)
        accept = torch.rand(3, t, generator=torch.Generator().manual_seed(seed)) < 0.1
        for base_accept in (None, accept):
            check(c, kappa=kappa, keep_confident=keep_confident, base_accept=base_accept)


def test_equality_is_not_confident_but_converged():
    y = torch.tensor([[4, 4, 4, 4]])
    c = torch.tensor([[0.9, 0.7, 0.9, 0.7]])
    copies = torch.tensor([[-1, 4, 4, -1]])
    out = check({"targets": y.int(), "top1": y, "prob1": c, "copy_top1": copies, "copy_prob1": c})
    assert out.reason.tolist() == [[0, CONVERGED, CONVERGED, 0]]
    assert out.left.tolist() == [2]


@pytest.mark.parametrize("t", [5, 700])
def test_the_first_of_equal_targets_is_forced(t):
    """Equal maxima within one block of 256 and in two of them; not the 1.0 of what is no target."""
    c = case(2, t)
    c["targets"][:] = 1
    c["targets"][:, 0] = -1
    c["prob1"][:] = 0.25
    c["prob1"][:, 0] = 1.0
    c["prob1"][0, [3, t - 1]] = 0.5
    c["prob1"][1, [t - 1, t - 2]] = 0.5
    c["copy_top1"][:] = -1
    out = check(c)
    assert out.reason.nonzero().tolist() == [[0, 3], [1, t - 2]]
    assert out.left.tolist() == [t - 2, t - 2]


def test_no_target_and_only_nan():
    c = case(3, 6)
    c["targets"][0] = -1
    c["prob1"][1:] = NAN
    c["targets"][1] = torch.tensor([-1, -1, 5, 5, 5, -1])
    out = check(c)
    assert out.reason[0].tolist() == [0] * 6
    assert out.reason[1].tolist() == [0, 0, FORCED, 0, 0, 0]


def test_confident_ones_wait_where_there_is_evidence():
    y = torch.tensor([[1, 2], [1, 2]])
    c = torch.tensor([[0.95, 0.8], [0.95, 0.8]])
    copies = torch.tensor([[3, 2], [-1, -1]])
    arguments = {"targets": y.int(), "top1": y, "prob1": c, "copy_top1": copies, "copy_prob1": c}
    assert check(arguments, keep_confident=False).reason.tolist() == [[0, CONVERGED], [CONFIDENT, 0]]


def test_strided_inputs():
    c = case(4, 40)
    c["base_accept"] = torch.rand(4, 40) < 0.2
    strided = {}
    for name, t in c.items():
        big = torch.ones(9, 81).to(t.dtype)
        strided[name] = big[1::2, 1::2].copy_(t)
    check(strided)
    check({name: t.t().contiguous().t() for name, t in c.items()})
    check({name: t[:1].expand(4, -1) for name, t in c.items()})


def test_empty_batch_determinism_and_blindness():
    check(case(0, 8))
    c = case(5, 33)
    first, second = check(c), check(c)
    alone = check({name: t[3:4] for name, t in c.items()})
    for a, b, one in zip(first, second, alone, strict=True):
        same(a, b)
        same(a[3:4], one)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(-1, 1),
            st.integers(0, 1),
            st.sampled_from([0.0, 0.5, 0.7, 0.8, 0.9, 1.0, NAN]),
            st.integers(-1, 1),
            st.sampled_from([0.0, 0.5, 1.0, NAN]),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(0.9, 0.7, 0.0), (0.7, 0.9, 0.5), (1.0, 0.0, 1.0)]),
)
def test_any_small_case(rows, keep_confident, with_accept, thresholds):
    targets, top1, prob1, copy_top1, copy_prob1, accept = (torch.tensor([column]) for column in zip(*rows, strict=True))
    c = {"targets": targets.int(), "top1": top1, "prob1": prob1, "copy_top1": copy_top1, "copy_prob1": copy_prob1}
    if with_accept:
        c["base_accept"] = accept
    phi, tau, kappa = thresholds
    check(c, phi=phi, tau=tau, kappa=kappa, keep_confident=keep_confident)
