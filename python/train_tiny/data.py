# SPDX-License-Identifier: Apache-2.0
"""Three families of problems in words, their answers with working, and the vocabulary they need.

    python python/train_tiny/data.py            # shows one problem of each family

Every answer is a chain: a later token follows from earlier ones, so that not all of it is known in one forward.
`story` adds up what somebody has, event by event; `code` writes a function and tests it on two inputs of its own
choice; `bill` turns an order into JSON, count or price first. A family's length depends on its prompt alone, never on
a computed value: numbers up to 99 are one token each, so that a masked token's position says what kind of token it is.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["CANVAS", "FAMILIES", "Sample", "held_out", "problem", "training_sample", "vocabulary"]

CANVAS = 96  # answer tokens and the EOS behind them; three blocks of 32
TOP = 99  # largest number that is a token
LARGEST = 60  # largest number that is a result: the fewer sums there are, the sooner they are learned
PROBLEMS = 300  # held-out problems of a family

NEW_LINE, INDENT = "\n", "\n    "  # tokens of their own, so that code reads like code

PEOPLE = {"Ann": "she", "Ben": "he", "Eva": "she", "Jack": "he", "Kate": "she", "Leo": "he", "Max": "he", "Mia": "she"}
THINGS = ("apples", "books", "cards", "coins", "eggs", "figs", "hats", "kites", "maps", "nuts", "pens", "shells")
MORE = ("buys", "finds", "gets", "wins")
LESS = ("drops", "gives", "loses", "sells")
OPENERS = ("Then", "Next", "Now")
# What functions are tested on, first and then. No number is in both, so that neither trace says anything of the other,
# and one is likely, so that it is surer than any guess at what comes out.
INPUTS = ((2,) * 8 + (1, 3), (5,) * 8 + (4, 6))


@dataclass(frozen=True)
class Sample:
    """One problem with a right answer."""

    family: str
    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    group: tuple[int, ...]
    """An answer token that is computed or chosen has a number from 1 up, the same wherever that value stands again or
    follows from the same choice; 0 for tokens that the prompt spells out."""


class _Answer:
    """Collects answer tokens."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.group: list[int] = []

    def easy(self, text: str) -> None:
        """Words that the prompt and their place determine."""
        tokens = text.split(" ")
        self.tokens += tokens
        self.group += [0] * len(tokens)

    def work(self, value: object, again: int | None = None) -> int:
        """A value that has to be computed or chosen; `again` is the group of a value that is repeated. Its group."""
        group = again or max(self.group, default=0) + 1
        self.tokens.append(str(value))
        self.group.append(group)
        return group


def story(rng: random.Random, events: int) -> Sample:
    """Ben has 16 books. He buys 7. ... -> each event with its sum, then the number that is left."""
    name, thing = rng.choice(list(PEOPLE)), rng.choice(THINGS)
    who = PEOPLE[name]
    have = rng.randint(5, 30)
    prompt = f"{name} has {have} {thing} ."
    answer = _Answer()
    result = None
    for _ in range(events):
        amount = rng.randint(2, 9)
        up = have < 12 or (have <= 40 and rng.random() < 0.5)
        verb, sign, after = (rng.choice(MORE), "+", have + amount) if up else (rng.choice(LESS), "-", have - amount)
        prompt += f" {who.capitalize()} {verb} {amount} ."
        answer.work(rng.choice(OPENERS))
        answer.easy(f"{who} {verb} {amount} , so")
        answer.work(have, again=result)
        answer.easy(f"{sign} {amount} =")
        result = answer.work(after)
        answer.easy(".")
        have = after
    answer.easy("Answer :")
    answer.work(have, again=result)
    answer.easy(f"{thing} .")
    prompt += f" How many {thing} does {name} have ?"
    return _sample("story", prompt, answer)


def code(rng: random.Random, operations: int) -> Sample:
    """Write a function that adds 3, doubles it, ... -> the function, and two inputs traced and asserted."""
    while True:
        steps = [_step(rng) for _ in range(operations)]
        if all(0 <= value <= LARGEST for x in range(1, 10) for value in _trace(steps, x)):
            break
    prompt = "Write a function that"
    answer = _Answer()
    answer.easy("def f ( x ) : INDENT")
    for words, sign, amount in steps:
        prompt += f" {words} ,"
        answer.easy(f"x = x {sign} {amount} INDENT")
    answer.easy("return x")
    for x in map(rng.choice, INPUTS):
        answer.easy("NEWLINE #")
        given = answer.work(x)
        values = _trace(steps, x)
        for value in values:
            answer.easy("->")
            result = answer.work(value)
        answer.easy("NEWLINE assert f (")
        answer.work(x, again=given)
        answer.easy(") ==")
        answer.work(values[-1], again=result)
    answer.tokens = [{"INDENT": INDENT, "NEWLINE": NEW_LINE}.get(token, token) for token in answer.tokens]
    prompt += " and test it twice ."
    return _sample("code", prompt, answer)


def _step(rng: random.Random) -> tuple[str, str, int]:
    """What the sentence says, the operator, its operand."""
    kind = rng.choice(("adds", "adds", "subtracts", "subtracts", "doubles", "triples"))
    if kind in ("doubles", "triples"):
        return f"{kind} it", "*", 2 if kind == "doubles" else 3
    amount = rng.randint(1, 9)
    return f"{kind} {amount}", "+" if kind == "adds" else "-", amount


def _trace(steps: list[tuple[str, str, int]], x: int) -> list[int]:
    values = []
    for _, sign, amount in steps:
        x = {"+": x + amount, "-": x - amount, "*": x * amount}[sign]
        values.append(x)
    return values


