# SPDX-License-Identifier: Apache-2.0
"""LEAP decoding of ONE sample, written from the specification (method.md) and from nothing else.

Python loops, a dense mask, no cache. It shares no code with the package: tests compare the package with it.
Numbers in comments are sections of method.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]

BASE, COPY, CANDIDATE = 0, 1, 2


@dataclass
class OracleResult:
    tokens: list[int]  # the generated ids, after the EOS rule 6.2
    steps: list[int]  # at which forward a position was committed, from 1; 0 = never
    reasons: list[str]  # "confident", "converged", "forced", "" = never committed
    nfe: int
    token_forwards: int
    appended: list[int] = field(default_factory=list)  # appended rows of each forward


class Row(NamedTuple):
    """One row of the superposed sequence (3)."""

    kind: int
    token: int
    pos: int
    hide: int  # -1 = none


@dataclass(frozen=True)
class Switches:
    """The switches of section 4, and the length of the blocks of a block-causal model (0 = full attention)."""

    copy_sees_original: bool
    copies_see_copies: bool
    candidates_see_candidates: bool
    candidates_see_copies: bool
    block_causal: int


def float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def first_argmax(values: list[float]) -> int:
    """Index of the highest value, the first one on a tie."""
    best = 0
    for index in range(len(values)):
        if values[index] > values[best]:
            best = index
    return best


def sees(rows: list[Row], query: int, key: int, switches: Switches) -> bool:
    """Section 4: may row `query` see row `key`?"""
    a, b = rows[query], rows[key]
    if query == key:
        return True
    # Block-causal models: no row, base or appended, sees a row of a later block.
    if switches.block_causal > 0 and b.pos // switches.block_causal > a.pos // switches.block_causal:
        return False
    if a.kind == BASE:
        return b.kind == BASE
    if a.kind == COPY:
        if b.kind == BASE:
            own_base_row = b.pos == a.pos
            return switches.copy_sees_original if own_base_row else True
        if b.kind == CANDIDATE:
            return b.pos != a.hide
        return switches.copies_see_copies and b.pos != a.pos
    # a is a candidate
    if b.kind == BASE:
        return True
    if b.kind == CANDIDATE:
        return switches.candidates_see_candidates and b.pos != a.hide
    return switches.candidates_see_copies and b.pos != a.pos


def visibility(rows: list[Row], switches: Switches) -> Tensor:
    """The dense mask (1, 1, R, R), True = visible."""
    number = len(rows)
    mask = [[sees(rows, query, key, switches) for key in range(number)] for query in range(number)]
    return torch.tensor(mask, dtype=torch.bool).view(1, 1, number, number)


def statistics(logits: Tensor, banned: Sequence[int]) -> tuple[list[list[float]], list[list[float]]]:
    """(R, V) logits -> float32 logits with banned ids at -inf, and their softmax rounded to float32 (1)."""
    values = logits.float().clone()
    for token in banned:
        values[:, token] = float("-inf")
    probabilities = torch.softmax(values.double(), dim=-1).float()
    return values.tolist(), probabilities.tolist()


def candidates_of(logits: list[float], probabilities: list[float], eta: float) -> list[int]:
    """Section 2: tokens with p >= eta, by logit and then by id, at most K."""
    at_most = min(len(logits), math.floor((1 + 1e-5) / eta))
    tokens = [token for token in range(len(logits)) if probabilities[token] >= eta]
    tokens.sort(key=lambda token: (-logits[token], token))
    return tokens[:at_most]


def blocks_of(prompt_length: int, length: int, block_length: int, block_causal: int) -> list[list[int]]:
    """Positions to decode, block by block.

    Block-causal: blocks lie at multiples of block_length in position; the first one may begin with the tail of the
    prompt, which is not decoded. Otherwise the first block starts where the prompt ends.
    """
    start = prompt_length
    if block_causal > 0:
        start = prompt_length // block_length * block_length
    blocks = []
    while start < length:
        end = min(start + block_length, length)
        blocks.append([position for position in range(start, end) if position >= prompt_length])
        start += block_length
    return [block for block in blocks if block]


def runs_of(masked: list[bool], run_length: int | None, block_causal: int) -> list[list[int]]:
    """Infilling (1): runs of positions from the first mask; from multiples of run_length in block-causal models.

    None is one run over everything, or block by block. Runs without masks are left out.
    """
    length = len(masked)
    start = 0 if block_causal > 0 else masked.index(True)
    step = run_length or block_causal or length
    runs = [list(range(first, min(first + step, length))) for first in range(start, length, step)]
    return [run for run in runs if any(masked[position] for position in run)]


@torch.no_grad()
def decode_one(
    forward: Forward,
    prompt: list[int],
    *,
    mask_id: int,
    eos_ids: Sequence[int] = (),
    pad_id: int | None = None,
    max_new_tokens: int = 0,
    block_length: int | None = 32,
    infill: bool = False,
    strategy: str = "leap",
    threshold: float = 0.9,
    base_entropy: float | None = None,
    tau: float = 0.7,
    eta: float = 0.2,
    keep_confident: bool = True,
    copy_threshold: float = 0.0,
    require_lookahead: bool = False,
    copy_sees_original: bool = True,
    copies_see_copies: bool = True,
    candidates_see_candidates: bool = True,
    candidates_see_copies: bool = True,
    suppress: Sequence[int] = (),
    early_stop: bool = True,
    free_first_token: bool = False,
    edit_threshold: float | None = None,
    edit_forwards: int = 16,
    shift: int = 0,
    block_causal: int = 0,
) -> OracleResult:
    """Decode one sample. `forward(input_ids (1, R), position_ids (1, R), mask (1, 1, R, R)) -> logits (1, R, V)`.

    strategy: "leap", "threshold" (confidence > threshold), or "full" (one token a forward). base_entropy: the first set
    of the decision is { entropy <= base_entropy } instead of { confidence > threshold } (5.5).
    infill: decode the masks inside the prompt instead of new ones behind it; an EOS then ends nothing.
    edit_threshold: LLaDA2.1's editing (decoders.md 2.16), by base rows, on either strategy.
    """
    if strategy not in ("leap", "threshold", "full"):
        raise ValueError(f"unknown strategy {strategy!r}")
    if shift not in (0, 1):
        raise ValueError(f"shift is 0 or 1, not {shift}")
    if block_causal > 0 and block_length is not None and block_causal % block_length != 0:
        raise ValueError(f"block_length {block_length} must equal or divide block_causal {block_causal}")

    phi, tau, eta, kappa = float32(threshold), float32(tau), float32(eta), float32(copy_threshold)
    switches = Switches(
        copy_sees_original, copies_see_copies, candidates_see_candidates, candidates_see_copies, block_causal
    )
    banned = [mask_id, *suppress]
    start = len(prompt)
    length = start + max_new_tokens
    canvas = list(prompt) + [mask_id] * max_new_tokens
    masked = [False] * start + [True] * max_new_tokens  # mask ids inside the prompt stay as they are
    if infill:
        start, length, canvas, early_stop = 0, len(prompt), list(prompt), False
        masked = [token == mask_id for token in prompt]
    steps = [0] * length
    reasons = [""] * length
    nfe = 0
    token_forwards = 0
    appended: list[int] = []

    # Base rows of the preceding forward of this sample: row number = position. Empty before the first forward (2.1).
    previous_logits: list[list[float]] = []
    previous_probabilities: list[list[float]] = []

    if infill:
        blocks = runs_of(masked, block_length, block_causal) if any(masked) else []
    else:
        assert block_length is not None
        blocks = blocks_of(start, length, block_length, block_causal)
    for block in blocks:
        forwards_when_clean = 0
        while True:
            clean = not any(masked[position] for position in block)
            if clean and (edit_threshold is None or forwards_when_clean == edit_forwards):
                break
            forwards_when_clean += clean
            # Tokens of ours that the block holds before this forward: not the prompt's, not those given with the masks.
            editable = [position for position in block if steps[position] > 0]
            targets = [position for position in block if masked[position]]

            # --- Section 2: candidates, from the preceding forward's base rows, for positions masked now.
            candidates: dict[int, list[int]] = {}
            rows_needed = [max(position - shift, 0) for position in block]
            computed_completely = all(row < len(previous_logits) for row in rows_needed)
            if strategy == "leap" and computed_completely:
                for target in targets:
                    row = max(target - shift, 0)
                    found = candidates_of(previous_logits[row], previous_probabilities[row], eta)
                    if found:
                        candidates[target] = found
            if len(targets) <= 1:  # 2.3
                candidates = {}

            # --- Section 3: the rows. Base rows: all, or those of block-causal blocks up to the current one.
            base_rows = length
            if block_causal > 0:
                base_rows = min(length, (block[0] // block_causal + 1) * block_causal)
            rows = [Row(BASE, canvas[position], position, -1) for position in range(base_rows)]
            copy_row: dict[int, int] = {}  # target -> number of its copy's row
            if candidates:  # 2.3: nothing appended without candidates
                for target in targets:
                    if target - shift < 0:  # read at row 0, never gets a copy
                        continue
                    copy_row[target] = len(rows)
                    rows.append(Row(COPY, canvas[target - shift], target - shift, target))
                for target in targets:
                    for token in candidates.get(target, []):
                        rows.append(Row(CANDIDATE, token, target, target))

            # --- The forward.
            mask = visibility(rows, switches)
            logits = forward(
                torch.tensor([[row.token for row in rows]], dtype=torch.int64),
                torch.tensor([[row.pos for row in rows]], dtype=torch.int64),
                mask,
            )
            row_logits, row_probabilities = statistics(logits[0], banned)
            nfe += 1
            token_forwards += len(rows)
            appended.append(len(rows) - base_rows)

            # --- Section 1: prediction y and confidence c of every target.
            y: dict[int, int] = {}
            c: dict[int, float] = {}
            for target in targets:
                row = max(target - shift, 0)
                y[target] = first_argmax(row_logits[row])
                c[target] = row_probabilities[row][y[target]]

            # --- Section 5: the decision.
            accept: dict[int, str] = {}
            if strategy != "full":
                for target in targets:
                    confident = c[target] > phi
                    if base_entropy is not None:  # 5.5
                        probabilities = row_probabilities[max(target - shift, 0)]
                        entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
                        confident = entropy <= base_entropy
                    if copy_row and not keep_confident:  # 5.1; a plain forward always uses the threshold rule
                        confident = False
                    converged = False
                    if target in copy_row:
                        row = copy_row[target]
                        agrees = first_argmax(row_logits[row]) == y[target]
                        sure = row_probabilities[row][y[target]] >= kappa  # 5.3
                        converged = agrees and c[target] >= tau and sure
                        if require_lookahead:
                            sees_candidate = False
                            for key in range(base_rows, len(rows)):
                                elsewhere = rows[key].kind == CANDIDATE and rows[key].pos != target
                                if elsewhere and mask[0, 0, row, key]:
                                    sees_candidate = True
                            converged = converged and sees_candidate
                    if confident:  # 5.4: confident before converged before forced
                        accept[target] = "confident"
                    elif converged:
                        accept[target] = "converged"
            if not accept and targets:  # 5.2: the highest confidence, the lowest position on a tie
                best = targets[0]
                for target in targets:
                    if c[target] > c[best]:
                        best = target
                accept[best] = "forced"
            if free_first_token:  # read in the block before, which is finished
                for target in targets:
                    if target > 0 and target % block_causal == 0 and target not in accept:
                        accept[target] = "forced"
            for target, reason in accept.items():
                canvas[target] = y[target]
                masked[target] = False
                steps[target] = nfe
                reasons[target] = reason
            edited = False
            if edit_threshold is not None:
                for position in editable:
                    row = max(position - shift, 0)
                    token = first_argmax(row_logits[row])
                    if token != canvas[position] and row_probabilities[row][token] > float32(edit_threshold):
                        canvas[position], steps[position], reasons[position] = token, nfe, "confident"
                        edited = True

            previous_logits = row_logits[:base_rows]
            previous_probabilities = row_probabilities[:base_rows]
            if clean and not edited:
                break

        # --- 6.2: the block is finished. Stop at the first EOS, and fill everything after it.
        eos_positions = [position for position in block if canvas[position] in eos_ids]
        if early_stop and eos_positions:
            first = eos_positions[0]
            filler = canvas[first] if pad_id is None else pad_id
            for position in range(first + 1, length):
                canvas[position] = filler
            break

    return OracleResult(canvas[start:], steps[start:], reasons[start:], nfe, token_forwards, appended)
