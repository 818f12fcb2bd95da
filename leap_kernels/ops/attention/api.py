# SPDX-License-Identifier: Apache-2.0
"""The public function `superposed_attention`, and the four switches of the visibility rule."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError, InputError, expected
from .. import validation
from ..backends import dispatch

__all__ = ["Attention", "Switches", "superposed_attention"]

KERNEL_MAX_HEAD_SIZE = 256


class Attention(NamedTuple):
    """What `superposed_attention` returns."""

    out: Tensor
    """(B, H, Q, D) in the dtype of q; 0 on rows that see nothing. Its memory is (B, Q, H, D), as a model wants it."""
    lse: Tensor
    """(B, H, Q) float32: natural log-sum-exp of the scores; -inf on rows that see nothing."""


@dataclass(frozen=True)
class Switches:
    """What the paper leaves open about who sees whom; the defaults are its literal reading (method.md section 4)."""

    copy_sees_original: bool = True
    """A copy sees the base row at its own position."""
    copies_see_copies: bool = True
    """A copy sees the copies of other targets."""
    candidates_see_candidates: bool = True
    """A candidate sees the candidates of other targets."""
    candidates_see_copies: bool = True
    """A candidate sees the copies of other targets."""

    def __post_init__(self) -> None:
        for field in fields(self):
            validation.flag(field.name, getattr(self, field.name))

    @property
    def bits(self) -> int:
        """The four as bits 0 to 3, in this order."""
        return sum(on << bit for bit, on in enumerate(astuple(self)))


def superposed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_pos: Tensor,
    q_hide: Tensor,
    q_kind: Tensor,
    q_slot: Tensor,
    k_pos: Tensor,
    k_kind: Tensor,
    k_hide: Tensor,
    lengths: Tensor | None = None,
    scale: float | None = None,
    block_causal: int = 0,
    window: int = 0,
    switches: Switches | None = None,
    splits: int = 1,
    backend: str = "auto",
) -> Attention:
    """Softmax attention in which row metadata decides who sees whom (paper Fig. 4); no mask tensor is formed.

    Args:
        q: (B, H, Q, D) queries after RoPE, bf16, fp16 or fp32 (fp64 on the reference); any strides, last one 1.
        k, v: (B, Hkv, S, D) keys and values in slots, same dtype; H must be a multiple of Hkv.
        q_pos, q_hide, q_kind, q_slot: (B, Q) int32 position, hidden position, kind and key slot of each query row.
        k_pos, k_kind, k_hide: (B, S) int32 the same of each key slot; kind -1 is seen by nobody.
        lengths: (B,) int32 slots in use, the rest is ignored; None uses all S.
        scale: factor on the scores, default 1 / sqrt(D).
        block_causal: block size of models that see earlier blocks and their own only; 0 for full attention.
        window: see positions closer than this only; 0 for all.
        switches: the four options of the rule; None for the defaults.
        splits: parts the keys are divided into on a GPU when there are few query rows, at least 1.
        backend: "auto", "reference" or "triton".

    Returns:
        Attention.

    Raises:
        InputError, ConfigError, BackendError as in `top_eta`.

    Cost: reads q, k and v once a query tile of 64 rows, 16 bytes of metadata a row; writes out and lse.

    >>> import torch
    >>> q = torch.randn(1, 2, 3, 8)
    >>> pos = torch.tensor([[0, 1, 2]], dtype=torch.int32); kind = torch.tensor([[0, 0, -1]], dtype=torch.int32)
    >>> none = torch.full_like(pos, -1)
    >>> out = superposed_attention(q, q, q, q_pos=pos, q_hide=none, q_kind=kind, q_slot=pos,
    ...                            k_pos=pos, k_kind=kind, k_hide=none)
    >>> out.out[0, :, 2].abs().sum().item(), out.lse[0, 0, 2].item()
    (0.0, -inf)
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        validation.dtype_in(name, t, validation.FLOATS)
        validation.shape_is(name, t, ("B", "H" if name == "q" else "Hkv", "Q" if name == "q" else "S", "D"))
        validation.last_stride_one(name, t)
    batch, heads, rows, size = q.shape
    if size < 1:
        raise InputError(expected("q.shape", "(B, H, Q, D) with D >= 1", tuple(q.shape)))
    kv_heads, slots = k.shape[1], k.shape[2]
    validation.shape_is("k", k, (batch, "Hkv", "S", size))
    validation.shape_is("v", v, tuple(k.shape))
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(expected("the dtypes of q, k and v", "equal", f"{q.dtype}, {k.dtype}, {v.dtype}"))
    if kv_heads < 1 or heads % kv_heads:
        raise InputError(expected("q's heads", "a multiple of k's heads", f"{heads} and {kv_heads}"))
    queries = {"q_pos": q_pos, "q_hide": q_hide, "q_kind": q_kind, "q_slot": q_slot}
    keys = {"k_pos": k_pos, "k_kind": k_kind, "k_hide": k_hide}
    for name, t in (queries | keys).items():
        validation.dtype_in(name, t, (torch.int32,))
        validation.shape_is(name, t, (batch, rows if name in queries else slots))
    if lengths is None:
        lengths = torch.full((batch,), slots, dtype=torch.int32, device=q.device)
    validation.dtype_in("lengths", lengths, (torch.int32,))
    validation.shape_is("lengths", lengths, (batch,))
    for name, value, least in (("block_causal", block_causal, 0), ("window", window, 0), ("splits", splits, 1)):
        validation.integer(name, value, least)
    device = validation.one_device(q=q, k=k, v=v, lengths=lengths, **queries, **keys)
    validation.no_gradients(q=q, k=k, v=v)
    scale = size**-0.5 if scale is None else scale
    validation.number("scale", scale, -math.inf, math.inf, "a finite number")
    switches = Switches() if switches is None else switches
    if not isinstance(switches, Switches):
        raise ConfigError(expected("switches", "Switches(...) or None", repr(switches)))
    args = (
        q, k, v, q_pos, q_hide, q_kind, q_slot, k_pos, k_kind, k_hide, lengths,
        float(scale), block_causal, window, switches.bits, splits,
    )  # fmt: skip
    return Attention(
        *dispatch("superposed_attention", "attention", backend, device, args, limit=_kernel_limit(q.dtype, size))
    )


def _kernel_limit(dtype: torch.dtype, size: int) -> str:
    if dtype == torch.float64:
        return "the kernel takes bf16, fp16 and fp32, not float64"
    if size % 16 or size > KERNEL_MAX_HEAD_SIZE:
        return f"the kernel takes head sizes that are multiples of 16 up to {KERNEL_MAX_HEAD_SIZE}, not {size}"
    return ""
