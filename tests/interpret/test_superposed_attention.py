# SPDX-License-Identifier: Apache-2.0
"""`superposed_attention` kernels against float64, within the budget of the reference in the same dtype.

bf16 is left to a GPU: the interpreter multiplies it wrongly. q, k and v are random, so one key too many or too few
moves an output by far more than the budget.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpret.checks import close, same, unchanged
from torch import Tensor

from leap_kernels.ops import Attention, Switches, superposed_attention
from leap_kernels.ops.attention import kernel

pytestmark = pytest.mark.interpret

NAN, INF = float("nan"), float("inf")


def case(
    b: int = 1,
    heads: int = 1,
    group: int = 1,
    n_q: int = 63,
    n_k: int = 130,
    size: int = 16,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    prefix: int = 64,
) -> dict[str, Tensor]:
    """All kinds of query rows over `prefix` context slots and then all kinds of keys, most rows having a slot."""
    g = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, n: int) -> Tensor:
        return torch.randint(low, high, (b, n), generator=g, dtype=torch.int32)

    def floats(h: int, n: int) -> Tensor:
        return torch.randn(b, n, h, size, generator=g).to(dtype).transpose(1, 2)

    c = {"q": floats(heads, n_q), "k": floats(heads // group, n_k), "v": floats(heads // group, n_k)}
    c |= {"q_pos": ints(0, 40, n_q), "q_hide": ints(-1, 40, n_q), "q_kind": ints(-1, 4, n_q)}
    c |= {"q_slot": ints(-1, max(n_k, 1), n_q)}
    c |= {"k_pos": ints(0, 40, n_k), "k_kind": ints(-1, 4, n_k), "k_hide": ints(-1, 40, n_k)}
    c["k_kind"][:, :prefix] = 0
    c["k_hide"][:, :prefix] = -1
    c["q_hide"] = torch.where(c["q_kind"] == 3, c["q_hide"] % 3, c["q_hide"])  # few branches, or none would match
    c["k_hide"] = torch.where(c["k_kind"] == 3, c["k_hide"] % 3, c["k_hide"])
    return c


def check(c: dict[str, Tensor], **options) -> Attention:
    out = unchanged(superposed_attention, **c, **options, backend="triton")
    reference = superposed_attention(**c, **options, backend="reference")
    exact = {name: t.double() if t.is_floating_point() else t for name, t in c.items()}
    truth = superposed_attention(**exact, **options, backend="reference")
    close(out.out, reference.out, truth.out)
    close(out.lse, reference.lse, truth.lse.double(), 1.0)
    assert out.out.stride() == reference.out.stride()
    return out


def run(c: dict[str, Tensor], **options) -> Attention:
    return superposed_attention(**c, **options, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("n_q", "n_k", "size", "heads", "group"),
    [
        (1, 1, 16, 1, 1),
        (63, 65, 32, 4, 4),
        (97, 130, 64, 2, 1),
        (1, 130, 128, 7, 7),
        (64, 64, 16, 4, 2),
        (33, 97, 48, 8, 8),
        (20, 90, 96, 2, 1),
        (5, 70, 256, 2, 2),
    ],
)
def test_odd_shapes_head_sizes_and_groups(n_q, n_k, size, heads, group, dtype):
    check(case(2, heads, group, n_q, n_k, size, dtype))


@pytest.mark.parametrize("splits", [1, 2])
def test_what_lies_beside_a_head_is_not_read(splits):
    """Heads of 48 are computed as 64: the 16 values behind each belong to somebody else, and are NaN."""
    c = case(2, 2, 1, 20, 90, 48)
    for name in ("q", "k", "v"):
        wide = torch.full((*c[name].shape[:-1], 64), NAN, dtype=c[name].dtype)
        c[name] = wide[..., :48].copy_(c[name])
    check(c, splits=splits)


@pytest.mark.parametrize("generation", [8, 10])
def test_tiles_of_other_gpus(generation, monkeypatch):
    monkeypatch.setattr(kernel, "_generation", lambda device: generation)
    check(case(n_q=40, n_k=70, size=128))


@pytest.mark.parametrize("bits", range(16))
def test_every_setting_of_the_switches(bits):
    switches = Switches(*(bool(bits >> i & 1) for i in range(4)))
    check(case(seed=bits), switches=switches)


@pytest.mark.parametrize("switches", [Switches(), Switches(copy_sees_original=False)])
@pytest.mark.parametrize(("block_causal", "window"), [(8, 0), (64, 0), (1, 0), (0, 5), (0, 1), (0, 64), (16, 9)])
def test_block_causal_and_window(block_causal, window, switches):
    c = case(seed=block_causal + window)
    c["q_pos"] += 10
    check(c, block_causal=block_causal, window=window, switches=switches)


@pytest.mark.parametrize("edge", ["block", "window before", "window after", "blind copy", "branch", "kind"])
def test_context_that_a_single_row_does_not_see(edge):
    """One row of the tile, or one slot of the context, is unlike the others: the mask must not be skipped."""
    c = case(n_q=20, n_k=128, prefix=128)
    c["q_kind"][:], c["q_pos"][:], c["q_slot"][:], c["k_pos"][:] = 0, 30, -1, 30
    options = {}
    if edge == "block":
        c["q_pos"][0, 7], options = 15, {"block_causal": 16}
        c["k_pos"][:, :127] = 3
    elif edge.startswith("window"):
        c["q_pos"][0, 7], options = 35 if edge == "window before" else 25, {"window": 6}
        c["k_pos"][0, 90] = 29 if edge == "window before" else 31
    elif edge == "blind copy":
        c["q_kind"][0, 7], c["q_pos"][0, 7], options = 1, 12, {"switches": Switches(copy_sees_original=False)}
        c["k_pos"][0, 90] = 12
    elif edge == "branch":
        c["q_kind"][0, 7], c["k_hide"][0, 90] = 3, 2
    else:
        c["k_kind"][0, 90] = 1
    check(c, **options)


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("prefix", [0, 64, 100])
def test_splits(splits, prefix):
    c = case(2, 2, 2, 33, 200, 32, prefix=prefix)
    check(c, splits=splits)
    check(c | {"lengths": torch.tensor([200, 70], dtype=torch.int32)}, splits=splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_lengths(splits):
    """From nothing to all, and out of range; what lies beyond is NaN."""
    lengths = [0, 1, 63, 64, 65, 100, 130, 999, -4]
    c = case(len(lengths), n_q=5, prefix=70)
    for b, length in enumerate(lengths):
        c["k"][b, :, max(length, 0) :] = NAN
        c["v"][b, :, max(length, 0) :] = NAN
    out = check(c | {"lengths": torch.tensor(lengths, dtype=torch.int32)}, splits=splits)
    assert (out.lse[[0, -1]] == -INF).all()
    assert (out.out[[0, -1]] == 0).all()


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_and_slots_of_kind_minus_one(splits):
    """NaN in slots that nobody sees and in padding queries; a sample of nothing but padding."""
    c = case(2, n_q=40)
    unused = c["k_kind"] < 0
    c["k"].masked_fill_(unused[:, None, :, None], NAN)
    c["v"].masked_fill_(unused[:, None, :, None], NAN)
    c["q"].masked_fill_((c["q_kind"] < 0)[:, None, :, None], NAN)
    c["q_kind"][1] = -1
    c["q"][1] = 1.0
    check(c | {"q": c["q"].nan_to_num()}, splits=splits)
    out = run(c, splits=splits)
    assert out.out.isfinite().all()
    assert (out.lse[1] == -INF).all()
    c["k_kind"][:] = -1
    out = check(c | {"q": c["q"].nan_to_num()}, splits=splits)
    assert (out.out == 0).all()


@pytest.mark.parametrize("splits", [1, 2])
def test_nothing_to_do(splits):
    check(case(0), splits=splits)
    check(case(n_q=0), splits=splits)
    out = check(case(n_k=0, prefix=0), splits=splits)
    assert (out.lse == -INF).all()


def test_scale_and_large_scores():
    check(case(), scale=3.0)
    c = case(dtype=torch.float32, n_q=20)
    c["q"] *= 300
    check(c)


def test_layouts_of_q_k_and_v():
    """[B, H, S, D], one of the three unlike the others, slices of a fused projection, heads and batches expanded."""
    c = case(2, 4, 2, 40, 100, 32)
    check({name: t.contiguous() for name, t in c.items()})
    for name in ("q", "k", "v"):
        check(c | {name: c[name].contiguous()})
    fused = torch.randn(2, 100, 3, 4, 48, generator=torch.Generator().manual_seed(0)).half()[..., 8:40]
    q, k, v = (t.transpose(1, 2) for t in fused.unbind(2))
    check(c | {"q": q[:, :, :40], "k": k[:, 2:], "v": v[:, 1:3]})
    check(c | {"k": c["k"][:1, :1].expand(2, 2, -1, -1), "k_pos": c["k_pos"][:1].expand(2, -1)})


@pytest.mark.parametrize("name", ["q_pos", "q_hide", "q_kind", "q_slot", "k_pos", "k_kind", "k_hide", "lengths"])
def test_metadata_of_any_stride(name):
    c = case(2, n_q=20, n_k=90) | {"lengths": torch.tensor([90, 70], dtype=torch.int32)}
    spread = torch.ones([2 * n + 1 for n in c[name].shape], dtype=torch.int32)[(slice(1, None, 2),) * c[name].dim()]
    check(c | {name: spread.copy_(c[name])})


@pytest.mark.parametrize("far", ["batch", "head", "slot", "context"])
def test_offsets_beyond_32_bits(far):
    """Batch, head or slot 2, or slot 32 of a context, starts at element 2^31.

    The memory is reserved, but little of it is ever touched.
    """
    n_k = 64 if far == "context" else 3
    c = case(3, 3, 1, 4, n_k, prefix=n_k if far == "context" else 0)
    strides = {
        "batch": (2**30, 48, 16),
        "head": (48, 2**30, 16),
        "slot": (48, 16, 2**30),
        "context": (48, 16, 2**26),
    }[far]
    storage = torch.empty(
        sum(s * (n - 1) for s, n in zip(strides, c["k"].shape, strict=False)) + 16, dtype=c["k"].dtype
    )
    c["k"] = c["v"] = storage.as_strided(c["k"].shape, (*strides, 1)).copy_(c["k"])
    check(c)


def test_deterministic_and_blind_to_other_rows_samples_and_slots():
    """A row alone, and a sample whose unused slots were cut off, give the same bits."""
    c = case(2, 2, 1, 70, 200, 32, prefix=140)
    c["lengths"] = torch.tensor([200, 150], dtype=torch.int32)
    for splits in (1, 3):
        first, second = run(c, splits=splits), run(c, splits=splits)
        same(first.out, second.out)
        same(first.lse, second.lse)
        rows = slice(66, 67)
        alone = {name: t[1:] for name, t in c.items()}
        alone |= {name: alone[name][:, rows] for name in ("q_pos", "q_hide", "q_kind", "q_slot")}
        alone |= {name: alone[name][:, :150] for name in ("k_pos", "k_kind", "k_hide")}
        alone |= {"q": alone["q"][:, :, rows], "k": alone["k"][:, :, :150], "v": alone["v"][:, :, :150]}
        one = run(alone, splits=splits)
        same(one.out, first.out[1:, :, rows])
        same(one.lse, first.lse[1:, :, rows])


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.data())
def test_any_small_case(data):
    n_q, n_k = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 7))
    c = case(1, 1, 1, n_q, n_k, prefix=0)

    def ints(low: int, high: int, n: int) -> Tensor:
        values = data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n))
        return torch.tensor(values, dtype=torch.int32).view(1, n)

    c |= {"q_pos": ints(0, 5, n_q), "q_hide": ints(-1, 5, n_q), "q_kind": ints(-1, 3, n_q), "q_slot": ints(-1, 6, n_q)}
    c |= {"k_pos": ints(0, 5, n_k), "k_kind": ints(-1, 3, n_k), "k_hide": ints(-1, 5, n_k)}
    c["lengths"] = torch.tensor([data.draw(st.integers(0, n_k))], dtype=torch.int32)
    switches = Switches(*(data.draw(st.booleans()) for _ in range(4)))
    block_causal, window = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    splits = data.draw(st.integers(1, 2))
    check(c, block_causal=block_causal, window=window, switches=switches, splits=splits)
