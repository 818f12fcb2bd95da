# SPDX-License-Identifier: Apache-2.0
"""Examples worked by hand: scripted models whose logits never change, and what each rule makes of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from leap_kernels import ModelSpec, decode
from leap_kernels.strategies import EntropyThreshold, Leap
from leap_kernels.strategies.base import even_share, ranks, reasons

V = 8
SPEC = ModelSpec(mask_token_id=0, vocab_size=V)


def confident(*confidences: float, others: tuple[int, ...] = (1, 2)) -> Any:
    """A model that predicts token 3 + i at generated position i (prompt of one token) with these confidences.

    What is left of the probability goes to `others` in equal parts.
    """
    table = torch.full((len(confidences) + 1, V), -1e9)
    for i, c in enumerate(confidences):
        table[i + 1, 3 + i % 5] = math.log(c)
        for token in others:
            table[i + 1, token] = math.log(max(1 - c, 1e-30) / len(others))

    def model(input_ids, position_ids, attention_mask):
        return table[position_ids.clamp(max=len(confidences))].clone()

    return model


def steps_of(model: Any, strategy: Any, n: int, **options: Any) -> list[int]:
    """The forward at which each of n tokens was committed; one block unless told otherwise."""
    settings = {"spec": SPEC, "max_new_tokens": n, "block_length": n, "early_stop": False} | options
    return decode(model, torch.tensor([5]), strategy=strategy, **settings).history.step[0].tolist()


# --- what rules share -------------------------------------------------------------------------------------------------


def test_ranks_by_falling_score_with_the_lowest_position_first():
    targets = torch.tensor([[4, 6, 7, 9], [5, 8, -1, -1]], dtype=torch.int32)
    score = torch.tensor([[0.2, 0.7, 0.7, 0.9], [float("-inf"), 0.1, 5.0, 5.0]])
    assert ranks(score, targets).tolist() == [[3, 1, 2, 0], [1, 0, 2, 3]]


def test_reasons_force_the_first_by_rank_where_none_qualified():
    targets = torch.tensor([[4, 6, 7], [5, 8, -1], [-1, -1, -1]], dtype=torch.int32)
    rank = torch.tensor([[1, 0, 2], [1, 0, 2], [0, 1, 2]])
    qualified = torch.tensor([[True, False, True], [False, False, True], [True, True, True]])
    assert reasons(qualified, rank, targets).tolist() == [[1, 0, 1], [0, 3, 0], [0, 0, 0]]


def test_even_schedule():
    assert [even_share(32, 5, j) for j in range(5)] == [7, 7, 6, 6, 6]
    assert [even_share(3, 5, j) for j in range(5)] == [1, 1, 1, 0, 0]


# --- full -------------------------------------------------------------------------------------------------------------


def test_full_takes_its_share_by_confidence():
    """Five masks in two steps: three, then two."""
    model = confident(0.5, 0.9, 0.7, 0.6, 0.8)
    assert steps_of(model, "full", 5, steps=2) == [2, 1, 1, 2, 1]
    assert steps_of(model, "full", 5) == [5, 1, 3, 4, 2]


def test_full_defers_tokens_to_the_end():
    """Tokens 4 and 5 (positions 1 and 2) are deferred, although they are the most confident."""
    model = confident(0.5, 0.9, 0.95, 0.6, 0.8)
    assert steps_of(model, "full", 5, defer_tokens=(4, 5)) == [3, 4, 5, 2, 1]


def test_full_as_llada_runs_idle_steps_and_renormalises_deferred_ids():
    model = confident(0.5, 0.9, 0.95, 0.6, 0.8)
    out = decode(model, torch.tensor([5]), spec=SPEC, strategy="full", steps=8, parity="llada", max_new_tokens=5,
                 block_length=5, early_stop=False)  # fmt: skip
    assert out.nfe.tolist() == [8]
    assert out.history.step[0].tolist() == [5, 2, 1, 4, 3]
    # Id 1 takes half of what is left: position 0 has .5 / .75 without it, position 3 has .6 / .8, position 4 .8 / .9,
    # position 1 .9 / .95 and position 2 .95 / .975. Then id 7 (position 4) is deferred too, with confidence 0.
    assert steps_of(model, "full", 5, steps=5, parity="llada", defer_tokens=(1, 7)) == [4, 2, 1, 3, 5]
    close = confident(0.50, 0.52, others=(1, 2))
    one_sided = confident(0.52, 0.50, others=(2, 2))
    assert steps_of(close, "full", 2, steps=2, parity="llada", defer_tokens=(2,)) == [2, 1]
    assert steps_of(one_sided, "full", 2, steps=2) == [1, 2]


def test_full_at_random_depends_on_the_samples_seed_and_not_on_its_neighbours():
    model = confident(*[0.5] * 12)
    runs = [steps_of(model, "full", 12, remasking="random", steps=6, seed=seed) for seed in range(20)]
    assert all(sorted(run) == sorted([*range(1, 7)] * 2) for run in runs)
    assert len({tuple(run) for run in runs}) == 20
    both = decode(model, [torch.tensor([5])] * 2, spec=SPEC, strategy="full", remasking="random", steps=6, seed=[3, 7],
                  max_new_tokens=12, block_length=12, early_stop=False)  # fmt: skip
    assert both.history.step.tolist() == [runs[3], runs[7]]
    first = torch.tensor(runs).eq(1).double().mean(0)  # each position comes first in a sixth of the runs
    assert first.max() < 0.5


def test_full_at_random_as_llada_reads_one_stream_for_the_whole_canvas():
    model = confident(*[0.5] * 6)
    torch.manual_seed(4)
    got = steps_of(model, "full", 6, remasking="random", steps=3, parity="llada")
    torch.manual_seed(4)
    left, expected = set(range(1, 7)), [0] * 7
    for step in (1, 2, 3):
        scores = torch.rand(1, 7)[0]
        for i in sorted(left, key=lambda i, scores=scores: -float(scores[i]))[:2]:
            expected[i] = step
            left.remove(i)
    assert got == expected[1:]


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_steps_are_shared_by_blocks(blocks):
    model = confident(*[0.9, 0.8, 0.7, 0.6] * 3)
    out = steps_of(model, "full", 12, steps=6, block_length=12 // blocks)
    assert max(out) == 6
    assert all(out.count(step) == 2 for step in range(1, 7))


# --- threshold, factor, entropy, entropy_threshold --------------------------------------------------------------------


def test_threshold_is_strict_and_public_code_is_not():
    """exp(0) / (exp(0) + exp(0)) is one half in every precision."""

    def half(input_ids, position_ids, attention_mask):
        logits = torch.full((*input_ids.shape, V), -1e9)
        logits[..., 3:5] = 0.0
        return logits

    assert steps_of(half, "threshold", 3, threshold=0.5) == [1, 2, 3]
    assert steps_of(half, "threshold", 3, threshold=0.5, parity="fast_dllm") == [1, 1, 1]
    assert steps_of(half, "threshold", 3, threshold=0.51, parity="fast_dllm") == [1, 2, 3]


def test_factor_stops_at_the_first_rank_below_its_limit():
    """Factor 1: limits .667, .75, .8 for the second to fourth."""
    assert steps_of(confident(0.95, 0.80, 0.70, 0.50), "factor", 4, factor=1.0) == [1, 1, 2, 3]
    assert steps_of(confident(0.70, 0.50, 0.80, 0.95), "factor", 4, factor=1.0) == [2, 3, 1, 1]


def test_factor_as_fast_dllm_takes_the_last_mask_along():
    model = confident(0.95, 0.80, 0.76, 0.50)
    assert steps_of(model, "factor", 4) == [1, 1, 1, 2]
    assert steps_of(model, "factor", 4, parity="fast_dllm") == [1, 1, 1, 1]
    # Not when another rank fails before it: 0.95 alone, then 0.70 and, as the last mask, 0.60.
    assert steps_of(confident(0.95, 0.60, 0.50), "factor", 3, parity="fast_dllm") == [1, 2, 2]


def certain(*entropies: float) -> Any:
    """A model with these entropies at its positions: two tokens, c and 1 - c, c found by halving intervals."""
    found = []
    for h in entropies:
        low, high = 0.5, 1.0
        for _ in range(60):
            c = (low + high) / 2
            low, high = (c, high) if -c * math.log(c) - (1 - c) * math.log(1 - c) > h else (low, c)
        found.append(low)
    return confident(*found, others=(2,))


def test_entropy_commits_what_its_bound_allows():
    """gamma .1: .02, .02 + .05 and not .02 + .05 + .06 in front; so three."""
    model = certain(0.02, 0.20, 0.06, 0.05)
    assert steps_of(model, "entropy", 4, gamma=0.1) == [1, 2, 1, 1]
    assert steps_of(model, "entropy", 4, gamma=0.06) == [1, 2, 2, 1]
    assert steps_of(model, "entropy", 4, gamma=0.0) == [1, 4, 3, 2]


def test_entropy_threshold_is_inclusive_and_forces_the_least_entropy():
    model = certain(0.30, 0.60, 0.45, 0.69)
    assert steps_of(model, "entropy_threshold", 4, threshold=0.5) == [1, 2, 1, 3]
    # Of two, the one with less entropy is not the more confident one: .6 and twice .2, or .65 and seven times .05.
    table = torch.full((3, 12), -1e9)
    table[1, 3], table[1, [4, 5]] = math.log(0.6), math.log(0.2)
    table[2, 3], table[2, 4:11] = math.log(0.65), math.log(0.05)
    spec = ModelSpec(mask_token_id=0, vocab_size=12)
    options = {"spec": spec, "threshold": 0.1}

    def model(input_ids, position_ids, attention_mask):
        return table[position_ids]

    assert steps_of(model, "entropy_threshold", 2, **options) == [1, 2]
    assert steps_of(model, "threshold", 2, spec=spec, threshold=0.9) == [2, 1]
    exact = decode(model, torch.tensor([5]), strategy="entropy_threshold", spec=spec, max_new_tokens=2, block_length=2,
                   threshold=2.0, early_stop=False)  # fmt: skip
    assert exact.nfe.tolist() == [1]


def test_leap_on_another_base_rule():
    """Without agreement (tau 1) the base rule alone decides; its name takes its defaults, an object its own."""
    model = certain(0.30, 0.60, 0.45, 0.69)
    assert steps_of(model, "leap", 4, tau=1.0, base="entropy_threshold") == [1, 2, 1, 3]
    assert steps_of(model, Leap(tau=1.0, base=EntropyThreshold(0.65)), 4) == [1, 1, 1, 2]
    assert steps_of(confident(0.95, 0.80, 0.76, 0.50), "leap", 4, tau=1.0, base="factor") == [1, 1, 1, 2]
    assert steps_of(certain(0.02, 0.20, 0.06, 0.05), "leap", 4, tau=1.0, base="entropy") == [1, 2, 1, 1]


# --- klass, prophet, credit -------------------------------------------------------------------------------------------


def test_klass_waits_for_two_quiet_forwards():
    """A model that never changes its mind: KL 0 from the second forward on. One block: forwards 1 and 2 commit the most
    confident, forward 3 whatever is confident, then one a forward again."""
    model = confident(0.95, 0.99, 0.96, 0.80, 0.70, 0.97)
    assert steps_of(model, "klass", 6) == [3, 1, 3, 4, 5, 2]
    assert steps_of(model, "klass", 6, history=1) == [2, 1, 2, 3, 4, 2]
    assert steps_of(model, "klass", 6, conf_threshold=0.75) == [3, 1, 3, 3, 4, 2]
    assert steps_of(model, "klass", 6, steps=3) == [2, 1, 2, 3, 3, 1]  # two a step


def test_klass_compares_a_new_block_with_the_forward_that_finished_the_last_one():
    """Of the second block (positions 3 to 5) the first forward is quiet already, so its second commits by the rule."""
    model = confident(0.95, 0.99, 0.96, 0.92, 0.97, 0.91)
    assert steps_of(model, "klass", 6, block_length=3) == [3, 1, 2, 5, 4, 5]
    causal = ModelSpec(mask_token_id=0, vocab_size=V, block_causal_length=4)  # there nobody has seen the second block
    options = {"spec": causal, "block_length": 4, "max_new_tokens": 7, "early_stop": False, "strategy": "klass"}
    out = decode(confident(0.95, 0.99, 0.96, 0.92, 0.97, 0.91, 0.94), torch.tensor([5]), **options)
    assert out.history.step[0].tolist() == [3, 1, 2, 6, 4, 6, 5]


def test_klass_wants_the_divergence_now_against_before():
    """A prediction that moves between two distributions: KL(now, before) alternates between two known values."""
    one, other = torch.tensor([0.8, 0.1, 0.1]), torch.tensor([0.6, 0.3, 0.1])
    forth, back = ((a * (a / b).log()).sum().item() for a, b in ((other, one), (one, other)))
    assert forth > back + 0.01

    def run(limit: float, history: int = 1) -> list[int]:
        calls = []

        def swaying(input_ids, position_ids, attention_mask):
            calls.append(0)
            logits = torch.full((*input_ids.shape, V), -1e9)
            logits[..., 3:6] = (one if len(calls) % 2 else other).log()
            logits[:, 1, 3:6] = torch.tensor([1.0, -1e9, -1e9])  # the first position is sure
            return logits

        return steps_of(swaying, "klass", 6, history=history, conf_threshold=0.5, kl_threshold=limit)

    # Forward 1 takes position 0. Forward 2 is `forth`, 3 is `back`: with a limit between, all go in forward 3.
    assert run((forth + back) / 2) == [1, 2, 3, 3, 3, 3]
    assert run(forth + 0.01) == [1, 2, 2, 2, 2, 2]
    assert run(back - 0.01) == [1, 2, 3, 4, 5, 6]
    assert run((forth + back) / 2, history=2) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("select", "expected"), [("confident", [4, 2, 3, 1]), ("kl", [2, 3, 4, 1])])
def test_klass_may_take_one_of_the_ready_targets(select, expected):
    model = confident(0.95, 0.97, 0.96, 0.99)
    assert steps_of(model, "klass", 4, history=1, select=select) == expected


def gaps(*gap: float) -> Any:
    """A model whose two highest logits differ by these gaps at the generated positions."""
    table = torch.full((len(gap) + 1, V), -1e9)
    for i, g in enumerate(gap):
        table[i + 1, 3 + i % 5], table[i + 1, 1] = g, 0.0
    return lambda input_ids, position_ids, attention_mask: table[position_ids]


@pytest.mark.parametrize(
    ("gap", "exit"),
    [
        (7.5, 1),
        (7.4, 4),
        (5.0, 4),
        (4.9, 7),
        (2.5, 7),
        (2.4, 10),
    ],  # of ten steps, .33 and .67 lie between 3, 4, 6 and 7
)
def test_prophet_fills_everything_when_the_answer_is_clear(gap, exit):
    """Ten tokens; the answer is at 4 to 8. Before the exit one token a forward, then all that is left."""
    others = [3.0, 2.0, 1.9, 1.8]
    model = gaps(*others, gap - 1, gap + 1, gap, gap, gap, 0.5)
    got = steps_of(model, "prophet", 10, answer_start=4)
    assert max(got) == exit
    assert sorted(got)[: exit - 1] == [*range(1, exit)]
    assert got.count(exit) == 10 - (exit - 1)


def test_prophet_crosses_blocks_and_stops_the_sample():
    """Exit in the first of three blocks: no forward of the others, and everything is there."""
    model = gaps(*[6.0] * 9)
    out = decode(model, torch.tensor([5]), spec=SPEC, strategy="prophet", max_new_tokens=9, block_length=3,
                 answer_start=4, early_stop=False)  # fmt: skip
    assert out.history.step[0].tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3]
    assert out.nfe.tolist() == [3]
    assert out.generated[0].tolist() == [3 + i % 5 for i in range(9)]


def test_prophet_keeps_constraints_and_skips_blocks_made_of_them():
    model = gaps(*[1.0] * 9)
    out = decode(model, torch.tensor([5]), spec=SPEC, strategy="prophet", max_new_tokens=9, block_length=3,
                 early_stop=False, constraints={3: 7, 4: 2, 5: 7, 8: 1})  # fmt: skip
    assert out.history.step[0].tolist() == [1, 2, 3, 0, 0, 0, 4, 5, 0]
    assert out.generated[0].tolist() == [3, 4, 5, 7, 2, 7, 4, 5, 1]
    assert out.nfe.tolist() == [5]


def test_prophet_as_published_lets_the_first_sample_decide():
    table = {5: 8.0, 6: 1.0}

    def model(input_ids, position_ids, attention_mask):
        logits = torch.full((*input_ids.shape, V), -1e9)
        logits[..., 1] = 0.0
        logits[..., 3] = torch.tensor([[table[int(ids[0])]] for ids in input_ids]).expand(input_ids.shape)
        return logits

    options = {"spec": SPEC, "strategy": "prophet", "max_new_tokens": 6, "block_length": 6, "answer_start": 0}
    prompts = [torch.tensor([5]), torch.tensor([6])]
    assert decode(model, prompts, **options).nfe.tolist() == [1, 6]
    assert decode(model, prompts, parity="prophet", **options).nfe.tolist() == [1, 1]
    assert decode(model, prompts[::-1], parity="prophet", **options).nfe.tolist() == [6, 6]


def one_by_one(input_ids, position_ids, attention_mask):
    """Generated positions become sure (.99) one after the other; the fifth of each five is .6 all the time."""
    logits = torch.full((*input_ids.shape, V), -1e9)
    for i in range(1, input_ids.shape[1]):
        sure = bool((input_ids[0, 1:i] != 0).all())
        c = 0.6 if i % 5 == 0 else 0.99 if sure else 0.3
        logits[0, i, 3 + (i - 1) % 5] = math.log(c)
        logits[0, i, [1, 2]] = torch.tensor([math.log((1 - c) / 2)] * 2)
    return logits


def test_credit_adds_up_fades_and_starts_anew_in_each_block():
    """Confidence .6, alpha 2, beta .5: credits .903, 1.354, 1.580 give .845, .893 and, above .9, .909."""
    c, credit, fused = 0.6, 0.0, []
    for _ in range(3):
        credit = credit * 0.5 + c**0.2
        boosted = c * (credit + 1) ** 2
        fused.append(boosted / (boosted + 1 - c))
    assert fused == pytest.approx([0.845, 0.893, 0.909], abs=1e-3)
    assert steps_of(one_by_one, "credit", 5, alpha=2.0, beta=0.5) == [1, 2, 3, 4, 3]
    assert steps_of(one_by_one, "credit", 5, alpha=2.0, beta=0.5, threshold=0.9095) == [1, 2, 3, 4, 4]
    assert steps_of(one_by_one, "credit", 5, alpha=2.0, beta=0.0) == [1, 2, 3, 4, 5]  # a forward remembers nothing
    assert steps_of(one_by_one, "credit", 5, alpha=0.0, beta=0.5) == [1, 2, 3, 4, 5]
    both = steps_of(one_by_one, "credit", 10, block_length=5, alpha=2.0, beta=0.5)
    assert both == [1, 2, 3, 4, 3, 5, 6, 7, 8, 7]


def test_credit_takes_near_ties_together():
    tied = confident(0.5, 0.5, 0.5)
    assert steps_of(tied, "credit", 3, threshold=1.0) == [1, 1, 1]
    apart = confident(0.5, 0.49, 0.48)
    assert steps_of(apart, "credit", 3, threshold=1.0) == [1, 2, 3]


# --- dream ------------------------------------------------------------------------------------------------------------


def test_dream_spreads_its_masks_over_equal_steps_of_time():
    """eps 0: two steps commit half of five masks and the rest; four steps 1/4, 1/3 (in float32 a little less), 1/2 and
    all of what is left."""
    model = confident(0.5, 0.9, 0.7, 0.6, 0.8)
    options = {"alg": "maskgit_plus", "eps": 0}
    assert steps_of(model, "dream", 5, steps=2, **options) == [2, 1, 2, 2, 1]
    eight = confident(0.5, 0.9, 0.7, 0.6, 0.8, 0.55, 0.75, 0.65)
    assert steps_of(eight, "dream", 8, steps=4, **options) == [4, 1, 3, 4, 1, 4, 2, 3]  # 2, int(1.9999999), 2, 3
    assert steps_of(model, "dream", 5, steps=2, alg="maskgit_plus", eps=0.3) == [2, 1, 2, 2, 2]  # int(5 * 0.35)
    # With more steps than masks most forwards commit nothing, as published.
    out = decode(model, torch.tensor([5]), spec=SPEC, strategy="dream", alg="entropy", steps=12, max_new_tokens=2,
                 early_stop=False)  # fmt: skip
    assert out.nfe.tolist() == [12]
    assert max(out.history.step[0].tolist()) == 12


def test_dream_ranks_by_probability_margin_or_entropy():
    """Probability .5 .45 .49, margin .1 .25 .005, entropy .94 1.85 .79: each picks another position first."""
    table = torch.full((4, 16), -1e9)
    table[1, 3:6] = torch.tensor([0.50, 0.40, 0.10]).log()
    table[2, 3:15] = torch.tensor([0.45, 0.20, *[0.035] * 10]).log()
    table[3, 3:6] = torch.tensor([0.49, 0.485, 0.025]).log()
    spec = ModelSpec(mask_token_id=0, vocab_size=16)

    def model(input_ids, position_ids, attention_mask):
        return table[position_ids]

    for parity in (None, "dream"):
        options = {"spec": spec, "steps": 2, "eps": 0, "parity": parity}  # int(1.5), then the rest
        first = {alg: steps_of(model, "dream", 3, alg=alg, **options).index(1)
                 for alg in ("maskgit_plus", "topk_margin", "entropy")}  # fmt: skip
        assert first == {"maskgit_plus": 0, "topk_margin": 1, "entropy": 2}


def test_dream_origin_commits_each_mask_by_itself():
    """Half of the masks on average, by the sample's seed; all the same whatever the model says."""
    model = confident(*[0.5] * 12)
    runs = [steps_of(model, "dream", 12, steps=2, eps=0, seed=seed) for seed in range(60)]
    assert {step for run in runs for step in run} == {1, 2}
    share = torch.tensor(runs).eq(1).double()
    assert abs(share.mean() - 0.5) < 0.05  # 720 coins
    assert share.sum(1).var() > 1  # 3 for coins, 0 for a fixed number
    both = decode(model, [torch.tensor([5])] * 2, spec=SPEC, strategy="dream", steps=2, eps=0, seed=[3, 7],
                  max_new_tokens=12, early_stop=False)  # fmt: skip
    assert both.history.step.tolist() == [runs[3], runs[7]]


