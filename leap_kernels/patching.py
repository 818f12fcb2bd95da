# SPDX-License-Identifier: Apache-2.0
"""`patch`: the forwards of the authors' own code, given rows whose positions and visibility are not its own.

Their code counts positions 0, 1, 2, ... and (Fast-dLLM's, dInfer's) drops every mask. Inside `with patch(model)` the
few methods in question are replaced on this one object; the replacements look at a side channel of the running thread
and call the original where it is empty, so that `model(ids)` stays what it was, also in other threads.

| class | replaced | handed over as arguments |
| --- | --- | --- |
| LLaDAModelLM (hub, Fast-dLLM, dInfer) | a block's `_scaled_dot_product_attention`, `rotary_emb.forward` | nothing |
| DreamModel (hub, Fast-dLLM) | each `rotary_emb.forward` | the mask, float, (B, 1, R, R) |
| LLaDA2MoeModelLM (hub, dInfer) | nothing | the mask, and position_ids |
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import over_rows
from .errors import InputError, ModelError, expected
from .models.load import spec_of
from .models.rope import refuse_broken_rope
from .models.spec import ModelSpec
from .ops import COPY, Switches
from .rows import Rows

__all__ = ["Patched", "patch"]


@contextlib.contextmanager
def patch(model: nn.Module) -> Iterator[Patched]:
    """Let a model of the authors' LLaDA, Fast-dLLM, Dream, LLaDA2 or dInfer code compute superposed rows.

    Per object, reversible, and safe with several threads, each of which may patch the same object. On entry a few rows
    are run: copies of tokens, at their positions, must give the logits of the tokens and change nothing else.

    Yields:
        Patched: call it with `Rows`, or with `(input_ids, position_ids=, attention_mask=4-D bool)`, for (B, R, V)
        logits; or hand it to `decode`, which then uses the authors' forward.

    Raises:
        ModelError: a class without known seams, a model in training mode, a RoPE table that is not initialised, or an
            object whose forward does not react to positions or masks as its class should.

    >>> import torch, leap_kernels
    >>> with leap_kernels.patch(torch.nn.Linear(2, 2)):  # doctest: +ELLIPSIS
    ...     pass
    Traceback (most recent call last):
    leap_kernels.errors.ModelError: patch knows no seams in Linear. ...
    """
    name = type(model).__name__
    if name not in _KINDS or type(model).__module__.startswith("transformers."):
        raise ModelError(
            f"patch knows no seams in {name}. It knows {', '.join(_KINDS)} of the authors' code; "
            f"{_WAYS_OUT.get(name, 'decode takes transformers models and callables as they are.')}"
        )
    if model.training:
        raise ModelError("the model is in training mode, which may drop out activations. Call model.eval().")
    refuse_broken_rope(model)
    patched = Patched(model)
    _install(model, _KINDS[name])
    try:
        patched.probe()
        yield patched
    finally:
        patched.over = True
        _remove(model)


_WAYS_OUT = {
    "LLaDAMoEModelLM": "LLaDA-MoE's refuses 4-D masks: use leap_kernels.load(path).",
    "Fast_dLLM_QwenForCausalLM": "Fast-dLLM v2's puts a mask of its own in: decode(model, ids) uses its weights.",
    "SDARForCausalLM": "decode(model, ids) uses SDAR's weights in the stock class.",
}

# --- the side channel -----------------------------------------------------------------------------------------------


@dataclass
class _Given:
    """What one forward is to compute: set for its length, in its thread."""

    model: nn.Module
    pos: Tensor
    """(B, R) positions."""
    mask: Tensor | None
    """(B, 1, R, R) bool, None where every row sees every row."""
    rows: Rows | None
    tables: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """cos and sin by what they depend on besides `pos`; made in the first layer, read in the others."""


class _Channel(threading.local):
    given: _Given | None = None


_channel = _Channel()


@contextlib.contextmanager
def _sending(given: _Given) -> Iterator[None]:
    before, _channel.given = _channel.given, given
    try:
        yield
    finally:
        _channel.given = before


class Patched:
    """A model inside `with patch(model)`, called with rows."""

    def __init__(self, model: nn.Module) -> None:
        self.over = False
        self._model = weakref.ref(model)
        self._named = set(inspect.signature(model.forward).parameters)
        self._by_mask = _KINDS[type(model).__name__].by_mask

    @property
    def model(self) -> Any:
        return self._model()

    @property
    def training(self) -> bool:
        return bool(self.model.training)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def spec(self) -> ModelSpec | None:
        """What `decode` has to know, as far as the model's config says it."""
        return spec_of(self.model)

    def __call__(
        self, input_ids: Tensor | Rows, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """(B, R, V) logits of `Rows`, or of (B, R) ids with their positions and a (B, 1, R, R) bool mask."""
        if self.over:
            raise InputError("this patch is over: call it inside `with leap_kernels.patch(model) as patched:`.")
        if isinstance(input_ids, Rows):
            rows = input_ids
            if rows.stored is not None:
                raise InputError("these rows leave keys to a cache, which the authors' forwards do not share.")
            return self._forward(rows.token, _Given(self.model, rows.pos, None, rows))
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand_as(input_ids)
        if attention_mask is not None and (attention_mask.dtype != torch.bool or attention_mask.dim() != 4):
            got = f"{attention_mask.dtype}, {tuple(attention_mask.shape)}"
            raise InputError(expected("attention_mask", "a (B, 1, R, R) bool tensor, True where a row sees", got))
        return self._forward(input_ids, _Given(self.model, position_ids, attention_mask, None))

    def _forward(self, ids: Tensor, given: _Given) -> Tensor:
        arguments: dict[str, Any] = {}
        if self._by_mask:
            # Float, since eager attention adds what it gets; finite, so that rows that see nothing stay finite.
            mask = given.rows.dense_mask if given.rows is not None else given.mask
            if mask is None:
                mask = torch.ones((1, 1, ids.shape[1], ids.shape[1]), dtype=torch.bool, device=ids.device)
            dtype = next(self.model.parameters()).dtype
            shape = (ids.shape[0], 1, ids.shape[1], ids.shape[1])
            hidden = torch.zeros(shape, dtype=dtype, device=ids.device).masked_fill(~mask, torch.finfo(dtype).min)
            arguments = {"attention_mask": hidden, "position_ids": given.pos.long()}
        if "use_cache" in self._named:
            arguments["use_cache"] = False
        with _sending(given):
            out = self.model(ids, **arguments)
        return _logits(out, self.model, ids)

    @torch.no_grad()
    def probe(self) -> None:
        """Run a few rows whose logits are known: a seam that does nothing is found before anything is decoded."""
        ids = torch.arange(8, device=self.device)[None]
        plain = Rows.plain(ids)
        at = torch.tensor([[0, 2]], device=self.device)
        # A copy of a token that sees what the token sees gives its logits.
        appended = Rows(
            torch.cat([ids, ids.gather(1, at)], 1),
            torch.cat([plain.pos, at.to(torch.int32)], 1),
            torch.cat([plain.kind, torch.full_like(at, COPY).to(torch.int32)], 1),
            torch.cat([plain.hide, at.to(torch.int32)], 1),
            base=8,
            switches=Switches(copy_sees_original=False, copies_see_copies=False),
        )
        alone, with_copies = self(plain).float(), self(appended).float()
        scale = float(alone.std()) * _TOLERANCE.get(next(self.model.parameters()).dtype, 1e-3)
        off = {
            "rows that must not be seen change the others (the mask is not used)": with_copies[:, :8] - alone,
            "a copy of a token differs from the token (positions or masks are not used)": with_copies[0, 8:]
            - alone[0, at[0]],
        }
        if not self._by_mask:
            plainly = self.model(ids, **({"use_cache": False} if "use_cache" in self._named else {}))
            off["its plain forward gives other logits"] = _logits(plainly, self.model, ids).float() - alone
        for what, difference in off.items():
            if not float(difference.abs().max()) <= scale:
                raise ModelError(
                    f"this {type(self.model).__name__} does not react as its class should: {what}, by up to "
                    f"{float(difference.abs().max()):.3g}. Use leap_kernels.load(path), or decode(model, ids)."
                )


def _logits(out: Any, model: nn.Module, ids: Tensor) -> Tensor:
    logits = out["logits"] if isinstance(out, dict) else getattr(out, "logits", out)
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(expected(f"the logits of {type(model).__name__}", f"{(*ids.shape, 'V')}", got))
    return logits


# Of the logits' spread. Ignored masks or positions are far above, rounding is far below.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}

# --- what is replaced -----------------------------------------------------------------------------------------------

Seam = tuple[Any, str, Callable[..., Any]]  # the object, the name of its method, what runs while the channel is set


def _llada_seams(model: nn.Module) -> Iterator[Seam]:
    for block in model.modules():
        if not hasattr(block, "_scaled_dot_product_attention"):
            continue
        yield block, "_scaled_dot_product_attention", _attend
        rotary = getattr(block, "rotary_emb", None)
        if rotary is None:
            raise ModelError(f"a block of this {type(model).__name__} has no rotary_emb. Use leap_kernels.load(path).")
        yield rotary, "forward", _rotation(model.config)


def _dream_seams(model: nn.Module) -> Iterator[Seam]:
    for module in model.modules():
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            yield module, "forward", _tables(module)


def _no_seams(model: nn.Module) -> Iterator[Seam]:
    return iter(())


def _attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """In the place of `_scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal)`."""
    given = _expect(q, k)
    if given.rows is not None:
        return over_rows(given.rows, q, k, v, None)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=given.mask, enable_gqa=q.shape[1] != k.shape[1])


