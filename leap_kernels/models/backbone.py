# SPDX-License-Identifier: Apache-2.0
"""`Backbone`: the two calls that the decode loop makes, rows -> hidden states and hidden states -> logits."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..attention import NAME, register
from ..errors import ModelError, expected
from ..ops.validation import FLOATS, dtype_in
from ..rows import Rows
from .esm import base_scaled_embeddings
from .registry import REGISTRY
from .rope import keep_float32, refuse_broken_rope, repair_frequencies
from .spec import ModelSpec

__all__ = ["Backbone", "FunctionBackbone", "TransformersBackbone", "backbone_for"]


class Backbone(Protocol):
    """A model as the loop sees it. Used as a context manager for the length of one `decode`."""

    superposes: bool
    """Whether it takes rows whose positions repeat and whose visibility is restricted."""
    stores: bool
    """Whether keys and values of earlier forwards can be kept (`Rows.stored`)."""

    def __enter__(self) -> Backbone: ...
    def __exit__(self, *error: object) -> None: ...

    def body(self, rows: Rows) -> Tensor:
        """(B, R, D) hidden states."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """(n, D) hidden states -> (n, V) logits."""
        ...


def backbone_for(model: Any, spec: ModelSpec) -> Backbone:
    """The Backbone of a transformers model or of a callable; ModelError for anything else."""
    from transformers import PreTrainedModel

    model = unwrapped(model)
    if isinstance(model, PreTrainedModel):
        refuse_broken_rope(model)
        return TransformersBackbone(model, spec)
    if callable(model):
        return FunctionBackbone(model)
    raise ModelError(
        f"model must be a transformers model or a callable f(input_ids, position_ids=, attention_mask=) -> logits, "
        f"got {type(model).__name__}. leap_kernels.load(path) returns one."
    )


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT one, whose layers hold the adapters; anything else as it is.

    Raises ModelError for adapters that are not in the layers.
    """
    base = getattr(model, "get_base_model", None) if isinstance(model, nn.Module) else None
    if not callable(base):
        return model
    for name, config in dict(getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False) or getattr(config, "is_adaption_prompt", False):
            raise ModelError(
                f"adapter {name!r} ({type(config).__name__}) puts learned tokens in front of every forward, and decode "
                "runs rows of its own. Adapters inside of layers (LoRA, IA3 and their like) work."
            )
    return base()


class TransformersBackbone:
    """A stock transformers model, decoder or masked LM, run with "leap" attention for the length of a `with` block."""

    superposes = True

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        name = type(model).__name__
        entry = REGISTRY.get(name)
        self._spec = spec
        self._model, self._body, self._masked_lm = model, model.base_model, bool(entry and entry.masked_lm)
        self.stores = not self._masked_lm  # ESM's embeddings depend on every row, for one
        if self._body is model or (model.get_output_embeddings() is None and not self._masked_lm):
            raise ModelError(f"{name} has no language-model head. Load the class that has one (...ForCausalLM).")
        if "position_ids" not in _arguments(type(self._body).forward):
            raise ModelError(
                f"{name} takes no position_ids, so lookahead rows cannot stand where they belong. Pass a callable "
                'f(input_ids, attention_mask=) -> logits around it, and strategy="threshold" or "full".'
            )
        if entry is not None and entry.head:
            self._head = [getattr(model, part) for part in entry.head]
        else:
            self._head = [model.get_output_embeddings()]
            changed = [key for key in _LOGIT_SETTINGS if getattr(model.config, key, None) not in (None, 1.0)]
            more = [
                c for c in model.children() if c not in (self._body, *self._head) and any(True for _ in c.parameters())
            ]
            if changed or more or self._head[0] not in model.children():
                what = f"{', '.join(changed)} of its config" if changed else "layers before its output embeddings"
                raise ModelError(
                    f"{name} computes its logits with {what}, which calling the head alone would leave out. Pass a "
                    "callable f(input_ids, position_ids=, attention_mask=) -> logits around the model."
                )
        self._scales_embeddings = hasattr(getattr(self._body, "embeddings", None), "token_dropout")  # ESM
        # The attention backend does not read this mask. But transformers returns a 4-D one as it is, where it would
        # otherwise (5.0) look at the positions on the host and build a causal one.
        self._no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=model.device)
        if not model._can_set_attn_implementation():
            raise ModelError(
                f"{name} does not use transformers' attention interface, so its masks cannot be set. "
                "Use leap_kernels.load(path), or pass a callable f(input_ids, position_ids=, attention_mask=)."
            )

    def __enter__(self) -> TransformersBackbone:
        if self._model.training:
            raise ModelError("the model is in training mode, which may drop out activations. Call model.eval().")
        register()
        config = self._model.config
        # Both the attention setting and is_causal are written to the shared config, by us and during a forward.
        self._lock = _lock_of(config)
        self._lock.acquire()
        self._before = {key: config.__dict__[key] for key in _SHARED_SETTINGS if key in config.__dict__}
        self._rotary: list[Any] = []
        try:
            if config._attn_implementation != NAME:
                self._model.set_attn_implementation(NAME)
            repair_frequencies(self._model)
            if self._spec.rope_fp32:
                self._rotary = keep_float32(self._model)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        config = self._model.config
        try:
            before = self._before.get("_attn_implementation_internal")
            if before != config._attn_implementation_internal:
                self._model.set_attn_implementation(before)  # reaches the configs of submodels too
            config.__dict__.pop("is_causal", None)
            config.__dict__.update(self._before)
            for module in self._rotary:
                del module.forward
        finally:
            self._lock.release()

    def body(self, rows: Rows) -> Tensor:
        inputs = {"input_ids": rows.token, "position_ids": rows.pos}
        if self._masked_lm:  # learned positions are looked up
            inputs["position_ids"] = rows.pos.long()
        if self._scales_embeddings:
            inputs["inputs_embeds"] = base_scaled_embeddings(self._body, inputs.pop("input_ids"), rows)
        hidden: Tensor = self._body(
            **inputs,
            attention_mask=self._no_mask,
            use_cache=False,
            is_causal=False,
            leap=rows,
        ).last_hidden_state
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        for part in self._head:
            hidden = part(hidden)
        return hidden


