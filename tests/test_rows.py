# SPDX-License-Identifier: Apache-2.0
"""`Rows`: which rows a forward computes, who sees whom among them, and where their results stand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from checkpoints import random_llama
from torch import Tensor

import leap_kernels
from leap_kernels import Rows, ops
from leap_kernels.errors import InputError

MASK = 43
SPEC = leap_kernels.ModelSpec(mask_token_id=MASK, vocab_size=48)
SHIFTED = leap_kernels.ModelSpec(mask_token_id=MASK, vocab_size=48, shift=1)

# Two samples; the second is padded and has fewer targets and fewer appended rows. None is padding.
CANVAS = [
    [5, 6, MASK, 7, MASK, MASK, 8],
    [None, None, 9, MASK, 4, 3, MASK],
]
# Candidates of the masked positions, in the order of `masked.nonzero()`: none, some, several, for ragged samples.
CANDIDATES = [[20, 21], [], [22], [], [31, 32]]


def canvas(rows: list[list[int | None]] = CANVAS) -> tuple[Tensor, Tensor, Tensor]:
    """Ids (padding is token 0), masked, attention_mask."""
    ids = torch.tensor([[0 if t is None else t for t in row] for row in rows])
    return ids, ids == MASK, torch.tensor([[t is not None for t in row] for row in rows])


def listed(candidates: list[list[int]], k: int = 3) -> ops.TopEta:
    """A TopEta that holds these candidates, as `ops.top_eta` lays them out."""
    ids = torch.tensor([tokens + [-1] * (k - len(tokens)) for tokens in candidates], dtype=torch.int64).reshape(-1, k)
    counts = torch.tensor([len(tokens) for tokens in candidates], dtype=torch.int32)
    zeros = torch.zeros(len(candidates))
    return ops.TopEta(ids, torch.where(ids >= 0, 0.25, 0.0), counts, ids[:, 0], zeros, zeros, zeros, zeros)


def table(rows: Rows, sample: int) -> list[tuple[int, int, int, int]]:
    """(token, pos, kind, hide) of every row that is no padding."""
    fields = zip(*(getattr(rows, name)[sample].tolist() for name in ("token", "pos", "kind", "hide")), strict=True)
    return [row for row in fields if row[2] != -1]


def expected_table(
    sample: list[int | None], candidates: list[list[int]], shift: int
) -> tuple[list[tuple[int, int, int, int]], list[int | None]]:
    """method.md section 3 for one sample, row by row; and for each target the number of its copy among the appended."""
    tokens = [t for t in sample if t is not None]
    base = [(token, pos, 0, -1) for pos, token in enumerate(tokens)]
    targets = [pos for pos, token in enumerate(tokens) if token == MASK]
    if len(targets) < 2 or not any(candidates):
        return base, [None] * len(targets)
    copies = [(tokens[i - shift], i - shift, 1, i) for i in targets if i >= shift]
    with_copy = [i for i in targets if i >= shift]
    place = [with_copy.index(i) if i in with_copy else None for i in targets]
    options = [(v, i, 2, i) for i, found in zip(targets, candidates, strict=True) for v in found]
    return base + copies + options, place


def split_candidates(rows: list[list[int | None]], candidates: list[list[int]]) -> list[list[list[int]]]:
    """The flat list, one entry a masked position, cut into samples."""
    flat = iter(candidates)
    return [[next(flat) for token in row if token == MASK] for row in rows]


# --- plain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_plain_rows_count_positions_without_padding(side: str) -> None:
    """Base rows at 0, 1, ... of their own sample; padding has kind -1 wherever it stands."""
    rows = [[5, 6, 7], [None, None, 9] if side == "left" else [9, None, None]]
    ids, _, valid = canvas(rows)
    plain = Rows.plain(ids, SPEC, valid.long())
    assert torch.equal(plain.token, ids)
    assert plain.pos[0].tolist() == [0, 1, 2]
    assert plain.pos[1][valid[1]].tolist() == [0]
    assert torch.equal(plain.kind, torch.where(valid, 0, -1))
    assert (plain.hide == -1).all()
    assert plain.base == 3
    assert plain.padded is True
    assert plain.slot.tolist() == [[0, 1, 2]] * 2
    assert {t.dtype for t in (plain.pos, plain.kind, plain.hide, plain.slot)} == {torch.int32}


def test_plain_rows_without_mask_are_all_base_rows() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 4]])
    plain = Rows.plain(ids)
    assert plain.pos.tolist() == [[0, 1, 2]] * 2
    assert (plain.kind == 0).all()
    assert plain.padded is False
    assert plain.targets is None
    assert plain.copy_row is None


# --- superpose -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, SHIFTED], ids=["unshifted", "shifted"])
def test_superposed_rows_are_those_of_the_specification(spec: leap_kernels.ModelSpec) -> None:
    """Copies by position, then candidates by position and rank, on a ragged and padded batch (method.md section 3)."""
    ids, masked, valid = canvas()
    rows = Rows.superpose(ids, masked, listed(CANDIDATES), spec, attention_mask=valid.long())
    longest = 0
    for sample, found in enumerate(split_candidates(CANVAS, CANDIDATES)):
        truth, place = expected_table(CANVAS[sample], found, spec.shift)
        assert table(rows, sample) == truth
        targets = masked[sample].nonzero()[:, 0].tolist()
        assert [t for t in rows.targets[sample].tolist() if t >= 0] == targets
        copy_row = rows.copy_row[sample, : len(targets)].tolist()
        assert copy_row == [-1 if p is None else p for p in place]
        longest = max(longest, len(truth) - int(valid[sample].sum()))
    assert rows.base == ids.shape[1]
    assert torch.equal(rows.token[:, : rows.base], ids)
    assert rows.token.shape == (2, ids.shape[1] + longest), "more padding rows than the longest sample needs"
    assert ((rows.token >= 0) & (rows.token < 48)).all(), "padding rows need an embedding too"


def test_the_first_position_of_a_shifted_model_gets_no_copy() -> None:
    """It is read at row 0, before which there is no row (method.md section 3); its candidates stay."""
    rows = [[MASK, MASK, 5]]
    ids, masked, _ = canvas(rows)
    superposed = Rows.superpose(ids, masked, listed([[20], [21]]), SHIFTED)
    assert table(superposed, 0)[3:] == [(MASK, 0, 1, 1), (20, 0, 2, 0), (21, 1, 2, 1)]
    assert superposed.copy_row.tolist() == [[-1, 0]]


@pytest.mark.parametrize(
    ("rows", "candidates"),
    [
        ([[5, MASK, 6]], [[20, 21]]),
        ([[5, MASK, MASK]], [[], []]),
        ([[5, 6, 7]], []),
    ],
    ids=["one-target", "no-candidates", "no-targets"],
)
def test_nothing_is_appended_without_a_use(rows: list[list[int | None]], candidates: list[list[int]]) -> None:
    """method.md 2.3: a plain forward, and no copy to read."""
    ids, masked, _ = canvas(rows)
    superposed = Rows.superpose(ids, masked, listed(candidates), SPEC)
    assert table(superposed, 0) == table(Rows.plain(ids), 0)
    assert superposed.token.shape == ids.shape
    assert superposed.mask is None
    base, copies = superposed.split(torch.ones(1, 3, 48))
    assert base.shape == (1, 3, 48)
    assert copies.shape == (int(masked.sum()), 48)
    assert copies.isnan().all()


def test_the_candidates_may_be_top_eta_of_the_masked_rows() -> None:
    """The documented call: `ops.top_eta(logits[masked], eta)`, its order and padding."""
    ids, masked, valid = canvas()
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((*ids.shape, 48), generator=generator)
    rows = Rows.superpose(ids, masked, ops.top_eta(logits[masked], 0.2, suppress=[MASK]), SPEC, attention_mask=valid)
    probabilities = logits.index_fill(-1, torch.tensor([MASK]), float("-inf")).softmax(-1)
    found = []
    for sample, column in masked.nonzero().tolist():
        p = probabilities[sample, column]
        found.append(sorted((v for v in range(48) if p[v] >= 0.2), key=lambda v, p=p: -p[v]))
    assert max(map(len, found)) >= 2, "the example is too easy"
    for sample, mine in enumerate(split_candidates(CANVAS, found)):
        assert table(rows, sample) == expected_table(CANVAS[sample], mine, 0)[0]


def test_switches_blocks_and_backend_travel_with_the_rows() -> None:
    """Neither superposing nor appending loses a setting, and plain rows take the block size from the spec."""
    ids, masked, _ = canvas([[5, MASK, MASK, 6]])
    spec = leap_kernels.ModelSpec(mask_token_id=MASK, block_causal_length=2)
    switches = ops.Switches(copy_sees_original=False, candidates_see_copies=False)
    rows = Rows.superpose(ids, masked, listed([[20], [21]]), spec, switches=switches, backend="reference")
    assert (rows.block_causal, rows.switches, rows.backend, rows.window) == (2, switches, "reference", 0)
    assert Rows.plain(ids, spec).block_causal == 2
    assert Rows.superpose(ids, masked, listed([[20], [21]]), SPEC).switches == ops.Switches()


# --- append --------------------------------------------------------------------------------------------------------


def test_append_takes_the_first_rows_and_leaves_the_original_alone() -> None:
    """What `superpose` allocated beyond `width` is dropped; the mask of the shorter rows is not handed on."""
    ids, masked, _ = canvas([[5, MASK, MASK, 6]])
    plain = Rows.plain(ids)
    plain.block_causal, plain.window, plain.switches = 3, 2, ops.Switches(copies_see_copies=False)
    plain.backend = "reference"
    before = plain.dense_mask.clone()
    targets = masked.nonzero()[:, 1][None].int()
    found = listed([[20], [21, 22]])
    extra = ops.superpose(ids, plain.pos, targets, found.ids[None], found.counts[None], mask_id=MASK)
    assert extra.token.shape[1] == 8
    rows = plain.append(extra, 5)
    assert table(rows, 0) == [
        (5, 0, 0, -1), (MASK, 1, 0, -1), (MASK, 2, 0, -1), (6, 3, 0, -1),
        (MASK, 1, 1, 1), (MASK, 2, 1, 2), (20, 1, 2, 1), (21, 2, 2, 2), (22, 2, 2, 2),
    ]  # fmt: skip
    assert (rows.base, rows.block_causal, rows.window, rows.backend) == (4, 3, 2, "reference")
    assert rows.switches == plain.switches
    assert torch.equal(rows.copy_row, extra.copy_row)
    assert rows.slot.tolist() == [list(range(9))]
    assert rows.dense_mask.shape == (1, 1, 9, 9)
    assert plain.token.shape == (1, 4)
    assert torch.equal(plain.dense_mask, before)


# --- who sees whom -------------------------------------------------------------------------------------------------


def sees(a: dict[str, int], b: dict[str, int], switches: ops.Switches, block: int, window: int) -> bool:
    """method.md section 4, for one query row a and one key row b."""
    if -1 in (a["kind"], b["kind"]):
        return False
    if block and b["pos"] // block > a["pos"] // block:
        return False
    if window and abs(a["pos"] - b["pos"]) >= window:
        return False
    if a["row"] == b["row"]:
        return True
    if b["kind"] == 0:
        own_row_of_a_copy = a["kind"] == 1 and b["pos"] == a["pos"]
        return switches.copy_sees_original if own_row_of_a_copy else True
    if a["kind"] == 0:
        return False
    if b["kind"] == 2:
        return b["pos"] != a["hide"] and (a["kind"] == 1 or switches.candidates_see_candidates)
    allowed = switches.copies_see_copies if a["kind"] == 1 else switches.candidates_see_copies
    return b["pos"] != a["pos"] and allowed


@pytest.mark.parametrize("spec", [SPEC, SHIFTED], ids=["unshifted", "shifted"])
@pytest.mark.parametrize(("block", "window"), [(0, 0), (3, 0), (0, 3), (2, 4)])
@pytest.mark.parametrize("bits", list(itertools.product([True, False], repeat=4)), ids=str)
def test_the_dense_mask_is_the_table_of_the_specification(
    spec: leap_kernels.ModelSpec, block: int, window: int, bits: tuple[bool, ...]
) -> None:
    """Every pair of rows of a ragged, padded batch, for every setting of the four switches."""
    ids, masked, valid = canvas()
    switches = ops.Switches(*bits)
    rows = Rows.superpose(ids, masked, listed(CANDIDATES), spec, attention_mask=valid, switches=switches)
    rows.block_causal, rows.window = block, window
    found = rows.dense_mask
    assert found.dtype == torch.bool
    assert found.shape == (2, 1, rows.token.shape[1], rows.token.shape[1])
    for sample in range(2):
        meta = [
            {"row": r, **{name: int(getattr(rows, name)[sample, r]) for name in ("pos", "kind", "hide")}}
            for r in range(rows.token.shape[1])
        ]
        truth = [[sees(a, b, switches, block, window) for b in meta] for a in meta]
        assert found[sample, 0].tolist() == truth


def make(case: str) -> Rows:
    ids, masked, valid = canvas()
    if case in ("superposed", "shifted"):
        return Rows.superpose(ids[:1], masked[:1], listed(CANDIDATES[:3]), SPEC if case == "superposed" else SHIFTED)
    if case == "padded":
        return Rows.plain(ids, SPEC, valid)
    rows = Rows.plain(ids, leap_kernels.ModelSpec(mask_token_id=MASK, block_causal_length=3 * (case == "blocks")))
    rows.window = 4 * (case == "window")
    return rows


@pytest.mark.parametrize("case", ["plain", "superposed", "shifted", "padded", "blocks", "window"])
def test_no_mask_exactly_where_every_row_sees_every_row(case: str) -> None:
    """None lets torch take its fast path; a None too many would show rows that must not be seen."""
    everything = bool(make(case).dense_mask.all())
    assert (make(case).mask is None) == everything
    assert everything == (case == "plain")
    if not everything:
        assert torch.equal(make(case).mask, make(case).dense_mask)


def test_the_mask_is_built_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a layer: three layers ask, one mask is made."""
    import leap_kernels.rows as module

    calls = []
    original = module.visible
    monkeypatch.setattr(module, "visible", lambda *args: calls.append(1) or original(*args))
    leap_kernels.attention.register()
    model = random_llama(attention="leap", num_hidden_layers=3)
    rows = make("superposed")
    with torch.inference_mode():
        model(rows.token, position_ids=rows.pos, leap=rows)
    assert len(calls) == 1
    assert rows.dense_mask is rows.mask
    assert len(calls) == 1


