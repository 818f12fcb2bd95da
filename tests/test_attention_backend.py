# SPDX-License-Identifier: Apache-2.0
"""The "leap" attention backend in transformers: exact for rows, transformers' own without them, and no trace left."""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import random_llama, randomize
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import leap_kernels
from leap_kernels import ModelSpec, Rows, ops
from leap_kernels.attention import attend, register
from leap_kernels.errors import BackendError, InputError, LeapError, ModelError

LIMIT = 1e-5  # fp32 (models.md section 3)
MASK = 43
SPEC = ModelSpec(mask_token_id=MASK, eos_token_ids=(41, 42), pad_token_id=40, vocab_size=48)
SHIFTED = ModelSpec(mask_token_id=MASK, vocab_size=48, shift=1)

register()


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def twin(model: Any, attention: str) -> Any:
    """The same weights under another attention setting of transformers."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(attention)
    return other


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


def listed(candidates: list[list[int]], k: int = 3) -> ops.TopEta:
    """A TopEta that holds these candidates, as `ops.top_eta` lays them out."""
    ids = torch.tensor([tokens + [-1] * (k - len(tokens)) for tokens in candidates], dtype=torch.int64).reshape(-1, k)
    counts = torch.tensor([len(tokens) for tokens in candidates], dtype=torch.int32)
    zeros = torch.zeros(len(candidates))
    return ops.TopEta(ids, torch.where(ids >= 0, 0.25, 0.0), counts, ids[:, 0], zeros, zeros, zeros, zeros)


# --- registration --------------------------------------------------------------------------------------------------


def test_registering_twice_changes_nothing() -> None:
    """One entry in each of transformers' two tables, and the other entries stay what they were."""
    before = {name: (AttentionInterface()[name], AttentionMaskInterface()[name]) for name in ("sdpa", "leap")}
    count = len(AttentionInterface()), len(AttentionMaskInterface())
    register()
    leap_kernels.attention.register()
    assert before["leap"][0] is attend
    assert {n: (AttentionInterface()[n], AttentionMaskInterface()[n]) for n in ("sdpa", "leap")} == before
    assert (len(AttentionInterface()), len(AttentionMaskInterface())) == count


# --- without rows: transformers' own attention ---------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [None, True, False], ids=["unset", "causal", "bidirectional"])
def test_without_rows_it_is_sdpa(kv_heads: int, causal: bool | None) -> None:
    """A model left on "leap" still computes what it computed on "sdpa", causal or not, with and without a cache."""
    model = random_llama(num_key_value_heads=kv_heads)
    leap, ids = twin(model, "leap"), random_ids(2, 11)
    how = {} if causal is None else {"is_causal": causal}
    with torch.inference_mode():
        truth = model(ids, **how).logits
        assert difference(leap(ids, **how).logits, truth) <= LIMIT
        assert difference(leap(ids, use_cache=False, **how).logits, truth) <= LIMIT
        first = leap(ids).logits[:, 0]
        assert difference(first, leap(ids[:, :1]).logits[:, 0]) <= LIMIT, "causal by default, as transformers has it"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padding_mask_is_honoured(causal: bool, side: str) -> None:
    """2-D masks, which transformers drops for a backend without a mask function: each sample as if it were alone."""
    model = random_llama(attention="leap")
    ids, lengths = random_ids(3, 9), [9, 5, 2]
    valid = torch.stack([torch.arange(9) < n if side == "right" else torch.arange(9) >= 9 - n for n in lengths])
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        logits = model(ids, attention_mask=valid.long(), position_ids=positions, is_causal=causal).logits
        for row, keep in enumerate(valid):
            alone = model(ids[row, keep][None], is_causal=causal).logits[0]
            assert difference(logits[row, keep], alone) <= LIMIT


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_mask_of_four_dimensions_is_honoured(kind: str) -> None:
    """Truth: transformers' eager attention with the additive form of the same mask."""
    model = random_llama(attention="eager")
    ids, repeated = random_ids(2, 9), torch.randint(0, 5, (2, 9), generator=torch.Generator().manual_seed(1))
    visible = torch.rand((2, 1, 9, 9), generator=torch.Generator().manual_seed(2)) < 0.5
    visible |= torch.eye(9, dtype=torch.bool)
    additive = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    with torch.inference_mode():
        truth = model(ids, position_ids=repeated, attention_mask=additive).logits
        given = visible if kind == "bool" else additive
        assert difference(twin(model, "leap")(ids, position_ids=repeated, attention_mask=given).logits, truth) <= LIMIT