def test_dream_draws_positions_by_their_ranks():
    """Of .9 and .5 one is taken first; softmax of these over .4 / ln 3 is 3 to 1."""
    model, options = confident(0.9, 0.5), {"alg": "maskgit_plus", "steps": 2, "eps": 0, "alg_temp": 0.4 / math.log(3)}
    first = [steps_of(model, "dream", 2, seed=seed, **options)[0] for seed in range(400)]
    assert abs(first.count(1) / 400 - 0.75) < 0.065  # three standard deviations
    hot = [steps_of(model, "dream", 2, seed=seed, **options | {"alg_temp": 1e6})[0] for seed in range(400)]
    assert abs(hot.count(1) / 400 - 0.5) < 0.075
    assert steps_of(model, "dream", 2, **options | {"alg_temp": 0}) == [1, 2]


def test_dream_as_published_ranks_what_temperature_and_limits_leave():
    """One token may be drawn: its probability is then 1 everywhere, and the lowest position goes first."""
    model = confident(0.5, 0.9, 0.7)
    options = {"alg": "maskgit_plus", "steps": 2, "eps": 0, "temperature": 1.0, "top_k": 1}
    assert steps_of(model, "dream", 3, **options) == [2, 1, 2]
    assert steps_of(model, "dream", 3, parity="dream", **options) == [1, 2, 2]
    # Entropies .69 and .80 at T = 1; at T = .25, where the small probabilities vanish, .69 and .04.
    table = torch.full((3, V), -1e9)
    table[1, 3:5] = torch.tensor([0.5, 0.5]).log()
    table[2, 3:6] = torch.tensor([0.7, 0.25, 0.05]).log()
    cold = {"alg": "entropy", "steps": 2, "eps": 0, "temperature": 0.25}

    def two(input_ids, position_ids, attention_mask):
        return table[position_ids]

    assert steps_of(two, "dream", 2, **cold) == [1, 2]
    assert steps_of(two, "dream", 2, parity="dream", **cold) == [2, 1]
    # In bfloat16 .9994 and .9997 are both 1.
    near = torch.full((3, V), -1e9)
    near[1, 3], near[2, 3], near[1:, 4] = 7.5, 8.0, 0.0

    def half(input_ids, position_ids, attention_mask):
        return near[position_ids].bfloat16()

    exact = {"alg": "maskgit_plus", "steps": 2, "eps": 0}
    assert steps_of(half, "dream", 2, **exact) == [2, 1]
    assert steps_of(half, "dream", 2, parity="dream", **exact) == [1, 2]