class FunctionBackbone:
    """A callable `f(input_ids, position_ids=, attention_mask=4-D bool) -> (B, R, V) logits`; its head is nothing."""

    stores = False

    def __init__(self, function: Callable[..., Any]) -> None:
        target = function.forward if isinstance(function, nn.Module) else function
        try:
            parameters = inspect.signature(target).parameters
        except ValueError as error:
            raise ModelError(f"the callable {function!r} is no model: {error}. See decode's docstring.") from error
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._function = function
        self._named = {n for n in ("position_ids", "attention_mask") if takes_all or n in parameters}
        self.superposes = len(self._named) == 2

    def __enter__(self) -> FunctionBackbone:
        if getattr(self._function, "training", False):
            raise ModelError("the model is in training mode, which may drop out activations. Call model.eval().")
        modules = self._function.modules() if isinstance(self._function, nn.Module) else ()
        if any(getattr(getattr(m, "config", None), "_attn_implementation", None) == "eager" for m in modules):
            raise ModelError(
                "this model wraps a transformers model with eager attention, which adds a bool mask to the scores "
                'instead of applying it. Call set_attn_implementation("sdpa") on the model inside.'
            )
        return self

    def __exit__(self, *error: object) -> None: ...

    def body(self, rows: Rows) -> Tensor:
        if "attention_mask" not in self._named and rows.mask is not None:
            raise ModelError(
                "this model takes no attention_mask, so padding and lookahead rows cannot be hidden from it. "
                "Decode one prompt at a time without LEAP, or give the callable an attention_mask argument."
            )
        if "position_ids" not in self._named and rows.padded:
            raise ModelError(
                "this model takes no position_ids, so a padded prompt would stand at wrong positions. "
                "Decode one prompt at a time, or give the callable a position_ids argument."
            )
        keywords = {}
        if "position_ids" in self._named:
            keywords["position_ids"] = rows.pos.long()
        if "attention_mask" in self._named:
            keywords["attention_mask"] = rows.dense_mask
        out = self._function(rows.token, **keywords)
        logits = out["logits"] if isinstance(out, dict) else getattr(out, "logits", out)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != rows.token.shape:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            wanted = f"a tensor of shape ({rows.token.shape[0]}, {rows.token.shape[1]}, V)"
            raise ModelError(expected("the model's logits", wanted, got))
        dtype_in("the model's logits", logits, FLOATS)
        return logits

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Names of its arguments; looking is slow, and every `decode` asks."""
    return frozenset(inspect.signature(function).parameters)


_LOGIT_SETTINGS = ("logits_scaling", "logit_scale", "final_logit_softcapping")
_SHARED_SETTINGS = ("_attn_implementation_internal", "is_causal")

_locks: dict[int, Any] = {}
_locks_guard = threading.Lock()


def _lock_of(config: Any) -> Any:
    """One re-entrant lock a config object (configs compare by value, so they cannot be keys themselves)."""
    with _locks_guard:
        if id(config) not in _locks:
            _locks[id(config)] = threading.RLock()
            weakref.finalize(config, _locks.pop, id(config), None)
        return _locks[id(config)]
