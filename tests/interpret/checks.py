# SPDX-License-Identifier: Apache-2.0
"""What the tests of kernels against references share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(a: Tensor, b: Tensor) -> None:
    """Bit for bit (0 is not -0), dtype and shape included; a NaN equals any NaN."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    differ = a != b
    if a.is_floating_point():
        integer = INTEGER_OF_SIZE[a.element_size()]
        differ = (a.contiguous().view(integer) != b.contiguous().view(integer)) & ~(a.isnan() & b.isnan())
    assert not differ.any(), f"{differ.sum()} of {a.numel()} elements differ"


def close(got: Tensor, reference: Tensor, truth: Tensor, scale: float = 0.0) -> None:
    """2 x (error of the reference + eps x max |truth|) ; not finite where it is not.

    `scale` stands in for max |truth| where the result is a small difference of larger terms.
    """
    assert got.dtype == reference.dtype
    assert got.shape == reference.shape
    finite = truth.isfinite()
    assert torch.equal(got[~finite].double().nan_to_num(nan=0.5), truth[~finite].double().nan_to_num(nan=0.5))
    eps = torch.finfo(got.dtype).eps
    got, reference, truth = got[finite].double(), reference[finite].double(), truth[finite].double()
    if not truth.numel():
        return
    budget = 2 * ((reference - truth).abs().max().item() + eps * max(truth.abs().max().item(), scale))
    error = (got - truth).abs().max().item()
    assert error <= budget, f"error {error:.3g}, allowed {budget:.3g}"


def unchanged(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """op(*args, **kwargs), which must leave its inputs as they are."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    before = [t.clone() for t in tensors]
    out = op(*args, **kwargs)
    for t, old in zip(tensors, before, strict=True):
        same(t, old)
    return out
