# SPDX-License-Identifier: Apache-2.0
"""`lopa`: several blocks open at once, and branches that try a token ahead (LoPA on D2F's walk)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..ops import BRANCH, CONFIDENT, CONVERGED, FORCED, PADDING, Superposed
from ..statistics import RowStatistics
from .base import FULL_ATTENTION, NEW_TOKENS, Decision, Strategy, View, check_choice, check_count, check_range, ranks
from .confidence import CONFIDENCES, confidence

if TYPE_CHECKING:
    from ..canvas import Canvas

__all__ = ["Lopa"]


@dataclass(frozen=True)
class Lopa(Strategy):
    """Walk: the canvas ends behind the last open block. Before a forward one block is appended if the last one's filled
    share is at least `add_threshold` (and no EOS is written that would end the sample). Then in every open block all
    masks with probability > skip_threshold are committed; where that is none, the one of highest confidence, in the
    first block and in blocks behind one whose filled share is at least `done_threshold`.

    Branches: each is the canvas with one more token written, the `branches` of highest confidence that the forward
    before left masked. One superposed forward evaluates all: branches are rows of the blocks that were not yet clean in
    the forward before, and share what is in front of those. The sequence of highest score is walked on: alpha times
    the written token's confidence (1 for the canvas itself) plus 1 - alpha times the mean of the lowest `branch_top_p`
    of its masks' confidences; 1 for a branch without masks. A tie goes to the earlier branch, and to the canvas last.
    """

    add_threshold: float = 0.1
    """Filled share of the last block from which another is appended, in [0, 1]."""
    done_threshold: float = 0.95
    """Filled share of a block from which the next commits in every forward, in [0, 1]."""
    skip_threshold: float = 0.9
    """Probability above which a token is committed, in [0, 1]; strict."""
    confidence: str = "neg_entropy"
    """"probability", "margin" (between the two likeliest tokens) or "neg_entropy"."""
    branches: int = 2
    """How many tokens are tried ahead, at least 1."""
    branch_top_p: float = 1.0
    """Share of a branch's masks, the least confident, that its score looks at, in [0, 1]; at least one."""
    alpha: float = 0.0
    """Weight of the written token in the score, in [0, 1]."""
    parity: str | None = None
    """None, or "lopa": confidences from a softmax in the logits' dtype, after temperature, top_p and top_k."""

    name: ClassVar[str] = "lopa"
    needs: ClassVar[frozenset[str]] = frozenset({FULL_ATTENTION, NEW_TOKENS})

    def __post_init__(self) -> None:
        for option in ("add_threshold", "done_threshold", "skip_threshold", "branch_top_p", "alpha"):
            check_range(option, getattr(self, option), 0, 1)
        check_choice("confidence", self.confidence, CONFIDENCES)
        check_count("branches", self.branches)
        check_choice("parity", self.parity, (None, "lopa"))

    def start(self, canvas: Canvas) -> _State:
        return _State(canvas, self.branches)

    def max_forwards(self, canvas: Canvas) -> int | None:
        return canvas.new_tokens  # the first open block commits in every forward

    def superpose(self, view: View, state: _State) -> Superposed | None:
        state.open_blocks(view, self.add_threshold)
        return state.rows(view)

    def accept(self, stats: RowStatistics, view: View, state: _State) -> Decision:
        all_ = self._sequences(stats, view, state)
        winner, own = self._winner(all_, state)
        there = view.targets >= 0
        written = there & ~own.masked

        confident, forced = self._fill(own, view, state)
        last = written, torch.where(written, state.token.gather(1, winner.clamp(max=self.branches - 1)), own.token)
        reason = CONFIDENT * confident + FORCED * forced + CONVERGED * written
        prob = torch.where(written, state.prob.gather(1, winner.clamp(max=self.branches - 1)), own.prob.float())
        state.branch(view, own, own.masked & ~confident & ~forced)
        return Decision(last[1], reason.to(torch.int32), prob)

    def _sequences(self, stats: RowStatistics, view: View, state: _State) -> _Predictions:
        """(B, S, T) of the branches, and of the canvas as the last of the S."""
        there = view.targets >= 0
        at, row = state.where(view)
        sample, _, slot = at
        column = view.targets[sample, slot].long()
        logits = stats.forward.appended(sample, row.clamp(min=0))
        # In shifted models a row that branches share predicts the first one: for all of them the same, to the last bit.
        canvas_row = torch.zeros(there.shape, dtype=torch.int64, device=row.device)
        canvas_row.view(-1)[stats.place] = torch.arange(len(stats.place), device=row.device)
        logits = torch.where((row < 0)[:, None], stats.logits[canvas_row[sample, slot]], logits)
        top = stats.forward.predict(logits, sample, column)
        target = stats.place - stats.sample * there.shape[1]
        canvas = torch.full_like(target, self.branches)
        every = tuple(torch.cat(pair) for pair in zip(at, (stats.sample, canvas, target), strict=True))
        both = torch.cat([logits, stats.logits])
        token = torch.cat([top.top1, stats.flat(stats.top1)])
        prob = torch.cat([top.prob1, stats.flat(stats.prob1)])
        never, published = stats.forward.suppress, self.parity is not None
        if published:
            prob = confidence("probability", both, token, view, never, published=True)
        score = confidence(self.confidence, both, token, view, never, published=published)
        greedy = token
        if view.temperature > 0:
            greedy = both.float().index_fill(1, never, float("-inf")).argmax(1)

        shape = (there.shape[0], self.branches + 1, there.shape[1])
        spread = (
            _spread(t, every, shape) for t in (torch.ones_like(token, dtype=torch.bool), token, greedy, prob, score)
        )
        return _Predictions(*spread)

    def _winner(self, all_: _Predictions, state: _State) -> tuple[Tensor, _Predictions]:
        """(B, 1) the sequence of highest score, and its (B, T) predictions."""
        count = all_.masked.sum(2)
        lowest = (count.double() * self.branch_top_p).floor().clamp(min=1)
        rising = all_.confidence.double().masked_fill(~all_.masked, float("inf")).sort(2).values
        among = torch.arange(rising.shape[2], device=rising.device) < lowest[:, :, None]
        mean = rising.where(among & rising.isfinite(), 0.0).sum(2) / lowest
        sure = torch.ones_like(mean[:, :1])
        created = torch.cat([state.created, sure], 1)
        score = torch.where(count > 0, self.alpha * created + (1 - self.alpha) * mean, 1.0)
        exists = torch.cat([state.offset, torch.zeros_like(state.offset[:, :1])], 1)
        winner = (ranks(score, exists) == 0).int().argmax(1, keepdim=True)
        at = winner[:, :, None].expand(-1, 1, all_.masked.shape[2])
        return winner, _Predictions(*(t.gather(1, at)[:, 0] for t in all_))

    def _fill(self, own: _Predictions, view: View, state: _State) -> tuple[Tensor, Tensor]:
        """(B, T) what to commit for its probability, and what because its block has nothing else."""
        block, length = state.blocks(view)
        masks = torch.zeros_like(length).scatter_add_(1, block, own.masked.long())
        done = (length - masks).double() / length.clamp(min=1) >= self.done_threshold
        enabled = torch.cat([torch.ones_like(done[:, :1]), done[:, :-1]], 1)
        confident = own.masked & (own.prob > own.prob.new_tensor(self.skip_threshold))
        some = torch.zeros_like(length).scatter_add_(1, block, confident.long()) > 0
        rank = ranks(own.confidence, torch.where(own.masked, view.targets, -1)).masked_fill(~own.masked, 2**31)
        best = torch.full_like(length, 2**31).scatter_reduce_(1, block, rank, "amin")
        forced = own.masked & (rank == best.gather(1, block)) & (enabled & ~some).gather(1, block)
        return confident, forced