# --- split ---------------------------------------------------------------------------------------------------------


def numbered(rows: Rows, width: int = 4) -> Tensor:
    """Logits that say where they stand: 1000 * sample + row, in every column."""
    batch, length = rows.token.shape
    number = 1000.0 * torch.arange(batch)[:, None] + torch.arange(length)
    return number[..., None].expand(batch, length, width)


@pytest.mark.parametrize("spec", [SPEC, SHIFTED], ids=["unshifted", "shifted"])
def test_split_finds_the_copy_of_every_masked_position(spec: leap_kernels.ModelSpec) -> None:
    """One copy a masked position, in the order of `masked.nonzero()`: the row of kind 1 that hides this position."""
    ids, masked, valid = canvas()
    rows = Rows.superpose(ids, masked, listed(CANDIDATES), spec, attention_mask=valid)
    base, copies = rows.split(numbered(rows))
    assert torch.equal(base, numbered(rows)[:, : ids.shape[1]])
    assert copies.shape == (int(masked.sum()), 4)
    for (sample, column), copy in zip(masked.nonzero().tolist(), copies, strict=True):
        at_sample, row = divmod(int(copy[0]), 1000)
        assert at_sample == sample
        assert (copy == copy[0]).all()
        assert int(rows.kind[sample, row]) == 1
        assert int(rows.hide[sample, row]) == int(rows.pos[sample, column])
        assert int(rows.pos[sample, row]) == int(rows.pos[sample, column]) - spec.shift


