# SPDX-License-Identifier: Apache-2.0
"""What is always true of `decode`, whatever the strategy (the list in docs/design.md)."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from noise import uniform as noise_of
from random_models import SPEC, plain_forward, random_llama
from torch import Tensor

import leap_kernels.strategies
from leap_kernels import ModelSpec, decode
from leap_kernels.errors import BadLogitsError
from leap_kernels.rows import Rows
from leap_kernels.strategies import Leap, Threshold

# Every rule with its defaults, and options that send it another way.
STRATEGIES: dict[str, dict] = {name: {"strategy": name} for name in leap_kernels.strategies.STRATEGIES} | {
    "leap on entropy_threshold": {"strategy": "leap", "base": "entropy_threshold"},
    "klass, one at random": {"strategy": "klass", "select": "random", "kl_threshold": 0.5, "conf_threshold": 0.2},
    "prophet, constrained": {"strategy": "prophet", "constraints": {1: 7, 2: 10}, "limits": (30.0, 20.0, 9.0)},
    "full, random": {"strategy": "full", "remasking": "random", "defer_tokens": (4,)},
}
# Some of their forwards commit nothing, or nothing that stays.
MAY_COMMIT_NOTHING = {"dream", "wino"}
RAGGED = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17], [], [18, 19, 20], [3, 4, 5, 6], [21, 22]]


def tensors(prompts):
    return [torch.tensor(p, dtype=torch.int64) for p in prompts]


def padded(prompts, side: str, pad: int = 2):
    width = max(map(len, prompts))
    ids, mask = [], []
    for p in prompts:
        gap = width - len(p)
        ids.append([pad] * gap + p if side == "left" else p + [pad] * gap)
        mask.append([0] * gap + [1] * len(p) if side == "left" else [1] * len(p) + [0] * gap)
    return torch.tensor(ids), torch.tensor(mask)


def same(a, i, b, j=0):
    """Sample i of one output is sample j of another: tokens, steps, reasons, counters."""
    assert torch.equal(a.generated[i], b.generated[j])
    assert torch.equal(a.history.step[i], b.history.step[j])
    assert torch.equal(a.history.reason[i], b.history.reason[j])
    assert (a.nfe[i], a.token_forwards[i], a.new_tokens[i]) == (b.nfe[j], b.token_forwards[j], b.new_tokens[j])


@pytest.fixture(scope="module")
def model():
    return random_llama(7, sharpness=10.0)


# --- 1: no mask is left, prompts are untouched ----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_no_mask_left_and_prompt_columns_as_given(model, strategy, side):
    ids, mask = padded(RAGGED, side, pad=22)
    before = ids.clone()
    out = decode(model, ids, mask, spec=SPEC, max_new_tokens=11, block_length=4, **STRATEGIES[strategy])
    assert torch.equal(out.sequences[:, : ids.shape[1]], before)
    assert torch.equal(ids, before)
    assert out.sequences.shape == (len(RAGGED), ids.shape[1] + 11)
    assert not (out.generated == SPEC.mask_token_id).any()


def test_a_list_of_prompts_is_padded_on_the_left(model):
    out = decode(model, tensors(RAGGED), spec=SPEC, max_new_tokens=3)
    width = max(map(len, RAGGED))
    for row, prompt in zip(out.sequences.tolist(), RAGGED, strict=True):
        assert row[: width - len(prompt)] == [SPEC.pad_token_id] * (width - len(prompt))
        assert row[width - len(prompt) : width] == prompt


def test_mask_tokens_in_the_prompt_are_kept_with_one_warning(model):
    with pytest.warns(UserWarning, match="mask tokens") as record:
        out = decode(model, tensors([[5, 0, 6], [0, 7]]), spec=SPEC, max_new_tokens=4)
    assert len(record) == 1
    assert out.sequences[0, :3].tolist() == [5, 0, 6]
    assert out.sequences[1, 1:3].tolist() == [0, 7]


# --- 2: every forward commits, and decoding ends ---------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_forward_commits_for_every_unfinished_sample(model, strategy):
    events = []
    out = decode(
        model, tensors(RAGGED), spec=SPEC, max_new_tokens=13, block_length=5, **STRATEGIES[strategy], early_stop=False,
        observers=[events.append],
    )  # fmt: skip
    assert [e.step for e in events] == list(range(1, int(out.nfe.max()) + 1))
    for i in range(len(RAGGED)):
        steps = set(out.history.step[i].tolist()) - {0}  # constraints are committed by no step
        assert strategy in MAY_COMMIT_NOTHING or sorted(steps) == list(range(1, int(out.nfe[i]) + 1))
        assert max(steps) == out.nfe[i]
        assert out.nfe[i] <= 13
    for event in events:
        assert set(event.sample) <= set(event.appended)
        assert strategy in MAY_COMMIT_NOTHING or set(event.sample) == set(event.appended)
    if strategy == "full":
        assert out.nfe.tolist() == [13] * len(RAGGED)


def test_blocks_are_decoded_left_to_right(model):
    out = decode(model, tensors(RAGGED), spec=SPEC, max_new_tokens=13, block_length=5, early_stop=False)
    for steps in out.history.step.tolist():
        blocks = [steps[0:5], steps[5:10], steps[10:13]]
        assert max(blocks[0]) < min(blocks[1])
        assert max(blocks[1]) < min(blocks[2])


def test_observers_see_what_history_records(model):
    events = []
    out = decode(model, tensors(RAGGED), spec=SPEC, max_new_tokens=12, block_length=4, observers=[events.append])
    seen = {
        (s, i): (e.step, t, r, c)
        for e in events
        for s, i, t, r, c in zip(e.sample, e.index, e.token, e.reason, e.confidence, strict=True)
    }
    for (s, i), (step, token, reason, confidence) in seen.items():
        assert out.history.step[s, i] == step
        assert out.history.reason[s, i] == reason
        assert out.history.confidence[s, i] == pytest.approx(confidence)
        if i < out.new_tokens[s]:
            assert out.generated[s, i] == token
    assert len(seen) == int((out.history.step > 0).sum())


# --- 3: base rows of a superposed forward equal a plain forward ------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("block_causal", [0, 4])
def test_base_logits_of_superposed_forwards_equal_plain_ones(shift, block_causal):
    """Record every forward of a real decode; its base rows alone, under the base rule, give the same logits."""
    model = random_llama(3, kv_heads=1)
    recorded = []
    inner = plain_forward(model)

    def spying(input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = inner(input_ids, position_ids, attention_mask)
        recorded.append((input_ids.clone(), logits))
        return logits

    spec = ModelSpec(mask_token_id=0, shift=shift, block_causal_length=block_causal, vocab_size=23)
    events = []
    decode(
        spying, tensors([[5, 6, 7]]), spec=spec, max_new_tokens=12, block_length=4, eta=0.1, observers=[events.append]
    )
    assert len(events) == len(recorded)
    assert any(event.appended[0] for event in events)
    for event, (ids, logits) in zip(events, recorded, strict=True):
        base = ids.shape[1] - event.appended[0]
        position = torch.arange(base)
        allow = torch.ones(base, base, dtype=torch.bool)
        if block_causal:
            allow = position[None] // block_causal <= position[:, None] // block_causal
        plain = inner(ids[:, :base], position[None], allow[None, None])
        assert torch.allclose(logits[:, :base], plain, rtol=0, atol=1e-5), event.step


# --- 4: neighbours, order and padding side do not matter -------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_sample_does_not_notice_its_neighbours(model, strategy, temperature):
    """Ragged batches of 8 and single runs, in float64: same tokens, steps, reasons and counters."""
    spec = dataclasses.replace(SPEC, eos_token_ids=(1, 9, 17))
    options = {"spec": spec, "max_new_tokens": 11, "block_length": 4, "temperature": temperature} | STRATEGIES[strategy]
    batch = decode(model, tensors(RAGGED), seed=[*range(8)], **options)
    order = [3, 0, 7, 5, 1, 6, 2, 4]
    permuted = decode(model, tensors([RAGGED[i] for i in order]), seed=order, **options)
    left = decode(model, *padded(RAGGED, "left"), seed=[*range(8)], **options)
    right = decode(model, *padded(RAGGED, "right", pad=19), seed=[*range(8)], **options)
    for i, prompt in enumerate(tensors(RAGGED)):
        alone = decode(model, prompt, seed=i, **options)
        for out, j in ((batch, i), (permuted, order.index(i)), (left, i), (right, i)):
            same(out, j, alone)
    assert len(set(batch.nfe.tolist())) > 1, "samples should finish at different times"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_neighbours_do_not_matter_on_the_bundled_model_in_float32(tiny, tiny_prompts, strategy):
    prompts = [torch.tensor(p) for group in tiny_prompts.values() for p in group[:3]]
    options = STRATEGIES[strategy] | ({"max_new_tokens": 24} if strategy not in ("threshold", "leap") else {})
    batch = decode(tiny, prompts, **options)
    for i, prompt in enumerate(prompts):
        alone = decode(tiny, prompt, **options)
        assert torch.equal(batch.generated[i], alone.generated[0])
        assert batch.nfe[i] == alone.nfe[0]


def test_results_do_not_depend_on_what_stands_under_the_padding(model):
    ids, mask = padded(RAGGED, "left")
    other = torch.where(mask == 1, ids, 13)
    a, b = (decode(model, x, mask, spec=SPEC, max_new_tokens=9, block_length=4) for x in (ids, other))
    for i in range(len(RAGGED)):
        same(a, i, b, i)


# --- 5: randomness ----------------------------------------------------------------------------------------------------


def test_greedy_decoding_draws_no_random_number(model):
    state = torch.random.get_rng_state()
    decode(model, tensors(RAGGED), spec=SPEC, max_new_tokens=5)
    assert torch.equal(state, torch.random.get_rng_state())


def test_same_seed_same_result_and_other_seed_another(model):
    options = {"spec": SPEC, "max_new_tokens": 16, "block_length": 8, "temperature": 1.0}
    state = torch.random.get_rng_state()
    a, b, c = (decode(model, tensors(RAGGED), seed=seed, **options) for seed in (1, 1, 2))
    assert torch.equal(a.sequences, b.sequences)
    assert not torch.equal(a.sequences, c.sequences)
    assert torch.equal(state, torch.random.get_rng_state())


def test_each_token_is_drawn_from_its_samples_seed_step_and_position():
    """A scripted model whose logits never change, block 1: the noise in Python integers picks every token."""
    logits, seeds, temperature = [-9.0, 1.0, 2.0, 0.5, -1.0], (5, -(2**40)), 1.3

    def flat(input_ids, position_ids, attention_mask):
        return torch.tensor(logits).expand(*input_ids.shape, 5)

    options = {"max_new_tokens": 12, "block_length": 1, "temperature": temperature, "seed": seeds}
    out = decode(flat, tensors([[1, 2], [3, 4, 1, 2]]), spec=ModelSpec(mask_token_id=0, vocab_size=5), **options)
    for sample, (seed, prompt) in enumerate(zip(seeds, (2, 4), strict=True)):
        for i, token in enumerate(out.generated[sample].tolist()):
            noise = [-math.log(-math.log(noise_of(seed, i + 1, prompt + i, v))) for v in range(5)]
            assert token == max(range(1, 5), key=lambda v, noise=noise: logits[v] + temperature * noise[v])


def test_confidence_with_temperature_is_the_unscaled_probability():
    """A scripted model whose logits never change: the recorded confidence is softmax(logits)[token] at T = 3."""
    logits = torch.tensor([-9.0, 1.0, 2.0, 0.5, -1.0])

    def flat(input_ids, position_ids, attention_mask):
        return logits.expand(*input_ids.shape, 5)

    spec = ModelSpec(mask_token_id=0, vocab_size=5)
    out = decode(flat, tensors([[1, 2]]), spec=spec, max_new_tokens=40, block_length=1, temperature=3.0, seed=5)
    p = logits[1:].double().softmax(0)
    expected = torch.tensor([p[t - 1] for t in out.generated[0].tolist()])
    assert torch.allclose(out.history.confidence[0].double(), expected, atol=1e-6)
    assert len(set(out.generated[0].tolist())) == 4


# --- 6: bad logits are an error --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bad_logits_name_step_and_position(value, strategy):
    """The row of position 6 of the second sample turns bad once position 5 is decoded."""
    inner = plain_forward(random_llama(7))

    def breaking(input_ids, position_ids, attention_mask):
        logits = inner(input_ids, position_ids, attention_mask).clone()
        for i in range(len(input_ids)):
            row = (position_ids[i] == 6).nonzero()[:1, 0]  # not there yet where the canvas grows
            earlier = (position_ids[i] < 5) & (input_ids[i] == 0)
            if input_ids[i, -1] != 99 and not earlier.any() and 8 in input_ids[i]:
                logits[i, row, 4] = value
        return logits

    # Blocks one after the other here as well, or position 6 is decoded before it turns bad.
    blocks = {"add_threshold": 1.0} if strategy == "lopa" else {}
    with pytest.raises(BadLogitsError, match=r"step \d+, position 6 of sample 1 \(base row\)"):
        decode(breaking, tensors([[5, 6], [8, 9]]), spec=SPEC, max_new_tokens=6, block_length=3, **STRATEGIES[strategy],
               **blocks, early_stop=False)  # fmt: skip


def test_bad_logits_of_a_copy_are_an_error_too():
    inner = plain_forward(random_llama(7))

    def breaking(input_ids, position_ids, attention_mask):
        logits = inner(input_ids, position_ids, attention_mask).clone()
        logits[:, 2 + 8 :] = float("nan")  # every appended row
        return logits

    with pytest.raises(BadLogitsError, match="mask copy"):
        decode(breaking, tensors([[5, 6]]), spec=SPEC, max_new_tokens=8, block_length=8, eta=0.05)


def test_suppressing_everything_is_an_error(model):
    with pytest.raises(BadLogitsError, match="step 1, position 2"):
        decode(model, tensors([[5, 6]]), spec=SPEC, max_new_tokens=8, suppress_tokens=range(23))


def test_a_nan_where_nothing_is_decided_does_not_matter():
    inner = plain_forward(random_llama(7))

    def breaking(input_ids, position_ids, attention_mask):
        logits = inner(input_ids, position_ids, attention_mask).clone()
        logits[:, :2] = float("nan")  # prompt rows
        return logits

    spec = SPEC
    a = decode(breaking, tensors([[5, 6]]), spec=spec, max_new_tokens=8, block_length=4)
    b = decode(inner_named(inner), tensors([[5, 6]]), spec=spec, max_new_tokens=8, block_length=4)
    same(a, 0, b)


def inner_named(forward):
    """The oracle's forward under the argument names that decode uses."""
    return lambda input_ids, position_ids, attention_mask: forward(input_ids, position_ids, attention_mask)