# --- wino -------------------------------------------------------------------------------------------------------------


def drafts(shadow: dict[int, float], seen: list[Any] | None = None) -> Any:
    """Four positions: .7 for the first two and, once those are filled, for the others; shadows as given.

    Position i is predicted to be 3 + i, with the rest of the probability on 1, 2 and 7.
    """

    def model(input_ids, position_ids, attention_mask):
        base = 5
        if seen is not None:
            seen.append((input_ids[0].tolist(), position_ids[0].tolist(), attention_mask[0, 0]))
        logits = torch.full((*input_ids.shape, V), -1e9)
        for row in range(1, input_ids.shape[1]):
            i = int(position_ids[0, row]) - 1
            c = 0.7 if i < 2 or bool((input_ids[0, 1:3] != 0).all()) else 0.3
            c = shadow[i] if row >= base else c
            logits[0, row, [1, 2, 7]], logits[0, row, 3 + i] = math.log((1 - c) / 3), math.log(c)
        return logits

    return model


@pytest.mark.parametrize(
    ("shadow", "options", "expected"),
    [
        ({0: 0.95, 1: 0.92}, {}, [1, 1, 2, 2]),
        ({0: 0.50, 1: 0.95}, {}, [3, 1, 2, 2]),  # masked again, and decoded in the third forward
        ({0: 0.50, 1: 0.40}, {}, [1, 3, 2, 2]),  # two were drafted before, so one at most
        ({0: 0.50, 1: 0.40}, {"threshold_back": 0.45}, [1, 3, 2, 2]),
        ({0: 0.50, 1: 0.40}, {"threshold_back": 0.3}, [1, 1, 2, 2]),
        ({0: 0.50, 1: 0.40}, {"threshold": 0.7001}, [1, 2, 3, 4]),  # one a forward is never checked
    ],
)
def test_wino_masks_again_what_its_shadow_does_not_confirm(shadow, options, expected):
    shadow = {2: 0.1, 3: 0.1, **shadow}  # those two are never under check
    assert steps_of(drafts(shadow), "wino", 4, **options) == expected


