# SPDX-License-Identifier: Apache-2.0
"""Random decodes keep what is always true (the eight invariants of docs/design.md, numbered as there).

A case draws strategy, cache, temperature, top-p, top-k, ragged prompts and lengths, padding side, blocks, block-causal
masks and shift. The model computes in float64. Number 8, kernels against references: tests/interpret and tests/aot.
"""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from random_models import plain_forward, random_llama
from test_invariants import STRATEGIES, padded
from torch import Tensor

import leap_kernels.strategies
from leap_kernels import ModelSpec, decode
from leap_kernels.errors import BadLogitsError, LeapError
from leap_kernels.models.backbone import TransformersBackbone
from leap_kernels.rows import Rows
from leap_kernels.strategies import Strategy
from leap_kernels.strategies.base import CANVAS, FULL_ATTENTION, NO_SHIFT

LEAP = {"eta": (0.05, 0.2, 0.5), "tau": (0.0, 0.3, 0.7), "require_lookahead": (True, False)}
FAULTS = (float("nan"), float("inf"), float("-inf"))
# What spoils a good call: settings that replace the good ones.
SPOILERS: tuple[dict[str, Any], ...] = (
    {"block_length": 0},
    {"max_new_tokens": 0},
    {"max_new_tokens": 1000},
    {"temperature": -0.5},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 1.5},
    {"cache": "paged"},
    {"cache": "none", "cache_refresh": 2},
    {"strategy": "lookahead"},
    {"steps_per_second": 3},
    {"seed": [1] * 9},
    {"suppress_tokens": [-1]},
    {"backend": "cpu"},
)


@dataclass(frozen=True)
class Case:
    model: tuple[int, int, float]
    """seed, kv_heads, sharpness of a random_llama"""
    spec: ModelSpec
    prompts: list[list[int]]
    new: list[int]
    side: str
    """on which side prompts are padded; "list": not by us"""
    rule: str
    """a key of STRATEGIES"""
    options: dict[str, Any]
    """everything else that decode gets"""
    seeds: list[int]
    alone: int
    """the sample that is decoded alone as well"""
    fault: tuple[float, float, float]
    """a value, and where it appears: shares of the forwards, and of the rows that decide"""
    spoiler: dict[str, Any] = field(default_factory=dict)


# Which cache, and whether the model is block-causal: each pair gets its own share of the cases.
CACHES = (("none", False), ("none", True), ("prefix", False), ("dual", False), ("delayed", False), ("block", True))


@st.composite
def cases(draw: st.DrawFn, cache: str, block_causal: bool) -> Case:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    causal = one_of(4, 8) if block_causal else 0
    anywhere = cache == "none" and not block_causal
    refusing = set() if anywhere else {CANVAS, FULL_ATTENTION} if block_causal else {CANVAS}
    rule = one_of(*(name for name in STRATEGIES if not refusing & rule_of(name).needs), *["leap"] * 3)
    batch = draw(st.integers(1, 3))
    low = 4 if "constraints" in STRATEGIES[rule] else 1
    new = draw(st.lists(st.integers(low, 14), min_size=batch, max_size=batch))
    options: dict[str, Any] = {
        "cache": cache,
        "block_length": one_of(*(n for n in (1, 2, 4, 8) if causal % n == 0)) if causal else draw(st.integers(1, 16)),
        "early_stop": draw(st.booleans()),
        "suppress_tokens": draw(st.lists(st.integers(3, 22), max_size=2)),
    }
    if cache in ("prefix", "dual", "delayed"):
        options["cache_refresh"] = one_of(None, 1, 2, 3)
    if draw(st.booleans()):
        options |= {
            "temperature": one_of(1e-6, 0.3, 1.0, 1e3),
            "top_p": one_of(None, 0.0, 0.6, 0.95),
            "top_k": one_of(None, 1, 5),
        }
    if rule == "leap":
        options |= {name: one_of(*values) for name, values in LEAP.items()}
    spec = ModelSpec(
        mask_token_id=0,
        eos_token_ids=one_of((), (1,), (1, 5, 9)),
        pad_token_id=one_of(None, 2),
        shift=0 if NO_SHIFT in rule_of(rule).needs else one_of(0, 1),
        block_causal_length=causal,
        vocab_size=23,
    )
    token = st.sampled_from([0, *range(3, 23)])  # a mask token in a prompt stays what it is
    return Case(
        model=(draw(st.integers(0, 4)), one_of(1, 2, 4), one_of(3.0, 6.0, 10.0)),
        spec=spec,
        prompts=draw(st.lists(st.lists(token, max_size=9), min_size=batch, max_size=batch)),
        new=new if draw(st.booleans()) else [new[0]] * batch,
        side=one_of("list", "left", "right"),
        rule=rule,
        options=options,
        seeds=draw(st.lists(st.integers(-(2**40), 2**40), min_size=batch, max_size=batch)),
        alone=draw(st.integers(0, batch - 1)),
        fault=(one_of(*FAULTS), draw(st.floats(0, 0.999)), draw(st.floats(0, 0.999))),
        spoiler=one_of(*SPOILERS),
    )