def _rotation(config: Any) -> Callable[..., Any]:
    """In the place of `rotary_emb(q, k, ...)`, which rotates by columns; float32 unless the config says otherwise."""

    def rotate(q: Tensor, k: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        given = _expect(q, k)
        exact = getattr(config, "rope_full_precision", True)
        theta = float(getattr(config, "rope_theta", None) or 10000.0)
        key = ("llada", theta, q.shape[-1], q.device)
        if key not in given.tables:
            half = q.shape[-1] // 2
            frequencies = 1.0 / theta ** (torch.arange(half, dtype=torch.float32, device=q.device) / half)
            angles = given.pos[:, None, :, None].float() * frequencies
            angles = torch.cat((angles, angles), -1)
            given.tables[key] = angles.cos(), angles.sin()
        out = []
        for x in (q, k):
            wide = x.to(torch.promote_types(x.dtype, torch.float32)) if exact else x
            cos, sin = (table.to(wide.dtype) for table in given.tables[key])
            first, second = wide.chunk(2, -1)
            out.append((wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype))
        return out[0], out[1]

    return rotate


def _tables(module: Any) -> Callable[..., Any]:
    """In the place of `rotary_emb(x, position_ids)` -> cos, sin, whatever positions the code made up."""

    def make(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        given = _channel.given
        assert given is not None
        angles = given.pos[..., None].float() * module.inv_freq.float()
        angles = torch.cat((angles, angles), -1)
        scaling = getattr(module, "attention_scaling", 1.0)
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)

    return make


def _expect(q: Tensor, k: Tensor) -> _Given:
    given = _channel.given
    assert given is not None
    rows = given.pos.shape[1]
    if q.shape[-2] != rows or k.shape[-2] != rows:
        raise InputError(
            f"{q.shape[-2]} queries and {k.shape[-2]} keys in a forward of {rows} rows: the model used a cache of its "
            "own. Patched forwards take none."
        )
    return given


@dataclass(frozen=True)
class _Kind:
    seams: Callable[[nn.Module], Iterator[Seam]]
    by_mask: bool
    """Whether the forward honours a 4-D mask that it is given."""


_KINDS = {
    "LLaDAModelLM": _Kind(_llada_seams, by_mask=False),
    "DreamModel": _Kind(_dream_seams, by_mask=True),
    "LLaDA2MoeModelLM": _Kind(_no_seams, by_mask=True),
}

# --- putting it in and taking it out --------------------------------------------------------------------------------


@dataclass
class _Installed:
    users: int
    replaced: list[tuple[Any, str, Any, Any]]
    """Object, name, what stood in its __dict__ (or _ABSENT), and what stands there now."""


_ABSENT = object()
_installed: weakref.WeakKeyDictionary[nn.Module, _Installed] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _install(model: nn.Module, kind: _Kind) -> None:
    with _lock:
        if model in _installed:
            _installed[model].users += 1
            return
        seams = list({(id(where), name): (where, name, new) for where, name, new in kind.seams(model)}.values())
        if not seams and kind.seams is not _no_seams:
            raise ModelError(
                f"this {type(model).__name__} has none of the methods that patch replaces. Use load(path)."
            )
        replaced = []
        for where, name, new in seams:
            before, ours = vars(where).get(name, _ABSENT), _switch(weakref.ref(model), getattr(where, name), new)
            setattr(where, name, ours)
            replaced.append((where, name, before, ours))
        _installed[model] = _Installed(1, replaced)


def _remove(model: nn.Module) -> None:
    with _lock:
        installed = _installed[model]
        installed.users -= 1
        if installed.users:
            return
        del _installed[model]
        for where, name, before, ours in installed.replaced:
            if vars(where).get(name) is not ours:
                continue  # somebody wrapped it since; ours calls the original from now on anyway
            if before is _ABSENT:
                delattr(where, name)
            else:
                setattr(where, name, before)


def _switch(model: weakref.ref[nn.Module], original: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    """`new` while a forward of ours is running on this model in this thread, else the original."""

    def call(*args: Any, **options: Any) -> Any:
        given = _channel.given
        return original(*args, **options) if given is None or given.model is not model() else new(*args, **options)

    return call
