# SPDX-License-Identifier: Apache-2.0
"""Which key tiles `superposed_attention` reads: all that some row sees, without a mask only those that all rows see in
full, and none beyond the outermost that could be seen. Truth is the dense mask of the reference.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leap_kernels.ops import Switches, superposed_attention
from leap_kernels.ops.attention import kernel
from leap_kernels.ops.attention.bounds import _superposed_attention_bounds_kernel, bounds_config
from leap_kernels.ops.attention.reference import visible

pytestmark = pytest.mark.interpret

BN = 16
FILLED = 77  # what the kernel must overwrite


def ints(values: list[int]) -> Tensor:
    return torch.tensor([values], dtype=torch.int32)


def rows_and_keys(queries: list[tuple[int, int, int]], keys: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Queries as (kind, pos, slot) and keys as (kind, pos); nothing is hidden."""
    kind, pos, slot = (list(column) for column in zip(*queries, strict=True))
    c = {"q_pos": ints(pos), "q_hide": ints([-1] * len(pos)), "q_kind": ints(kind), "q_slot": ints(slot)}
    kind, pos = (list(column) for column in zip(*keys, strict=True))
    return c | {"k_pos": ints(pos), "k_kind": ints(kind), "k_hide": ints([-1] * len(pos))}


def bounds(
    c: dict[str, Tensor], length: int, block_causal: int = 0, window: int = 0, switches: int = 15, splits: int = 1,
    bm: int = 16,
) -> list[list[list[int]]]:  # fmt: skip
    """[split][query tile] -> [first, middle, resume, stop]"""
    how = bounds_config(bm, BN)
    n_q, n_k = c["q_pos"].shape[1], c["k_pos"].shape[1]
    tiles = -(-n_q // bm)
    out = torch.full((splits, tiles, 4), FILLED, dtype=torch.int32)
    q = [c[name] for name in ("q_pos", "q_kind", "q_slot")]
    k = [c[name] for name in ("k_pos", "k_kind", "k_hide")]
    _superposed_attention_bounds_kernel[(tiles, splits)](
        *q, *k, ints([length]), out, n_q, n_k, splits, block_causal, window, switches,
        *(stride for t in q + k for stride in t.stride()), 1, **how.constants, **how.options,
    )  # fmt: skip
    return out.tolist()


BASE, COPY, CANDIDATE, BRANCH, PADDING = 0, 1, 2, 3, -1
CONTEXT = [(BASE, i) for i in range(64)]
NOTHING = [(PADDING, 0)] * 48


@pytest.mark.parametrize(
    ("queries", "keys", "options", "expected"),
    [
        pytest.param([(BASE, 3, 3)], CONTEXT, {}, [0, 64, 64, 64], id="everything is seen"),
        pytest.param([(BASE, 3, 3)], CONTEXT[:40], {}, [0, 32, 32, 40], id="the last tile is short"),
        pytest.param([(BASE, 3, 51)], NOTHING + CONTEXT, {}, [48, 112, 112, 112], id="padding on the left"),
        pytest.param([(BASE, 3, 3)], CONTEXT + NOTHING, {}, [0, 64, 112, 64], id="padding on the right"),
        pytest.param(
            [(COPY, 3, 112)], CONTEXT + NOTHING + [(COPY, 3)] * 8, {}, [0, 64, 112, 120], id="a gap before the copies"
        ),
        pytest.param(
            [(BASE, 3, 3)], CONTEXT + [(COPY, 3)] * 40, {}, [0, 64, 104, 64], id="appended rows that base rows ignore"
        ),
        pytest.param(
            [(BASE, 3, 3)], CONTEXT, {"block_causal": 16}, [0, 16, 64, 16], id="later blocks, whole tiles"
        ),
        pytest.param([(BASE, 9, 9)], CONTEXT, {"block_causal": 10}, [0, 0, 0, 16], id="a block that ends in a tile"),
        pytest.param([(BASE, 40, 40)], CONTEXT, {"window": 9}, [32, 48, 48, 64], id="a window on tiles"),
        pytest.param([(BASE, 40, 40)], CONTEXT, {"window": 4}, [32, 32, 32, 48], id="a window in a tile"),
        pytest.param(
            [(COPY, 3, 80)], CONTEXT + [(COPY, 5)] * 40, {"switches": 0b1101}, [0, 64, 80, 96], id="its own slot alone"
        ),
        pytest.param([(PADDING, 0, -1)], CONTEXT, {}, [64, 64, 64, 0], id="padding asks for nothing"),
        pytest.param([(BASE, 3, 3)], [(PADDING, 0)] * 40, {}, [40, 40, 40, 0], id="nothing there"),
        pytest.param(
            [(COPY, 20, -1)], CONTEXT, {"switches": 0b1110}, [0, 16, 16, 64], id="a copy that must not see its original"
        ),
    ],
)  # fmt: skip
def test_by_hand(queries, keys, options, expected):
    """One tile of queries, tiles of 16 keys. Equal ends are an empty range, wherever it stands."""
    got = bounds(rows_and_keys(queries, keys), len(keys), **options)[0][0]

    def ranges(first: int, middle: int, resume: int, stop: int) -> tuple[range, range]:
        return range(first, middle), range(resume, stop)

    assert ranges(*got) == ranges(*expected)


@pytest.mark.parametrize("scan", [16, 32, 1024])
def test_scans_of_any_width_agree(scan, monkeypatch):
    """The keys are looked at 1024 at a time: with fewer at a time, tiles of one range come in several looks."""
    keys = NOTHING + CONTEXT + NOTHING + [(COPY, 3)] * 20
    queries = [(BASE, 3, 51), (COPY, 3, 160)]
    how = bounds_config(16, BN)
    wide = how._replace(constants=how.constants | {"SCAN": scan})
    monkeypatch.setitem(bounds.__globals__, "bounds_config", lambda bm, bn: wide)
    assert bounds(rows_and_keys(queries, keys), len(keys)) == [[[48, 112, 160, 180]]]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data())