# --- superposed forwards against transformers with a dense mask ----------------------------------------------------


class Row(NamedTuple):
    token: int
    pos: int
    kind: int
    hide: int


def may_see(rows: list[Row], a: int, b: int, switches: ops.Switches, block: int) -> bool:
    """method.md section 4 for query row number a and key row number b of one sample."""
    if block and rows[b].pos // block > rows[a].pos // block:
        return False
    if a == b:
        return True
    query, key = rows[a], rows[b]
    if key.kind == 0:
        return not (query.kind == 1 and key.pos == query.pos) or switches.copy_sees_original
    if query.kind == 0:
        return False
    if key.kind == 2:
        return key.pos != query.hide and (query.kind == 1 or switches.candidates_see_candidates)
    return key.pos != query.pos and (switches.copies_see_copies if query.kind == 1 else switches.candidates_see_copies)


def oracle(
    model: Any, tokens: list[int], candidates: dict[int, list[int]], spec: ModelSpec, switches: ops.Switches
) -> tuple[Tensor, dict[int, Tensor]]:
    """Base logits (L, V) and each target's copy logits of ONE unpadded sample, by transformers' own attention.

    The rows stand in another order than the package's, each candidate before its copy, so that nothing but the mask
    can make the results agree.
    """
    rows = [Row(token, pos, 0, -1) for pos, token in enumerate(tokens)]
    copy_at: dict[int, int] = {}
    if len(candidates) > 1 and any(candidates.values()):
        for target in sorted(candidates, reverse=True):
            rows += [Row(token, target, 2, target) for token in candidates[target]]
            if target >= spec.shift:
                copy_at[target] = len(rows)
                rows.append(Row(tokens[target - spec.shift], target - spec.shift, 1, target))
    n, block = len(rows), spec.block_causal_length
    mask = torch.tensor([[may_see(rows, a, b, switches, block) for b in range(n)] for a in range(n)])[None, None]
    if model.config._attn_implementation == "eager":
        mask = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, float("-inf"))
    ids, positions = (torch.tensor([[getattr(row, name) for row in rows]]) for name in ("token", "pos"))
    with torch.inference_mode():
        logits = model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits[0]
    return logits[: len(tokens)], {target: logits[row] for target, row in copy_at.items()}


class State(NamedTuple):
    """A half decoded batch; `tokens` and `candidates` are the same without padding, for the oracle."""

    ids: Tensor
    masked: Tensor
    valid: Tensor
    tokens: list[list[int]]
    candidates: list[dict[int, list[int]]]

    def flat(self) -> ops.TopEta:
        return listed([found for sample in self.candidates for _, found in sorted(sample.items())])


def state(side: str = "left", seed: int = 0, lengths: tuple[int, ...] = (13, 9, 11), vocab: int = 40) -> State:
    """Random samples of the given lengths with every other position or so masked, padded on one side."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, valid = torch.zeros((len(lengths), width), dtype=torch.int64), torch.zeros((len(lengths), width)).bool()
    tokens, candidates = [], []
    for row, n in enumerate(lengths):
        sample = torch.randint(0, vocab, (n,), generator=generator)
        masked = torch.rand(n, generator=generator) < 0.5
        masked[0], masked[-1] = row == 1, True  # a target at position 0 in one sample
        sample[masked] = MASK
        place = slice(width - n, width) if side == "left" else slice(0, n)
        ids[row, place], valid[row, place] = sample, True
        tokens.append(sample.tolist())
        counts = torch.randint(0, 4, (n,), generator=generator).tolist()
        options = torch.randint(0, vocab, (n, 3), generator=generator).tolist()
        candidates.append({i: options[i][: counts[i]] for i in masked.nonzero()[:, 0].tolist()})
    return State(ids, ids == MASK, valid, tokens, candidates)


def forward(model: Any, rows: Rows, **more: Any) -> Tensor:
    """The documented call."""
    with torch.inference_mode():
        return model(rows.token, position_ids=rows.pos, leap=rows, **more).logits


def check_against_oracle(
    model: Any, dense: Any, given: State, spec: ModelSpec, switches: ops.Switches | None = None, **more: Any
) -> None:
    """Every valid base row and every copy of `model` with rows equals `dense`, sample by sample."""
    rows = Rows.superpose(
        given.ids, given.masked, given.flat(), spec, attention_mask=given.valid.long(), switches=switches
    )
    base, copies = rows.split(forward(model, rows, **more))
    flat = iter(copies)
    for row, (tokens, candidates) in enumerate(zip(given.tokens, given.candidates, strict=True)):
        base_truth, copy_truth = oracle(dense, tokens, candidates, spec, switches or ops.Switches())
        assert difference(base[row, given.valid[row]], base_truth) <= LIMIT
        for target in sorted(candidates):
            found = next(flat)
            if target in copy_truth:
                assert difference(found, copy_truth[target]) <= LIMIT, (row, target)
            else:
                assert found.isnan().all()
    assert next(flat, None) is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", [SPEC, SHIFTED], ids=["unshifted", "shifted"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_superposed_logits_equal_those_of_a_dense_mask(
    attention: str, spec: ModelSpec, side: str, kv_heads: int
) -> None:
    """Ragged, padded batch, grouped heads: base rows and copies as transformers' own attention computes them alone."""
    model = random_llama(num_key_value_heads=kv_heads, attention="leap", is_causal=False, seed=kv_heads)
    check_against_oracle(model, twin(model, attention), state(side, seed=kv_heads), spec)


