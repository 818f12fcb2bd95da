# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""`superposed_attention` in Triton: flash attention whose mask is computed from row metadata.

Definition   reference.py, for bf16, fp16 and fp32 and head sizes 16, 32, 48, ... 256. One that is no power of two is
             computed as the next one, with zeros that are neither loaded nor stored.
Grid         (query tiles, H, B * splits), after bounds.py, which says once for all heads which key tiles are read, and
             with splits > 1 before merge.py. The tile sizes depend on head size, dtype and GPU generation, and where
             a sample is split on its own length: nothing else, so a row does not notice how many other rows, samples
             or unused slots there are.
Bytes        reads q once, and k, v and 12 bytes of metadata a slot once per query tile; writes out and lse; with
             splits > 1 also (D + 1) * 4 bytes a row and split, twice. Of the keys only the ranges of bounds.py.
Mask         never in memory. A key tile that every row of the query tile sees in full (the cached context) skips it.
Numerics     float32 scores and sums, base 2 inside with log2(e) folded into the scale, natural log outside. The
             weights are rounded to the dtype of v for their product with it. Keys and values that nobody may see are
             never loaded. Rows that see nothing give 0 and -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Config, on_device
from .bounds import _superposed_attention_bounds_kernel, bounds_config
from .merge import _superposed_attention_merge_kernel, merge_config
from .rules import CHANGING, _block_end, _class_bit, _seen_classes

__all__ = ["config", "launch"]

LOG2_E = 1.4426950408889634

# (BM, BN, num_warps, num_stages) by head size, rounded up to a power of two: what compiles without spilling registers
# into less than 99 KB of shared memory. Blackwell and Hopper multiply out of shared memory (or tensor memory), 64 rows
# at a time; the others hold the operands in registers, and float32, which has no tensor cores, all the more.
_HOPPER = {16: (64, 64, 4, 3), 32: (64, 64, 4, 3), 64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)}
_BLACKWELL = _HOPPER | {128: (64, 32, 4, 3)}
_OTHER = {16: (64, 32, 4, 3), 32: (64, 64, 4, 3), 64: (64, 32, 4, 3), 128: (32, 32, 4, 3), 256: (16, 32, 4, 2)}
_FLOAT32 = {16: (32, 16, 4, 2), 32: (16, 16, 4, 2), 64: (16, 16, 4, 2), 128: (16, 16, 4, 2), 256: (16, 16, 8, 2)}


def config(head_size: int, dtype: torch.dtype, generation: int) -> Config:
    """How the attention kernel is compiled for these heads on a GPU with compute capability `generation`.x."""
    half = {9: _HOPPER, 10: _BLACKWELL}.get(generation, _OTHER)
    width = triton.next_power_of_2(head_size)
    bm, bn, warps, stages = (_FLOAT32 if dtype == torch.float32 else half)[width]
    return Config(
        {"HEAD_SIZE": head_size, "WIDTH": width, "BM": bm, "BN": bn},
        # Left to itself, ptxas aims at more blocks an SM here and there, and spills for it.
        {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False, "maxnreg": 255},
    )


