# SPDX-License-Identifier: Apache-2.0
"""Every decoder but LEAP for ONE sample, written from its published description and from nothing else.

Python loops, dense masks, a whole forward a step, probabilities in float64 rounded to float32 at the end. It shares no
code with the package: tests compare the package with it. LEAP is in oracle.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
WORD = 2**32 - 1


class Sample:
    """One canvas, and how it is read and written. Decoders below take one and fill it."""

    def __init__(
        self,
        forward: Forward,
        prompt: list[int],
        *,
        mask_id: int,
        max_new_tokens: int,
        block_length: int = 32,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        suppress: Sequence[int] = (),
        early_stop: bool = True,
        shift: int = 0,
        seed: int = 0,
    ) -> None:
        self.forward, self.start, self.length = forward, len(prompt), len(prompt) + max_new_tokens
        self.canvas = [*prompt, *[mask_id] * max_new_tokens]
        self.masked = [False] * self.start + [True] * max_new_tokens
        self.block_length, self.mask_id, self.shift, self.seed = block_length, mask_id, shift, seed
        self.banned, self.eos_ids, self.pad_id, self.early_stop = [mask_id, *suppress], eos_ids, pad_id, early_stop
        self.steps = [0] * self.length
        self.nfe = 0
        self.logits = torch.zeros(0)  # of the latest forward, float64: row i is what predicts position i

    def run(self) -> Tensor:
        """One forward of the whole canvas: (L, V) probabilities, row i for position i."""
        ids = torch.tensor([self.canvas], dtype=torch.int64)
        self.nfe += 1
        return self.read(self.forward(ids, torch.arange(self.length)[None], dense(self.length))[0])

    def read(self, logits: Tensor) -> Tensor:
        """Shift, ban, softmax in float64, round to float32 (kept in float64)."""
        self.raw = torch.cat([logits[:1], logits[:-1]]) if self.shift else logits
        self.logits = self.raw.double().clone()
        self.logits[:, self.banned] = float("-inf")
        self.exact = torch.softmax(self.logits, 1)
        self.with_mask = self.raw.double().clone()  # the mask id allowed, suppressed ones not
        self.with_mask[:, [i for i in self.banned if i != self.mask_id]] = float("-inf")
        return self.exact.float().double()

    def blocks(self) -> list[range]:
        stops = range(self.start, self.length, self.block_length)
        return [range(s, min(s + self.block_length, self.length)) for s in stops]

    def masks(self, positions: Sequence[int]) -> list[int]:
        return [i for i in positions if self.masked[i]]

    def commit(self, position: int, token: int) -> None:
        assert self.masked[position]
        self.canvas[position], self.masked[position], self.steps[position] = token, False, self.nfe

    def remask(self, position: int) -> None:
        assert position >= self.start
        self.canvas[position], self.masked[position], self.steps[position] = self.mask_id, True, 0

    def ends(self, positions: Sequence[int]) -> bool:
        """Whether an EOS in a finished block ends the sample; what stands behind it is then padding."""
        found = [i for i in positions if self.canvas[i] in self.eos_ids]
        if not found or not self.early_stop:
            return False
        first = min(i for i in range(self.start, self.length) if self.canvas[i] in self.eos_ids)
        fill = self.canvas[first] if self.pad_id is None else self.pad_id
        self.canvas[first + 1 :] = [fill] * (self.length - first - 1)
        return True

    @property
    def tokens(self) -> list[int]:
        return self.canvas[self.start :]


def dense(length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool)


def first_argmax(row: Tensor) -> int:
    """Lowest id of the highest value."""
    return int((row == row.max()).nonzero()[0])


def by_falling(positions: Sequence[int], value: Callable[[int], float]) -> list[int]:
    """Positions by falling value, the lowest position first on a tie."""
    return sorted(positions, key=lambda i: (-value(i), i))


def evenly(masks: int, steps: int) -> list[int]:
    """32 masks in 5 steps: 7, 7, 6, 6, 6."""
    shares = [masks // steps] * steps
    for i in range(masks % steps):
        shares[i] += 1
    return shares


def hashed(seed: int, step: int, position: int, token: int) -> float:
    """The package's uniform numbers, in Python's integers."""

    def mix(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) & WORD
        x = ((x ^ x >> 15) * 0x846CA68B) & WORD
        return x ^ x >> 16

    key = mix(seed & WORD ^ 0x9E3779B9)
    key = mix(key ^ mix(seed >> 32 & WORD))
    key = mix(key + step * 0x85EBCA6B & WORD)
    key = mix(key + position * 0xC2B2AE35 & WORD)
    return ((mix(key + token * 0x27D4EB2F & WORD) >> 9) + 0.5) / 2**23


# --- full -------------------------------------------------------------------------------------------------------------


def full(
    sample: Sample,
    *,
    steps: int | None = None,
    remasking: str = "low_confidence",
    defer_tokens: Sequence[int] = (),
    parity: str | None = None,
) -> None:
    blocks = sample.blocks()
    for block in blocks:
        shares = evenly(len(block), steps // len(blocks) if steps else len(block))
        for share in shares:
            if share == 0 and parity is None:
                break
            p = sample.run()
            y = {i: first_argmax(p[i]) for i in sample.masks(block)}
            score = {i: float(p[i, y[i]]) for i in y}
            if remasking == "random":
                score = {i: hashed(sample.seed, sample.nfe, i, -1) for i in y}
                if parity:  # for the whole canvas, from torch's generator
                    drawn = torch.rand(1, sample.length)[0]
                    score = {i: float(drawn[i]) for i in y}
            for i in y:
                if defer_tokens and parity and remasking != "random":
                    without = sample.logits[i].clone()
                    without[list(defer_tokens)] = float("-inf")
                    score[i] = float(torch.softmax(without, 0)[y[i]].float())
                elif y[i] in defer_tokens and not parity:
                    score[i] = float("-inf")
            for i in by_falling(list(y), lambda i, score=score: score[i])[:share]:
                sample.commit(i, y[i])
        if sample.ends(block):
            return


# --- rules that look at one forward -----------------------------------------------------------------------------------


def by_block(sample: Sample, choose: Callable[[list[int], Tensor], list[int]]) -> None:
    """Fill block after block: what `choose(masked positions, probabilities)` says, with the likeliest tokens."""
    for block in sample.blocks():
        while masks := sample.masks(block):
            p = sample.run()
            for i in choose(masks, p):
                sample.commit(i, first_argmax(p[i]))
        if sample.ends(block):
            return


def float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def threshold(
    sample: Sample,
    *,
    threshold: float = 0.9,
    parity: str | None = None,
    edit_threshold: float | None = None,
    edit_forwards: int = 16,
) -> None:
    if edit_threshold is not None:
        assert parity is None
        with_edits(sample, threshold, edit_threshold, edit_forwards)
        return

    def choose(masks: list[int], p: Tensor) -> list[int]:
        c = {i: float((sample.exact if parity else p)[i].max()) for i in masks}
        order = by_falling(masks, c.get)
        if parity:
            return [i for n, i in enumerate(order) if n == 0 or c[i] >= threshold]
        return [i for n, i in enumerate(order) if n == 0 or c[i] > float32(threshold)]

    by_block(sample, choose)


def with_edits(sample: Sample, threshold: float, edit_threshold: float, edit_forwards: int) -> None:
    """LLaDA2.1: after the masks of a block are gone, up to `edit_forwards` forwards more, until one changes nothing."""
    for block in sample.blocks():
        post, done = 0, False
        while not done:
            masks = sample.masks(block)
            if not masks:
                post += 1
                if post > edit_forwards:
                    break
            held = [i for i in block if i not in masks]
            p = sample.run()
            y = {i: first_argmax(p[i]) for i in block}
            sure = [i for i in masks if p[i, y[i]] > float32(threshold)]
            for i in sure or by_falling(masks, lambda i, p=p, y=y: float(p[i, y[i]]))[:1]:
                sample.commit(i, y[i])
            changed = [i for i in held if y[i] != sample.canvas[i] and p[i, y[i]] > float32(edit_threshold)]
            for i in changed:
                sample.canvas[i], sample.steps[i] = y[i], sample.nfe
            done = not masks and not changed
        if sample.ends(block):
            return


def factor(sample: Sample, *, factor: float = 1.0, parity: str | None = None) -> None:
    def choose(masks: list[int], p: Tensor) -> list[int]:
        c = {i: float((sample.exact if parity else p)[i].max()) for i in masks}
        order = by_falling(masks, c.get)
        kept = 1
        while kept < len(order):
            limit = 1 - factor / (kept + 2)
            if c[order[kept]] < (limit if parity else float32(limit)):
                break
            kept += 1
        if parity and kept == len(order) - 1:  # the only failing rank is the last one
            kept += 1
        return order[:kept]

    by_block(sample, choose)


def entropy_of(row: Tensor, epsilon: float = 0.0) -> float:
    """Of a row of float64 probabilities, in nats."""
    return -float(sum(q * math.log(q + epsilon) for q in row.tolist() if q > 0))


def entropy(sample: Sample, *, gamma: float = 0.1) -> None:
    def choose(masks: list[int], p: Tensor) -> list[int]:
        h = {i: float32(entropy_of(sample.exact[i])) for i in masks}
        order = by_falling(masks, lambda i: -h[i])
        kept = 1
        while kept < len(order) and sum(h[i] for i in order[:kept]) <= gamma:
            kept += 1
        return order[:kept]

    by_block(sample, choose)


def entropy_threshold(sample: Sample, *, threshold: float = 0.5) -> None:
    def choose(masks: list[int], p: Tensor) -> list[int]:
        h = {i: float32(entropy_of(sample.exact[i], 1e-12)) for i in masks}
        order = by_falling(masks, lambda i: -h[i])
        return [i for n, i in enumerate(order) if n == 0 or h[i] <= threshold]

    by_block(sample, choose)


# --- rules with a memory ----------------------------------------------------------------------------------------------


def klass(
    sample: Sample,
    *,
    conf_threshold: float = 0.9,
    kl_threshold: float = 0.01,
    history: int = 2,
    steps: int | None = None,
    select: str = "all",
    parity: str | None = None,
) -> None:
    """State is kept for every position and for the whole run, as the public code does."""
    blocks = sample.blocks()
    before = None
    kept: list[list[float]] = [[math.inf] * history for _ in range(sample.length)]
    epsilon = 1e-12 if parity else 0.0
    for block in blocks:
        per_block = steps // len(blocks) if steps else len(block)
        shares = evenly(len(block), per_block)
        j = 0
        while masks := sample.masks(block):
            p = sample.run()
            exact = sample.exact
            for i in range(sample.start, sample.length):
                kl = math.inf
                if before is not None:
                    kl = sum(
                        a * (math.log(a + epsilon) - math.log(b + epsilon))
                        for a, b in zip(exact[i].tolist(), before[i].tolist(), strict=True)
                        if a > 0
                    )
                kept[i] = [*kept[i][1:], kl if parity else float32(kl)]
            before = exact
            c = {i: float(exact[i].max()) for i in masks}
            limit = kl_threshold if parity else float32(kl_threshold)
            stable = [i for i in masks if all(kl < limit for kl in kept[i]) and j >= history - 1]
            ready = [i for i in stable if c[i] > conf_threshold]
            if ready and select != "all":
                preference = {
                    "confident": c.get,
                    "kl": lambda i: -kept[i][-1],
                    "random": lambda i: hashed(sample.seed, sample.nfe, i, -1),
                }
                ready = by_falling(ready, preference[select])[:1]
            if not ready:
                share = shares[j] if j < per_block else len(block) // per_block
                ready = by_falling(masks, c.get)[: max(share, 1)]
            for i in ready:
                sample.commit(i, first_argmax(p[i]))
            j += 1
        if sample.ends(block):
            return


def prophet(
    sample: Sample,
    *,
    answer_start: int | None = None,
    window: int = 5,
    limits: Sequence[float] = (7.5, 5.0, 2.5),
    constraints: dict[int, int] | None = None,
    steps: int | None = None,
    parity: str | None = None,
) -> None:
    for offset, token in (constraints or {}).items():
        sample.canvas[sample.start + offset], sample.masked[sample.start + offset] = token, False
    answer = range(sample.start, sample.length)
    if answer_start is not None:
        answer = range(sample.start + answer_start, sample.start + answer_start + window)
    blocks = sample.blocks()
    new = sample.length - sample.start
    per_block = steps // len(blocks) if steps else sample.block_length
    for number, block in enumerate(blocks):
        masks = sample.masks(block)
        shares = evenly(len(masks), per_block)
        for j in range(per_block):
            if not sample.masks(block):
                break
            p = sample.run()
            y = {i: first_argmax(p[i]) for i in range(sample.start, sample.length)}
            top = [sample.logits[i].topk(2).values.tolist() for i in answer]
            gap = sum(a - b for a, b in top) / len(top)
            progress = (number * per_block + j + 1) / (steps or new)
            if gap >= limits[0 if progress < 0.33 else 1 if progress < 0.67 else 2]:
                for i in sample.masks(range(sample.start, sample.length)):
                    sample.commit(i, y[i])
                sample.ends(block) or sample.ends(range(sample.start, sample.length))
                return
            for i in by_falling(sample.masks(block), lambda i, p=p: float(p[i].max()))[: shares[j]]:
                sample.commit(i, y[i])
        if masks and sample.ends(block):
            return


def credit(
    sample: Sample, *, threshold: float = 0.9, alpha: float = 0.7, beta: float = 0.8, gamma: float = 0.2
) -> None:
    for block in sample.blocks():
        table = {i: {} for i in block}
        while masks := sample.masks(block):
            sample.run()
            with_mask = torch.softmax(sample.with_mask, 1)
            for row in table.values():
                for token in row:
                    row[token] *= beta
            p, y = {}, {}
            for i in masks:
                best = first_argmax(with_mask[i])
                table[i][best] = table[i].get(best, 0.0) + float(with_mask[i, best]) ** gamma
                fused = sample.logits[i].clone()
                for token, amount in table[i].items():
                    fused[token] += alpha * math.log(amount + 1)
                y[i] = first_argmax(fused)
                p[i] = float(torch.softmax(fused, 0)[y[i]])
            limit = min(threshold, max(p.values()) - 1e-5)
            for i in masks:
                if p[i] >= limit:
                    sample.commit(i, y[i])
        if sample.ends(block):
            return


# --- dream ------------------------------------------------------------------------------------------------------------


def dream(
    sample: Sample,
    *,
    alg: str = "origin",
    steps: int | None = None,
    eps: float = 1e-3,
    alg_temp: float | None = None,
    parity: str | None = None,
) -> None:
    blocks = sample.blocks()
    for block in blocks:
        per_block = steps // len(blocks) if steps else len(block)
        time = torch.linspace(1, eps, per_block + 1, dtype=torch.float32)
        for j in range(per_block):
            masks = sample.masks(block)
            if not masks:
                break
            p = sample.run()
            last = j == per_block - 1
            share = 1 - time[j + 1] / time[j]
            drawn = {i: hashed(sample.seed, sample.nfe, i, -1) for i in masks}
            if alg == "origin":
                chosen = [i for i in masks if last or drawn[i] < share.item()]
            else:
                count = len(masks) if last else int(torch.tensor(float(len(masks))) * share)
                chosen = by_falling(masks, dream_ranks(sample, masks, drawn, alg, alg_temp, parity).get)[:count]
            for i in chosen:
                sample.commit(i, first_argmax(p[i]))
        if sample.ends(block):
            return


def dream_ranks(
    sample: Sample,
    masks: list[int],
    drawn: dict[int, float],
    alg: str,
    alg_temp: float | None,
    parity: str | None,
) -> dict[int, float]:
    ranks = {}
    for i in masks:
        if alg == "maskgit_plus":
            value = float(sample.exact[i].max())
        elif alg == "topk_margin":
            first, second = sorted(sample.exact[i].tolist())[-2:][::-1]
            value = first - second
        else:
            value = -entropy_of(sample.exact[i], 1e-10 if parity else 0.0)
        ranks[i] = value / alg_temp - math.log(-math.log(drawn[i])) if alg_temp else value
    return ranks


# --- wino -------------------------------------------------------------------------------------------------------------


def with_shadows(sample: Sample, block: range) -> tuple[Tensor, dict[int, Tensor]]:
    """One forward of the canvas and a shadow of each position of the block: probabilities of both."""
    length, shadows = sample.length, list(block)
    ids = [*sample.canvas, *[sample.mask_id] * len(shadows)]
    rows = length + len(shadows)
    sees = torch.zeros(1, 1, rows, rows, dtype=torch.bool)
    sees[0, 0, :length, :length] = True
    for n, i in enumerate(shadows):
        for j in range(rows):
            sees[0, 0, length + n, j] = j != i
    sample.nfe += 1
    pos = torch.tensor([[*range(length), *shadows]])
    logits = sample.forward(torch.tensor([ids]), pos, sees)[0]
    behind = sample.read(logits[length:])
    return sample.read(logits[:length]), dict(zip(shadows, behind, strict=True))


def wino(sample: Sample, *, threshold: float = 0.6, threshold_back: float = 0.9) -> None:
    for block in sample.blocks():
        last, checked = 30, set()
        while masks := sample.masks(block):
            p, shadow = with_shadows(sample, block)
            order = by_falling(masks, lambda i, p=p: float(p[i].max()))
            cap = min(max(int(0.7 * len(masks)), 5), 20)
            draft = [i for i in order if float(p[i].max()) > float32(threshold)][:cap] or order[:1]
            weak = []
            if len(draft) > 1:
                q = {i: float(shadow[i][sample.canvas[i]]) for i in sorted(checked)}
                weak = [i for i in q if q[i] < float32(threshold_back)]
                if len(weak) >= last:
                    weak = sorted(weak, key=lambda i, q=q: (q[i], i))[: last - 1]
            for i in draft:
                sample.commit(i, first_argmax(p[i]))
            for i in weak:
                sample.remask(i)
            checked = (checked | set(draft)) - set(weak)
            last = len(draft)
        if sample.ends(block):
            return


# --- lopa -------------------------------------------------------------------------------------------------------------


def lopa(
    sample: Sample,
    *,
    add_threshold: float = 0.1,
    done_threshold: float = 0.95,
    skip_threshold: float = 0.9,
    confidence: str = "neg_entropy",
    branches: int = 2,
    branch_top_p: float = 1.0,
    alpha: float = 0.0,
    parity: str | None = None,
) -> None:
    """Each branch in a forward of its own, behind the rows of the canvas that it shares; that counts as one forward."""

    def measure(i: int) -> float:
        if confidence == "neg_entropy":
            return -entropy_of(sample.exact[i], 1e-10 if parity else 0.0)
        second, first = sorted(sample.exact[i].tolist())[-2:]
        return first - second if confidence == "margin" else first

    def share(block: range, masked: set[int]) -> float:
        return (len(block) - len(masked & set(block))) / len(block)

    waiting, opened, tried = sample.blocks(), [], []
    clean = 0  # blocks in front that had no mask before the latest forward
    while True:
        masked = {i for block in opened for i in block if sample.masked[i]}
        written = {sample.canvas[i] for block in opened for i in block if not sample.masked[i]}
        closed = sample.early_stop and bool(written & set(sample.eos_ids))
        if waiting and not closed and (not opened or share(opened[-1], masked) >= add_threshold):
            opened.append(waiting.pop(0))
            masked |= set(opened[-1])
        if not masked:
            sample.ends([i for block in opened for i in block])
            return
        end = opened[-1].stop
        common = sample.start + sum(len(block) for block in opened[:clean])

        sample.nfe += 1
        best = None
        for position, token, creation in [*tried, (None, None, 1.0)]:
            mine = list(sample.canvas[:end])
            still = sorted(masked - {position})
            if position is None:
                p = sample.read(sample.forward(torch.tensor([mine]), torch.arange(end)[None], dense(end))[0])
            else:
                mine[position] = token
                p = sample.read(branch_logits(sample, mine, common, end))
            values = {i: measure(i) for i in still}
            lowest = sorted(values.values())[: max(1, int(len(still) * branch_top_p))]
            score = 1.0
            if still:
                score = alpha * creation + (1 - alpha) * sum(lowest) / len(lowest)
            if best is None or score > best[0]:
                sure = {i: float((sample.exact if parity else p)[i].max()) for i in still}
                best = score, position, token, values, sure, {i: first_argmax(p[i]) for i in still}
        _, position, token, values, sure, tokens = best
        if position is not None:
            sample.commit(position, token)

        filled = set()
        for number, block in enumerate(opened):
            mine = [i for i in block if i in values]
            chosen = [i for i in mine if sure[i] > (skip_threshold if parity else float32(skip_threshold))]
            enabled = number == 0 or share(opened[number - 1], set(values)) >= done_threshold
            if not chosen and enabled:
                chosen = by_falling(mine, values.get)[:1]
            filled |= set(chosen)
        for i in filled:
            sample.commit(i, tokens[i])
        left = by_falling([i for i in values if i not in filled], values.get)[:branches]
        tried = [(i, tokens[i], values[i]) for i in left]
        clean = next((n for n, block in enumerate(opened) if masked & set(block)), len(opened))


def branch_logits(sample: Sample, mine: list[int], common: int, end: int) -> Tensor:
    """The rows of a branch from `common` on, which see themselves and the rows of the canvas in front of them."""
    ids = [*sample.canvas[:end], *mine[common:]]
    sees = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.bool)
    sees[0, 0, :end, :end] = True
    sees[0, 0, end:, :common] = True
    sees[0, 0, end:, end:] = True
    pos = torch.tensor([[*range(end), *range(common, end)]])
    logits = sample.forward(torch.tensor([ids]), pos, sees)[0]
    return torch.cat([logits[:common], logits[end:]])
