# SPDX-License-Identifier: Apache-2.0
"""The public function `superpose`, and the kinds a row can have."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError, expected
from .. import validation
from ..backends import dispatch

__all__ = ["BASE", "BRANCH", "CANDIDATE", "COPY", "PADDING", "Superposed", "superpose"]

BASE, COPY, CANDIDATE, BRANCH, PADDING = 0, 1, 2, 3, -1


class Superposed(NamedTuple):
    """What `superpose` returns: the appended rows of B samples, at most A each, packed, padding last."""

    token: Tensor
    """(B, A) int64: input ids."""
    pos: Tensor
    """(B, A) int32: RoPE positions; 0 on padding."""
    kind: Tensor
    """(B, A) int32: 1 mask copy, 2 candidate, -1 padding."""
    hide: Tensor
    """(B, A) int32: the position whose appended rows this row must not see; -1 on padding."""
    copy_row: Tensor
    """(B, T) int32: which appended row is the copy for this target; -1 where there is none."""
    count: Tensor  # type: ignore[assignment]  # the schema's name, which hides tuple.count
    """(B,) int32: appended rows that are not padding."""


def superpose(
    ids: Tensor,
    pos: Tensor,
    targets: Tensor,
    cand_ids: Tensor,
    counts: Tensor,
    *,
    mask_id: int,
    capacity: int | None = None,
    shift: int = 0,
    backend: str = "auto",
) -> Superposed:
    """Copies of the masked targets and their candidates, as rows to append to the sequence (paper Eq. 9).

    Args:
        ids: (B, L) int64 canvas, masks included.
        pos: (B, L) int32 position of each column.
        targets: (B, T) int32 columns of the masked positions, rising; -1 where a sample has fewer.
        cand_ids: (B, T, K) int64 candidates by rank, as `top_eta` lists them.
        counts: (B, T) int32 how many of the K are candidates.
        mask_id: token of padding rows (any valid id would do: nobody sees them).
        capacity: A, rows to allocate; at least T * (1 + K), which is the default.
        shift: 1 for models that predict position i at row i - 1 (Dream), else 0.
        backend: "auto", "reference" or "triton".

    Returns:
        Superposed, on the device of `ids`; nothing is copied to the host.

    Raises:
        InputError, ConfigError, BackendError as in `top_eta`.

    Cost: one launch; writes B * A * 20 bytes.

    >>> import torch
    >>> out = superpose(torch.tensor([[5, 9, 9]]), torch.tensor([[0, 1, 2]], dtype=torch.int32),
    ...                 torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[[7], [-1]]]),
    ...                 torch.tensor([[1, 0]], dtype=torch.int32), mask_id=9)
    >>> out.token[0, :3].tolist(), out.pos[0, :3].tolist(), out.kind[0].tolist()
    ([9, 9, 7], [1, 2, 1], [1, 1, 2, -1])
    """
    for name, t, dtype in (
        ("ids", ids, torch.int64),
        ("pos", pos, torch.int32),
        ("targets", targets, torch.int32),
        ("cand_ids", cand_ids, torch.int64),
        ("counts", counts, torch.int32),
    ):
        validation.dtype_in(name, t, (dtype,))
    validation.shape_is("ids", ids, ("B", "L"))
    batch = ids.shape[0]
    validation.shape_is("pos", pos, tuple(ids.shape))
    validation.shape_is("targets", targets, (batch, "T"))
    validation.shape_is("cand_ids", cand_ids, (batch, targets.shape[1], "K"))
    validation.shape_is("counts", counts, tuple(targets.shape))
    validation.integer("shift", shift, 0, "0 or 1")
    if shift > 1:
        raise InputError(expected("shift", "0 or 1", shift))
    validation.integer("mask_id", mask_id, 0)
    needed = targets.shape[1] * (1 + cand_ids.shape[2])
    capacity = needed if capacity is None else capacity
    validation.integer("capacity", capacity)
    if capacity < needed:  # formatted only here: while compiling, a number in a message becomes a constant
        raise InputError(expected("capacity", f"at least T * (1 + K) = {needed}", capacity, "Leave it out."))
    device = validation.one_device(ids=ids, pos=pos, targets=targets, cand_ids=cand_ids, counts=counts)
    validation.in_range("targets", targets, -1, ids.shape[1])
    args = (ids, pos, targets, cand_ids, counts, capacity, shift, mask_id)
    return Superposed(*dispatch("superpose", "superposition", backend, device, args))