def test_a_target_without_copy_is_no_evidence_all_the_way() -> None:
    """NaN from `split`, -1 from `top_eta`, and `check_consistency` decides by confidence alone."""
    ids, masked, _ = canvas([[5, MASK, MASK], [6, MASK, MASK]])
    rows = Rows.superpose(ids, masked, listed([[20], [21], [], []]), SPEC)  # the second sample has no candidates
    logits = torch.zeros((2, rows.token.shape[1], 48))
    for row, token, gain in ((1, 7, 12.0), (2, 8, 5.3)):  # confident, and sure enough for tau
        logits[:, row, token] = gain
    logits[0, 3, 7], logits[0, 4, 8] = 9.0, 9.0  # the first sample's copies agree
    base, copies = rows.split(logits)
    assert copies[:2].isfinite().all()
    assert copies[2:].isnan().all()
    top, copy = ops.top_eta(base[masked], 0.2), ops.top_eta(copies, 0.2, suppress=[MASK])
    assert copy.top1.tolist() == [7, 8, -1, -1]
    assert copy.counts[2:].tolist() == [0, 0]
    c = top.prob1.view(2, 2)
    assert (c[:, 0] > 0.9).all()
    assert ((c[:, 1] >= 0.7) & (c[:, 1] <= 0.9)).all()
    verdict = ops.check_consistency(
        rows.targets, top.top1.view(2, 2), c, copy.top1.view(2, 2), copy.prob1.view(2, 2), phi=0.9, tau=0.7
    )
    assert verdict.reason.tolist() == [[1, 2], [1, 0]]
    assert verdict.left.tolist() == [0, 1]