def test_any_metadata(data):
    """What is seen is read, and what is read without a mask is seen by every row that sees anything."""
    n_q, n_k = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 70))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))

    def some(low: int, high: int, n: int) -> Tensor:
        return torch.randint(low, high, (1, n), generator=draw, dtype=torch.int32)

    c = {"q_pos": some(0, 70, n_q), "q_hide": some(-1, 9, n_q), "q_kind": some(-1, 4, n_q), "q_slot": some(-1, 70, n_q)}
    c |= {"k_pos": some(0, 70, n_k), "k_kind": some(-1, 4, n_k), "k_hide": some(-1, 9, n_k)}
    if data.draw(st.booleans()):  # a context, or padding, with few exceptions
        start, stop = sorted((data.draw(st.integers(0, n_k)), data.draw(st.integers(0, n_k))))
        c["k_kind"][:, start:stop], c["k_hide"][:, start:stop] = data.draw(st.sampled_from([BASE, PADDING])), -1
    if data.draw(st.booleans()):
        c["k_pos"] = torch.arange(n_k, dtype=torch.int32)[None]
    if data.draw(st.booleans()):
        c["q_kind"][:] = data.draw(st.integers(-1, 3))
    length, splits = data.draw(st.integers(0, n_k)), data.draw(st.integers(1, 3))
    blocks, windows = st.sampled_from([0, 5, 16, 32]), st.sampled_from([0, 3, 20])
    rule = {"block_causal": data.draw(blocks), "window": data.draw(windows)}
    switches = data.draw(st.integers(0, 15))
    order = ("q_pos", "q_hide", "q_kind", "q_slot", "k_pos", "k_kind", "k_hide")
    sees = visible(*(c[name] for name in order), ints([length])[0], *rule.values(), switches)[0]

    tiles = -(-n_q // 16)
    read = torch.zeros(tiles, n_k, dtype=torch.bool)
    for split in bounds(c, length, **rule, switches=switches, splits=splits):
        for tile, (first, middle, resume, stop) in enumerate(split):
            rows = sees[tile * 16 : tile * 16 + 16]
            live = c["q_kind"][0, tile * 16 : tile * 16 + 16] >= 0
            assert rows[live, first:middle].all()
            assert not read[tile, first:middle].any()
            read[tile, first:middle] = True
            assert not read[tile, resume:stop].any()
            read[tile, resume:stop] = True
    for tile in range(tiles):
        assert read[tile, sees[tile * 16 : tile * 16 + 16].any(0)].all()


@pytest.mark.parametrize("splits", [1, 2])
def test_keys_outside_are_not_loaded(splits):
    """NaN wherever no row can look: read, even with a weight of 0, it would spoil the result."""
    bn = kernel.config(16, torch.float16, 9).constants["BN"]
    queries = [(BASE, 2 * bn + i, 2 * bn + i) for i in range(16)]
    far = [(COPY, 5)] * bn
    keys = [(BASE, i) for i in range(4 * bn)] + far
    c = rows_and_keys(queries, keys)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=g).half() for n in (16, len(keys), len(keys)))
    options = {"window": 9, "switches": Switches(), "splits": splits}
    truth = superposed_attention(q, k, v, **c, **options, backend="reference")
    for x in (k, v):
        x[:, :, :bn], x[:, :, 3 * bn :] = float("nan"), float("nan")
    out = superposed_attention(q, k, v, **c, **options, backend="triton")
    assert (out.out - truth.out).abs().max() < 2e-3
    assert (out.lse - truth.lse).abs().max() < 1e-3
