# SPDX-License-Identifier: Apache-2.0
"""What the Triton launchers share."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Config", "on_device"]


class Config(NamedTuple):
    """How one kernel is compiled; launchers and ahead-of-time tests both take it from the same function."""

    constants: dict[str, Any]
    """Its constexpr arguments."""
    options: dict[str, Any]
    """num_warps, num_stages, and enable_fp_fusion, whose default changes with triton 3.10."""


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the GPU of `tensor` current: Triton launches on the current one and faults on pointers of another."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