# --- refusals ------------------------------------------------------------------------------------------------------


def superposed(**changes: Any) -> Rows:
    ids, masked, valid = canvas()
    given = {"ids": ids, "masked": masked, "candidates": listed(CANDIDATES), "spec": SPEC, "attention_mask": valid}
    return Rows.superpose(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"masked": canvas()[1][:, :-1]}, r"masked must be bool of shape \(2, 7\).*\(2, 6\)"),
        ({"masked": canvas()[1][0]}, r"masked must be bool of shape \(2, 7\).*\(7,\)"),
        ({"masked": canvas()[1].long()}, r"masked must be bool.*int64"),
        ({"candidates": listed(CANDIDATES[:-1])}, r"candidates must be 5 rows.*4 rows"),
        ({"candidates": listed([*CANDIDATES, [20]])}, r"candidates must be 5 rows.*6 rows"),
        ({"attention_mask": canvas()[2][:, :-1]}, r"\(2, 7\).*\(2, 6\)"),
        ({"ids": canvas()[0].int()}, r"ids.*int64.*int32"),
    ],
    ids=["masked-short", "masked-1d", "masked-ints", "too-few", "too-many", "attention-mask-short", "int32-ids"],
)
def test_superpose_refuses_what_does_not_fit_together(changes: dict[str, Any], message: str) -> None:
    """InputError with what was expected and what came."""
    with pytest.raises(InputError, match=message):
        superposed(**changes)


def test_plain_refuses_an_attention_mask_of_another_shape() -> None:
    """A mask cut to the block (nishide-dev/unturtle#44) must not pass as rows."""
    with pytest.raises(InputError, match=r"attention_mask.*\(2, 7\).*\(2, 6\)"):
        Rows.plain(canvas()[0], SPEC, canvas()[2][:, :-1])


def test_split_refuses_rows_without_copies() -> None:
    with pytest.raises(InputError, match=r"no copies.*Rows\.superpose"):
        Rows.plain(canvas()[0]).split(torch.zeros(2, 7, 48))


@pytest.mark.parametrize("shape", [(2, 7, 48), (2, 1, 48), (1, 13, 48), (26, 48)], ids=str)
def test_split_refuses_logits_of_other_rows(shape: tuple[int, ...]) -> None:
    """Logits of a plain forward, or of `logits_to_keep` rows, would be read at the wrong places."""
    rows = superposed()
    assert rows.token.shape == (2, 13)
    with pytest.raises(InputError, match=r"logits.*13"):
        rows.split(torch.zeros(shape))