@pytest.mark.parametrize("spec", [SPEC, SHIFTED], ids=["unshifted", "shifted"])
@pytest.mark.parametrize("bits", list(itertools.product([True, False], repeat=4)), ids=str)
def test_every_switch_setting_equals_its_dense_mask(spec: ModelSpec, bits: tuple[bool, ...]) -> None:
    """The four options of method.md section 4, through all layers."""
    model = random_llama(attention="leap", is_causal=False)
    check_against_oracle(model, twin(model, "sdpa"), state(), spec, ops.Switches(*bits))


@pytest.mark.parametrize("shift", [0, 1])
def test_block_causal_rows_equal_their_dense_mask(shift: int) -> None:
    """Blocks of 4: nobody, base or appended, sees a later block."""
    spec = ModelSpec(mask_token_id=MASK, shift=shift, block_causal_length=4)
    model = random_llama(attention="leap", is_causal=False)
    check_against_oracle(model, twin(model, "sdpa"), state("right"), spec)


@pytest.mark.parametrize("cache", [{}, {"use_cache": False}], ids=["default-cache", "no-cache"])
@pytest.mark.parametrize("spec", [SPEC, SHIFTED], ids=["unshifted", "shifted"])
def test_a_causal_model_with_repeated_positions_is_no_trap(spec: ModelSpec, cache: dict[str, Any]) -> None:
    """A stock Llama, `is_causal` unset, reads repeated positions without a mask as packed sequences; rows decide."""
    model = random_llama(attention="leap")
    assert "is_causal" not in model.config.to_dict()
    check_against_oracle(model, twin(model, "sdpa"), state(), spec, **cache)