def _generation(device: torch.device) -> int:
    """Major compute capability; in the interpreter that of the GPU whose tiles the tests should run."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


@triton.jit
def _visible(q_pos, q_hide, q_slot, q_end, q_classes, q_blind, k_pos, k_hide, k_kind, slot, window):
    """The mask of one tile, what reference.visible says of live rows; the q_ have shape [BM] and the others [BN].

    Few values a key and few steps an element: all of them live in registers beside the tile's scores.
    """
    k_bit = _class_bit(k_kind, k_hide)

    # A key is hidden where its position is that of the row (copies, and base rows from blind copies) or the one that
    # the row hides (candidates); a branch is hidden where its own hide is not that of the row.
    is_branch = k_kind == 3
    k_value = tl.where(is_branch, k_hide, k_pos)
    q_value = tl.where((k_kind == 1)[None, :], q_pos[:, None], q_blind[:, None])
    q_value = tl.where((k_kind >= 2)[None, :], q_hide[:, None], q_value)
    sees = (k_value[None, :] == q_value) == is_branch[None, :]
    sees &= (q_classes[:, None] & k_bit[None, :]) != 0

    sees |= slot[None, :] == q_slot[:, None]
    sees &= k_pos[None, :] < q_end[:, None]
    sees &= (window == 0) | (tl.abs(q_pos[:, None] - k_pos[None, :]) < window)
    return sees & (k_kind >= 0)[None, :]


@triton.jit
def _accumulate(s, v, top, total, acc):
    """Online softmax: the scores `s` in base 2 and the values of one tile join the running maximum, sum and output."""
    new_top = tl.maximum(top, tl.max(s, 1))
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
    p = tl.exp2(s - origin[:, None])
    decay = tl.exp2(top - origin)
    total = total * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit(do_not_specialize=[*CHANGING, "group", "stride_qhb", "stride_qhm", "stride_lx", "stride_lb", "stride_lh"])
def _superposed_attention_tile_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_pos_ptr,
    q_hide_ptr,
    q_kind_ptr,
    q_slot_ptr,
    k_pos_ptr,
    k_kind_ptr,
    k_hide_ptr,
    bounds_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    n_q,
    splits,
    group,
    block_causal,
    window,
    switches,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_qpb,
    stride_qpm,
    stride_qhb,
    stride_qhm,
    stride_qkb,
    stride_qkm,
    stride_qsb,
    stride_qsm,
    stride_kpb,
    stride_kpn,
    stride_kkb,
    stride_kkn,
    stride_khb,
    stride_khn,
    stride_ox,
    stride_ob,
    stride_oh,
    stride_om,
    stride_lx,
    stride_lb,
    stride_lh,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch = (tl.program_id(2) // splits).to(tl.int64)
    split = tl.program_id(2) % splits
    kv_head = head // group

    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    lane = tl.arange(0, BN)
    dim = tl.arange(0, WIDTH)
    in_q = row < n_q

    q_pos = tl.load(q_pos_ptr + batch * stride_qpb + row * stride_qpm, mask=in_q, other=0)
    q_hide = tl.load(q_hide_ptr + batch * stride_qhb + row * stride_qhm, mask=in_q, other=-1)
    q_kind = tl.load(q_kind_ptr + batch * stride_qkb + row * stride_qkm, mask=in_q, other=-1)
    q_slot = tl.load(q_slot_ptr + batch * stride_qsb + row * stride_qsm, mask=in_q, other=-1)
    q_offset = batch * stride_qb + head * stride_qh + row[:, None] * stride_qm + dim[None, :]
    in_head = dim < HEAD_SIZE
    q = tl.load(q_ptr + q_offset, mask=in_q[:, None] & in_head[None, :], other=0.0)

    k_pos_ptr += batch * stride_kpb
    k_kind_ptr += batch * stride_kkb
    k_hide_ptr += batch * stride_khb
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh

    nowhere: tl.constexpr = -2147483648
    q_end = _block_end(q_pos, block_causal)  # one division a row, none a key
    q_classes = _seen_classes(q_kind, switches)
    live = q_classes != 0
    blind = (q_kind == 1) & ((switches & 1) == 0)
    q_blind = tl.where(blind, q_pos, nowhere)

    bounds_ptr += (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 4
    first = tl.load(bounds_ptr)
    middle = tl.load(bounds_ptr + 1)
    resume = tl.load(bounds_ptr + 2)
    stop = tl.load(bounds_ptr + 3)

    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, WIDTH], tl.float32)
    for start in range(first, middle, BN):
        place = (start + lane).to(tl.int64)
        k_ptrs = k_ptr + place[None, :] * stride_kn + dim[:, None]
        v_ptrs = v_ptr + place[:, None] * stride_vn + dim[None, :]
        if WIDTH == HEAD_SIZE:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        else:
            k = tl.load(k_ptrs, mask=in_head[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=in_head[None, :], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * scale_log2
        top, total, acc = _accumulate(s, v, top, total, acc)
    # Three stages: the keys and values to load depend on metadata that has to be loaded first.
    for start in tl.range(resume, stop, BN, num_stages=3):
        slot = start + lane
        place = slot.to(tl.int64)
        k_kind = tl.load(k_kind_ptr + place * stride_kkn, mask=slot < stop, other=-1)
        k_pos = tl.load(k_pos_ptr + place * stride_kpn, mask=slot < stop, other=0)
        k_hide = tl.load(k_hide_ptr + place * stride_khn, mask=slot < stop, other=-1)
        # What nobody may see can hold a NaN, and a weight of 0 times NaN would be NaN.
        used = k_kind >= 0
        k_ptrs = k_ptr + place[None, :] * stride_kn + dim[:, None]
        k = tl.load(k_ptrs, mask=used[None, :] & in_head[:, None], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * scale_log2
        sees = _visible(q_pos, q_hide, q_slot, q_end, q_classes, q_blind, k_pos, k_hide, k_kind, slot, window)
        s = tl.where(sees, s, float("-inf"))
        v_ptrs = v_ptr + place[:, None] * stride_vn + dim[None, :]
        v = tl.load(v_ptrs, mask=used[:, None] & in_head[None, :], other=0.0)
        top, total, acc = _accumulate(s, v, top, total, acc)

    # Padding rows took part in all this, with whatever their q holds: they saw nothing all the same.
    seen = live & (top > float("-inf"))
    acc = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    lse = tl.where(seen, (top + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    out_offset = split.to(tl.int64) * stride_ox + batch * stride_ob + head * stride_oh
    out_ptrs = out_ptr + out_offset + row[:, None] * stride_om + dim[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_q[:, None] & in_head[None, :])
    tl.store(lse_ptr + split.to(tl.int64) * stride_lx + batch * stride_lb + head * stride_lh + row, lse, mask=in_q)


def launch(
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
    """Run the kernels on the device of `q`; arguments and results as in the schema of `superposed_attention`."""
    b, h, n_q, d = q.shape
    out = q.new_empty((b, n_q, h, d)).transpose(1, 2)
    lse = q.new_empty((b, h, n_q), dtype=torch.float32)
    if q.numel() == 0:
        return out, lse

    if splits == 1:
        part, part_lse = out[None], lse[None]
    else:
        part = q.new_empty((splits, b, h, n_q, d), dtype=torch.float32)
        part_lse = q.new_empty((splits, b, h, n_q), dtype=torch.float32)
    how = config(d, q.dtype, _generation(q.device))
    scan = bounds_config(how.constants["BM"], how.constants["BN"])
    tiles = triton.cdiv(n_q, how.constants["BM"])
    bounds = q.new_empty((b * splits, tiles, 4), dtype=torch.int32)
    with on_device(q):
        _superposed_attention_bounds_kernel[(tiles, b * splits)](
            q_pos,
            q_kind,
            q_slot,
            k_pos,
            k_kind,
            k_hide,
            lengths,
            bounds,
            n_q,
            k.shape[2],
            splits,
            block_causal,
            window,
            switches,
            *q_pos.stride(),
            *q_kind.stride(),
            *q_slot.stride(),
            *k_pos.stride(),
            *k_kind.stride(),
            *k_hide.stride(),
            lengths.stride(0),
            **scan.constants,
            **scan.options,
        )
        _superposed_attention_tile_kernel[(tiles, h, b * splits)](
            q,
            k,
            v,
            q_pos,
            q_hide,
            q_kind,
            q_slot,
            k_pos,
            k_kind,
            k_hide,
            bounds,
            part,
            part_lse,
            scale * LOG2_E,
            n_q,
            splits,
            h // k.shape[1],
            block_causal,
            window,
            switches,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *q_pos.stride(),
            *q_hide.stride(),
            *q_kind.stride(),
            *q_slot.stride(),
            *k_pos.stride(),
            *k_kind.stride(),
            *k_hide.stride(),
            *part.stride()[:4],
            *part_lse.stride()[:3],
            **how.constants,
            **how.options,
        )
        if splits > 1:
            how = merge_config(d)
            _superposed_attention_merge_kernel[(triton.cdiv(n_q, how.constants["BM"]), h, b)](
                part, part_lse, out, lse, n_q, splits, **how.constants, **how.options
            )
    return out, lse