# --- counters ---------------------------------------------------------------------------------------------------------


def test_counters_add_up_on_a_scripted_model():
    """Prompt 3, block 4, 8 new tokens. The model is sure of everything: one forward a block, EOS at the sixth token."""
    tokens = [5, 6, 7, 8, 9, 1, 11, 12]

    def sure(input_ids, position_ids, attention_mask):
        logits = torch.zeros(*input_ids.shape, 23)
        for i, pos in enumerate(position_ids[0].tolist()):
            if pos >= 3:
                logits[0, i, tokens[pos - 3]] = 20.0
        return logits

    out = decode(sure, tensors([[3, 3, 3]]), spec=SPEC, max_new_tokens=8, block_length=4, strategy="threshold")
    assert out.generated[0].tolist() == [5, 6, 7, 8, 9, 1, 2, 2]  # padding behind the EOS
    assert out.history.step[0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert (out.nfe[0], out.token_forwards[0], out.new_tokens[0]) == (2, 22, 6)
    assert out.tokens_per_forward[0] == 3.0
    kept = decode(sure, tensors([[3, 3, 3]]), spec=SPEC, max_new_tokens=8, block_length=4, early_stop=False)
    assert kept.generated[0].tolist() == tokens
    assert kept.new_tokens[0] == 6


def test_early_stop_ends_after_the_block_with_the_eos():
    """EOS in the first block of eight: no forward of a later block, and the rest was never committed."""

    def eos(input_ids, position_ids, attention_mask):
        logits = torch.zeros(*input_ids.shape, 23)
        logits[..., 1] = 20.0
        return logits

    out = decode(eos, tensors([[3]]), spec=SPEC, max_new_tokens=32, block_length=4, strategy="full")
    assert out.nfe[0] == 4
    assert out.generated[0].tolist() == [1] + [2] * 31
    assert out.history.step[0].tolist() == [1, 2, 3, 4] + [0] * 28


def test_without_pad_token_the_eos_fills_the_rest(model):
    spec = ModelSpec(mask_token_id=0, eos_token_ids=(1, 9), vocab_size=23)

    def nine(input_ids, position_ids, attention_mask):
        logits = torch.zeros(*input_ids.shape, 23)
        logits[..., 9] = 20.0
        return logits

    out = decode(nine, tensors([[3]]), spec=spec, max_new_tokens=6, block_length=2)
    assert out.generated[0].tolist() == [9] * 6
    assert out.new_tokens[0] == 1


def test_only_deciding_rows_go_through_the_head(tiny, tiny_prompts):
    """The head sees the masked targets, their copies, and each next block once: never a whole canvas."""
    rows_seen = []
    handle = tiny.lm_head.register_forward_hook(lambda module, args, out: rows_seen.append(args[0].shape))
    try:
        events = []
        out = decode(tiny, torch.tensor(tiny_prompts[next(iter(tiny_prompts))][0]), observers=[events.append])
    finally:
        handle.remove()
    committed = torch.bincount(out.history.step[0].long(), minlength=int(out.nfe[0]) + 1)[1:].tolist()
    left, expected = 32, []
    for event, n in zip(events, committed, strict=True):
        expected.append(left * 2 if event.appended[0] else left)
        left -= n
        if not left and event is not events[-1]:
            expected.append(32)
            left = 32
    assert [shape[0] for shape in rows_seen] == expected
    assert all(len(shape) == 2 for shape in rows_seen)


# --- a rule of one's own ---------------------------------------------------------------------------------------------


def test_a_strategy_by_object_equals_the_one_by_name(model):
    for name, rule in (("threshold", Threshold(threshold=0.6)), ("leap", Leap(tau=0.5, eta=0.1))):
        options = {"threshold": 0.6} if name == "threshold" else {"tau": 0.5, "eta": 0.1}
        a = decode(model, tensors(RAGGED), spec=SPEC, max_new_tokens=9, block_length=4, strategy=rule)
        b = decode(model, tensors(RAGGED), spec=SPEC, max_new_tokens=9, block_length=4, strategy=name, **options)
        for i in range(len(RAGGED)):
            same(a, i, b, i)


def test_rows_without_appended_ones_see_everything():
    assert Rows.plain(torch.zeros(1, 4, dtype=torch.int64)).mask is None