def rule_of(name: str) -> type[Strategy]:
    return leap_kernels.strategies.STRATEGIES[STRATEGIES[name]["strategy"]]


@functools.cache
def model_of(number: int, kv_heads: int, sharpness: float) -> Any:
    return random_llama(number, kv_heads=kv_heads, sharpness=sharpness)


def given_ids(case: Case) -> tuple[Any, ...]:
    """The prompts as decode gets them."""
    if case.side == "list":
        return ([torch.tensor(prompt, dtype=torch.int64) for prompt in case.prompts],)
    ids, mask = padded(case.prompts, case.side)
    return ids.long(), mask.long()


def settings_of(case: Case) -> dict[str, Any]:
    return {"spec": case.spec, **STRATEGIES[case.rule], **case.options}


def superposed_forwards_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """3: the base rows of every superposed forward, alone on the same stored keys and values, get the same hidden
    states."""
    body = TransformersBackbone.body

    def checked(self: TransformersBackbone, rows: Rows) -> Tensor:
        n = rows.base
        if rows.token.shape[1] == n:
            return body(self, rows)
        plain = Rows(
            rows.token[:, :n], rows.pos[:, :n], rows.kind[:, :n], rows.hide[:, :n], base=n, backend=rows.backend,
            block_causal=rows.block_causal, column=rows.column, stored=copy.deepcopy(rows.stored),
        )  # fmt: skip
        hidden = body(self, rows)
        there = plain.kind >= 0
        torch.testing.assert_close(hidden[:, :n][there], body(self, plain)[there], rtol=0, atol=1e-11)
        return hidden

    monkeypatch.setattr(TransformersBackbone, "body", checked)


def check_outcome(case: Case, out: Any, columns: Tensor) -> None:
    """1: no mask is left, prompt columns are as given. What each sample has is consistent."""
    assert torch.equal(out.sequences[:, : columns.shape[1]], columns)
    assert not (out.generated == 0).any()
    assert out.history.confidence.isfinite().all()
    assert torch.equal(out.history.step > 0, out.history.reason > 0)
    assert (out.history.step.max(1).values <= out.nfe).all()
    for i, n in enumerate(case.new):
        assert out.new_tokens[i] <= n
        assert not out.history.step[i, n:].any()


def check_progress(case: Case, out: Any, events: list[Any]) -> None:
    """2: a sample's forwards follow each other from the first step on, and each commits a token of it."""
    assert [event.step for event in events] == list(range(1, len(events) + 1))
    for i, n in enumerate(case.new):
        took_part = [event.step for event in events if i in event.appended]
        assert took_part == list(range(1, int(out.nfe[i]) + 1))
        if rule_of(case.rule).max_forwards is Strategy.max_forwards:
            assert out.nfe[i] <= n
            assert all(i in event.sample for event in events if i in event.appended)


def check_confidences(case: Case, model: Any, events: list[Any]) -> None:
    """3, 5: with every row computed or an exact cache, each token committed has the probability that transformers' own
    forward of the canvas gives it, unscaled, and without temperature it is the likeliest."""
    forward, spec = plain_forward(model), case.spec
    banned = torch.tensor([0, *case.options["suppress_tokens"]])
    for i, (prompt, n) in enumerate(zip(case.prompts, case.new, strict=True)):
        length = len(prompt) + n
        canvas = torch.tensor([*prompt, *[0] * n])
        for offset, token in STRATEGIES[case.rule].get("constraints", {}).items():
            canvas[len(prompt) + offset] = token
        pos = torch.arange(length)
        sees = torch.ones(length, length, dtype=torch.bool)
        if spec.block_causal_length:
            sees = pos // spec.block_causal_length <= pos[:, None] // spec.block_causal_length
        for event in events:
            own = [j for j, sample in enumerate(event.sample) if sample == i]
            if not own:
                continue
            at = torch.tensor([event.index[j] for j in own]) + len(prompt)
            token = torch.tensor([event.token[j] for j in own])
            logits = forward(canvas[None], pos[None], sees[None, None])[0, (at - spec.shift).clamp(min=0)].clone()
            logits[:, banned] = float("-inf")
            p = logits.softmax(1)
            confidence = torch.tensor([event.confidence[j] for j in own], dtype=torch.float64)
            torch.testing.assert_close(p.gather(1, token[:, None])[:, 0], confidence, rtol=1e-5, atol=1e-6)
            if not case.options.get("temperature"):
                assert torch.equal(token, logits.argmax(1))
            canvas[at] = token