def test_the_bundled_model_superposed(tiny_prompts: dict[str, list[list[int]]]) -> None:
    """Two real prompts with 12 masks, candidates from a plain forward: the same oracle, and alone the same logits. In
    float64, since a trained model's logits are large."""
    tiny = leap_kernels.load("tiny", dtype="float64")
    prompts = [prompts[0] for prompts in tiny_prompts.values()][:2]
    tokens = [prompt + [1] * 12 for prompt in prompts]
    width = max(map(len, tokens))
    ids = torch.tensor([[0] * (width - len(t)) + t for t in tokens])
    valid = torch.arange(width) >= torch.tensor([[width - len(t)] for t in tokens])
    masked = ids == 1
    spec = tiny.leap_spec
    logits = forward(tiny, Rows.plain(ids, spec, valid))
    dense = twin(tiny, "sdpa")
    with torch.inference_mode():
        for row, sample in enumerate(tokens):
            alone = dense(torch.tensor([sample])).logits[0]
            assert difference(logits[row, valid[row]], alone) <= LIMIT
    found = ops.top_eta(logits[masked], 0.2, suppress=[1])
    assert int(found.counts.sum()) > 12
    flat = iter(zip(found.ids.tolist(), found.counts.tolist(), strict=True))
    candidates = []
    for sample in tokens:
        mine = [i for i, token in enumerate(sample) if token == 1]
        candidates.append({i: options[:count] for i, (options, count) in zip(mine, flat, strict=False)})
    check_against_oracle(tiny, dense, State(ids, masked, valid, tokens, candidates), spec)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_base_rows_have_the_logits_of_a_plain_forward(kv_heads: int) -> None:
    """architecture.md section 6.3: appended rows change nothing for the sequence, with and without padding."""
    model = random_llama(num_key_value_heads=kv_heads, attention="leap")
    plain = twin(model, "sdpa")
    given = state()
    rows = Rows.superpose(given.ids, given.masked, given.flat(), SPEC, attention_mask=given.valid)
    assert rows.token.shape[1] > given.ids.shape[1]
    base = rows.split(forward(model, rows))[0]
    again = forward(model, Rows.plain(given.ids, SPEC, given.valid))
    positions = (given.valid.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        truth = plain(given.ids, attention_mask=given.valid, position_ids=positions, is_causal=False).logits
    assert difference(base[given.valid], truth[given.valid]) <= LIMIT
    assert difference(again[given.valid], truth[given.valid]) <= LIMIT


@pytest.mark.parametrize("spec", [SPEC, SHIFTED], ids=["unshifted", "shifted"])
@pytest.mark.parametrize("block", [0, 4])
def test_a_copy_without_help_predicts_what_its_base_row_predicts(spec: ModelSpec, block: int) -> None:
    """Both copy switches off and no candidate elsewhere: the copy stands in for its base row, exactly.

    And it is not so by accident: with its base row visible as well, or with a candidate, it predicts something else.
    """
    spec = ModelSpec(mask_token_id=MASK, shift=spec.shift, block_causal_length=block)
    model = random_llama(attention="leap", num_hidden_layers=3)
    ids = random_ids(1, 10)
    ids[0, [3, 5, 6]] = MASK
    off = ops.Switches(copy_sees_original=False, copies_see_copies=False)
    for at, target in enumerate([3, 5, 6]):
        only_here = [[7, 8] if i == at else [] for i in range(3)]
        rows = Rows.superpose(ids, ids == MASK, listed(only_here), spec, switches=off)
        base, copies = rows.split(forward(model, rows))
        own = base[0, target - spec.shift]
        assert difference(copies[at], own) <= LIMIT
        helped = [i for i, other in enumerate([3, 5, 6]) if i != at and (not block or other - spec.shift >= 4)]
        for i in helped:
            assert difference(copies[i], base[0, [3, 5, 6][i] - spec.shift]) > 100 * LIMIT
        rows = Rows.superpose(ids, ids == MASK, listed(only_here), spec, switches=ops.Switches(copies_see_copies=False))
        assert difference(rows.split(forward(model, rows))[1][at], own) > 100 * LIMIT


@pytest.mark.parametrize("spec", [SPEC, SHIFTED], ids=["unshifted", "shifted"])
def test_a_candidate_is_hidden_from_its_own_copy_in_layer_one(spec: ModelSpec) -> None:
    """One layer: another candidate at i leaves the bits of i's copy and of every base row, and changes other copies."""
    model = random_llama(attention="leap", num_hidden_layers=1)
    ids = random_ids(1, 10)
    targets = [2, 4, 5, 9]
    ids[0, targets] = MASK
    candidates = [[10], [11, 12], [13], [14]]
    rows = Rows.superpose(ids, ids == MASK, listed(candidates), spec)
    base, copies = rows.split(forward(model, rows))
    for at in range(4):
        changed = [[(t + 7) % 40 for t in found] if i == at else found for i, found in enumerate(candidates)]
        rows = Rows.superpose(ids, ids == MASK, listed(changed), spec)
        base_after, copies_after = rows.split(forward(model, rows))
        assert torch.equal(base_after, base)
        for other in range(4):
            moved = difference(copies_after[other], copies[other])
            assert moved == 0 if other == at else moved > 100 * LIMIT, (at, other)


# --- padding -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["dense", "op"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways through `attend`: SDPA with the dense mask, and the op that a GPU takes (here its reference)."""
    if request.param == "op":
        monkeypatch.setattr(Rows, "dense", property(lambda self: False))
    return request.param


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_op_computes_what_the_dense_mask_computes(path: str, kv_heads: int) -> None:
    """Every row argument arrives where it belongs: switches, blocks, padding, shift, scale, grouped heads."""
    model = random_llama(num_key_value_heads=kv_heads, attention="leap")
    switches = ops.Switches(copy_sees_original=False, candidates_see_candidates=False)
    for block in (0, 4):
        spec = ModelSpec(mask_token_id=MASK, shift=1, block_causal_length=block)
        check_against_oracle(model, twin(model, "sdpa"), state(), spec, switches)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("superposed", [False, True], ids=["plain", "superposed"])
def test_nothing_under_the_padding_leaks(path: str, side: str, superposed: bool) -> None:
    """NaN in every padding row's embedding: all other rows are finite and as if zeros stood there."""
    model = random_llama(attention="leap")
    given = state(side)
    rows = Rows.plain(given.ids, SPEC, given.valid)
    if superposed:
        rows = Rows.superpose(given.ids, given.masked, given.flat(), SPEC, attention_mask=given.valid)
    padding = rows.kind < 0
    assert padding.any(1).sum() >= 2
    embeddings = model.get_input_embeddings()(rows.token).detach()
    results = []
    for filling in (0.0, float("nan"), float("inf")):
        filled = embeddings.masked_fill(padding[..., None], filling)
        with torch.inference_mode():
            results.append(model(inputs_embeds=filled, position_ids=rows.pos, leap=rows).logits[~padding])
    assert results[0].isfinite().all()
    for spoiled in results[1:]:
        assert difference(spoiled, results[0]) <= LIMIT
    assert difference(results[0], forward(model, rows)[~padding]) <= LIMIT


def test_a_padding_row_gets_zero(path: str) -> None:
    """architecture.md section 2: a row that sees nothing has output 0, whatever it holds."""
    rows = Rows.plain(torch.tensor([[5, 6, 7]]), SPEC, torch.tensor([[0, 1, 1]]))
    q = torch.randn((1, 2, 3, 16), generator=torch.Generator().manual_seed(0))
    for filling in (1.0, float("nan")):
        q[:, :, 0] = filling
        out, weights = attend(torch.nn.Module(), q, q, q, None, scaling=0.25, leap=rows)
        assert weights is None
        assert out.shape == (1, 3, 2, 16)
        assert (out[:, 0] == 0).all()
        assert out.isfinite().all()


# --- refusals ------------------------------------------------------------------------------------------------------


def plain_rows(ids: Tensor) -> Rows:
    return Rows.plain(ids, SPEC)


def test_a_sliding_window_is_honoured_or_refused() -> None:
    """Mistral's window: refused where the rows do not carry it, exact where they do, transformers' own without rows."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, head_dim=8,
    )  # fmt: skip
    model = randomize(MistralForCausalLM._from_config(config, attn_implementation="leap")).eval()
    ids = random_ids(1, 12)
    with pytest.raises(InputError, match="sliding_window=4"):
        forward(model, plain_rows(ids))
    rows = plain_rows(ids)
    rows.window = 5
    with pytest.raises(InputError, match="sliding_window=4"):
        forward(model, rows)
    rows = plain_rows(ids)
    rows.window = 4
    distance = (torch.arange(12)[:, None] - torch.arange(12)).abs()
    with torch.inference_mode():
        truth = twin(model, "sdpa")(ids, attention_mask=(distance < 4)[None, None]).logits
        assert difference(forward(model, rows), truth) <= LIMIT
        assert difference(model(ids).logits, twin(model, "sdpa")(ids).logits) <= LIMIT


def test_soft_capping_is_refused() -> None:
    """Gemma 2 caps its scores: with rows by us, without rows by transformers' SDPA, never ignored."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, layer_types=["full_attention"], attn_logit_softcapping=50.0,
    )  # fmt: skip
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="leap").eval()
    with pytest.raises(InputError, match=r"softcap=50\.0"):
        forward(model, plain_rows(random_ids(1, 5)))
    with pytest.raises(ValueError, match="softcap"):
        model(random_ids(1, 5))


