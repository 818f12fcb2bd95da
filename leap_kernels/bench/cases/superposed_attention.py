# SPDX-License-Identifier: Apache-2.0
"""`superposed_attention`: a canvas, copies and candidates of its last targets behind it, and the last rows asking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.attention.reference import visible
from .case import Baseline, Case, Cost, Inputs, Shape, compiled

__all__ = ["CASE", "dense_mask", "flex_mask"]

INF = float("inf")
ALL_SWITCHES = 0b1111


def make(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, fill: float = 1.0) -> Inputs:
    """Slots: the canvas, one copy of each target, then the candidates of each. The last `rows` slots are the queries.

    Below fill 1 only that share of the slots is in `lengths`, the two before are padding, and both hold NaN.
    """
    b, h, hkv, d = shape["batch"], shape["heads"], shape["kv_heads"], shape["size"]
    n, s, t, c = shape["rows"], shape["slots"], shape["targets"], shape["candidates"]
    canvas = s - t * (1 + c)
    if canvas < t or n > s:
        raise ValueError(f"{s} slots cannot hold {t} targets with {c} candidates each and {n} query rows")
    of_target = torch.arange(canvas - t, canvas)
    pos = torch.cat([torch.arange(canvas), of_target, of_target.repeat_interleave(c)])
    kind = torch.cat([torch.full((size,), i) for i, size in enumerate((canvas, t, t * c))])
    hide = torch.where(kind > 0, pos, -1)
    g = torch.Generator(device).manual_seed(seed)
    q, k, v = (
        torch.randn(b, rows, heads, d, generator=g, device=device).to(dtype).transpose(1, 2)
        for rows, heads in ((n, h), (s, hkv), (s, hkv))
    )
    table = {"pos": pos, "kind": kind, "hide": hide, "slot": torch.arange(s)}
    table = {name: x.to(device, torch.int32).repeat(b, 1) for name, x in table.items()}
    queries = {f"q_{name}": x[:, s - n :].clone() for name, x in table.items()}
    keys = {f"k_{name}": table[name] for name in ("pos", "kind", "hide")}
    lengths = torch.full((b,), s, dtype=torch.int32, device=device)
    if fill < 1:
        used = round(fill * s)
        unseen = max(0, used - 2)
        lengths.fill_(used)
        keys["k_kind"][:, unseen:used] = -1
        for x in keys.values():
            x[:, used:] = 77
        k[:, :, unseen:], v[:, :, unseen:] = float("nan"), float("nan")
        queries["q_kind"][:, -1] = -1
        q[:, :, -1] = float("nan")
    return {"q": q, "k": k, "v": v, **queries, **keys, "lengths": lengths, "splits": shape["splits"]}


def dense_mask(inputs: Inputs) -> Tensor:
    """(B, 1, Q, S) bool: what the specification says of who sees whom."""
    queries = (inputs[f"q_{name}"] for name in ("pos", "hide", "kind", "slot"))
    keys = (inputs[f"k_{name}"] for name in ("pos", "kind", "hide"))
    return visible(*queries, *keys, inputs["lengths"], 0, 0, ALL_SWITCHES)[:, None]  # type: ignore[call-arg]


def softmax_attention(inputs: Inputs, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores, mask, softmax, product, in `exact`; keys that nobody sees are zeroed, blind rows give 0 and -inf."""
    q, k, v = (inputs[name].to(exact).nan_to_num() for name in "qkv")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q.shape[-1] ** -0.5 * q @ k.mT).masked_fill(~dense_mask(inputs), -INF)
    lse = scores.logsumexp(-1)
    return (scores.softmax(-1).nan_to_num() @ v), lse


def plain(inputs: Inputs) -> tuple[Tensor, Tensor]:
    out, lse = softmax_attention(inputs, torch.float32)
    return out.to(inputs["q"].dtype), lse


def cost(inputs: Inputs) -> Cost:
    """q, k, v and metadata in, out and lse out; two products over all pairs, hidden ones included."""
    q, k = inputs["q"], inputs["k"]
    b, h, n, d = q.shape
    s = k.shape[2]
    memory = (2 * q.numel() + 2 * k.numel()) * q.element_size() + b * (16 * n + 12 * s + 4) + 4 * b * h * n
    return Cost(memory, 4 * b * h * n * s * d)


# --- fair baselines -------------------------------------------------------------------------------------------------


