# SPDX-License-Identifier: Apache-2.0
"""The public function `sample_rows`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import validation
from ..backends import dispatch

__all__ = ["Sampled", "sample_rows"]


class Sampled(NamedTuple):
    """What `sample_rows` returns for R rows."""

    token: Tensor
    """(R,) int64: the drawn token; -1 on a bad row."""
    prob: Tensor
    """(R,) float32: its probability in the softmax without temperature; NaN on a bad row."""


def sample_rows(
    logits: Tensor,
    seeds: Tensor,
    steps: Tensor,
    positions: Tensor,
    *,
    temperature: float,
    rows: Tensor | None = None,
    suppress: Tensor | Sequence[int] | None = None,
    backend: str = "auto",
) -> Sampled:
    """One token a row from softmax(logits / temperature), by the Gumbel-max trick and noise that needs no state.

    token = argmax_v x_v - temperature * ln(-ln u_v) with x = float32(logits[row]), suppressed ids at -inf, and u_v a
    32-bit hash of (seed, step, position, v): a row's draw depends on nothing else, so neither on its neighbours nor
    on the device. `prob` is the softmax at temperature 1 of the same x.

    The uniforms of reference and kernel are bit-equal, their logarithms within 4 ulp of the exact ones. Both thus draw
    the exact argmax wherever it leads by more than 2^-19 (18 temperature + |x|), |x| the larger of the two logits;
    below that, either token is right.

    Args:
        logits: (N, V) bf16, fp16, fp32 (fp64 on the reference, rounded to fp32), any row stride, last stride 1.
        seeds: (R,) int64 or int32, all 64 bits count.
        steps: (R,) int64 or int32, the low 32 bits count.
        positions: (R,) int64 or int32, the low 32 bits count.
        temperature: in [0, 1e6]; 0 gives the argmax, first id on a tie.
        rows: (R,) int64 or int32 row indices in [0, N), in any order, repeats allowed; None takes all rows.
        suppress: ids that are never drawn, such as the mask token.
        backend: "auto", "reference" or "triton".

    Returns:
        Sampled. A row with a NaN, a +inf or no finite logit gets token -1 and prob NaN.

    Raises:
        InputError: wrong shape, dtype, stride or device, an index out of range, or an input that requires grad.
        ConfigError: temperature out of range, or an unknown backend.
        BackendError: the backend asked for cannot run here.

    Cost: reads R * V logits once, with a hash and two logarithms each; writes R * 12 bytes.

    >>> import torch
    >>> logits, ones = torch.tensor([[0.0, 1.0, 0.5]]).expand(6, 3), torch.ones(6, dtype=torch.int64)
    >>> sample_rows(logits, ones, ones, torch.arange(6), temperature=1.0).token.tolist()
    [2, 2, 1, 2, 0, 0]
    """
    validation.logits("logits", logits)
    validation.number("temperature", temperature, 0, 1e6, "in [0, 1e6]", "0 is greedy.")
    if rows is None:
        rows = torch.arange(logits.shape[0], device=logits.device)
    validation.dtype_in("rows", rows, validation.INTEGERS)
    validation.shape_is("rows", rows, ("R",))
    for name, value in (("seeds", seeds), ("steps", steps), ("positions", positions)):
        validation.dtype_in(name, value, validation.INTEGERS)
        validation.shape_is(name, value, (rows.shape[0],))
    suppress = validation.token_ids("suppress", suppress, logits.device)
    device = validation.one_device(
        logits=logits, rows=rows, seeds=seeds, steps=steps, positions=positions, suppress=suppress
    )
    validation.no_gradients(logits=logits)
    validation.in_range("rows", rows, 0, logits.shape[0])
    validation.in_range("suppress", suppress, 0, logits.shape[1])
    limit = "the kernel takes bf16, fp16 and fp32 logits, not float64" if logits.dtype == torch.float64 else ""
    args = (logits, rows.long(), seeds.long(), steps.long(), positions.long(), temperature, suppress)
    return Sampled(*dispatch("sample_rows", "sampling", backend, device, args, limit=limit))