@pytest.mark.parametrize("with_rows", [True, False], ids=["rows", "no-rows"])
@pytest.mark.parametrize("name", ["s_aux", "softcap"])
def test_what_would_change_attention_is_never_ignored(name: str, with_rows: bool) -> None:
    """Attention sinks (gpt-oss) and soft capping reach us as keywords that SDPA cannot honour."""
    q = torch.randn((1, 2, 3, 16), generator=torch.Generator().manual_seed(0))
    rows = plain_rows(torch.tensor([[5, 6, 7]])) if with_rows else None
    with pytest.raises(ValueError, match=name):
        attend(torch.nn.Module(), q, q, q, None, scaling=0.25, leap=rows, **{name: torch.tensor([1.0, 2.0])})


def test_dropout_is_refused() -> None:
    """A model in training mode drops attention weights; rows are for inference."""
    model = random_llama(attention="leap", attention_dropout=0.1)
    ids = random_ids(1, 5)
    assert forward(model, plain_rows(ids)).isfinite().all()
    model.train()
    with pytest.raises(InputError, match=r"dropout=0\.1.*eval"):
        forward(model, plain_rows(ids))


def test_a_backend_that_cannot_run_is_refused() -> None:
    """`backend="triton"` on a CPU falls back to nothing."""
    ids = random_ids(1, 5)
    ids[0, 1:3] = MASK
    rows = plain_rows(ids)
    rows.backend = "triton"
    with pytest.raises(BackendError, match="triton"):
        forward(random_llama(attention="leap"), rows)


