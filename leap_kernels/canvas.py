# SPDX-License-Identifier: Apache-2.0
"""`Canvas`: the sequences being denoised, and where each sample stands in its blocks.

Inside, every prompt is padded on the left, so that the generated region of all samples starts at one column and a
sample's forward does not depend on which side its prompt was padded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .models.spec import ModelSpec
from .ops import BASE, PADDING

__all__ = ["Canvas"]


@dataclass(eq=False)
class Canvas:
    """B unfinished samples of P + N columns: prompts, then N = max_new_tokens generated columns.

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
    sample: list[int]
    """Index in the caller's batch."""
    n_prompt: list[int]
    block: list[int]
    """Number of the current block."""
    left: list[int]
    """Masked positions left in the current block."""
    start: Tensor
    """(B, 1) int64: first generated column of the current block, counted from P."""
    stop: Tensor
    """(B, 1) int64: past its last."""
    runs: list[list[tuple[int, int, int]]] | None = None
    """Infilling: the blocks of each sample, as first column, past-the-last column and number of masks."""

    @classmethod
    def create(cls, prompts: list[Tensor], max_new_tokens: int, block_length: int, spec: ModelSpec) -> Canvas:
        """A canvas of `prompts` (1-D, any lengths, on one device) followed by `max_new_tokens` masks."""
        n_prompt = [len(p) for p in prompts]
        width, batch, device = max(n_prompt), len(prompts), prompts[0].device
        total = width + max_new_tokens
        ids = torch.full((batch, total), spec.mask_token_id, dtype=torch.int64, device=device)
        lengths = torch.tensor(n_prompt, device=device)[:, None]
        pos = torch.arange(total, device=device) - (width - lengths)
        for row, prompt in zip(ids, prompts, strict=True):
            row[width - len(prompt) : width] = prompt
        new = (batch, max_new_tokens)
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
            block=[0] * batch,
            left=[0] * batch,
            start=lengths,
            stop=lengths,
        )
        canvas.enter_blocks(range(batch))
        return canvas

    @classmethod
    def infill(cls, prompts: list[Tensor], run_length: int | None, spec: ModelSpec) -> Canvas:
        """A canvas of nothing but `prompts`, all of whose columns count as generated, with blocks where masks stand.

        Runs of `run_length` positions from the first mask (in block-causal models: from multiples of it), those
        without masks left out; None is one run over everything (a block, in block-causal models).
        """
        width, size = max(len(p) for p in prompts), spec.block_causal_length
        filler = int(spec.mask_token_id == 0)  # under the padding of shorter samples; any token but the mask
        ids = torch.full((len(prompts), width), filler, dtype=torch.int64, device=prompts[0].device)
        runs: list[list[tuple[int, int, int]]] = []
        for row, prompt in zip(ids, prompts, strict=True):
            pad = width - len(prompt)
            row[pad:] = prompt
            masks = (prompt == spec.mask_token_id).nonzero()[:, 0].tolist()
            start, step = (0 if size else masks[0] if masks else 0), run_length or size or width
            per_run: dict[int, int] = {}
            for mask in masks:
                per_run[(mask - start) // step] = per_run.get((mask - start) // step, 0) + 1
            spans = [
                (start + n * step, min(start + (n + 1) * step, len(prompt)), count) for n, count in per_run.items()
            ]
            runs.append([(pad + first, pad + last, count) for first, last, count in spans])
        canvas = cls.create([p[:0] for p in prompts], width, 1, spec)
        pos = torch.arange(width, device=ids.device) - torch.tensor(
            [[width - len(p)] for p in prompts], device=ids.device
        )
        canvas.ids, canvas.runs = ids, runs
        canvas.pos = (pos.clamp(min=0) + spec.position_offset).to(torch.int32)
        canvas.kind = torch.where(pos < 0, PADDING, BASE).to(torch.int32)
        canvas.n_prompt = [len(p) - width for p in prompts]  # positions are columns plus this
        canvas.block_length = max((last - first for spans in runs for first, last, _ in spans), default=1)
        canvas.enter_blocks(range(len(prompts)))
        return canvas

    @property
    def prompt(self) -> int:
        """P, the first generated column."""
        return self.ids.shape[1] - self.new_tokens

    @property
    def new_tokens(self) -> int:
        """N, the generated columns."""
        return self.step.shape[1]

    @property
    def device(self) -> torch.device:
        return self.ids.device

    @property
    def hide(self) -> Tensor:
        """(B, P + N) int32: base rows hide nothing."""
        return torch.full_like(self.pos, -1)

    def span(self, i: int, block: int) -> tuple[int, int]:
        """First and past-the-last generated column (counted from P) of a sample's block; empty past the end.

        Blocks start where the prompt ends; in block-causal models at multiples of `block_length` in position, so
        that the tail of a prompt shares the first block. Infilling: where there are masks.
        """
        if self.runs is not None:
            return self.runs[i][block][:2] if block < len(self.runs[i]) else (self.new_tokens, self.new_tokens)
        tail = self.n_prompt[i] % self.block_length if self.spec.block_causal_length else 0
        start = block * self.block_length - tail
        return max(start, 0), min(start + self.block_length, self.new_tokens)

    def is_last_block(self, i: int) -> bool:
        if self.runs is not None:
            return self.block[i] + 1 >= len(self.runs[i])
        return self.span(i, self.block[i])[1] >= self.new_tokens

    def computed_columns(self, i: int) -> int:
        """How many columns a block-causal model has computed when sample i works on its current block."""
        size = self.spec.block_causal_length
        last = self.n_prompt[i] + self.span(i, self.block[i])[1] - 1
        return self.prompt + min(self.new_tokens, (last // size + 1) * size - self.n_prompt[i])

    def covers_next_block(self, i: int) -> bool:
        """Whether the forwards on sample i's current block computed the next block completely as well."""
        if not self.spec.block_causal_length:
            return True
        return self.prompt + self.span(i, self.block[i] + 1)[1] <= self.computed_columns(i)

    def targets(self, width: int) -> Tensor:
        """(B, width) int32: columns of the masked positions of each sample's current block, rising; -1 padded."""
        offset = self.start + torch.arange(self.block_length, device=self.device)
        column = (self.prompt + offset).clamp(max=self.ids.shape[1] - 1)
        masked = (offset < self.stop) & (self.ids.gather(1, column) == self.spec.mask_token_id)
        columns = torch.where(masked, column, self.ids.shape[1])  # what is not masked sorts behind
        columns = columns.sort(1).values[:, :width]
        return torch.where(columns < self.ids.shape[1], columns, -1).to(torch.int32)

    def masks_and_eos(self) -> Tensor:
        """(2, B): masks left in the current block, and whether it holds an EOS."""
        offset = torch.arange(self.new_tokens, device=self.device)
        inside = (offset >= self.start) & (offset < self.stop)
        tokens = self.ids[:, self.prompt :]
        return torch.stack(
            [((tokens == self.spec.mask_token_id) & inside).sum(1), (self.is_eos(tokens) & inside).any(1).long()]
        )

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Elementwise: whether a token ends a sample."""
        out = torch.zeros_like(tokens, dtype=torch.bool)
        for eos in self.spec.eos_token_ids:
            out |= tokens == eos
        return out

    def commit(
        self, sample: Tensor, column: Tensor, token: Tensor, reason: Tensor, confidence: Tensor, now: int
    ) -> None:
        """Unmask: all arguments (n,), one entry a masked target; entries with reason 0 stay masked."""
        accepted = reason > 0
        old = self.ids[sample, column]
        self.ids[sample, column] = torch.where(accepted, token, old)
        at = (sample, column - self.prompt)
        self.step[at] = torch.where(accepted, now, 0).to(torch.int32)
        self.reason[at] = reason
        self.confidence[at] = torch.where(accepted, confidence, 0.0)

    def advance(self, moved: list[int]) -> None:
        """Move these samples to their next blocks."""
        for i in moved:
            self.block[i] += 1
        self.enter_blocks(moved)

    def enter_blocks(self, samples: Iterable[int]) -> None:
        """Count the masks of blocks that are new; tell the device where every sample's block is."""
        spans = [self.span(i, block) for i, block in enumerate(self.block)]
        for i in samples:
            self.left[i] = spans[i][1] - spans[i][0]
            if self.runs is not None:
                self.left[i] = self.runs[i][self.block[i]][2] if self.runs[i] else 0
        self.start, self.stop = torch.tensor(spans, device=self.device).T[:, :, None]

    def select(self, keep: list[int], index: Tensor) -> None:
        """Drop the samples that are not in `keep`; `index` is the same on the device."""
        for name in ("ids", "pos", "kind", "step", "reason", "confidence", "start", "stop"):
            setattr(self, name, getattr(self, name).index_select(0, index))
        for name in ("sample", "n_prompt", "block", "left"):
            setattr(self, name, [getattr(self, name)[i] for i in keep])
        if self.runs is not None:
            self.runs = [self.runs[i] for i in keep]
