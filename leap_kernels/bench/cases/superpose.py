# SPDX-License-Identifier: Apache-2.0
"""`superpose`: integers only, so the truth is written out row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .case import Baseline, Case, Cost, Inputs, Shape

__all__ = ["CASE"]

MASK = 126336
JUNK = 10**12  # what stands where nobody may look


def make(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, fill: float = 1.0) -> Inputs:
    """The last T columns are targets, with 0 to K candidates each; odd seeds take the rule of shifted models.

    Below fill 1 each sample has fewer targets, the last one none at all; what then counts for nothing is JUNK.
    """
    b, length, t, k = shape["batch"], shape["columns"], shape["targets"], shape["k"]
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, k + 1, (b, t), generator=g, dtype=torch.int32)
    cand_ids = torch.randint(0, MASK, (b, t, k), generator=g)
    cand_ids[torch.arange(k) >= counts[..., None]] = JUNK if fill < 1 else -1
    targets = torch.arange(length - t, length, dtype=torch.int32).repeat(b, 1)
    if fill < 1:
        used = torch.tensor([round(fill * t)] * (b - 1) + [0 if b > 1 else round(fill * t)])
        unused = torch.arange(t) >= used[:, None]
        targets[unused], counts[unused], cand_ids[unused] = -1, 99, JUNK
    inputs = {
        "ids": torch.randint(0, MASK, (b, length), generator=g),
        "pos": torch.arange(length, dtype=torch.int32).repeat(b, 1),
        "targets": targets,
        "cand_ids": cand_ids,
        "counts": counts,
    }
    return {name: x.to(device) for name, x in inputs.items()} | {"mask_id": MASK, "shift": seed % 2}


def truth(inputs: Inputs) -> tuple[Tensor, ...]:
    """Paper Eq. 9, one appended row at a time."""
    ids, pos, targets, cand_ids, counts = (
        inputs[name].tolist() for name in ("ids", "pos", "targets", "cand_ids", "counts")
    )
    shift, k = inputs["shift"], inputs["cand_ids"].shape[2]
    capacity = inputs["targets"].shape[1] * (1 + k)
    rows: list[list[tuple[int, int, int, int]]] = []
    copy_rows: list[list[int]] = []
    for b, columns in enumerate(targets):
        copies: list[tuple[int, int, int, int]] = []
        candidates: list[tuple[int, int, int, int]] = []
        copy_row = [-1] * len(columns)
        for i, column in enumerate(columns):
            if column < 0:
                continue
            at = pos[b][column]
            if at >= shift:
                copy_row[i] = len(copies)
                copies.append((ids[b][column - shift], pos[b][column - shift], 1, at))
            candidates += [(token, at, 2, at) for token in cand_ids[b][i][: counts[b][i]]]
        alone = sum(column >= 0 for column in columns) < 2
        nothing = alone or not candidates
        rows.append([] if nothing else copies + candidates)
        copy_rows.append([-1] * len(columns) if nothing else copy_row)
    padded = torch.tensor([r + [(inputs["mask_id"], 0, -1, -1)] * (capacity - len(r)) for r in rows])
    token, new_pos, kind, hide = padded.to(inputs["ids"].device).unbind(-1)
    small = [
        x.to(torch.int32) for x in (new_pos, kind, hide, torch.tensor(copy_rows), torch.tensor(list(map(len, rows))))
    ]
    return token, *(x.to(token.device) for x in small)


def cost(inputs: Inputs) -> Cost:
    """Targets, counts and candidates in, canvas of the copies in; six outputs."""
    b, t, k = inputs["cand_ids"].shape
    return Cost(b * (8 * t + 8 * t * k + 12 * t) + b * (20 * t * (1 + k) + 4 * t + 4), 0)


def torch_eager(inputs: Inputs) -> Callable[[], Any]:
    """The reference: arange, cumsum, gather, scatter."""
    return lambda: CASE.call(inputs, "reference")


LLADA = {"batch": 1, "columns": 1024, "targets": 32, "k": 5}

CASE = Case(
    op="superpose",
    small={"batch": 3, "columns": 97, "targets": 67, "k": 3},
    tiny={"batch": 1, "columns": 4, "targets": 2, "k": 1},
    odd=({"targets": 1, "k": 1}, {"columns": 1025, "targets": 33, "k": 5}, {"k": 11}),
    shapes={"llada": LLADA, "llada-batch-8": LLADA | {"batch": 8}},
    make=make,
    truth=truth,
    plain=truth,
    cost=cost,
    baselines=(Baseline("torch eager", torch_eager, field="token", pick=lambda result: result.token),),
    dtypes=(torch.int64,),
)
