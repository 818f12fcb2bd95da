# SPDX-License-Identifier: Apache-2.0
"""The "leap" attention backend for transformers: attention whose visibility comes from `Rows`.

`model(rows.token, position_ids=rows.pos, leap=rows)`: transformers hands every extra keyword down to the attention
function, so no model class is changed. Without `leap=` the backend is transformers' own SDPA.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import InputError
from .ops import superposed_attention
from .rows import Rows

__all__ = ["NAME", "attend", "over_rows", "register"]

NAME = "leap"

# Keywords with which transformers' models change what attention computes; honoured by `Rows` or refused.
_CHANGES_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias")


@functools.cache
def register() -> None:
    """Make `attn_implementation="leap"` known to transformers. Calling it again does nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    # Without a mask function transformers would drop a 2-D padding mask without a word.
    AttentionMaskInterface.register(NAME, _mask_without_rows)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    leap: Rows | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention over (B, H, R, D) queries and (B, Hkv, R, D) keys and values; returns ((B, R, H, D), None).

    With `leap` the rows' metadata is the whole visibility rule and `attention_mask` is not read.
    Raises InputError for settings that the rows do not carry, and for dropout.
    """
    for name in ("s_aux", "softcap"):  # attention sinks and capped scores: SDPA may drop them without a word
        if other.get(name) is not None:
            raise InputError(f'attention backend "leap" cannot honour {name}={other[name]} of this model.')
    # LLaDA rotates in float32: queries and keys then arrive wider than the values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if leap is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if other.get("is_causal") is None and _is_bidirectional(getattr(module, "config", None)):
            other["is_causal"] = False
        out: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **other
        )[0]
        return out, None
    for name in _CHANGES_ATTENTION:
        if other.get(name) is not None and not (name == "sliding_window" and other[name] == leap.window):
            raise InputError(f'attention backend "leap" cannot honour {name}={other[name]} of this model.')
    if leap.window and other.get("sliding_window") is None:
        leap = leap.unwindowed
    _check_fit(leap, query, other.get("position_ids"))
    if dropout:
        raise InputError(f'attention backend "leap" is for inference, got dropout={dropout}. Call model.eval().')
    if leap.stored is not None:
        used = leap.keys[0].shape[1]
        layer: Any = module.layer_idx
        key, value = leap.stored.store.write(layer, leap.slot, key, value, used)
    out = over_rows(leap, query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


def over_rows(rows: Rows, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """(B, H, R, D) attention of (B, H, R, D) queries over (B, Hkv, S, D) keys and values, as `rows` allow it."""
    k_pos, k_kind, k_hide = rows.keys
    if rows.dense:
        mask = rows.mask
        if rows.padded:  # padding gives 0, and a NaN in it must not reach the others
            unused = (k_kind < 0)[:, None, :, None]
            query = query.masked_fill((rows.kind < 0)[:, None, :, None], 0)
            key, value = (t.masked_fill(unused, 0) for t in (key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        out = superposed_attention(
            query, key, value,
            q_pos=rows.pos, q_hide=rows.hide, q_kind=rows.kind, q_slot=rows.slot,
            k_pos=k_pos, k_kind=k_kind, k_hide=k_hide,
            scale=scale, block_causal=rows.block_causal, window=rows.window, switches=rows.switches,
            backend=rows.backend,
        ).out  # fmt: skip
    return out


def _is_bidirectional(config: Any) -> bool:
    return getattr(config, "is_causal", None) is False


def _mask_without_rows(*args: Any, **options: Any) -> Tensor | None:
    """transformers' SDPA mask; bidirectional where the config says so, which early releases of 5 do not look at.

    Block-causal for models that are, so that `model(ids)` is what its authors' would be.
    """
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    config = options.get("config")
    if _is_bidirectional(config):
        # Only the builder of bidirectional masks sets this option; from the other one comes a causal mask, or one for
        # packed sequences where positions repeat.
        from_causal_builder = "allow_is_bidirectional_skip" not in options
        size = getattr(config, "block_causal_length", 0)
        if size:
            options["mask_function"] = _see_blocks(size, options)
        elif from_causal_builder:
            options["mask_function"] = bidirectional_mask_function
        if size or from_causal_builder:
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": not size}
    mask: Tensor | None = sdpa_mask(*args, **options)
    return mask


def _see_blocks(size: int, options: dict[str, Any]) -> Any:
    """A mask function of transformers': rows see their block and earlier ones, counted from a sample's first token."""
    valid = options.get("attention_mask")
    if not isinstance(valid, Tensor):
        return lambda batch, head, query, key: key // size <= query // size
    block = (valid.long().cumsum(1) - 1).clamp(min=0) // size
    return lambda batch, head, query, key: block[batch, key] <= block[batch, query]


def _check_fit(rows: Rows, query: Tensor, position_ids: Tensor | None) -> None:
    """Refuse rows of another forward, and a call without `position_ids=rows.pos` (which would count 0, 1, 2, ...)."""
    shape = (query.shape[0], query.shape[2])
    if rows.pos.shape != shape:
        raise InputError(f"leap=rows has {tuple(rows.pos.shape)} rows, the forward {shape}. Pass input_ids=rows.token.")
    if position_ids is None or position_ids is rows.pos or rows.pos.device.type != "cpu":
        return  # elsewhere a look at the values would wait for the device, in every layer
    if not torch.equal(position_ids.expand_as(rows.pos), rows.pos.to(position_ids.dtype)):
        raise InputError("position_ids differ from leap=rows. Pass position_ids=rows.pos beside leap=rows.")
