# SPDX-License-Identifier: Apache-2.0
"""Checks that every op makes before the dispatcher sees its tensors: device, dtype, shape, stride, gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError, InputError, expected

__all__ = [
    "FLOATS",
    "INTEGERS",
    "dtype_in",
    "flag",
    "in_range",
    "integer",
    "last_stride_one",
    "logits",
    "no_gradients",
    "number",
    "one_device",
    "shape_is",
    "token_ids",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InputError(expected(name, "a torch.Tensor", type(value).__name__))


def dtype_in(name: str, value: Tensor, allowed: Iterable[torch.dtype]) -> None:
    """Refuse `value` unless it is a tensor whose dtype is one of `allowed`."""
    tensor(name, value)
    allowed = tuple(allowed)
    if value.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise InputError(expected(f"{name}.dtype", names, str(value.dtype).removeprefix("torch.")))


def shape_is(name: str, value: Tensor, shape: tuple[int | str, ...]) -> None:
    """Refuse `value` unless its shape matches; a string stands for any size and names it in the message."""
    if value.shape == shape:
        return
    fits = value.dim() == len(shape) and all(
        isinstance(want, str) or want == got for want, got in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = "(" + ", ".join(str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"
        raise InputError(expected(f"{name}.shape", wanted, tuple(value.shape)))


def last_stride_one(name: str, value: Tensor) -> None:
    """Refuse a tensor whose last dimension is not contiguous: copying it silently would hide the cost."""
    if value.numel() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise InputError(
            f"{name} must have stride 1 in the last dimension, got stride {tuple(value.stride())}. "
            "Call .contiguous() or pass the untransposed tensor."
        )


def logits(name: str, value: Tensor) -> None:
    """Refuse what is no (N, V) float tensor with V >= 1 and contiguous rows."""
    dtype_in(name, value, FLOATS)
    shape_is(name, value, ("N", "V"))
    if value.shape[1] < 1:
        raise InputError(expected(f"{name}.shape", "(N, V) with V >= 1", tuple(value.shape)))
    last_stride_one(name, value)


def token_ids(name: str, value: Tensor | Sequence[int] | None, device: torch.device) -> Tensor | None:
    """An optional list of token ids as a 1-D int64 tensor; a sequence is put on `device`."""
    if value is not None and not isinstance(value, Tensor):
        if not isinstance(value, Sequence) or not all(_is_id(i) for i in value):
            raise InputError(expected(name, "a 1-D int64 tensor or a sequence of token ids", repr(value)))
        value = torch.tensor(list(value), dtype=torch.int64, device=device)
    if value is not None:
        dtype_in(name, value, (torch.int64,))
        shape_is(name, value, ("n",))
    return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def one_device(**tensors: Tensor | None) -> torch.device:
    """Refuse tensors on different devices; return the one device."""
    present = {name: t for name, t in tensors.items() if t is not None}
    devices = {t.device for t in present.values()}
    if len(devices) > 1:
        listed = ", ".join(f"{name} {t.device}" for name, t in present.items())
        raise InputError(f"all tensors must be on one device: {listed}. Move them with .to(device).")
    return devices.pop()


def no_gradients(**tensors: Tensor | None) -> None:
    """Refuse tensors that ask for gradients: the registered ops have no backward and would drop them."""
    if not torch.is_grad_enabled():
        return
    for name, t in tensors.items():
        if t is not None and t.requires_grad:
            raise InputError(
                f"{name} requires grad, but leap ops are inference-only; "
                "use torch.inference_mode() or detach the inputs."
            )


def in_range(name: str, ids: Tensor | None, low: int, high: int) -> None:
    """Refuse indices outside [low, high) of a CPU tensor.

    On a GPU a look at the values would wait for the device, and while compiling there are none: there the caller is
    trusted.
    """
    if ids is None or ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return
    values = ids.flatten().tolist()  # there are few: rows of logits, or suppressed tokens
    least, most = min(values), max(values)
    if least < low or most >= high:
        raise InputError(expected(name, f"in [{low}, {high})", f"values from {least} to {most}"))


def integer(name: str, value: object, least: int = -(2**63), what: str = "") -> None:
    """Refuse what is no whole number of at least `least` that fits 64 bits."""
    whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not whole or value < least or value >= 2**63:  # type: ignore[operator]
        raise InputError(expected(name, (what or f"at least {least}") + _as_python(value, int), repr(value)))


def number(name: str, value: object, low: float, high: float, what: str, hint: str = "") -> None:
    """Refuse what is no number in [low, high], `what` in words; infinities as bounds are not inside."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not low <= value <= high or value in (math.inf, -math.inf):  # type: ignore[operator]
        raise ConfigError(expected(name, what + _as_python(value, float), repr(value), hint))


def _as_python(value: object, kind: type) -> str:
    """What to add to a message where a NumPy or torch scalar would be right if it were a Python number."""
    return f" (a Python {kind.__name__})" if hasattr(value, "item") else ""


def flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise ConfigError(expected(name, "True or False", repr(value)))