def bill(rng: random.Random, n: int) -> Sample:
    """Ben buys 2 apples at 3, 4 pens at 5, ... -> JSON with the cost of each item and the running sum."""
    while True:
        items = [(thing, rng.randint(2, 5), rng.randint(2, 9)) for thing in rng.sample(THINGS, n)]
        if sum(count * price for _, count, price in items) <= LARGEST:
            break
    order = " , ".join(f"{count} {thing} at {price}" for thing, count, price in items)
    prompt = f"{rng.choice(list(PEOPLE))} buys {order} . Write the bill as JSON ."
    answer = _Answer()
    answer.easy('{ "items": [')
    total = 0
    for i, (thing, count, price) in enumerate(items):
        total += count * price
        answer.easy(f'{{ "item": " {thing} " ,')
        # Either may come first; the two keys are one choice.
        (key, value), (other, other_value) = rng.sample([("count", count), ("price", price)], 2)
        choice = answer.work(f'"{key}":')
        answer.easy(f"{value} ,")
        answer.work(f'"{other}":', again=choice)
        answer.easy(f'{other_value} , "cost":')
        answer.work(count * price)
        answer.easy(', "sum":')
        running = answer.work(total)
        answer.easy("} ," if i < n - 1 else "} ]")
    answer.easy(', "total":')
    answer.work(total, again=running)
    answer.easy("}")
    return _sample("bill", prompt, answer)


def _sample(family: str, prompt: str, answer: _Answer) -> Sample:
    if len(answer.tokens) >= CANVAS:
        raise ValueError(f"{family}: an answer of {len(answer.tokens)} tokens leaves no EOS on a canvas of {CANVAS}")
    return Sample(family, tuple(prompt.split(" ")), tuple(answer.tokens), tuple(answer.group))


FAMILIES: dict[str, Callable[[random.Random, int], Sample]] = {"story": story, "code": code, "bill": bill}

SIZES = {"story": (5, 6), "code": (3, 4), "bill": (3, 4)}  # events, operations, items of a problem


def problem(split: str, family: str, number: int | str, sizes: tuple[int, int] | None = None) -> Sample:
    """Sample `number` of a family, as large as SIZES or `sizes` says; splits draw from seeds of their own."""
    rng = random.Random(f"{split}/{family}/{number}")
    return FAMILIES[family](rng, rng.randint(*(sizes or SIZES[family])))


@functools.cache
def held_out() -> dict[str, list[Sample]]:
    """The problems that measure the model: PROBLEMS of each family, no prompt twice."""
    found: dict[str, list[Sample]] = {}
    for family in FAMILIES:
        unique: dict[tuple[str, ...], Sample] = {}
        number = 0
        while len(unique) < PROBLEMS:
            sample = problem("test", family, number)
            unique.setdefault(sample.prompt, sample)
            number += 1
        found[family] = list(unique.values())
    return found


@functools.cache
def _closed_prompts() -> frozenset[tuple[str, ...]]:
    return frozenset(sample.prompt for samples in held_out().values() for sample in samples)


def drill(seed: int, number: int, tokens: int) -> Sample:
    """Nothing but sums, differences and products, in training only: many results a sequence, none said twice."""
    rng = random.Random(f"drill-{seed}/{number}")
    answer = _Answer()
    while len(answer.tokens) + 6 < tokens:
        sign = rng.choice("++--*")
        if sign == "*":
            a, b = rng.choice([(rng.randint(2, 30), rng.randint(2, 3)), (rng.randint(2, 5), rng.randint(2, 9))])
        elif rng.random() < 0.7:
            a, b = rng.randint(0, LARGEST), rng.randint(1, 9)
        else:
            a, b = rng.randint(4, LARGEST), rng.randint(4, 45)
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        if 0 <= result <= LARGEST:
            answer.easy(f"{a} {sign} {b} =")
            answer.work(result)
            answer.easy(".")
    return Sample("drill", (), tuple(answer.tokens), tuple(answer.group))


def training_sample(
    seed: int, number: int, largest: int | None = None, families: Sequence[str] = tuple(FAMILIES)
) -> Sample:
    """Training sample `number`: families in turn, held-out prompts passed over.

    `largest` makes problems of 1 up to so many events, operations or items; None makes them as large as SIZES says,
    one in five smaller.
    """
    family = families[number % len(families)]
    least, most = SIZES[family]
    if largest is not None:
        least, most = 1, min(largest, most)
    elif random.Random(f"size/{seed}/{number}").random() < 1 / 5:
        least, most = 1, least - 1
    tries = (problem(f"train-{seed}", family, f"{number}.{i}", (least, most)) for i in itertools.count())
    return next(sample for sample in tries if sample.prompt not in _closed_prompts())


def vocabulary() -> dict[str, int]:
    """Every word the families can write, numbers, and the three special tokens at 0, 1 and 2."""
    words = {str(number) for number in range(TOP + 1)}
    words |= {*PEOPLE, *THINGS, *MORE, *LESS, *OPENERS, NEW_LINE, INDENT}
    words |= {form for who in PEOPLE.values() for form in (who, who.capitalize())}
    for family in FAMILIES:
        for index in range(300):
            sample = problem("vocabulary", family, index)
            words |= {*sample.prompt, *sample.answer}
    return {token: i for i, token in enumerate(["[PAD]", "[MASK]", "[EOS]", *sorted(words)])}


if __name__ == "__main__":
    print(f"{len(vocabulary())} words")
    for family in FAMILIES:
        sample = problem("test", family, 0)
        print(f"\n{family}, {len(sample.answer)} answer tokens\n{' '.join(sample.prompt)}\n{' '.join(sample.answer)}")