def test_winos_shadows_see_all_but_their_own_position():
    seen = []
    steps_of(drafts({0: 0.95, 1: 0.95, 2: 0.9, 3: 0.9}, seen), "wino", 4)
    first, (ids, pos, mask) = seen
    assert first[0] == [5, 0, 0, 0, 0]  # nothing is under check yet
    assert (ids, pos) == ([5, 3, 4, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 1, 2, 3, 4])
    assert mask[:5].tolist() == [[True] * 5 + [False] * 4] * 5
    for i in range(1, 5):
        assert mask[4 + i].tolist() == [j != i for j in range(9)]


def test_wino_drafts_a_share_of_the_masks():
    """Of sixteen sure tokens int(.7 * 16) = 11, then 5 of 5; of four all four; of forty 20."""
    sure = [0.7 + i / 1000 for i in range(16)]
    assert steps_of(confident(*sure), "wino", 16, threshold_back=0.0) == [2] * 5 + [1] * 11
    assert steps_of(confident(*sure[:4]), "wino", 4) == [1] * 4
    forty = steps_of(confident(*[0.7] * 40), "wino", 40, threshold_back=0.0)
    assert [forty.count(step) for step in (1, 2, 3, 4)] == [20, 14, 5, 1]


def test_wino_streams_blocks_and_tells_observers_of_masks():
    events = []
    model = drafts({0: 0.5, 1: 0.95, 2: 0.1, 3: 0.1})
    steps_of(model, "wino", 4, observers=[events.append])
    assert [(event.index, event.token) for event in events] == [([0, 1], [3, 4]), ([2, 3, 0], [5, 6, 0]), ([0], [3])]

    class Streamer:
        def __init__(self):
            self.put_ids = []

        def put(self, ids):
            self.put_ids.append(ids.flatten().tolist())

        def end(self):
            pass

    streamer = Streamer()
    steps_of(model, "wino", 4, streamer=streamer)
    assert streamer.put_ids == [[5], [3, 4, 5, 6]]


