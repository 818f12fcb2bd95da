# SPDX-License-Identifier: Apache-2.0
"""Specification of `superpose` in plain torch (method.md sections 2.3 and 3; paper Eq. 9)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["superpose"]


def superpose(
    ids: Tensor, pos: Tensor, targets: Tensor, cand_ids: Tensor, counts: Tensor, capacity: int, shift: int, mask_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x_sup = x + { a copy of every target } + { every candidate of every target }   (paper Eq. 9)

        row                     kind  token           pos           hide
        copy for target i       1     x[i - shift]    pos(i) - shift pos(i)
        candidate v at i        2     v               pos(i)        pos(i)
        padding                 -1    mask_id         0             -1

    Copies stand first, in the order of the targets, then candidates by target and rank. A sample with fewer than
    two targets, or whose targets have no candidate at all, gets nothing (2.3). In shifted models the target at
    position 0 has no row before it and gets no copy.
    """
    batch, width = targets.shape
    k = cand_ids.shape[2]
    valid = targets >= 0
    column = targets.clamp(min=0).long()
    target_pos = pos.gather(1, column).to(torch.int32)

    n_cand = torch.where(valid, counts, 0).clamp(0, k)
    active = (valid.sum(1) > 1) & (n_cand.sum(1) > 0)
    is_copy = valid & active[:, None] & (column >= shift) & (target_pos >= shift)
    is_cand = (torch.arange(k, device=ids.device) < n_cand[:, :, None]) & active[:, None, None]
    is_cand = is_cand.reshape(batch, width * k)

    # Where each appended row goes; rows that do not exist go to one extra column that is cut off at the end.
    n_copy = is_copy.sum(1, dtype=torch.int32)
    copy_row = torch.where(is_copy, is_copy.cumsum(1) - 1, -1).to(torch.int32).contiguous()
    cand_row = torch.where(is_cand, n_copy[:, None] + is_cand.cumsum(1) - 1, capacity)
    where = torch.cat([torch.where(is_copy, copy_row, capacity), cand_row], 1)

    source = (column - shift).clamp(min=0)
    cand_pos = target_pos.repeat_interleave(k, 1)

    def table(copies: Tensor, candidates: Tensor, padding: int) -> Tensor:
        out = copies.new_full((batch, capacity + 1), padding)
        return out.scatter_(1, where, torch.cat([copies, candidates], 1))[:, :capacity].contiguous()

    token = table(ids.gather(1, source), cand_ids.reshape(batch, width * k), mask_id)
    new_pos = table(pos.gather(1, source).to(torch.int32), cand_pos, 0)
    kind = table(torch.ones_like(target_pos), torch.full_like(cand_pos, 2), -1)
    hide = table(target_pos, cand_pos, -1)
    return token, new_pos, kind, hide, copy_row, n_copy + is_cand.sum(1, dtype=torch.int32)