def check_alone(case: Case, model: Any, out: Any) -> None:
    """4, and 5: one sample without its neighbours and their padding, with the same seed, gives the same."""
    i, n = case.alone, case.new[case.alone]
    prompt = torch.tensor(case.prompts[i], dtype=torch.int64)
    alone = decode(model, prompt, max_new_tokens=n, seed=case.seeds[i], **settings_of(case))
    assert torch.equal(out.generated[i, :n], alone.generated[0])
    for name in ("step", "reason"):
        assert torch.equal(getattr(out.history, name)[i, :n], getattr(alone.history, name)[0])
    for name in ("nfe", "token_forwards", "new_tokens"):
        assert getattr(out, name)[i] == getattr(alone, name)[0]


def check_bad_logits(case: Case, model: Any, out: Any) -> None:
    """6: a row that decides nothing is an error that names the step, and a position that was still open."""
    value, when, where = case.fault
    step = 1 + int(when * int(out.nfe.max()))
    forwards, fresh = 0, False

    def count(*_: Any) -> None:
        nonlocal forwards, fresh
        forwards, fresh = forwards + 1, True

    def spoil(module: Any, args: Any, logits: Tensor) -> Tensor:
        nonlocal fresh
        if fresh and forwards == step:  # the first rows read of a forward are those that decide
            logits = logits.clone()
            logits[int(where * len(logits))] = value
        fresh = False
        return logits

    handles = [model.model.register_forward_pre_hook(count), model.lm_head.register_forward_hook(spoil)]
    try:
        with pytest.raises(BadLogitsError) as error:
            decode(model, *given_ids(case), max_new_tokens=case.new, seed=case.seeds, **settings_of(case))
    finally:
        for handle in handles:
            handle.remove()
    named = re.search(r"at step (\d+), position (\d+) of sample (\d+)", str(error.value))
    at, position, sample = (int(group) for group in named.groups())
    assert at == step
    committed = out.history.step[sample, position - len(case.prompts[sample])]
    assert committed == 0 or committed >= step or rule_of(case.rule).revises


def check_refusal(case: Case, model: Any) -> None:
    """7: a call with one bad setting is refused, and no forward made."""
    calls = []
    handle = model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    good = {"max_new_tokens": case.new, "seed": case.seeds, **settings_of(case)}
    try:
        with pytest.raises(LeapError):
            decode(model, *given_ids(case), **(good | case.spoiler))
        if any(case.prompts):
            wrong = [torch.tensor([*prompt, 23]) for prompt in case.prompts]
            with pytest.raises(LeapError, match="23"):
                decode(model, wrong, **good)
    finally:
        handle.remove()
    assert not calls


def check(case: Case) -> None:
    model = model_of(*case.model)
    options, ids = settings_of(case), given_ids(case)
    events: list[Any] = []
    state = torch.random.get_rng_state()
    with pytest.MonkeyPatch.context() as monkeypatch:
        superposed_forwards_checked(monkeypatch)
        out = decode(model, *ids, max_new_tokens=case.new, seed=case.seeds, observers=[events.append], **options)
    assert torch.equal(state, torch.random.get_rng_state())  # 5: no draw of torch's
    columns = ids[0]
    if case.side == "list":
        columns = out.sequences[:, : max(map(len, case.prompts))]
        for row, prompt in zip(columns.tolist(), case.prompts, strict=True):
            assert row[len(row) - len(prompt) :] == prompt
    check_outcome(case, out, columns)
    check_progress(case, out, events)
    if case.options["cache"] in ("none", "block") and case.rule != "credit":  # whose confidence is not the model's
        check_confidences(case, model, events)
    check_alone(case, model, out)
    check_bad_logits(case, model, out)
    check_refusal(case, model)


def run(examples: int, number: int, cache: str, block_causal: bool) -> None:
    """`check` on so many cases, the same in every run of this `number`."""
    fixed = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    seed(number)(fixed(given(cases(cache, block_causal))(check)))()


@pytest.mark.filterwarnings("ignore:the prompt holds mask tokens")
@pytest.mark.parametrize(("cache", "block_causal"), CACHES)
def test_random_decodes_keep_the_invariants(cache, block_causal):
    run(12, 0, cache, block_causal)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the prompt holds mask tokens")
@pytest.mark.parametrize(("cache", "block_causal"), CACHES)
def test_a_thousand_random_decodes_keep_the_invariants(cache, block_causal):
    run(167, 1, cache, block_causal)
