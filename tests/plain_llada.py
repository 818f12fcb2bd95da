# SPDX-License-Identifier: Apache-2.0
"""A plain forward of a LLaDA checkpoint, straight from the authors' parameter names. Slow on purpose.

It shares nothing with the package (no transformers class, no fused attention): it serves as a second opinion.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

BLOCK_WEIGHTS = ("attn_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_norm", "ff_proj", "up_proj", "ff_out")

# What this file implements: value of a config key that it needs, where the key is present at all.
EXPECTED_CONFIG = {
    "rope": True,
    "alibi": False,
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "bias_for_layer_norm": False,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) in float32, cast back, times the weight."""
    wide = x.float()
    normed = wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate(x: Tensor, position_ids: Tensor, theta: float) -> Tensor:
    """Half-rotation RoPE in float32, cast back. x (B, heads, R, d), position_ids (B, R)."""
    half = x.shape[-1] // 2
    inverse_frequencies = 1.0 / theta ** (torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = position_ids[:, None, :, None].float() * inverse_frequencies  # (B, 1, R, d / 2)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float()[..., :half], x.float()[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention by hand. mask (B, 1, R, R), True = visible; a row that sees nothing gives 0."""
    scores = (q.float() @ k.float().transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    mask = mask.expand(scores.shape)
    scores = scores.masked_fill(~mask, float("-inf"))
    highest = scores.amax(dim=-1, keepdim=True)
    highest = torch.where(highest == float("-inf"), torch.zeros_like(highest), highest)
    weights = torch.exp(scores - highest)
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / torch.where(total == 0, torch.ones_like(total), total)
    return (weights @ v.float()).to(v.dtype)


class PlainLlada:
    """`model(input_ids, position_ids, mask) -> logits`, for a dense LLaDA checkpoint."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        for key, wanted in EXPECTED_CONFIG.items():
            if config.get(key) not in (None, wanted):
                raise ValueError(f"config.json: {key} = {config[key]!r}, this file only knows {wanted!r}")
        self.n_layers: int = config["n_layers"]
        self.n_heads: int = config["n_heads"]
        self.n_kv_heads: int = config.get("n_kv_heads") or self.n_heads
        self.head_dim: int = config["d_model"] // self.n_heads
        self.theta = float(config.get("rope_theta", 10000.0))
        self.eps = float(config.get("rms_norm_eps", 1e-5))
        self.tied = bool(config.get("weight_tying", False))
        self.weights = weights

        expected = {"model.transformer.wte.weight", "model.transformer.ln_f.weight"}
        if not self.tied:
            expected.add("model.transformer.ff_out.weight")
        for layer in range(self.n_layers):
            for name in BLOCK_WEIGHTS:
                expected.add(f"model.transformer.blocks.{layer}.{name}.weight")
        found = set(weights)
        if self.tied:
            found.discard("model.transformer.ff_out.weight")  # some files store the tied head a second time
        if found != expected:
            raise ValueError(f"missing {sorted(expected - found)}, unexpected {sorted(found - expected)}")

    @classmethod
    def from_folder(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> PlainLlada:
        """Read config.json and every *.safetensors of a folder."""
        folder = Path(path)
        config = json.loads((folder / "config.json").read_text())
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            for name, value in load_file(file).items():
                weights[name] = value.to(dtype)
        return cls(config, weights)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"model.transformer.{name}.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"model.transformer.{name}.weight"], self.eps)

    def heads(self, x: Tensor, number: int) -> Tensor:
        """(B, R, number * d) -> (B, number, R, d)"""
        return x.view(x.shape[0], x.shape[1], number, self.head_dim).transpose(1, 2)

    def attention(self, x: Tensor, position_ids: Tensor, mask: Tensor | None, block: str) -> Tensor:
        q = rotate(self.heads(self.linear(x, f"{block}.q_proj"), self.n_heads), position_ids, self.theta)
        k = rotate(self.heads(self.linear(x, f"{block}.k_proj"), self.n_kv_heads), position_ids, self.theta)
        v = self.heads(self.linear(x, f"{block}.v_proj"), self.n_kv_heads)
        group = self.n_heads // self.n_kv_heads  # query head h reads key head h // group
        k = torch.stack([k[:, head // group] for head in range(self.n_heads)], dim=1)
        v = torch.stack([v[:, head // group] for head in range(self.n_heads)], dim=1)
        out = attend(q, k, v, mask).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
        return self.linear(out, f"{block}.attn_out")

    def mlp(self, x: Tensor, block: str) -> Tensor:
        gate = self.linear(x, f"{block}.ff_proj")
        gate = gate * torch.sigmoid(gate)
        return self.linear(gate * self.linear(x, f"{block}.up_proj"), f"{block}.ff_out")

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """input_ids, position_ids (B, R), mask bool (B, 1, R, R) or None = everything visible -> logits (B, R, V)."""
        x = self.weights["model.transformer.wte.weight"][input_ids]
        for layer in range(self.n_layers):
            block = f"blocks.{layer}"
            x = x + self.attention(self.norm(x, f"{block}.attn_norm"), position_ids, mask, block)
            x = x + self.mlp(self.norm(x, f"{block}.ff_norm"), block)
        x = self.norm(x, "ln_f")
        return self.linear(x, "wte" if self.tied else "ff_out")