def _every_head(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, with keys and values for each query head."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    group = q.shape[1] // k.shape[1]
    return (q, k, v) if group == 1 else (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


def sdpa_dense(inputs: Inputs) -> Callable[[], Any]:
    """The mask is made once and not timed, as a model would make it once for all layers; nor is repeating keys for
    grouped heads, without which torch has no fast kernel that takes a mask."""
    (q, k, v), mask = _every_head(inputs), dense_mask(inputs)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sdpa_flash(inputs: Inputs) -> Callable[[], Any]:
    """No mask at all: other results, and the time to come near to."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    grouped = q.shape[1] != k.shape[1]

    def call() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    return call


def prefix_and_tail(inputs: Inputs) -> Callable[[], Any]:
    """Flash over the canvas, which every row sees, softmax with a mask over the appended rows; merged by lse."""
    q, k, v = _every_head(inputs)
    scale = q.shape[-1] ** -0.5
    canvas = int((inputs["k_kind"][0] == 0).sum())
    mask = dense_mask(inputs)[..., canvas:]
    k0, v0, k1, v1 = k[:, :, :canvas], v[:, :, :canvas], k[:, :, canvas:], v[:, :, canvas:]

    def prefix() -> tuple[Tensor, Tensor]:
        if q.is_cuda:
            found = torch.ops.aten._scaled_dot_product_flash_attention(q, k0, v0, scale=scale)
            return found[0], found[1][..., : q.shape[2]]
        scores = scale * q.float() @ k0.float().mT
        return (scores.softmax(-1) @ v0.float()).to(q.dtype), scores.logsumexp(-1)

    def call() -> Any:
        out, lse = prefix()
        scores = (scale * (q @ k1.mT).float()).masked_fill(~mask, -INF)
        total = torch.logaddexp(lse, scores.logsumexp(-1))
        tail = (scores - total[..., None]).exp().to(v1.dtype) @ v1
        return (out * (lse - total).exp()[..., None] + tail).to(q.dtype)

    return call


def flex_mask(inputs: Inputs) -> Callable[[Tensor, Tensor, Tensor, Tensor], Any]:
    """The rule with default switches and without padding as FlexAttention's mask_mod."""
    q_pos, q_hide, q_kind, q_slot = (inputs[f"q_{name}"] for name in ("pos", "hide", "kind", "slot"))
    k_pos, k_kind = inputs["k_pos"], inputs["k_kind"]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        kind, appended = k_kind[b, k], q_kind[b, q] > 0
        elsewhere = torch.where(kind == 1, k_pos[b, k] != q_pos[b, q], k_pos[b, k] != q_hide[b, q])
        return (kind == 0) | (appended & elsewhere) | (k == q_slot[b, q])

    return mask_mod


def flex(inputs: Inputs) -> Callable[[], Any]:
    """FlexAttention under torch.compile with its BlockMask made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    b, h, n, _ = q.shape
    mask = create_block_mask(flex_mask(inputs), b, None, n, k.shape[2], device=q.device.type)
    attend = compiled(flex_attention, q)
    grouped = h != k.shape[1]
    return lambda: attend(q, k, v, block_mask=mask, enable_gqa=grouped)


def flashinfer(inputs: Inputs) -> Callable[[], Any]:
    """One sample, (rows, heads, size), with the dense mask."""
    from flashinfer import single_prefill_with_kv_cache

    q, k, v = (inputs[name][0].transpose(0, 1).contiguous() for name in "qkv")
    mask = dense_mask(inputs)[0, 0].contiguous()
    return lambda: single_prefill_with_kv_cache(q, k, v, custom_mask=mask)


LLADA = {
    "batch": 1, "heads": 32, "kv_heads": 32, "size": 128, "rows": 192, "slots": 1184, "targets": 32, "candidates": 4,
    "splits": 1,
}  # fmt: skip

CASE = Case(
    op="superposed_attention",
    small={
        "batch": 2, "heads": 2, "kv_heads": 1, "size": 32, "rows": 37, "slots": 97, "targets": 5, "candidates": 3,
        "splits": 1,
    },
    tiny={"batch": 1, "heads": 1, "kv_heads": 1, "size": 16, "rows": 1, "slots": 4, "targets": 1, "candidates": 1},
    odd=(
        {"rows": 1, "splits": 3},
        {"heads": 7, "kv_heads": 1, "size": 128, "splits": 2},
        {"heads": 8, "kv_heads": 1, "size": 64, "slots": 1025, "rows": 131},
        {"size": 256, "rows": 33},
        {"size": 96, "heads": 4, "kv_heads": 1},
        LLADA,
        LLADA | {"splits": 4},
    ),
    shapes={
        "block": LLADA,
        "full": LLADA | {"rows": 1184},
        "block, 2 splits": LLADA | {"splits": 2},
        "block, 4 splits": LLADA | {"splits": 4},
        "block, 7 heads a key head": LLADA | {"heads": 28, "kv_heads": 4},
    },
    make=make,
    truth=lambda inputs: softmax_attention(inputs, torch.float64),
    plain=plain,
    cost=cost,
    baselines=(
        Baseline("SDPA, dense mask", sdpa_dense, field="out"),
        Baseline("SDPA flash, unmasked (other results)", sdpa_flash, gpu=True),
        Baseline("SDPA flash prefix + masked tail, merged", prefix_and_tail, field="out"),
        Baseline("FlexAttention, cached BlockMask", flex, field="out", compiled=("block", "full")),
        Baseline(
            "FlashInfer, dense mask", flashinfer, field="out", gpu=True, package="flashinfer", compiled=("block",),
            pick=lambda result: result.transpose(0, 1)[None],
        ),
    ),
)  # fmt: skip
