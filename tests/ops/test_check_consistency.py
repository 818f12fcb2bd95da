# SPDX-License-Identifier: Apache-2.0
"""`check_consistency` against loops over the targets, as method.md section 5 tells it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leap_kernels.ops import CONFIDENT, CONVERGED, FORCED, Consistency, check_consistency

NAN = float("nan")
UP, DOWN = 2.0, -1.0  # what nextafter walks towards


def float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def next_float32(x: float, towards: float) -> float:
    """The neighbour of float32(x)."""
    return torch.nextafter(torch.tensor(x, dtype=torch.float32), torch.tensor(towards)).item()


@dataclass(frozen=True)
class Case:
    """One call; every field a list per sample. Copies that are absent are -1."""

    targets: list[list[int]]
    top1: list[list[int]]
    prob1: list[list[float]]
    copy_top1: list[list[int]]
    copy_prob1: list[list[float]]
    base_accept: list[list[bool]] | None = None
    phi: float = 0.9
    tau: float = 0.7
    kappa: float = 0.0
    keep_confident: bool = True

    def tensors(self) -> tuple[list[Tensor], Tensor | None]:
        shape = (len(self.targets), len(self.targets[0]))
        integer, floating = torch.int64, torch.float32
        made = [
            torch.tensor(values, dtype=dtype).reshape(shape)
            for values, dtype in (
                (self.targets, torch.int32),
                (self.top1, integer),
                (self.prob1, floating),
                (self.copy_top1, integer),
                (self.copy_prob1, floating),
            )
        ]
        base = None if self.base_accept is None else torch.tensor(self.base_accept, dtype=torch.bool).reshape(shape)
        return made, base

    def run(self) -> Consistency:
        tensors, base = self.tensors()
        options = {"phi": self.phi, "tau": self.tau, "kappa": self.kappa, "keep_confident": self.keep_confident}
        return check_consistency(*tensors, base_accept=base, **options)


def one_by_one(case: Case) -> list[list[int]]:
    """The reason for every target, decided in the order of section 5."""
    phi, tau, kappa = float32(case.phi), float32(case.tau), float32(case.kappa)
    reasons = []
    for b, columns in enumerate(case.targets):
        masked = [t for t, column in enumerate(columns) if column >= 0]
        reason = [0] * len(columns)
        has_copies = any(case.copy_top1[b][t] >= 0 for t in masked)
        for t in masked:
            c, p_copy = float32(case.prob1[b][t]), float32(case.copy_prob1[b][t])
            confident = c > phi if case.base_accept is None else case.base_accept[b][t]
            agrees = case.copy_top1[b][t] >= 0 and case.copy_top1[b][t] == case.top1[b][t]
            if confident and (case.keep_confident or not has_copies):
                reason[t] = CONFIDENT
            elif agrees and c >= tau and p_copy >= kappa:
                reason[t] = CONVERGED
        if masked and not any(reason):
            best = masked[0]
            for t in masked[1:]:
                a, c = case.prob1[b][best], case.prob1[b][t]
                if not math.isnan(c) and (math.isnan(a) or float32(c) > float32(a)):
                    best = t
            reason[best] = FORCED
        reasons.append(reason)
    return reasons


def check(case: Case) -> list[list[int]]:
    got = case.run()
    shape = (len(case.targets), len(case.targets[0]))
    assert (got.reason.dtype, tuple(got.reason.shape)) == (torch.int32, shape)
    assert (got.left.dtype, tuple(got.left.shape)) == (torch.int32, shape[:1])
    want = one_by_one(case)
    assert got.reason.tolist() == want
    left = [sum(c >= 0 and r == 0 for c, r in zip(*pair, strict=True)) for pair in zip(case.targets, want, strict=True)]
    assert got.left.tolist() == left
    return got.reason.tolist()


def sample(prob1: list[float], *, agree: bool | list[bool] = True, **fields: object) -> Case:
    """One sample whose targets all have copies; `agree` says where the copy repeats the base row's token."""
    n = len(prob1)
    agree = [agree] * n if isinstance(agree, bool) else agree
    tokens = list(range(10, 10 + n))
    copies = [t if same else t + 100 for t, same in zip(tokens, agree, strict=True)]
    case = Case([list(range(n))], [tokens], [prob1], [copies], [[0.5] * n])
    return replace(case, **fields)


def test_hand_worked_example() -> None:
    """One of each: confident against its copy, converged, agreeing but unsure, sure enough but contradicted, a hole."""
    case = Case(
        [[3, 5, 8, 9, -1], [3, 5, 8, -1, -1]],
        [[7, 7, 7, 7, 7], [1, 2, 3, 4, 5]],
        [[0.95, 0.8, 0.6, 0.85, 0.99], [0.5, 0.6, 0.3, 0.99, 0.99]],
        [[8, 7, 7, 8, 7], [9, 9, 3, 4, 5]],
        [[0.1] * 5, [0.1] * 5],
    )
    assert check(case) == [[1, 2, 0, 0, 0], [0, 3, 0, 0, 0]]
    assert case.run().left.tolist() == [2, 2]
    assert (CONFIDENT, CONVERGED, FORCED) == (1, 2, 3)


