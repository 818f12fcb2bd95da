# SPDX-License-Identifier: Apache-2.0
"""`Rows`: what one forward computes. A row is a token with a position, not a place in a tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .errors import InputError, expected
from .models.spec import ModelSpec
from .ops import BASE, PADDING, Superposed, Switches, TopEta, superpose
from .ops.attention.reference import visible
from .store import Stored

__all__ = ["Rows"]

DEFAULT_SWITCHES = Switches()


@dataclass(eq=False)
class Rows:
    """The rows of one forward, B samples of R rows each: base rows first, appended rows behind them."""

    token: Tensor
    """(B, R) int64: input ids."""
    pos: Tensor
    """(B, R) int32: RoPE positions, repeated freely."""
    kind: Tensor
    """(B, R) int32: 0 base, 1 mask copy, 2 candidate, 3 branch, -1 padding (sees nothing, seen by nobody)."""
    hide: Tensor
    """(B, R) int32: the position whose appended rows this row must not see; -1 for none."""
    base: int
    """How many of the R rows are base rows (or padding among them)."""
    targets: Tensor | None = None
    """(B, T) int32: columns of the masked targets, -1 padded; None in a plain forward."""
    copy_row: Tensor | None = None
    """(B, T) int32: row of the target's copy counted from `base`, -1 where there is none."""
    block_causal: int = 0
    window: int = 0
    """In layers with a sliding window, see positions closer than this; 0 when the model has no such layers."""
    switches: Switches = DEFAULT_SWITCHES
    backend: str = "auto"
    column: Tensor | None = None
    """(B, base) int64: canvas column of each base row, rising, -1 on padding; None where row j is column j."""
    stored: Stored | None = None
    """Keys and values of rows that are not among these; None where there are none (no cache)."""

    @cached_property
    def slot(self) -> Tensor:
        """(B, R) int32: where a row's keys and values go: without a cache its own index; else its column, or for an
        appended row a slot behind all columns; -1 for padding."""
        index = torch.arange(self.token.shape[1], dtype=torch.int32, device=self.token.device).expand_as(self.pos)
        if self.stored is None:
            return index
        base = index[:, : self.base] if self.column is None else self.column.to(torch.int32)
        slot = torch.cat([base, index[:, self.base :] - self.base + self.stored.store.columns], 1)
        return slot.masked_fill(self.kind == PADDING, -1)

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S) int32 each: position, kind and hide of what can be seen, by slot."""
        if self.stored is None:
            return self.pos, self.kind, self.hide
        hide = torch.full_like(self.stored.pos, -1) if self.stored.hide is None else self.stored.hide
        columns = (self.stored.pos, self.stored.kind, hide)
        appended = (self.pos[:, self.base :], self.kind[:, self.base :], self.hide[:, self.base :])
        pos, kind, hide = (torch.cat(pair, 1) for pair in zip(columns, appended, strict=True))
        return pos, kind, hide

    def row_of(self, sample: Tensor, column: Tensor) -> Tensor:
        """(n,) the base rows at canvas columns `column` of the samples `sample`; each must be among the rows."""
        if self.column is None:
            return column
        # Columns rise, and padding (-1, behind them) counts as beyond all.
        behind = torch.where(self.column < 0, torch.iinfo(torch.int64).max, self.column)
        return torch.searchsorted(behind[sample], column[:, None].contiguous())[:, 0]

    @property
    def dense(self) -> bool:
        """Whether attention uses torch's SDPA with `mask` (CPU, reference) instead of the kernel."""
        return self.backend == "reference" or (self.backend == "auto" and self.token.device.type != "cuda")

    @cached_property
    def unwindowed(self) -> Rows:
        """These rows as the layers without a sliding window take them."""
        return replace(self, window=0)

    @cached_property
    def padded(self) -> bool:
        """Whether any row or slot is padding. Looks at the device, once a forward."""
        return bool((self.kind == PADDING).any()) or bool((self.keys[1] == PADDING).any())

    @cached_property
    def dense_mask(self) -> Tensor:
        """(B, 1, R, S) bool, True where row a (second to last axis) sees slot b; built once a forward."""
        queries = (self.pos, self.hide, self.kind, self.slot)
        return visible(*queries, *self.keys, None, self.block_causal, self.window, self.switches.bits)[:, None]

    @cached_property
    def mask(self) -> Tensor | None:
        """`dense_mask`, or None where every row sees every slot."""
        everything = not self.block_causal and not self.window and bool((self.kind == BASE).all())
        everything = everything and (self.stored is None or bool((self.keys[1] == BASE).all()))
        return None if everything else self.dense_mask

    def append(self, extra: Superposed, width: int) -> Rows:
        """These rows with the first `width` appended rows of every sample behind them."""
        return Rows(
            torch.cat([self.token, extra.token[:, :width]], 1),
            torch.cat([self.pos, extra.pos[:, :width]], 1),
            torch.cat([self.kind, extra.kind[:, :width]], 1),
            torch.cat([self.hide, extra.hide[:, :width]], 1),
            base=self.base,
            targets=self.targets,
            copy_row=extra.copy_row,
            block_causal=self.block_causal,
            window=self.window,
            switches=self.switches,
            backend=self.backend,
            column=self.column,
            stored=self.stored,
        )

    @classmethod
    def plain(cls, ids: Tensor, spec: ModelSpec | None = None, attention_mask: Tensor | None = None) -> Rows:
        """Every column of `ids` (B, L) as a base row; `attention_mask` (B, L) marks padding with 0."""
        if attention_mask is not None and attention_mask.shape != ids.shape:
            raise InputError(expected("attention_mask.shape", f"{tuple(ids.shape)}", tuple(attention_mask.shape)))
        if attention_mask is not None and bool(((attention_mask != 0) & (attention_mask != 1)).any()):
            raise InputError(expected("attention_mask", "1 on tokens and 0 on padding", "other values"))
        valid = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        pos = (valid.cumsum(1) - 1).clamp(min=0).to(torch.int32)
        if spec is not None:
            pos = pos + spec.position_offset
        kind = torch.where(valid, BASE, PADDING).to(torch.int32)
        hide = torch.full_like(pos, -1)
        block_causal, window = (spec.block_causal_length, spec.window) if spec else (0, 0)
        return cls(ids, pos, kind, hide, base=ids.shape[1], block_causal=block_causal, window=window)

    @classmethod
    def superpose(
        cls,
        ids: Tensor,
        masked: Tensor,
        candidates: TopEta,
        spec: ModelSpec,
        *,
        attention_mask: Tensor | None = None,
        switches: Switches | None = None,
        backend: str = "auto",
    ) -> Rows:
        """The superposed sequence (paper Eq. 9) for your own decode loop.

        Args:
            ids: (B, L) int64 canvas, masks included.
            masked: (B, L) bool, the masked positions that are being decoded.
            candidates: `ops.top_eta(logits[masked], eta)`: one row for each True of `masked`, in order. (In models
                with shifted logits take the logits of row i - 1 for the masked position i.)
            spec: the model's ModelSpec (mask id, shift, block-causal length).
            attention_mask: (B, L), 0 on padding.
            switches: who sees whom, None for the defaults.

        Returns:
            Rows for `model(rows.token, position_ids=rows.pos, leap=rows)`; then `rows.split(logits)`.

        Raises:
            InputError: shapes or dtypes that do not fit together.
        """
        if masked.shape != ids.shape or masked.dtype != torch.bool:
            raise InputError(
                expected("masked", f"bool of shape {tuple(ids.shape)}", f"{masked.dtype}, {tuple(masked.shape)}")
            )
        batch = ids.shape[0]
        per_sample = masked.sum(1)
        if candidates.ids.shape[0] != int(per_sample.sum()):
            raise InputError(
                expected("candidates", f"{int(per_sample.sum())} rows, one for each masked position",
                         f"{candidates.ids.shape[0]} rows")
            )  # fmt: skip
        width = int(per_sample.max()) if batch else 0
        at_front = torch.arange(width, device=ids.device) < per_sample[:, None]
        targets = torch.full((batch, width), -1, dtype=torch.int32, device=ids.device)
        targets[at_front] = masked.nonzero()[:, 1].to(torch.int32)
        cand_ids = torch.full((batch, width, candidates.ids.shape[1]), -1, device=ids.device)
        cand_ids[at_front] = candidates.ids
        counts = torch.zeros_like(targets)
        counts[at_front] = candidates.counts

        rows = cls.plain(ids, spec, attention_mask)
        if bool((masked & (rows.kind == PADDING)).any()):
            raise InputError("masked marks positions that attention_mask calls padding. Mask tokens only.")
        rows.targets, rows.backend = targets, backend
        rows.switches = switches or DEFAULT_SWITCHES
        extra = superpose(
            ids, rows.pos, targets, cand_ids, counts, mask_id=spec.mask_token_id, shift=spec.shift, backend=backend
        )
        return rows.append(extra, int(extra.count.max()) if batch else 0)

    def split(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(B, R, V) logits of a superposed forward -> the base rows' (B, L, V) and the copies' (n, V).

        The copies come one for each masked position, in the order of `masked.nonzero()`. A target without a copy
        (its sample had no candidates) gets NaN, which `top_eta` reports as top1 = -1 and `check_consistency` takes
        as "no evidence".
        """
        if self.targets is None or self.copy_row is None:
            raise InputError("these rows hold no copies; make them with Rows.superpose(...).")
        if logits.dim() != 3 or logits.shape[:2] != self.token.shape:
            wanted = f"({self.token.shape[0]}, {self.token.shape[1]}, V), one row for each of these"
            raise InputError(expected("logits.shape", wanted, tuple(logits.shape)))
        valid = self.targets >= 0
        row = (self.base + self.copy_row).clamp(max=logits.shape[1] - 1).long()
        copies = logits.gather(1, row[..., None].expand(*row.shape, logits.shape[2]))
        copies = copies.masked_fill((self.copy_row < 0)[..., None], float("nan"))
        return logits[:, : self.base], copies[valid]
