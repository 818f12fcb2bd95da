# SPDX-License-Identifier: Apache-2.0
"""A forward for oracle.py that recomputes only what a cache would, written from decoders.md 2.12 and 2.13.

A Llama in plain torch over a dictionary of keys and values; it shares no code with the package. Rows that are not
computed get NaN logits, from which no decoder could decide anything.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, pos: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = pos.to(x.dtype)[:, None] / theta ** (torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class CachingForward:
    """`forward(input_ids (1, R), position_ids (1, R), mask (1, 1, R, R)) -> (1, R, V)` for one decode of one sample."""

    def __init__(
        self,
        model,
        cache: str,
        *,
        n_prompt: int,
        block_length: int,
        shift: int = 0,
        block_causal: int = 0,
        refresh: int | None = None,
        mask_id: int = 0,
    ) -> None:
        self.config, self.weights = model.config, model.state_dict()
        self.cache, self.refresh, self.mask_id = cache, refresh, mask_id
        self.n_prompt, self.block_length, self.shift, self.block_causal = n_prompt, block_length, shift, block_causal
        self.keys: dict[int, dict[int, Tensor]] = {n: {} for n in range(self.config.num_hidden_layers)}
        self.values: dict[int, dict[int, Tensor]] = {n: {} for n in range(self.config.num_hidden_layers)}
        self.before: list[int] = []  # the canvas of the forward before, and the block it worked on
        self.block = -1
        self.age = 0
        self.computed: list[int] = []  # rows of each forward, appended ones included

    def block_of(self, ids: list[int]) -> int:
        """Number of the first block that has a mask; block-causal blocks lie at multiples of their length."""
        first = next(i for i in range(self.n_prompt, len(ids)) if ids[i] == self.mask_id)
        origin = self.n_prompt if not self.block_causal else 0
        return (first - origin) // self.block_length

    def bounds(self, block: int, length: int) -> tuple[int, int]:
        origin = self.n_prompt if not self.block_causal else 0
        start = origin + block * self.block_length
        return max(start, self.n_prompt), min(start + self.block_length, length)

    def columns(self, ids: list[int]) -> list[int]:
        """Which positions this forward recomputes."""
        block, length = self.block_of(ids), len(ids)
        previous, self.age = self.block, self.age + 1 if block == self.block else 0
        start, stop = self.bounds(block, length)
        self.block = block
        everything = list(range(length))
        again = self.refresh is not None and self.age % self.refresh == 0
        masked = [i for i in range(self.n_prompt, length) if ids[i] == self.mask_id]
        before, self.before = self.before, list(ids)
        if self.cache == "block":
            if previous < 0:
                return everything
            start = self.bounds(previous, length)[0] // self.block_causal * self.block_causal
            return list(range(max(0, start - self.shift), length))
        if self.age == 0 or again or (self.cache == "delayed" and self.age == 1):
            return everything
        if self.cache == "prefix":
            return list(range(max(0, start - self.shift), length))
        if self.cache == "dual":
            return list(range(max(0, start - self.shift), stop))
        new = [i for i in range(self.n_prompt, length) if before[i] == self.mask_id and ids[i] != self.mask_id]
        return sorted({*masked, *new, *(max(0, i - self.shift) for i in masked)})

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        token, pos, c = input_ids[0], position_ids[0], self.config
        base = next((i for i in range(len(pos)) if pos[i] != i), len(pos))
        columns = self.columns(token[:base].tolist())
        rows = [*columns, *range(base, len(pos))]
        self.computed.append(len(rows))
        sees = mask[0, 0][rows]
        d = c.hidden_size // c.num_attention_heads
        x = self.weights["model.embed_tokens.weight"][token[rows]]
        for layer in range(c.num_hidden_layers):

            def w(name: str, layer: int = layer) -> Tensor:
                return self.weights[f"model.layers.{layer}.{name}.weight"]

            h = self.norm(x, w("input_layernorm"))
            q, k, v = (
                (h @ w(f"self_attn.{name}_proj").T).view(len(rows), -1, d).transpose(0, 1) for name in ("q", "k", "v")
            )
            theta = c.rope_parameters["rope_theta"]
            q, k = rotate(q, pos[rows], theta), rotate(k, pos[rows], theta)
            for stored, new in ((self.keys[layer], k), (self.values[layer], v)):
                for number, row in enumerate(rows):
                    stored[row] = new[:, number]  # appended rows are written again before they are read again
            k, v = (
                torch.stack([stored[row] for row in range(len(pos))], 1).repeat_interleave(q.shape[0] // k.shape[0], 0)
                for stored in (self.keys[layer], self.values[layer])
            )
            scores = (q @ k.transpose(1, 2) * d**-0.5).masked_fill(~sees, float("-inf"))
            x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(rows), -1) @ w("self_attn.o_proj").T
            h = self.norm(x, w("post_attention_layernorm"))
            gate = h @ w("mlp.gate_proj").T
            x = x + (gate * gate.sigmoid() * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
        logits = self.norm(x, self.weights["model.norm.weight"]) @ self.weights["lm_head.weight"].T
        out = torch.full((1, len(pos), logits.shape[1]), float("nan"), dtype=logits.dtype)
        out[0, rows] = logits
        if self.cache == "dual":  # its candidates never cross a block (method.md 2.2)
            last = self.bounds(self.block, base)[1] - 1
            out[0, max(last - self.shift, 0) + 1 : base] = float("nan")  # behind the row that predicts the last token
        return out

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps)