# --- a decode loop of one's own ------------------------------------------------------------------------------------


class Log:
    """What an observer sees, step by step: {index: (token, reason)}."""

    def __init__(self) -> None:
        self.steps: list[dict[int, tuple[int, int]]] = []

    def __call__(self, event: Any) -> None:
        taken = zip(event.index, event.token, event.reason, strict=True)
        self.steps.append({index: (token, reason) for index, token, reason in taken})


@pytest.mark.parametrize("task", [0, 2])
def test_rows_in_a_loop_of_ones_own_decide_what_decode_decides(
    tiny_prompts: dict[str, list[list[int]]], task: int
) -> None:
    """The documented five lines and `ops.check_consistency`, at every state of a block, in float64."""
    model = leap_kernels.load("tiny", dtype="float64")
    spec = model.leap_spec
    prompt = list(tiny_prompts.values())[task][3]
    log = Log()
    out = leap_kernels.decode(
        model, torch.tensor([prompt]), max_new_tokens=32, early_stop=False, strategy="leap", tau=0.25, observers=[log]
    )

    ids = torch.tensor([prompt + [spec.mask_token_id] * 32])
    candidates = None
    for expected in log.steps:
        masked = ids == spec.mask_token_id
        with torch.inference_mode():
            if candidates is None:
                rows = Rows.plain(ids, spec)
                base = model(rows.token, position_ids=rows.pos, leap=rows).logits
                copies = torch.full_like(base[masked], float("nan"))
            else:
                rows = Rows.superpose(ids, masked, candidates, spec)
                logits = model(rows.token, position_ids=rows.pos, leap=rows).logits
                base, copies = rows.split(logits)
        top = ops.top_eta(base[masked], 0.2, suppress=[spec.mask_token_id])
        copy_ = ops.top_eta(copies, 0.2, suppress=[spec.mask_token_id])
        targets = masked.nonzero()[:, 1][None].int()
        verdict = ops.check_consistency(
            targets, top.top1[None], top.prob1[None], copy_.top1[None], copy_.prob1[None], phi=0.9, tau=0.25
        )
        taken = verdict.reason[0] > 0
        mine = {
            column - len(prompt): (token, reason)
            for column, token, reason in zip(
                targets[0, taken].tolist(), top.top1[taken].tolist(), verdict.reason[0, taken].tolist(), strict=True
            )
        }
        assert mine == expected
        ids[0, targets[0, taken].long()] = top.top1[taken]
        candidates = ops.TopEta(*(field[~taken] for field in top))
    assert torch.equal(ids, out.sequences)
    assert (out.history.reason == 2).any(), "no token converged: the example shows nothing"


# --- what decode leaves behind -------------------------------------------------------------------------------------

GREEDY = {"max_new_tokens": 12, "block_length": 6, "threshold": 0.3, "tau": 0.05, "eta": 0.05}
PROMPT = torch.tensor([[5, 6, 7, 8, 9]])


