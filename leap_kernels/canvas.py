# SPDX-License-Identifier: Apache-2.0
"""`Canvas`: the sequences being denoised, and where each sample stands in its blocks.

Inside, every prompt is padded on the left, so that the generated region of all samples starts at one column and a
sample's forward does not depend on which side its prompt was padded.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .models.spec import ModelSpec
from .ops import BASE, PADDING

__all__ = ["Canvas"]


class Block(NamedTuple):
    """Positions that are decoded together."""

    start: int
    """First generated column."""
    stop: int
    """Past the last."""
    masks: int
    """How many there are to decode when a sample gets there."""


@dataclass(eq=False)
class Canvas:
    """B unfinished samples of P + N columns: prompts, then N generated columns, of which a sample may use fewer.

    Tensors live on the model's device; what the host must know to steer (block numbers, masks left) lives in lists.
    """

    ids: Tensor
    """(B, P + N) int64."""
    pos: Tensor
    """(B, P + N) int32: position of each column in its own sample, from the model's first one on; that on padding."""
    kind: Tensor
    """(B, P + N) int32: 0 base row, -1 padding."""
    step: Tensor
    """(B, N) int32: 1-based step at which a token was committed, 0 while it is masked."""
    reason: Tensor
    """(B, N) int32: why (1 confident, 2 converged, 3 forced)."""
    confidence: Tensor
    """(B, N) float32: its probability then."""
    spec: ModelSpec
    block_length: int
    """Positions of the longest block."""
    sample: list[int]
    """Index in the caller's batch."""
    n_prompt: list[int]
    """Position of the first generated column; negative where padding stands there (infilling)."""
    n_new: list[int]
    """Generated columns that belong to the sample; those behind are padding."""
    blocks: list[list[Block]]
    """The blocks of each sample, from the left."""
    block: list[int]
    """Number of the current block."""
    left: list[int]
    """Masked positions left in the current block."""
    entered: list[int]
    """Masked positions it had when the sample entered it."""
    forwards: list[int]
    """Forwards made on the current block."""
    start: Tensor
    """(B, 1) int64: first generated column of the current block, counted from P."""
    stop: Tensor
    """(B, 1) int64: past its last."""
    shared: list[int] | None = None
    """Generated columns in front, counted from P, that branches share with the base rows: they see no later base row.
    None for rules without branches."""
    _seen: tuple[Tensor, Tensor, Tensor] | None = None
    """What `_current` found, until a token or a block changes."""

    @classmethod
    def create(cls, prompts: list[Tensor], max_new_tokens: list[int], block_length: int, spec: ModelSpec) -> Canvas:
        """A canvas of `prompts` (1-D, any lengths, on one device), each followed by its `max_new_tokens` masks.

        Blocks start where the prompt ends; in block-causal models at multiples of `block_length` in position, so that
        the tail of a prompt shares the first block.
        """
        n_prompt = [len(p) for p in prompts]
        width, device = max(n_prompt), prompts[0].device
        shape = (len(prompts), width + max(max_new_tokens))
        ids = torch.full(shape, spec.mask_token_id, dtype=torch.int64, device=device)
        fill = _filler(spec) if spec.fill_token_id is None else spec.fill_token_id
        blocks = []
        for row, prompt, new in zip(ids, prompts, max_new_tokens, strict=True):
            row[width - len(prompt) : width] = prompt
            row[width + new :] = fill
            tail = len(prompt) % block_length if spec.block_causal_length else 0
            starts = range(-tail, new, block_length)
            spans = [(max(start, 0), min(start + block_length, new)) for start in starts]
            blocks.append([Block(start, stop, stop - start) for start, stop in spans])
        longest = max(block.stop - block.start for each in blocks for block in each)
        return cls._start(ids, n_prompt, list(max_new_tokens), blocks, longest, spec)

    @classmethod
    def infill(cls, prompts: list[Tensor], run_length: int | None, spec: ModelSpec) -> Canvas:
        """A canvas of nothing but `prompts`, all of whose columns count as generated, with blocks where masks stand.

        Runs of `run_length` positions from the first mask (in block-causal models: from multiples of it), those
        without masks left out; None is one run over everything (a block, in block-causal models).
        """
        width, size = max(len(p) for p in prompts), spec.block_causal_length
        ids = torch.full((len(prompts), width), _filler(spec), dtype=torch.int64, device=prompts[0].device)
        blocks = []
        for row, prompt in zip(ids, prompts, strict=True):
            pad = width - len(prompt)
            row[pad:] = prompt
            masks = (prompt == spec.mask_token_id).nonzero()[:, 0].tolist()
            first, step = (0 if size else min(masks, default=0)), run_length or size or width
            runs = Counter((mask - first) // step for mask in masks)
            spans = [(first + n * step, min(first + (n + 1) * step, len(prompt)), count) for n, count in runs.items()]
            blocks.append([Block(pad + start, pad + stop, count) for start, stop, count in spans])
        longest = max((block.stop - block.start for each in blocks for block in each), default=1)
        n_prompt = [len(p) - width for p in prompts]  # what the position of the first generated column is
        return cls._start(ids, n_prompt, [width] * len(prompts), blocks, longest, spec)

    @classmethod
    def _start(
        cls,
        ids: Tensor,
        n_prompt: list[int],
        n_new: list[int],
        blocks: list[list[Block]],
        block_length: int,
        spec: ModelSpec,
    ) -> Canvas:
        device, (batch, total) = ids.device, ids.shape
        new = (batch, max(n_new))
        offset = torch.arange(total, device=device) - (total - max(n_new))
        first, stop = (torch.tensor(n, device=device)[:, None] for n in (n_prompt, n_new))
        pos = torch.where(offset < stop, offset + first, -1)
        canvas = cls(
            ids=ids,
            pos=(pos.clamp(min=0) + spec.position_offset).to(torch.int32),
            kind=torch.where(pos < 0, PADDING, BASE).to(torch.int32),
            step=torch.zeros(new, dtype=torch.int32, device=device),
            reason=torch.zeros(new, dtype=torch.int32, device=device),
            confidence=torch.zeros(new, dtype=torch.float32, device=device),
            spec=spec,
            block_length=block_length,
            sample=list(range(batch)),
            n_prompt=n_prompt,
            n_new=n_new,
            blocks=blocks,
            block=[0] * batch,
            left=[0] * batch,
            entered=[0] * batch,
            forwards=[0] * batch,
            start=first,
            stop=stop,
        )
        canvas.enter_blocks(range(batch))
        return canvas

    @property
    def prompt(self) -> int:
        """P, the first generated column."""
        return self.ids.shape[1] - self.new_tokens

    @property
    def new_tokens(self) -> int:
        """N, the generated columns of the longest sample."""
        return self.step.shape[1]

    @property
    def device(self) -> torch.device:
        return self.ids.device

    @property
    def hide(self) -> Tensor:
        """(B, P + N) int32: 0 on base rows that branches do not see, -1 on all others."""
        if self.shared is None:
            return torch.full_like(self.pos, -1)
        first = self.prompt + torch.tensor(self.shared, device=self.device)[:, None]
        own = torch.arange(self.ids.shape[1], device=self.device) >= first
        return torch.where(own, 0, -1).to(torch.int32)

    def span(self, i: int, block: int) -> tuple[int, int]:
        """First and past-the-last generated column (counted from P) of a sample's block; empty past the end."""
        if block >= len(self.blocks[i]):
            return self.n_new[i], self.n_new[i]
        return self.blocks[i][block][:2]

    def is_last_block(self, i: int) -> bool:
        return self.block[i] + 1 >= len(self.blocks[i])

    def computed_columns(self, i: int) -> int:
        """How many columns a block-causal model has computed when sample i works on its current block."""
        size = self.spec.block_causal_length
        last = self.n_prompt[i] + self.span(i, self.block[i])[1] - 1
        return self.prompt + min(self.n_new[i], (last // size + 1) * size - self.n_prompt[i])

    def covers_next_block(self, i: int) -> bool:
        """Whether the forwards on sample i's current block computed the next block completely as well."""
        if not self.spec.block_causal_length:
            return True
        return self.prompt + self.span(i, self.block[i] + 1)[1] <= self.computed_columns(i)

    def targets(self, width: int) -> Tensor:
        """(B, width) int32: columns of the masked positions of each sample's current block, rising; -1 padded."""
        column, _, masked = self._current()
        columns = torch.where(masked, column, self.ids.shape[1])  # what is not masked sorts behind
        columns = columns.sort(1).values[:, :width]
        return torch.where(columns < self.ids.shape[1], columns, -1).to(torch.int32)

    def masks_and_eos(self) -> Tensor:
        """(3, B): masks left in the current block, whether it holds an EOS, and masks left on the canvas."""
        _, token, masked = self._current()
        everywhere = self.ids[:, self.prompt :] == self.spec.mask_token_id
        return torch.stack([masked.sum(1), self.is_eos(token).any(1).long(), everywhere.sum(1)])

    def _current(self) -> tuple[Tensor, Tensor, Tensor]:
        """(B, block) each: columns of the current block, their tokens (-1 behind the block), and which are masked."""
        if self._seen is None:
            offset = self.start + torch.arange(self.block_length, device=self.device)
            column = (self.prompt + offset).clamp(max=self.ids.shape[1] - 1)
            token = torch.where(offset < self.stop, self.ids.gather(1, column), -1)
            self._seen = column, token, token == self.spec.mask_token_id
        return self._seen

    def is_own(self) -> Tensor:
        """(B, N): which generated columns belong to their samples."""
        return self.kind[:, self.prompt :] == BASE

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Elementwise: whether a token ends a sample."""
        ends = [tokens == eos for eos in self.spec.eos_token_ids]
        return functools.reduce(torch.logical_or, ends) if ends else torch.zeros_like(tokens, dtype=torch.bool)

    def commit(
        self, sample: Tensor, column: Tensor, token: Tensor, reason: Tensor, confidence: Tensor, now: int
    ) -> None:
        """Write tokens: all arguments (n,), one entry a generated column; entries with reason 0 change nothing.

        A mask token masks the position again, and takes it out of the history.
        """
        self._seen = None
        accepted = reason > 0
        self.ids[sample, column] = torch.where(accepted, token, self.ids[sample, column])
        at, stays = (sample, column - self.prompt), token != self.spec.mask_token_id
        self.step[at] = torch.where(accepted, stays * now, self.step[at]).to(torch.int32)
        self.reason[at] = torch.where(accepted, stays * reason, self.reason[at])
        self.confidence[at] = torch.where(accepted, stays * confidence, self.confidence[at])

    def pin(self, tokens: Mapping[int, int]) -> None:
        """Write tokens at generated columns, in every sample, before the first forward. They are no masks then."""
        self._seen = None
        for offset, token in tokens.items():
            self.ids[:, self.prompt + offset] = token
        self.blocks = [
            [Block(a, b, masks - sum(a <= offset < b for offset in tokens)) for a, b, masks in blocks]
            for blocks in self.blocks
        ]
        self.enter_blocks(range(len(self.sample)))

    def reach(self, ends: list[int]) -> None:
        """Have each sample end at these generated columns, for now, in one block: those behind are padding."""
        self._seen = None
        self.n_new = list(ends)
        self.blocks = [[Block(0, end, end)] for end in ends]
        self.stop = torch.tensor(self.n_new, device=self.device)[:, None]
        there = torch.arange(self.new_tokens, device=self.device) < self.stop
        self.kind[:, self.prompt :] = torch.where(there, BASE, PADDING).to(torch.int32)

    def advance(self, moved: list[int]) -> None:
        """Move these samples to their next blocks."""
        for i in moved:
            self.block[i] += 1
        self.enter_blocks(moved)

    def enter_blocks(self, samples: Iterable[int]) -> None:
        """Count the masks of blocks that are new; tell the device where every sample's block is."""
        for i in samples:
            while not self.is_last_block(i) and not self.blocks[i][self.block[i]].masks:
                self.block[i] += 1
            here = self.blocks[i][self.block[i]] if self.blocks[i] else Block(0, 0, 0)
            self.left[i] = self.entered[i] = here.masks
            self.forwards[i] = 0
        self._seen = None
        spans = [self.span(i, block) for i, block in enumerate(self.block)]
        self.start, self.stop = torch.tensor(spans, device=self.device).T[:, :, None]

    def select(self, keep: list[int], index: Tensor) -> None:
        """Drop the samples that are not in `keep`; `index` is the same on the device."""
        self._seen = None
        for name in ("ids", "pos", "kind", "step", "reason", "confidence", "start", "stop"):
            setattr(self, name, getattr(self, name).index_select(0, index))
        for name in ("sample", "n_prompt", "n_new", "blocks", "block", "left", "entered", "forwards"):
            setattr(self, name, [getattr(self, name)[i] for i in keep])
        if self.shared is not None:
            self.shared = [self.shared[i] for i in keep]


def _filler(spec: ModelSpec) -> int:
    """What stands in columns that no row sees: any token but the mask."""
    return 0 if spec.mask_token_id else 1
