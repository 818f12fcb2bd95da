# SPDX-License-Identifier: Apache-2.0
"""The prompts of a `decode` call: every form they may have, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .config import DecodeConfig
from .errors import ConfigError, InputError, expected
from .models.spec import ModelSpec
from .ops.backends import choose

__all__ = ["Prompts", "check"]


@dataclass(frozen=True)
class Prompts:
    columns: Tensor
    """(B, P) int64: what the output shows in front of the generated tokens."""
    prompts: list[Tensor]
    """The prompts without their padding, 1-D int64."""
    max_new_tokens: list[int] = field(default_factory=list)
    """One a prompt."""


def check(
    input_ids: Tensor | Sequence[Tensor],
    attention_mask: Tensor | None,
    model: Any,
    spec: ModelSpec,
    config: DecodeConfig,
) -> Prompts:
    """Bring the prompts into one form; InputError or ModelError with what is wrong otherwise."""
    if isinstance(input_ids, Tensor):
        prompts = _from_tensor(input_ids, attention_mask)
    elif isinstance(input_ids, Sequence) and not isinstance(input_ids, str):
        prompts = _from_list(input_ids, attention_mask, spec)
    else:
        hint = 'Tokenize text first: load_tokenizer(path)(text, return_tensors="pt").'
        raise InputError(expected("input_ids", "a tensor or a list of 1-D tensors", type(input_ids).__name__, hint))
    device = getattr(model, "device", None)
    if isinstance(device, torch.device) and device != prompts.columns.device:
        raise InputError(
            f"input_ids are on {prompts.columns.device}, the model is on {device}. Move them with .to(model.device)."
        )
    _one_each(len(prompts.prompts), config)
    wanted, batch = config.max_new_tokens, len(prompts.prompts)
    prompts = replace(prompts, max_new_tokens=[wanted] * batch if isinstance(wanted, int) else list(wanted))
    for i, (prompt, new) in enumerate(zip(prompts.prompts, prompts.max_new_tokens, strict=True)):
        _in_vocabulary(prompt, spec, i)
        total = len(prompt) + new
        if spec.max_positions is not None and total > spec.max_positions:
            raise InputError(
                f"sample {i} needs {len(prompt)} + max_new_tokens {new} = {total} positions, the "
                f"model has {spec.max_positions}. Shorten the prompt or pass a smaller max_new_tokens."
            )
    _check_settings(spec, config)
    choose(config.backend, prompts.columns.device)
    return prompts


def _from_tensor(ids: Tensor, attention_mask: Tensor | None) -> Prompts:
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(expected("input_ids.dtype", "int64", str(ids.dtype)))
    if ids.dim() not in (1, 2) or (ids.shape[0] == 0 and ids.dim() == 2):
        raise InputError(expected("input_ids.shape", "(B, P) with B >= 1, or (P,)", tuple(ids.shape)))
    if ids.dim() == 1:
        ids = ids[None]
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 1:
            attention_mask = attention_mask[None]
    ids = ids.long()
    if attention_mask is None:
        return Prompts(ids, list(ids))
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != ids.shape:
        got = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise InputError(expected("attention_mask.shape", f"that of input_ids {tuple(ids.shape)}", got))
    if attention_mask.device != ids.device:
        raise InputError(f"attention_mask is on {attention_mask.device}, input_ids are on {ids.device}.")
    keep = attention_mask != 0
    if bool((keep & (attention_mask != 1)).any()):
        raise InputError(expected("attention_mask", "1 on tokens and 0 on padding", "other values"))
    if ids.shape[1] and not bool(keep.any()):
        raise InputError(expected("attention_mask", "1 on tokens and 0 on padding", "0 everywhere"))
    edges = (keep[:, 1:] != keep[:, :-1]).sum(1)
    if bool((edges > 1).any()):
        bad = int((edges > 1).nonzero()[0])
        raise InputError(
            f"attention_mask of sample {bad} has padding on both sides or inside: padding must stand on one side "
            "of a prompt. Tokenize the prompts again with one padding_side."
        )
    return Prompts(ids, [row[k] for row, k in zip(ids, keep, strict=True)])


def _from_list(prompts: Sequence[Any], attention_mask: Tensor | None, spec: ModelSpec) -> Prompts:
    if attention_mask is not None:
        raise InputError(
            "attention_mask goes with a (B, P) tensor; a list of prompts needs none. Leave it out, or have the "
            'tokenizer return tensors: tokenizer(texts, padding=True, return_tensors="pt").'
        )
    if not prompts:
        raise InputError(expected("input_ids", "at least one prompt", "an empty list"))
    tensors = []
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, Tensor) or prompt.dim() != 1 or prompt.dtype not in (torch.int64, torch.int32):
            got = f"{tuple(prompt.shape)} {prompt.dtype}" if isinstance(prompt, Tensor) else type(prompt).__name__
            raise InputError(expected(f"input_ids[{i}]", "a 1-D int64 tensor", got))
        tensors.append(prompt.long())
    if len({t.device for t in tensors}) > 1:
        raise InputError("the prompts are on different devices. Move them to the model's.")
    width = max(len(t) for t in tensors)
    # Padding of ours: any id would do, since no row sees it.
    fill = spec.fill_token_id if spec.fill_token_id is not None else 0
    columns = torch.full((len(tensors), width), fill, dtype=torch.int64, device=tensors[0].device)
    for row, prompt in zip(columns, tensors, strict=True):
        row[width - len(prompt) :] = prompt
    return Prompts(columns, tensors)


def _in_vocabulary(prompt: Tensor, spec: ModelSpec, i: int) -> None:
    if not len(prompt):
        return
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or (spec.vocab_size is not None and high >= spec.vocab_size):
        top = spec.vocab_size if spec.vocab_size is not None else "vocabulary size"
        got = f"values from {low} to {high}"
        raise InputError(expected(f"ids of sample {i}", f"in [0, {top})", got, "Use this model's tokenizer."))


def _one_each(batch: int, config: DecodeConfig) -> None:
    for name in ("max_new_tokens", "seed"):
        value = getattr(config, name)
        if not isinstance(value, int) and len(value) != batch:
            what = f"one number, or one for each of the {batch} samples"
            raise InputError(expected(name, what, f"{len(value)} numbers"))


def _check_settings(spec: ModelSpec, config: DecodeConfig) -> None:
    top = spec.vocab_size
    wrong = [i for i in config.suppress_tokens if top is not None and i >= top]
    if wrong:
        raise InputError(expected("suppress_tokens", f"in [0, {top})", wrong))
    block = spec.block_causal_length
    if config.cache != "none" and (config.cache == "block") != bool(block):
        fitting = '"block" is exact and cheaper' if block else '"block" needs a block-causal model'
        raise ConfigError(
            f"cache={config.cache!r} does not go with this {'block-causal' if block else 'full-attention'} model: "
            f"{fitting}. Use {'block or none' if block else 'prefix, dual, delayed or none'}."
        )
    if block and block % config.block:
        raise ConfigError(
            f"block_length {config.block} must divide the model's block-causal length {block}. "
            f"Pass block_length={block}."
        )