# --- lopa -------------------------------------------------------------------------------------------------------------


def walk(*confidences: float, calls: list[Any] | None = None) -> Any:
    """As `confident`, and keeps each forward's ids, positions and mask (of the first sample) in `calls`."""
    inner = confident(*confidences)

    def model(input_ids, position_ids, attention_mask):
        if calls is not None:
            calls.append((input_ids[0].tolist(), position_ids[0].tolist(), attention_mask[0, 0].tolist()))
        return inner(input_ids, position_ids, attention_mask)

    return model


PROBABILITY = {"confidence": "probability", "branches": 1}


def test_lopa_opens_a_block_when_the_last_one_is_filled_enough():
    """Blocks of four. Of each two are sure; the others are tried one by one, by the branch and by the canvas."""
    calls = []
    model = walk(0.95, 0.95, 0.6, 0.5, 0.95, 0.95, 0.8, 0.7, calls=calls)
    got = steps_of(model, "lopa", 8, block_length=4, add_threshold=0.5, **PROBABILITY)
    # Forward 1 sees one block and commits its sure ones. Half of it is filled: 2 sees both blocks. Its branch, with .6
    # written, scores (.95 + .95 + .8 + .7 + .5) / 5 = .78, the canvas .75. The branch is walked on: .6 by it, then the
    # two sure ones, and .5, which the first block has left. In 3 the branch has .7 left, and the canvas .75 on average.
    assert got == [1, 1, 2, 2, 2, 2, 3, 4]
    assert [len(ids) for ids, *_ in calls] == [5, 9 + 8, 9 + 8, 9 + 4]
    late = steps_of(walk(0.95, 0.95, 0.6, 0.5, 0.95, 0.95, 0.8, 0.7), "lopa", 8, block_length=4, add_threshold=0.6,
                    **PROBABILITY)  # fmt: skip
    # 2: .5 for the branch, .55 for the canvas, .6 by it: three quarters. 3: .85 and .78, so .5 by the branch.
    assert late == [1, 1, 2, 3, 3, 3, 4, 5]