class _Predictions:
    """Of one sequence (B, T) or several (B, S, T): what is masked, and what is predicted there."""

    def __init__(self, masked: Tensor, token: Tensor, greedy: Tensor, prob: Tensor, confidence: Tensor) -> None:
        self.masked, self.token, self.greedy, self.prob, self.confidence = masked, token, greedy, prob, confidence

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((self.masked, self.token, self.greedy, self.prob, self.confidence))


class _State:
    """How far each sample's canvas reaches, and the branches of the coming forward."""

    def __init__(self, canvas: Canvas, branches: int) -> None:
        batch = len(canvas.sample)
        self.canvas, self.size, self.total = canvas, canvas.block_length, list(canvas.n_new)
        self.clean = [0] * batch
        """Blocks in front that had no mask before the latest forward."""
        shape = (batch, branches)
        self.offset = torch.full(shape, -1, dtype=torch.int64, device=canvas.device)
        """(B, k) generated column that a branch has written, -1 where there is none."""
        self.token, self.prob = torch.zeros_like(self.offset), torch.zeros(shape, device=canvas.device)
        self.created = torch.zeros(shape, dtype=torch.float64, device=canvas.device)
        """(B, k) confidence of the written token."""
        canvas.block_length = canvas.new_tokens  # what decides is every mask there is
        canvas.shared = [0] * batch
        canvas.reach([min(self.size, n) for n in self.total])
        canvas.enter_blocks(range(batch))

    def open_blocks(self, view: View, add_threshold: float) -> None:
        """Append blocks where there is reason to; share those that were clean in the forward just made."""
        canvas, size = self.canvas, self.size
        tokens = view.ids[:, canvas.prompt :]
        own, eos = tokens.masked_fill(~canvas.is_own(), -1), canvas.is_eos(tokens) & canvas.is_own()
        masked = torch.nn.functional.pad(own == view.spec.mask_token_id, (0, -tokens.shape[1] % size))
        table = torch.cat([eos.any(1, keepdim=True), masked.unflatten(1, (-1, size)).sum(2)], 1).tolist()
        ends, canvas.shared = [], [min(n * size, end) for n, end in zip(self.clean, canvas.n_new, strict=True)]
        for i, (has_eos, *masks) in enumerate(table):
            end = canvas.n_new[i]
            last = -(-end // size) - 1
            share = 1 - masks[last] / (end - last * size)
            closed = has_eos and view.early_stop
            ends.append(min(end + size, self.total[i]) if share >= add_threshold and not closed else end)
            self.clean[i] = next((b for b in range(last) if masks[b]), last + (not masks[last]))
        canvas.reach(ends)

    def rows(self, view: View) -> Superposed:
        """All columns behind the shared ones, once for each branch."""
        canvas, count = self.canvas, (self.offset >= 0).sum(1, keepdim=True)
        first, length = self._window()
        width = self.offset.shape[1] * int(max(e - f for e, f in zip(canvas.n_new, canvas.shared or [], strict=True)))
        index = torch.arange(width, device=first.device)
        branch, offset = index // length, first + index % length
        there = branch < count
        column = (canvas.prompt + offset).clamp(max=view.ids.shape[1] - 1)
        branch = branch.clamp(max=self.offset.shape[1] - 1)
        written = self.offset.gather(1, branch) == offset
        token = torch.where(written, self.token.gather(1, branch), view.ids.gather(1, column))
        return Superposed(
            token=torch.where(there, token, view.spec.mask_token_id),
            pos=torch.where(there, view.pos.gather(1, column), 0),
            kind=torch.where(there, BRANCH, PADDING).to(torch.int32),
            hide=torch.where(there, branch, -1).to(torch.int32),
            copy_row=torch.full((len(count), canvas.block_length), -1, dtype=torch.int32, device=first.device),
            count=(count * length)[:, 0].to(torch.int32),
        )

    def where(self, view: View) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Sample, branch and target of the n masks of all branches, and (n,) the appended rows that predict them.

        A negative row is a base row's: the one in front of the branch.
        """
        offset = view.targets.long() - self.canvas.prompt
        masked = (
            (view.targets >= 0)[:, None] & (self.offset >= 0)[:, :, None] & (offset[:, None] != self.offset[:, :, None])
        )
        sample, branch, slot = masked.nonzero().T
        first, length = (t[sample, 0] for t in self._window())
        column = view.targets[sample, slot].long()
        shift = view.spec.shift * (view.pos[sample, column] > 0)
        place = offset[sample, slot] - shift - first
        return (sample, branch, slot), torch.where(place < 0, -1, branch * length + place)

    def blocks(self, view: View) -> tuple[Tensor, Tensor]:
        """(B, T) the block of each target, and (B, blocks) the length of each open block, 0 of others."""
        ends = torch.tensor(self.canvas.n_new, device=view.targets.device)[:, None]
        count = -(-max(self.canvas.n_new) // self.size)
        start = self.size * torch.arange(count, device=ends.device)
        block = (view.targets.long() - self.canvas.prompt).clamp(min=0) // self.size
        return block, (ends - start).clamp(0, self.size)

    def branch(self, view: View, own: _Predictions, masked: Tensor) -> None:
        """Branch off, at the most confident of what is still masked."""
        confidence = own.confidence.double().masked_fill(~masked, float("-inf"))
        best = confidence.sort(dim=1, descending=True, stable=True).indices[:, : self.offset.shape[1]]
        best_of = {
            "offset": torch.where(masked, view.targets.long() - self.canvas.prompt, -1),
            "token": own.greedy,
            "prob": own.prob.float(),
            "created": own.confidence.double(),
        }
        for name, values in best_of.items():
            mine = getattr(self, name)
            fewer = torch.full_like(mine[:, best.shape[1] :], -1)  # with fewer targets than branches
            setattr(self, name, torch.cat([values.gather(1, best).to(mine.dtype), fewer], 1))

    def _window(self) -> tuple[Tensor, Tensor]:
        """(B, 1) the first column of every branch, and how many it has (at least 1, to divide by)."""
        device = self.canvas.device
        first = torch.tensor(self.canvas.shared, device=device)[:, None]
        return first, (torch.tensor(self.canvas.n_new, device=device)[:, None] - first).clamp(min=1)

    def select(self, index: Tensor) -> None:
        for name in ("offset", "token", "prob", "created"):
            setattr(self, name, getattr(self, name)[index])
        for name in ("total", "clean"):
            setattr(self, name, [getattr(self, name)[i] for i in index.tolist()])


def _spread(values: Tensor, at: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    """(n,) values to their places in a table of zeros."""
    return torch.zeros(shape, dtype=values.dtype, device=values.device).index_put_(at, values)
