# SPDX-License-Identifier: Apache-2.0
"""The ways to call an op: the public function, the registered operator, and the Python body behind it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import ops
from ..ops.backends import NAMESPACE
from .cases import Case, Inputs

__all__ = ["body", "interpreted", "raw", "registered"]


class _Listen(TorchDispatchMode):
    """Remembers the last call of one of our operators."""

    heard: tuple[Any, tuple[Any, ...]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            self.heard = func, tuple(named.get(a.name, a.default_value) for a in func._schema.arguments)
        return func(*args, **(kwargs or {}))


def raw(case: Case, inputs: Inputs) -> tuple[Any, tuple[Any, ...]]:
    """The registered operator that the public function calls, and all its arguments."""
    listen: Any = _Listen()  # type: ignore[no-untyped-call]
    with listen:
        case.call(inputs)
    if listen.heard is None:
        raise RuntimeError(f"{case.op} did not reach its registered operator")
    operator, args = listen.heard
    return operator, args


def _folder(case: Case) -> str:
    return str(getattr(ops, case.op).__module__.rpartition(".")[0])


def registered(case: Case, inputs: Inputs) -> Callable[[], Any]:
    """The operator through torch's dispatcher, validation left out."""
    operator, args = raw(case, inputs)
    return lambda: operator(*args)


def body(case: Case, inputs: Inputs) -> Callable[[], Any]:
    """What the dispatcher would run for these tensors, called directly: reference on a CPU, launcher on a GPU."""
    args = raw(case, inputs)[1]
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in args):
        launch = importlib.import_module(f"{_folder(case)}.kernel").launch
    else:
        launch = getattr(importlib.import_module(f"{_folder(case)}.reference"), case.op)
    return lambda: launch(*args)


def interpreted(case: Case, inputs: Inputs) -> Callable[[], Any]:
    """The Triton launcher on CPU tensors, in a process that interprets."""
    args = raw(case, inputs)[1]
    launch = importlib.import_module(f"{_folder(case)}.kernel").launch
    return lambda: launch(*args)
