# SPDX-License-Identifier: Apache-2.0
"""The programs that trained and measured the bundled model: their data, masks, resumption, export and statistics."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import leap_kernels
from leap_kernels.models.tiny import is_right, problems
from leap_kernels.models.tiny.checks import CHECKS

sys.path.insert(0, str(Path(__file__).parents[1] / "python/train_tiny"))

import data
import evaluate
import export
import masking
import train

# --- data -----------------------------------------------------------------------------------------------------------


def test_no_held_out_prompt_is_in_training(monkeypatch):
    closed = {s.prompt for samples in data.held_out().values() for s in samples}
    assert len(closed) == 900
    seen = {data.training_sample(0, i, largest).prompt for i in range(6000) for largest in (None, 2)}
    assert not seen & closed
    # And what would be one is replaced, not returned.
    victim = data.training_sample(0, 7)
    monkeypatch.setattr(data, "_closed_prompts", lambda: frozenset({victim.prompt}))
    assert data.training_sample(0, 7).prompt != victim.prompt


def test_a_sample_depends_on_its_number_and_seed_only():
    assert data.training_sample(0, 11) == data.training_sample(0, 11)
    assert data.training_sample(0, 11) != data.training_sample(1, 11)
    assert data.training_sample(0, 11) != data.training_sample(0, 14)


def test_problems_are_as_long_as_they_should_be_and_in_the_vocabulary():
    words = data.vocabulary()
    assert [words[t] for t in ("[PAD]", "[MASK]", "[EOS]")] == [0, 1, 2]
    assert len(words) <= train.Settings().rows
    for family, samples in data.held_out().items():
        assert len(samples) == 300
        for sample in samples:
            assert sample.family == family
            assert 40 <= len(sample.answer) < data.CANVAS
            assert len(sample.prompt) + data.CANVAS <= train.Settings().stages[-1].length
            assert {*sample.prompt, *sample.answer} <= words.keys()


def test_the_bundled_problems_are_the_held_out_ones(tiny_tokenizer):
    samples = [s for samples in data.held_out().values() for s in samples]
    assert len(samples) == len(problems())
    ids = tiny_tokenizer.get_vocab()
    for sample, problem in zip(samples, problems(), strict=True):
        assert tiny_tokenizer(problem.prompt)["input_ids"] == [ids[t] for t in sample.prompt]
        assert tiny_tokenizer(problem.reference)["input_ids"] == [ids[t] for t in sample.answer]
        assert is_right(problem, problem.reference)


@pytest.mark.parametrize("largest", [1, 2, 4, None])
def test_training_samples_of_every_stage_are_right_and_fit(tiny_tokenizer, largest):
    ids = tiny_tokenizer.get_vocab()
    length = next(s.length for s in train.Settings().stages if s.largest is None or s.largest >= (largest or 99))
    for i in range(300):
        sample = data.training_sample(3, i, largest)
        assert len(sample.prompt) + len(sample.answer) < length
        text = tiny_tokenizer.decode([ids[t] for t in sample.answer])
        assert CHECKS[sample.family](text) is not None, text


def test_a_value_has_one_group_wherever_it_stands():
    """Tokens of a group are equal (a bill's two keys are one choice), computed tokens have groups, and no result
    escapes its group."""
    keys = {'"count":', '"price":'}
    for family, largest in itertools.product(data.FAMILIES, (2, None)):
        for i in range(40):
            sample = data.problem("groups", family, i, None if largest is None else (1, largest))
            said: dict[int, str] = {}
            for token, group in zip(sample.answer, sample.group, strict=True):
                before = said.setdefault(group, token) if group else token
                assert before == token or {before, token} == keys
            assert sorted(said) == list(range(1, len(said) + 1))
    story = data.problem("groups", "story", 0, (2, 2))
    results = [
        group for token, group in zip(story.answer[1:], story.group[1:], strict=True) if group and token.isdigit()
    ]
    start, first, again, second, answer = results
    assert first == again != start
    assert second == answer != first


def test_drills_are_sums_that_come_out():
    sample = data.drill(0, 5, 72)
    assert len(sample.answer) < 72
    facts = " ".join(sample.answer).removesuffix(" .").split(" . ")
    assert len(facts) > 8
    for fact in facts:
        left, _, right = fact.partition(" = ")
        assert eval(left) == int(right)
    said = [token for token, group in zip(sample.answer, sample.group, strict=True) if group]
    assert said == [fact.split(" = ")[1] for fact in facts]


def test_what_a_length_depends_on_is_the_prompt_alone():
    """Two samples with equally long prompts of one family have equally long answers, whatever is computed."""
    for family in data.FAMILIES:
        lengths: dict[int, set[int]] = {}
        for i in range(400):
            sample = data.problem("lengths", family, i)
            lengths.setdefault(len(sample.prompt), set()).add(len(sample.answer))
        assert all(len(found) == 1 for found in lengths.values()), (family, lengths)


# --- masks ----------------------------------------------------------------------------------------------------------


START, END, LENGTH, BATCH = 10, 70, 110, 64


def batch_of_masks(window_share, value_share, seed=0, start=START):
    """Groups, masks and weights of answers from 10 to 70 on sequences of 110; each value stands twice, 5 apart."""
    group = np.zeros((BATCH, LENGTH), dtype=int)
    group[:, 12:62:10] = group[:, 17:67:10] = np.arange(1, 6)
    starts, ends = np.full(BATCH, start), np.full(BATCH, END)
    rng = np.random.default_rng(seed)
    return group, *masking.mask_batch(rng, starts, ends, group, window_share, value_share)


@pytest.mark.parametrize("window_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("value_share", [0.0, 1.0])
def test_prompts_stay_and_every_sample_has_something_to_learn(window_share, value_share):
    _, masked, weight = batch_of_masks(window_share, value_share)
    assert not masked[:, :START].any()
    assert masked.any(1).all()
    assert ((weight > 0) <= masked).all()
    assert (weight.max(1) > 0).all()
    again = batch_of_masks(window_share, value_share)
    assert (again[1] == masked).all()
    assert (again[2] == weight).all()


def test_independent_masks_cover_all_shares_and_weigh_every_sample_alike():
    _, masked, weight = batch_of_masks(0.0, 0.0)
    share = masked[:, START:].mean(1)
    assert share.min() < 0.1
    assert share.max() > 0.9
    for row in np.flatnonzero(share > masking.LEAST):  # 1 / t a masked token, per token of the canvas
        loud = masked[row].copy()
        loud[END + 1 :] = False
        assert weight[row, loud] == pytest.approx(1 / share[row] / (LENGTH - START), rel=1e-5)
        quiet = masked[row] & ~loud
        assert weight[row, quiet] == pytest.approx(masking.FAINT / share[row] / (LENGTH - START), rel=1e-5)


def test_values_are_masked_as_wholes_and_more_than_the_rest():
    group, masked, _ = batch_of_masks(0.0, 1.0)
    for row in range(BATCH):
        for value in range(1, 6):
            places = masked[row, group[row] == value]
            assert places.all() or not places.any()
    easy = (group == 0) & (np.arange(LENGTH) >= START)
    assert masked[group > 0].mean() > masked[easy].mean() + 0.1
    assert masked[easy].mean() > 0


@pytest.mark.parametrize("value_share", [0.0, 1.0])
def test_windows_are_what_semi_autoregressive_decoding_sees(value_share):
    starts = set()
    for seed in range(20):
        _, masked, weight = batch_of_masks(1.0, value_share, seed)
        for row in range(BATCH):
            hidden = np.flatnonzero(masked[row])
            first, loud = hidden[0], np.flatnonzero(weight[row] > 1 / LENGTH)
            if not loud.size:  # a window on nothing but the EOS behind the first
                assert first >= END
                continue
            behind = loud[-1] + masking.BLOCK
            assert masked[row, behind:].all()  # all behind the window is masked
            assert loud[-1] - loud[0] < masking.BLOCK
            assert weight[row, behind : END + 1] == pytest.approx(masking.FAINT / LENGTH)
            assert (weight[row, max(behind, END + 1) :] == 0).all()
            starts.add(first)
    assert {START, START + 32, 12, 17} <= starts


def test_drills_hide_results_and_little_else():
    group, masked, _ = batch_of_masks(0.5, 0.5, start=0)
    assert 0.4 < masked[group > 0].mean() < 0.6
    assert masked[group == 0].mean() < 0.05


# --- training and export --------------------------------------------------------------------------------------------

SMALL = train.Settings(
    layers=1, width=32, heads=2, mlp=48, batch=4, steps=4, warmup=1, stages=(train.Stage(4, 2, 72, 0.25),)
)


@pytest.mark.parametrize("shifted", [False, True])
def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path, monkeypatch, shifted):
    monkeypatch.setattr(train, "SAVE", 2)
    monkeypatch.setattr(train, "EVERY", 2)
    settings = replace(SMALL, shifted=shifted)
    train.train(settings, tmp_path / "whole", compiled=False)
    with monkeypatch.context() as patch:
        patch.setattr(train.Batches, "at", breaks_at(2))
        with pytest.raises(KeyboardInterrupt):
            train.train(settings, tmp_path / "broken", compiled=False)
    assert torch.load(tmp_path / "broken/last.pt", weights_only=True)["step"] == 2
    train.train(settings, tmp_path / "broken", compiled=False)
    whole, broken = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "broken"))
    assert whole["step"] == broken["step"] == 4
    for name, value in whole["model"].items():
        assert torch.equal(value, broken["model"][name]), name
    assert (tmp_path / "whole/curve.svg").stat().st_size > 1000
    assert len((tmp_path / "whole/log.jsonl").read_text().splitlines()) == 2


def breaks_at(step):
    real = train.Batches.at

    def at(self, now):
        if now == step:
            raise KeyboardInterrupt
        return real(self, now)

    return at


@pytest.mark.parametrize("shifted", [False, True])
def test_a_run_can_begin_with_a_checkpoints_weights(tmp_path, shifted):
    settings = replace(SMALL, shifted=shifted, steps=2)
    train.train(settings, tmp_path / "first", compiled=False)
    export.export(tmp_path / "first", tmp_path / "folder", "float32")
    idle = replace(settings, steps=1, matrix_rate=0.0, rest_rate=0.0)
    train.train(idle, tmp_path / "second", tmp_path / "folder", compiled=False)
    first, second = (torch.load(tmp_path / run / "last.pt", weights_only=True)["model"] for run in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_loss_is_the_cross_entropy_of_the_masked_tokens():
    """By hand on one sequence: shifted models are read one row earlier."""
    ids = torch.tensor([[5, 6, 7, 8]])
    weight = torch.tensor([[0.0, 0.0, 0.5, 2.0]])
    logits = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    logp = logits.log_softmax(-1)[0]

    class Fixed:
        def __call__(self, input_ids):
            return type("Out", (), {"logits": logits})

    plain, _ = train.loss_of(Fixed(), ids, ids, weight, False)
    shifted, _ = train.loss_of(Fixed(), ids, ids, weight, True)
    assert plain.item() == pytest.approx(-(0.5 * logp[2, 7] + 2 * logp[3, 8]).item(), rel=1e-5)
    assert shifted.item() == pytest.approx(-(0.5 * logp[1, 7] + 2 * logp[2, 8]).item(), rel=1e-5)


@pytest.mark.parametrize("shifted", [False, True])
def test_an_exported_run_computes_what_the_trained_model_does(tmp_path, shifted):
    settings = replace(SMALL, shifted=shifted, steps=1, layers=2)
    train.train(settings, tmp_path / "run", compiled=False)
    export.export(tmp_path / "run", tmp_path / "folder", "float32")
    trained = train.new_model(settings)
    trained.load_state_dict(torch.load(tmp_path / "run/last.pt", weights_only=True)["model"])
    loaded = leap_kernels.load(tmp_path / "folder")
    assert loaded.leap_spec.shift == int(shifted)
    assert loaded.leap_spec.mask_token_id == 1
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected, found = trained.eval()(ids).logits, loaded(ids, is_causal=False).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert len(leap_kernels.load_tokenizer(tmp_path / "folder")) == len(data.vocabulary())


def test_the_rate_warms_up_stays_and_decays_to_nothing():
    settings = train.Settings(steps=100, warmup=10, decay=0.2)
    rates = [train.rate_at(settings, step) for step in range(100)]
    assert rates[0] == 0.1
    assert set(rates[9:80]) == {1.0}
    assert rates[90] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.05)


# --- evaluation -----------------------------------------------------------------------------------------------------


def test_intervals_and_p_values_by_hand():
    assert evaluate.wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert evaluate.wilson(300, 300)[0] == pytest.approx(0.98736, abs=1e-4)
    assert evaluate.mcnemar(0, 0) == 1.0
    assert evaluate.mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 1024)
    assert evaluate.mcnemar(9, 1) == evaluate.mcnemar(1, 9)
    low, high = evaluate.bootstrap(lambda i: i.mean(), 100)
    assert 43 < low < 45 < 54 < high < 56  # mean 49.5, standard error 2.9


def test_cost_at_equal_accuracy_is_read_off_the_curve():
    curve = [(0.9, 20.0), (0.8, 10.0), (0.5, 5.0)]
    assert evaluate.at_equal_accuracy(curve, 0.85) == pytest.approx(15.0)
    assert evaluate.at_equal_accuracy(curve, 0.8) == 10.0
    assert evaluate.at_equal_accuracy(curve, 0.4) == 5.0
    assert evaluate.at_equal_accuracy(curve, 0.95) is None


def test_left_to_right_goes_from_left_to_right(tiny, tiny_prompts):
    prompt = torch.tensor(next(iter(tiny_prompts.values()))[0])
    out = leap_kernels.decode(tiny, prompt, strategy=evaluate.LeftToRight(), max_new_tokens=40, early_stop=False)
    assert out.history.step[0].tolist() == list(range(1, 41))


def test_a_summary_pairs_problem_by_problem():
    def record(strategy, number, right, nfe):
        return {"strategy": strategy, "id": f"story-{number}", "task": "story", "right": right, "nfe": nfe,
                "token_forwards": 10 * nfe}  # fmt: skip

    records = [record("threshold 0.9", i, i != 0, 20) for i in range(4)]
    records += [record("threshold 0.5", i, i > 1, 10) for i in range(4)]
    records += [record("leap", i, i != 1, 15) for i in reversed(range(4))]
    row = next(r for r in evaluate.summarise(records) if (r["family"], r["strategy"]) == ("story", "leap"))
    assert (row["right"], row["gained"], row["lost"]) == (3, 1, 1)
    assert row["nfe_ratio"] == row["ratio_low"] == row["ratio_high"] == 0.75
    assert row["threshold_nfe_at_equal_accuracy"] == 20.0
    assert evaluate.markdown(evaluate.summarise(records)).count("\n") == 7