def settings(model: Any) -> tuple[Any, ...]:
    """All that decode could disturb: the attention setting, is_causal present or not, the whole config, forwards."""
    config = model.config
    return (
        config._attn_implementation,
        config.__dict__.get("is_causal", "absent"),
        sorted(config.__dict__),
        config.to_json_string(use_diff=False),
        [(name, module.training) for name, module in model.named_modules()],
        [name for name, module in model.named_modules() if "forward" in vars(module)],
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager", "leap"])
@pytest.mark.parametrize("causal", [..., True, False], ids=["unset", "causal", "bidirectional"])
def test_decode_leaves_the_model_as_it_found_it(attention: str, causal: Any) -> None:
    """Attention setting, is_causal and the bits of the model's own forward; "leap" only while it decodes."""
    model = random_llama(attention=attention, is_causal=causal)
    ids = random_ids(2, 9)
    seen = set()
    model.model.layers[1].register_forward_pre_hook(lambda *_: seen.add(model.config._attn_implementation))
    with torch.inference_mode():
        before = settings(model), model(ids).logits
        seen.clear()
        first = leap_kernels.decode(model, PROMPT, **GREEDY)
        assert seen == {"leap"}
        assert settings(model) == before[0]
        assert torch.equal(model(ids).logits, before[1])
        assert torch.equal(leap_kernels.decode(model, PROMPT, **GREEDY).sequences, first.sequences)
    bidirectional = leap_kernels.decode(random_llama(is_causal=False), PROMPT, **GREEDY)
    assert torch.equal(first.sequences, bidirectional.sequences), "the found setting reached the decoding"


@pytest.mark.parametrize("causal", [..., True, False], ids=["unset", "causal", "bidirectional"])
def test_decode_lets_transformers_build_no_mask(causal: Any) -> None:
    """Rows say who sees whom; the L x L mask that a causal model would get is never made."""
    model = random_llama(is_causal=causal)
    masks = []

    def look(_: Any, __: Any, keywords: dict[str, Any]) -> None:
        masks.append(keywords["attention_mask"])

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
    out = leap_kernels.decode(model, PROMPT, **GREEDY)
    assert [mask.numel() for mask in masks] == [1] * (2 * int(out.nfe[0]))


def in_another_thread(call: Callable[[], Any], seconds: float = 30) -> Any:
    """The result of a call, or an AssertionError when it does not come back: a lock was left locked."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "deadlock"
    assert results, "the call raised"
    return results[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("causal", [..., True, False], ids=["unset", "causal", "bidirectional"])
def test_an_error_in_a_forward_leaves_the_model_as_it_was(attention: str, causal: Any) -> None:
    """A hook that raises in layer two of the third forward: settings restored, lock released, model usable."""
    model = random_llama(attention=attention, is_causal=causal)
    ids, calls = random_ids(2, 9), []
    with torch.inference_mode():
        before = settings(model), model(ids).logits
    right = leap_kernels.decode(model, PROMPT, **GREEDY).sequences

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("from a hook")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError, match="from a hook"):
        leap_kernels.decode(model, PROMPT, **GREEDY)
    handle.remove()
    assert settings(model) == before[0]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, before[1])
    assert torch.equal(in_another_thread(lambda: leap_kernels.decode(model, PROMPT, **GREEDY).sequences), right)


def test_a_refusal_before_the_first_forward_leaves_the_model_as_it_was() -> None:
    """A model in training mode is refused by name and left alone, lock included."""
    model = random_llama(attention="eager").train()
    before = settings(model)
    with pytest.raises(ModelError, match=r"training mode.*eval"):
        leap_kernels.decode(model, PROMPT, **GREEDY)
    assert settings(model) == before
    model.eval()
    in_another_thread(lambda: leap_kernels.decode(model, PROMPT, **GREEDY))


def test_a_decode_inside_a_decode_of_the_same_model() -> None:
    """An observer may decode with the model that is decoding: no deadlock, both right, the settings restored."""
    model = random_llama()
    before = settings(model)
    right = leap_kernels.decode(model, PROMPT, **GREEDY).sequences
    inner = []

    def look(_: Any) -> None:
        if len(inner) < 2:
            inner.append(leap_kernels.decode(model, PROMPT, **GREEDY).sequences)

    outer = in_another_thread(lambda: leap_kernels.decode(model, PROMPT, observers=[look], **GREEDY).sequences)
    assert torch.equal(outer, right)
    assert len(inner) == 2
    assert all(torch.equal(sequences, right) for sequences in inner)
    assert settings(model) == before


# --- threads -------------------------------------------------------------------------------------------------------


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs at the same time, started by one barrier; raises what any of them raised."""
    barrier, results, errors = threading.Barrier(len(jobs)), [None] * len(jobs), []

    def run(number: int) -> None:
        try:
            barrier.wait(30)
            results[number] = jobs[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]
    return results


def decodes(model: Any, prompts: list[Tensor]) -> Callable[[], list[Tensor]]:
    return lambda: [leap_kernels.decode(model, prompt, **GREEDY).sequences for prompt in prompts]


def test_two_models_in_two_threads_do_not_disturb_each_other() -> None:
    """Models of other shapes and settings, decoding at once: the tokens of a quiet machine, settings restored."""
    models = [
        random_llama(attention="sdpa", seed=1, num_hidden_layers=3),
        random_llama(attention="eager", seed=2, num_key_value_heads=1, is_causal=True),
    ]
    prompts = [random_ids(1, 5, seed) for seed in range(6)]
    before = [settings(model) for model in models]
    right = [decodes(model, prompts)() for model in models]
    found = together(*(decodes(model, prompts) for model in models))
    for mine, truth in zip(found, right, strict=True):
        assert len(mine) == 6
        assert all(torch.equal(a, b) for a, b in zip(mine, truth, strict=True))
    assert [settings(model) for model in models] == before


def test_one_model_in_two_threads_gives_the_right_tokens() -> None:
    """Setting and restoring the shared config must not reach into the other thread's forwards."""
    model = random_llama(attention="sdpa", is_causal=True)
    before = settings(model)
    prompts = [[random_ids(1, 5, 10 * thread + i) for i in range(6)] for thread in range(2)]
    right = [decodes(model, mine)() for mine in prompts]
    found = together(*(decodes(model, mine) for mine in prompts))
    for mine, truth in zip(found, right, strict=True):
        assert len(mine) == 6
        assert all(torch.equal(a, b) for a, b in zip(mine, truth, strict=True))
    assert settings(model) == before


def test_a_second_decode_of_the_same_model_waits_for_the_first() -> None:
    """One lock a config: a thread that finished would otherwise restore "sdpa" under the forwards of the other."""
    model = random_llama(attention="sdpa", is_causal=True)
    before = settings(model)
    right = leap_kernels.decode(model, PROMPT, **GREEDY).sequences
    inside, done, seen, overlapped = threading.Event(), threading.Event(), [], []

    def second() -> Tensor:
        assert inside.wait(30)
        sequences = leap_kernels.decode(model, PROMPT, **GREEDY).sequences
        done.set()
        return sequences

    def look(*_: Any) -> None:
        seen.append(model.config._attn_implementation)
        if len(seen) == 2:  # in the middle of the first thread's second forward
            inside.set()
            overlapped.append(done.wait(0.5))

    model.model.layers[0].register_forward_pre_hook(look)
    found = together(lambda: leap_kernels.decode(model, PROMPT, **GREEDY).sequences, second)
    assert overlapped == [False]
    assert set(seen) == {"leap"}
    assert all(torch.equal(sequences, right) for sequences in found)
    assert settings(model) == before


# --- RoPE after model.to(bfloat16) ---------------------------------------------------------------------------------


def test_rounded_rotary_frequencies_are_repaired_with_one_warning() -> None:
    """`model.to(bfloat16)` rounds inv_freq; decode recomputes it in float32 from the config and says so once."""
    model = random_llama()
    exact = model.model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    rounded = model.model.rotary_emb.inv_freq
    assert rounded.dtype == torch.bfloat16
    assert not torch.equal(rounded.float(), exact)
    with pytest.warns(UserWarning, match="inv_freq") as caught:
        first = leap_kernels.decode(model, PROMPT, **GREEDY)
    assert len(caught) == 1
    assert "dtype=" in str(caught[0].message)
    repaired = model.model.rotary_emb.inv_freq
    assert repaired.dtype == torch.float32
    assert torch.equal(repaired, exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = leap_kernels.decode(model, PROMPT, **GREEDY)
    assert torch.equal(again.sequences, first.sequences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_rotary_frequencies_are_left_alone(dtype: torch.dtype) -> None:
    """Nothing to repair in float32, and float64 is finer still."""
    model = random_llama().to(dtype)
    before = model.model.rotary_emb.inv_freq.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leap_kernels.decode(model, PROMPT, **GREEDY)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert model.model.rotary_emb.inv_freq.dtype == dtype


def test_a_warning_turned_into_an_error_leaves_the_model_as_it_was() -> None:
    """`python -W error` makes the repair raise before the first forward."""
    model = random_llama(attention="eager").to(torch.bfloat16)
    before = settings(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="inv_freq"):
            leap_kernels.decode(model, PROMPT, **GREEDY)
    assert settings(model) == before


def test_no_error_of_the_backend_escapes_the_hierarchy() -> None:
    for error in (BackendError, InputError, ModelError):
        assert issubclass(error, LeapError)