PROBABILITIES = [0.0, 0.3, 0.5, 0.7, 0.9, 1.0, NAN]
PROBABILITIES += [next_float32(x, way) for x in (0.5, 0.7, 0.9) for way in (UP, DOWN)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few tokens and probabilities on and beside the thresholds, so that ties and equalities are common."""
    batch, width = draw(st.integers(1, 3)), draw(st.integers(0, 5))

    def table(values: st.SearchStrategy) -> list[list]:
        return draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=batch, max_size=batch))

    return Case(
        table(st.sampled_from([-1, 0, 4, 31])),
        table(st.integers(0, 2)),
        table(st.sampled_from(PROBABILITIES)),
        table(st.integers(-1, 2)) if draw(st.booleans()) else [[-1] * width] * batch,
        table(st.sampled_from(PROBABILITIES)),
        table(st.booleans()) if draw(st.booleans()) else None,
        draw(st.sampled_from([0.9, 0.5, 1.0, 0.0])),
        draw(st.sampled_from([0.7, 0.5, 1.0, 0.0])),
        draw(st.sampled_from([0.0, 0.0, 0.5, 0.9, 1.0])),
        draw(st.booleans()),
    )


@settings(derandomize=True, deadline=None, max_examples=600)
@given(cases())
def test_any_batch(case: Case) -> None:
    """All options together, with NaN, holes, missing copies and equal confidences; at least one commit a sample."""
    reasons = check(case)
    for columns, reason in zip(case.targets, reasons, strict=True):
        assert any(reason) == any(column >= 0 for column in columns)


@pytest.mark.parametrize("phi", [0.9, 0.5, 0.7, 1 / 3])
def test_phi_is_strict_in_float32(phi: float) -> None:
    """c = float32(phi) is not confident, the next number is; float64's 0.9 is neither."""
    at, above, below = float32(phi), next_float32(phi, UP), next_float32(phi, DOWN)
    assert check(sample([above, at, below], agree=False, phi=phi)) == [[1, 0, 0]]
    # Exactly at phi nothing is accepted, and the forced rule has to step in.
    assert check(sample([below, at], agree=False, phi=phi)) == [[0, 3]]


@pytest.mark.parametrize("tau", [0.7, 0.9, 0.5, 0.1])
def test_tau_is_inclusive_in_float32(tau: float) -> None:
    """c = float32(tau) converges although float64's tau may lie above it; the number below does not."""
    at, above, below = float32(tau), next_float32(tau, UP), next_float32(tau, DOWN)
    assert check(sample([at, above, below], tau=tau, phi=1.0)) == [[2, 2, 0]]


@pytest.mark.parametrize("kappa", [0.9, 0.7, 0.3])
def test_kappa_is_inclusive_in_float32(kappa: float) -> None:
    """The copy must give its argmax at least kappa; where it does not, agreement is not enough."""
    at, above, below = float32(kappa), next_float32(kappa, UP), next_float32(kappa, DOWN)
    case = sample([0.8, 0.8, 0.8], kappa=kappa, copy_prob1=[[at, above, below]])
    assert check(case) == [[2, 2, 0]]
    # kappa = 0, the paper: the copy's confidence decides nothing.
    assert check(replace(case, kappa=0.0, copy_prob1=[[0.0, 0.1, 1.0]])) == [[2, 2, 2]]


def test_confident_comes_before_converged_before_forced() -> None:
    """A target that satisfies both rules is recorded as confident; forced only where neither holds."""
    assert check(sample([0.95, 0.85], agree=True)) == [[1, 2]]
    assert check(sample([0.6, 0.65], agree=True)) == [[0, 3]]
    # One accepted target of either kind is enough to force nothing.
    assert check(sample([0.95, 0.6], agree=False)) == [[1, 0]]
    assert check(sample([0.85, 0.6], agree=True)) == [[2, 0]]


def test_ties_force_the_lowest_target() -> None:
    """Equal confidences: the first target, holes skipped, however many there are."""
    assert check(sample([0.5, 0.6, 0.6, 0.6])) == [[0, 3, 0, 0]]
    assert check(sample([0.6] * 40)) == [[3, *[0] * 39]]
    assert check(sample([0.9, 0.6, 0.6], targets=[[-1, 5, 6]])) == [[0, 3, 0]]
    assert check(sample([0.0, 0.0])) == [[3, 0]]


def test_nan_accepts_nothing_by_itself() -> None:
    """A NaN confidence is below every number, and the first one is forced only if there is nothing else."""
    assert check(sample([NAN, 0.1])) == [[0, 3]]
    assert check(sample([NAN, 0.0, NAN])) == [[0, 3, 0]]
    assert check(sample([NAN, NAN])) == [[3, 0]]
    assert check(sample([NAN, NAN], targets=[[-1, 4]])) == [[0, 3]]
    assert check(sample([0.8, 0.8], copy_prob1=[[NAN, 0.5]])) == [[0, 2]]
    assert check(sample([NAN, 0.95], phi=0.0, tau=0.0)) == [[0, 1]]


def test_no_targets() -> None:
    """Nothing is committed and nothing is left, whatever the other columns say."""
    case = sample([0.99, 0.99], targets=[[-1, -1]])
    assert check(case) == [[0, 0]]
    assert case.run().left.tolist() == [0]
    for batch, width in ((0, 3), (2, 0), (0, 0)):
        i, f = torch.zeros(batch, width, dtype=torch.int64), torch.zeros(batch, width)
        out = check_consistency(i.int(), i, f, i, f)
        assert out.reason.shape == (batch, width)
        assert out.left.tolist() == [0] * batch


def test_absent_copies_are_no_evidence() -> None:
    """Without a copy only phi decides, also where token and copy are both -1."""
    assert check(sample([0.95, 0.8, 0.8], copy_top1=[[-1, -1, 12]])) == [[1, 0, 2]]
    assert check(sample([0.8, 0.8], top1=[[-1, 11]], copy_top1=[[-1, -1]])) == [[3, 0]]


def test_keep_confident_off() -> None:
    """Eq. 11 alone in samples that have copies; the threshold rule as ever in samples that have none (5.1)."""
    case = sample([0.95, 0.8, 0.99], agree=[False, True, True], keep_confident=False)
    assert check(case) == [[0, 2, 2]]
    assert check(replace(case, copy_top1=[[-1, -1, -1]])) == [[1, 0, 1]]
    # The copy behind a hole is nobody's evidence.
    assert check(replace(case, targets=[[0, 1, -1]], copy_top1=[[-1, -1, 12]])) == [[1, 0, 0]]
    # Samples decide apart from each other.
    both = Case([[0, 1]] * 2, [[5, 6]] * 2, [[0.95, 0.5]] * 2, [[9, 9], [-1, -1]], [[1.0, 1.0]] * 2)
    assert check(replace(both, keep_confident=False)) == [[3, 0], [1, 0]]
    assert check(both) == [[1, 0], [1, 0]]


def test_base_accept_replaces_phi() -> None:
    """An exchanged base rule decides alone, also against phi and for NaN; the rest of the rule stays."""
    case = sample([0.99, 0.1, 0.75, 0.6], agree=[False, False, True, True], base_accept=[[False, True, False, False]])
    assert check(case) == [[0, 1, 2, 0]]
    assert check(replace(case, base_accept=[[False] * 4], tau=0.8)) == [[3, 0, 0, 0]]
    assert check(replace(case, base_accept=[[True] * 4], targets=[[0, -1, 2, 3]])) == [[1, 0, 1, 1]]
    assert check(replace(case, prob1=[[NAN] * 4])) == [[0, 1, 0, 0]]


def test_strides_determinism_and_inputs() -> None:
    """Slices of wider tables and transposed tables decide the same, twice, and are only read."""
    case = Case(
        [[0, 1, 2], [4, -1, 6]],
        [[5, 6, 7], [5, 6, 7]],
        [[0.95, 0.8, 0.75], [0.4, 0.99, 0.5]],
        [[5, 6, 9], [5, 6, 9]],
        [[0.5] * 3] * 2,
        [[True, False, False], [False, True, False]],
    )
    tensors, base = case.tensors()
    tensors.append(base)
    want = check(case)
    wide = []
    for t in tensors:
        table = torch.ones(4, 7, dtype=t.dtype)
        wide.append(table[::2, 1::2].copy_(t))
    for views in (wide, [t.t().contiguous().t() for t in tensors]):
        before = [t.clone() for t in views]
        for _ in range(2):
            out = check_consistency(*views[:5], base_accept=views[5])
            assert out.reason.tolist() == want
        assert all(torch.equal(x, y) for x, y in zip(views, before, strict=True))


def test_samples_do_not_notice_each_other() -> None:
    """Each sample alone gets what it gets in the batch."""
    g = torch.Generator().manual_seed(0)
    targets = torch.randint(-1, 9, (5, 12), generator=g, dtype=torch.int32)
    top1, copies = (torch.randint(0, 3, (5, 12), generator=g) for _ in range(2))
    prob1, copy_prob1 = (torch.rand(5, 12, generator=g) for _ in range(2))
    tensors = (targets, top1, prob1, copies - 1, copy_prob1)
    together = check_consistency(*tensors, keep_confident=False)
    for b in range(5):
        alone = check_consistency(*(t[b : b + 1] for t in tensors), keep_confident=False)
        assert torch.equal(alone.reason, together.reason[b : b + 1])
        assert torch.equal(alone.left, together.left[b : b + 1])
