# SPDX-License-Identifier: Apache-2.0
"""`Store`: keys and values that outlive a forward, one slot a canvas column, and slots of one forward behind them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Store", "Stored"]


class Store:
    """Keys and values of every layer, after RoPE, for B samples of L columns.

    Appended rows live in slots from L on, which the next forward writes again; the last slot takes what nobody reads.
    Memory is made when a layer is first met, and made again only when a forward appends more rows than any before.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, slot: Tensor, key: Tensor, value: Tensor, used: int) -> tuple[Tensor, Tensor]:
        """Put the rows' keys and values (B, Hkv, R, D) into their slots (B, R); the first `used` slots of the layer.

        A slot of -1 is nobody's.
        """
        if layer not in self._layers or self._layers[layer][0].shape[2] <= used:
            self._grow(layer, key, value, used)
        stored = self._layers[layer]
        last = stored[0].shape[2] - 1
        slot = torch.where(slot < 0, last, slot).long()
        sample = torch.arange(slot.shape[0], device=slot.device)[:, None]
        for memory, new in zip(stored, (key, value), strict=True):
            memory.transpose(1, 2)[sample, slot] = new.transpose(1, 2)
        return stored[0][:, :, :used], stored[1][:, :, :used]

    def _grow(self, layer: int, key: Tensor, value: Tensor, used: int) -> None:
        old = self._layers.get(layer)
        made = []
        for i, new in enumerate((key, value)):
            # Zeros: attention gives unwritten slots no weight, but no weight times NaN would be NaN.
            memory = new.new_zeros((new.shape[0], new.shape[1], used + 1, new.shape[3]))
            if old is not None:
                memory[:, :, : self.columns] = old[i][:, :, : self.columns]
            made.append(memory)
        self._layers[layer] = (made[0], made[1])

    def select(self, index: Tensor) -> None:
        """Follow the batch."""
        self._layers = {n: (k.index_select(0, index), v.index_select(0, index)) for n, (k, v) in self._layers.items()}


@dataclass(frozen=True, eq=False)
class Stored:
    """What a forward's rows find in a store: its slots, and what is known of the columns in it."""

    store: Store = field(repr=False)
    pos: Tensor
    """(B, L) int32: position of each column."""
    kind: Tensor
    """(B, L) int32: 0 where a column has keys and values, -1 elsewhere."""
    hide: Tensor | None = None
    """(B, L) int32: 0 on columns that branches do not see, -1 on others; None is -1 everywhere."""
