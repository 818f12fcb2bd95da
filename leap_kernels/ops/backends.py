# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs: the rule behind every op's `backend=` argument."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from ..errors import BackendError, ConfigError
from . import extension

__all__ = ["BACKENDS", "INTERPRETED", "NAMESPACE", "check_name", "choose", "dispatch", "why_no_triton"]

NAMESPACE = "leap"  # of the operators that library.py registers

BACKENDS = ("auto", "reference", "triton", "cuda")

# Triton reads this variable when a kernel is decorated, so what it was at import decides for the whole process.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

MIN_CAPABILITY = (8, 0)

_log = logging.getLogger("leap_kernels")


def check_name(backend: str, op: str = "") -> None:
    """Refuse a backend that does not exist, or that has no kernel for `op`; without `op`, for one of the four."""
    if backend not in BACKENDS:
        raise ConfigError(f'backend must be one of {", ".join(BACKENDS)}, got {backend!r}. Leave it at "auto".')
    if backend == "cuda" and op not in extension.OPS:
        raise BackendError(
            f'backend="cuda" is the optional CUDA extension, which has a kernel for {", ".join(extension.OPS)} and '
            f'{f"none for {op}" if op else "not for the other ops"}. Use backend="auto", "triton" or "reference".'
        )


def why_no_triton(device: torch.device) -> str:
    """The reason why Triton kernels cannot run on tensors of `device`; empty when they can."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed (it exists for Linux only)"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return f"{device} has compute capability {capability[0]}.{capability[1]}"
        return ""
    if device.type == "cpu" and INTERPRETED:
        return ""
    if device.type == "cpu":
        return (
            f"the tensors are on the CPU (torch.cuda.is_available() is {torch.cuda.is_available()}) and "
            "TRITON_INTERPRET=1 was not set before leap_kernels was imported"
        )
    return f"the tensors are on {device}"


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)


def choose(backend: str, device: torch.device, *, op: str = "", limit: str = "") -> str:
    """Resolve `backend` for tensors on `device` to "reference", "triton" or "cuda"; `op` as in `check_name`.

    `limit` says, when not empty, why the Triton kernel of this op cannot take this input. A backend asked for by
    name never falls back (BackendError); "auto" may, and says so once. It never takes "cuda".
    """
    check_name(backend, op)
    if backend == "reference" or (backend == "auto" and device.type != "cuda"):
        return "reference"
    if backend == "cuda":
        reason = extension.why_not("cuda") if device.type == "cuda" else f"it needs CUDA tensors, these are on {device}"
        if not reason:
            return "cuda"
        raise BackendError(
            'backend="cuda", the optional CUDA extension, cannot run here; '
            f'use backend="auto", "triton" or "reference". The reason: {reason}'
        )
    reason = why_no_triton(device)
    if backend == "triton" and reason:
        raise BackendError(
            f'backend="triton" needs a CUDA GPU with compute capability >= 8.0: {reason}. '
            'Use backend="reference" or "auto".'
        )
    if backend == "triton" and limit:
        raise BackendError(f'backend="triton" cannot take this input: {limit}. Use backend="reference" or "auto".')
    reason = reason or limit
    if not reason:
        return "triton"
    _say_once(f"leap_kernels runs the reference instead of Triton: {reason}.")
    return "reference"


def _is_eager(given: torch.Tensor) -> bool:
    """Whether nobody wants to see the operator as one: no compiler, no dispatch mode, no subclass (fake tensors)."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    return type(given) is torch.Tensor and not traced


# What library.py registers for these devices; every other pair is called past the dispatcher.
_REGISTERED = {("cpu", "reference"), ("meta", "reference"), ("cuda", "triton")}


@functools.cache
def _reference(folder: str, op: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(f".{folder}.reference", __package__), op)
    return found


def dispatch(
    op: str, folder: str, backend: str, device: torch.device, args: tuple[Any, ...], *, limit: str = ""
) -> Any:
    """Run operator `op`, whose files are in `ops/<folder>`, on the backend that `choose` picks."""
    chosen = choose(backend, device, op=op, limit=limit)
    if (device.type, chosen) in _REGISTERED and not (device.type == "cpu" and _is_eager(args[0])):
        return getattr(getattr(torch.ops, NAMESPACE), op)(*args)
    if chosen == "cuda":
        return extension.run(op, args)
    if chosen == "triton":
        return importlib.import_module(f".{folder}.kernel", __package__).launch(*args)
    return _reference(folder, op)(*args)