def test_lopas_second_block_waits_for_the_first_one_to_be_done():
    """Nothing is sure: a forward commits the best of the first block, and of the second once the first is at 3/4."""
    model = walk(0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
    options = {"block_length": 4, "add_threshold": 0.25, "alpha": 1.0, **PROBABILITY}  # alpha 1: the canvas always wins
    assert steps_of(model, "lopa", 8, done_threshold=0.75, **options) == [4, 3, 2, 1, 7, 6, 5, 4]
    assert steps_of(model, "lopa", 8, done_threshold=0.25, **options) == [4, 3, 2, 1, 5, 4, 3, 2]
    assert steps_of(model, "lopa", 8, done_threshold=1.0, **options) == [4, 3, 2, 1, 8, 7, 6, 5]


def test_lopas_branches_are_rows_that_see_themselves_and_what_is_in_front():
    """Two branches of one block of three; then of two blocks, of which the first was clean in the forward before."""
    calls = []
    model = walk(0.95, 0.6, 0.5, 0.4, 0.3, 0.2, calls=calls)
    steps_of(model, "lopa", 6, block_length=3, add_threshold=1.0, confidence="probability", branches=2, alpha=1.0)
    ids, pos, mask = calls[1]
    assert ids == [5, 3, 0, 0, 3, 4, 0, 3, 0, 5]
    assert pos == [0, 1, 2, 3] + [1, 2, 3] * 2
    canvas, first, second = [True] * 4 + [False] * 6, [0, 4, 5, 6], [0, 7, 8, 9]
    assert mask[:4] == [canvas] * 4
    assert mask[4:7] == [[j in first for j in range(10)]] * 3
    assert mask[7:] == [[j in second for j in range(10)]] * 3
    # Forwards 2 and 3 fill the first block. 4 opens the second, with nothing left to try; in it the first is clean, so
    # the branches of 5 begin behind it.
    assert [len(ids) for ids, *_ in calls] == [4, 4 + 6, 4 + 3, 7, 7 + 6, 7 + 3]
    ids, pos, mask = calls[4]
    assert pos[7:] == [4, 5, 6] * 2
    assert mask[7] == [j in (0, 1, 2, 3, 7, 8, 9) for j in range(13)]


def test_lopa_scores_branches():
    """The lowest masks of a branch, or the written token, or 1 where nothing is left; ties go to the first branch."""

    def order(*confidences: float, **options: Any) -> tuple[list[int], list[int]]:
        out = decode(
            walk(*confidences), torch.tensor([5]), spec=SPEC, strategy="lopa", max_new_tokens=len(confidences),
            confidence="probability", **options,
        )  # fmt: skip
        return out.history.step[0].tolist(), out.history.reason[0].tolist()

    # After .8, branches write .7 and .6, and have .6 .55 and .7 .55 left, the canvas .7 .6 .55: .575, .625 and .617. A
    # branch's token has reason 2, a block's best 3.
    assert order(0.8, 0.7, 0.6, 0.55) == ([1, 2, 2, 3], [3, 3, 2, 2])
    # The lowest is .55 in all of them, and the first branch wins.
    assert order(0.8, 0.7, 0.6, 0.55, branch_top_p=0.0) == ([1, 2, 2, 3], [3, 2, 3, 2])
    # With the written token's confidence, 1 for the canvas, that wins until a branch has no masks left: 1 as well.
    assert order(0.8, 0.7, 0.6, 0.55, alpha=1.0) == ([1, 2, 3, 4], [3, 3, 3, 2])
    assert order(0.8, 0.7, 0.6, 0.55, alpha=0.5, branches=1) == ([1, 2, 3, 4], [3, 3, 3, 2])  # .7 + .575 < 1 + .617


def test_lopa_ends_at_an_eos_and_opens_nothing_behind_it():
    calls = []
    model = walk(0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, calls=calls)  # 3 4 5 6 7 3 4 5 6
    spec = ModelSpec(mask_token_id=0, vocab_size=V, eos_token_ids=(7,), pad_token_id=2)
    options = {"spec": spec, "strategy": "lopa", "max_new_tokens": 9, "block_length": 3}
    out = decode(model, torch.tensor([5]), **options)
    assert out.generated[0].tolist() == [3, 4, 5, 6, 7, 2, 2, 2, 2]
    assert out.new_tokens.tolist() == [5]
    assert out.history.step[0].tolist() == [1, 1, 1, 2, 2, 2, 0, 0, 0]
    assert out.token_forwards.tolist() == [4 + 7]
    assert out.nfe.tolist() == [2]
    out = decode(model, torch.tensor([5]), early_stop=False, **options)
    assert out.history.step[0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_lopa_as_published_ranks_in_the_logits_dtype():
    """In bfloat16 .9994 and .9997 are both 1, and the first goes first."""
    near = torch.full((3, V), -1e9)
    near[1, 3], near[2, 3], near[1:, 4] = 7.5, 8.0, 0.0

    def half(input_ids, position_ids, attention_mask):
        return near[position_ids].bfloat16()

    options = {"skip_threshold": 1.0, "alpha": 1.0, **PROBABILITY}
    assert steps_of(half, "lopa", 2, **options) == [2, 1]
    assert steps_of(half, "lopa", 2, parity="lopa", **options) == [1, 2]
