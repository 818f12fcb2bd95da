# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.1's editing of committed tokens, on `leap` and `threshold`: against the slow decoder, and a case by hand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write
from oracle import decode_one
from plain import Plain
from random_models import plain_forward, random_llama
from torch import Tensor

import leap_kernels
from leap_kernels import ModelSpec, decode
from leap_kernels.errors import ConfigError
from leap_kernels.strategies import Leap, Threshold

REASONS = ["", "confident", "converged", "forced"]


def check_random_case(seed: int) -> tuple[int, int]:
    """Three ragged prompts in one batch, each against the slow decoder; how many tokens edits changed, or forwards."""
    rng = random.Random(seed)
    size = rng.choice([0, 4, 8])
    block = rng.choice([2, 4, 8][: 1 + (size or 8) // 4]) if size else rng.randint(1, 8)
    spec = ModelSpec(
        mask_token_id=0, eos_token_ids=rng.choice([(), (1, 5)]), shift=rng.choice([0, 1]), block_causal_length=size,
        pad_token_id=2, vocab_size=23,
    )  # fmt: skip
    options: dict[str, Any] = {
        "strategy": rng.choice(["leap", "leap", "threshold"]),
        "threshold": rng.choice([0.3, 0.6]),
    }
    if options["strategy"] == "leap":
        options |= {"tau": rng.choice([0.1, 0.3]), "eta": rng.choice([0.05, 0.2])}
    edits = {"edit_threshold": rng.choice([0.15, 0.3, 0.5]), "edit_forwards": rng.choice([0, 1, 2, 16])}
    canvas: dict[str, Any] = {
        "max_new_tokens": rng.randint(1, 20),
        "block_length": block,
        "early_stop": rng.random() < 0.7,
        "free_first_token": bool(size and spec.shift and rng.random() < 0.5),
    }
    cache = rng.choice(["none", "block"] if size else ["none", "none"])
    prompts = [[rng.randrange(3, 23) for _ in range(rng.randint(1, 9))] for _ in range(3)]
    model = random_llama(seed, sharpness=rng.choice([3.0, 5.0]))
    ids = [torch.tensor(prompt) for prompt in prompts]
    out = decode(model, ids, spec=spec, cache=cache, **options, **edits, **canvas)
    plain = decode(model, ids, spec=spec, cache=cache, **options, **canvas)
    for i, prompt in enumerate(prompts):
        truth = decode_one(
            plain_forward(model), prompt, mask_id=0, eos_ids=spec.eos_token_ids, pad_id=2, shift=spec.shift,
            block_causal=size, **options, **edits, **canvas,
        )  # fmt: skip
        assert out.generated[i].tolist() == truth.tokens, seed
        assert out.nfe[i].item() == truth.nfe, seed
        assert out.history.step[i].tolist() == truth.steps, seed
        assert [REASONS[r] for r in out.history.reason[i].tolist()] == truth.reasons, seed
        if cache == "none":
            assert out.token_forwards[i].item() == truth.token_forwards, seed
    return int((out.sequences != plain.sequences).sum()), int((out.nfe - plain.nfe).sum())


def test_random_configurations_decode_as_the_slow_decoder() -> None:
    changed, more = (sum(found) for found in zip(*map(check_random_case, range(25)), strict=True))
    assert changed > 25, "no case edits anything"
    assert more > 25


@pytest.mark.slow
def test_hundreds_of_random_configurations() -> None:
    for seed in range(1000, 1200):
        check_random_case(seed)


@pytest.mark.parametrize("strategy", ["leap", "threshold"])
def test_llada2_is_edited_in_its_own_blocks(tmp_path: Path, strategy: str) -> None:
    """A checkpoint in LLaDA2's names with the settings it recommends, and edits on top."""
    folder = write(tmp_path, "LLaDA2", seed=4)
    model, plain = leap_kernels.load(folder), Plain.from_folder(folder, torch.float64)
    options = {"max_new_tokens": 21, "threshold": 0.2, "edit_threshold": 0.12, "suppress_tokens": (40, 41, 44, 45)}
    prompt = torch.randint(0, 40, (11,), generator=torch.Generator().manual_seed(1))
    out = decode(model, prompt, strategy=strategy, **options)
    without = decode(model, prompt, strategy=strategy, **{**options, "edit_threshold": None})
    suppress = options.pop("suppress_tokens")
    truth = decode_one(
        plain, prompt.tolist(), mask_id=43, eos_ids=(41,), pad_id=40, block_length=8, block_causal=8,
        suppress=suppress, strategy=strategy, **options,
    )  # fmt: skip
    assert out.generated[0].tolist() == truth.tokens
    assert out.history.step[0].tolist() == truth.steps
    assert (out.nfe[0].item(), out.token_forwards[0].item()) == (truth.nfe, truth.token_forwards)
    assert (out.sequences != without.sequences).any(), "nothing was edited: the example shows nothing"


def scripted(predictions: list[list[int]], first: int = 1) -> Any:
    """A model over 8 tokens: forward n predicts `predictions[n]` from column `first` on, with probability 0.97."""
    forwards = []

    def model(input_ids: Tensor) -> Tensor:
        rows = predictions[min(len(forwards), len(predictions) - 1)]
        forwards.append(input_ids[0].tolist())
        logits = torch.zeros(1, input_ids.shape[1], 8)
        rest = torch.log(torch.tensor(0.03 / 6))  # the mask is never predicted: 7 tokens
        logits[...] = rest
        for column, token in enumerate(rows, first):
            logits[0, column, token] = torch.log(torch.tensor(0.97))
        return logits

    model.forwards = forwards
    return model


SPEC = ModelSpec(mask_token_id=0, vocab_size=8)


def run(model: Any, **options: Any) -> Any:
    ids = torch.tensor([[7]])
    return decode(model, ids, spec=SPEC, strategy="threshold", max_new_tokens=2, block_length=2, **options)


def test_by_hand() -> None:
    """Forward 1 commits 3 and 4; 2 changes the 4 into a 5; 3 changes it back; 4 changes nothing and is the last."""
    model = scripted([[3, 4], [3, 5], [3, 4], [3, 4], [6, 6]])
    out = run(model, threshold=0.9, edit_threshold=0.9)
    assert out.generated.tolist() == [[3, 4]]
    assert (out.nfe.tolist(), out.history.step.tolist()) == ([4], [[1, 3]])
    assert model.forwards == [[7, 0, 0], [7, 3, 4], [7, 3, 5], [7, 3, 4]]


def test_an_edit_must_be_surer_than_its_threshold() -> None:
    """Strictly, in float32: at the very probability of the forward nothing changes."""
    sure = run(scripted([[3, 4]])).history.confidence[0, 0].item()
    assert sure == pytest.approx(0.97)
    predictions = [[3, 4], [5, 5], [5, 5]]
    assert run(scripted(predictions), edit_threshold=sure).generated.tolist() == [[3, 4]]
    assert run(scripted(predictions), edit_threshold=sure - 1e-6).generated.tolist() == [[5, 5]]


def test_edits_that_never_rest_end() -> None:
    turns = [[3 + n % 2, 6] for n in range(40)]
    for most in (0, 1, 5, 16):
        model = scripted(turns)
        assert run(model, edit_threshold=0.5, edit_forwards=most).nfe.tolist() == [1 + most]
    assert run(scripted(turns)).nfe.tolist() == [1]


def test_given_tokens_are_not_edited() -> None:
    """What stands between the masks of a text is the caller's, whatever the model says."""
    text = torch.tensor([[0, 3, 0, 4]])
    model = scripted([[5, 6, 5, 6], [2, 6, 2, 6], [2, 6, 2, 6]], first=0)
    out = decode(model, text, spec=SPEC, infill=True, strategy="threshold", edit_threshold=0.5)
    assert out.sequences.tolist() == [[2, 3, 2, 4]]
    assert out.nfe.tolist() == [3]


def test_a_streamer_sees_finished_blocks_only(tiny: Any, tiny_prompts: dict[str, list[list[int]]]) -> None:
    """What was shown cannot be edited any more, so nothing of an open block is shown."""

    class Shown:
        def __init__(self) -> None:
            self.parts: list[list[int]] = []

        def put(self, ids: Tensor) -> None:
            self.parts.append(ids.flatten().tolist())

        def end(self) -> None: ...

    shown = Shown()
    prompt = torch.tensor(tiny_prompts["code"][0])
    out = decode(tiny, prompt, streamer=shown, edit_threshold=0.3, threshold=0.5, block_length=8)
    assert [t for part in shown.parts[1:] for t in part] == out.generated[0, : out.new_tokens[0]].tolist()
    assert all(len(part) % 8 == 0 for part in shown.parts[1:-1])


def test_draws_are_edited_too() -> None:
    """With a temperature the token drawn decides; the same seed gives the same tokens."""
    model = random_llama(2, sharpness=4.0)
    options: dict[str, Any] = {"spec": ModelSpec(mask_token_id=0, vocab_size=23), "max_new_tokens": 12}
    options |= {"block_length": 4, "edit_threshold": 0.2, "threshold": 0.4}
    first, again, other = (
        decode(model, torch.tensor([[5, 6]]), temperature=1.0, seed=seed, **options).sequences for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Threshold(edit_threshold=1.5), "edit_threshold"),
        (lambda: Leap(edit_threshold="0.9"), "edit_threshold"),
        (lambda: Leap(edit_threshold=0.9, edit_forwards=-1), "edit_forwards: expected a whole number of at least 0"),
        (lambda: Leap(edit_threshold=0.9, edit_forwards=True), "edit_forwards"),
        (lambda: Threshold(edit_forwards=3), "edit_forwards bounds the edits that edit_threshold allows"),
        (lambda: Leap(base=Threshold(edit_threshold=0.9)), "edit_threshold is an option of leap itself"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_delayed_cache_is_refused() -> None:
    spec = ModelSpec(mask_token_id=0, vocab_size=23)
    with pytest.raises(ConfigError, match="with edits reads tokens that are committed; cache='delayed'"):
        decode(random_llama(), torch.tensor([[5]]), spec=spec, cache="delayed", edit_threshold=0.9)


def test_rules_without_edits_are_what_they_were() -> None:
    assert not Leap.revises
    assert not Leap().revises
    assert Leap(edit_threshold=0.9).revises
    assert Leap(edit_threshold=0.9) != Leap()
