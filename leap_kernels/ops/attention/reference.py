# SPDX-License-Identifier: Apache-2.0
"""Specification of `superposed_attention` in plain torch (method.md section 4; paper Fig. 4)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["superposed_attention", "visible"]


def visible(
    q_pos: Tensor,
    q_hide: Tensor,
    q_kind: Tensor,
    q_slot: Tensor,
    k_pos: Tensor,
    k_kind: Tensor,
    k_hide: Tensor,
    lengths: Tensor | None,
    block_causal: int,
    window: int,
    switches: int,
) -> Tensor:
    """The dense mask (B, Q, S), True where query row a sees key row b.

        a          sees base b                    sees appended b
        base       yes                            never
        copy       yes; its own base row iff      itself; candidates with pos(b) != hide(a);
                   copy_sees_original             copies with pos(b) != pos(a) iff copies_see_copies
        candidate  yes                            itself; candidates with pos(b) != hide(a) iff
                                                  candidates_see_candidates; copies with pos(b) != pos(a) iff
                                                  candidates_see_copies
        branch     base rows with hide(b) = -1    branches with hide(b) = hide(a)
        padding    nothing                        nothing

    and of those only rows with block(b) <= block(a) when `block_causal`, |pos(a) - pos(b)| < window when `window`,
    and key slots below `lengths`. `switches` holds the four options as bits 0 to 3, in the order of method.md.
    """
    copy_sees_original, copies_see_copies, candidates_see_candidates, candidates_see_copies = (
        bool(switches >> bit & 1) for bit in range(4)
    )
    a_pos, a_hide, a_kind, a_slot = (t[:, :, None] for t in (q_pos, q_hide, q_kind, q_slot))
    b_pos, b_kind, b_hide = (t[:, None, :] for t in (k_pos, k_kind, k_hide))
    elsewhere = b_pos != a_pos
    base = b_kind == 0
    copies = (b_kind == 1) & elsewhere
    candidates = (b_kind == 2) & (b_pos != a_hide)
    slot = torch.arange(k_pos.shape[1], device=k_pos.device)

    sees = (a_kind == 0) & base
    from_copy = (base & elsewhere if not copy_sees_original else base) | candidates
    from_candidate = base
    if copies_see_copies:
        from_copy = from_copy | copies
    if candidates_see_candidates:
        from_candidate = from_candidate | candidates
    if candidates_see_copies:
        from_candidate = from_candidate | copies
    sees = sees | (a_kind == 1) & from_copy | (a_kind == 2) & from_candidate
    sees = sees | (a_kind == 3) & (base & (b_hide < 0) | (b_kind == 3) & (b_hide == a_hide))
    sees = sees | (slot == a_slot)
    if block_causal:
        sees = sees & (b_pos // block_causal <= a_pos // block_causal)
    if window:
        sees = sees & ((a_pos - b_pos).abs() < window)
    sees = sees & (a_kind >= 0) & (b_kind >= 0)
    return sees if lengths is None else sees & (slot < lengths[:, None, None])


def superposed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    q_hide: Tensor,
    q_kind: Tensor,
    q_slot: Tensor,
    k_pos: Tensor,
    k_kind: Tensor,
    k_hide: Tensor,
    lengths: Tensor,
    scale: float,
    block_causal: int,
    window: int,
    switches: int,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """out_a = sum_b softmax_b(scale * q_a . k_b) v_b over the visible b; lse_a = ln sum_b exp(scale * q_a . k_b).

    A row that sees nothing gets 0 and -inf. Computed in float32 (float64 for float64 inputs); query head h reads
    key head h // (H / Hkv). `splits` is a hint for kernels and changes nothing here.
    """
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = q.shape[1] // k.shape[1]
    sees = visible(q_pos, q_hide, q_kind, q_slot, k_pos, k_kind, k_hide, lengths, block_causal, window, switches)
    sees = sees[:, None]
    # Keys that nobody may see can hold anything; a NaN there times a weight of 0 would still be NaN.
    unused = ~((k_kind >= 0) & (torch.arange(k_pos.shape[1], device=k.device) < lengths[:, None]))
    k, v = (t.to(exact).masked_fill(unused[:, None, :, None], 0).repeat_interleave(heads, 1) for t in (k, v))
    scores = (scale * (q.to(exact) @ k.transpose(-1, -2))).masked_fill(~sees, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3])).transpose(1, 2)
    return out.copy_(weights @ v), lse.float()
