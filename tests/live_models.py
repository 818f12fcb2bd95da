# SPDX-License-Identifier: Apache-2.0
"""Small models with the class names, attributes, methods and behaviour of the authors' modeling code, written here.

LLaDA: `model.transformer.blocks[i]` with `rotary_emb(q, k)` over positions 0, 1, 2, ..., `attention` and
`_scaled_dot_product_attention`; keys are cached before they are rotated. The hub's file honours `attention_bias`,
Fast-dLLM's and dInfer's drop every mask. Dream, SDAR, LLaDA2: `model.layers[i].self_attn` with a shared `rotary_emb`
that returns tables; Fast-dLLM's Dream takes `position_ids` and ignores them.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from families import FAMILIES, weights_of
from plain import rms_norm
from torch import Tensor, nn

__all__ = ["live"]


def live(family: str, *, flavour: str = "hub", fused: bool = False, seed: int = 0, **changes: Any) -> Any:
    """A model of `family` with random weights. `flavour` "fast" drops masks (LLaDA) or positions (Dream)."""
    config = {**copy.deepcopy(FAMILIES["SDAR" if family == "LLaDA2" else family]), **changes}
    weights = weights_of(config, seed)
    if fused:
        weights = fuse(weights)
    model = CLASSES[family](Config(config), flavour, fused)
    model.load_state_dict(weights, strict=True)
    return model.eval()


def fuse(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values of each layer one below the other."""
    out = dict(weights)
    for name in weights:
        if ".q_proj." in name:
            parts = [out.pop(name.replace(".q_proj.", f".{x}_proj.")) for x in "qkv"]
            out[name.replace(".q_proj.", ".att_proj." if "blocks" in name else ".qkv_proj.")] = torch.cat(parts)
    return out


class Config:
    """What config.json says, as attributes."""

    def __init__(self, raw: dict[str, Any]) -> None:
        vars(self).update(raw)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def heads(x: Tensor, number: int) -> Tensor:
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


# --- LLaDA ---------------------------------------------------------------------------------------------------------


class LLaDARotary(nn.Module):
    """Rotates by 0, 1, 2, ... in float32; queries are the last of the keys, or end at block_end_index."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, q: Tensor, k: Tensor, block_end_index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        half = q.shape[-1] // 2
        frequencies = self.config.rope_theta ** -(torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(k.shape[-2], dtype=torch.float32)[:, None] * frequencies
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
        stop = k.shape[-2] if block_end_index is None else int(block_end_index)
        rows = slice(stop - q.shape[-2], stop)
        return turned(q.float(), cos[rows], sin[rows]).type_as(q), turned(k.float(), cos, sin).type_as(k)


class LLaDABlock(nn.Module):
    def __init__(self, config: Config, flavour: str, fused: bool) -> None:
        super().__init__()
        self.config, self.flavour = config, flavour
        width, wide = config.d_model, config.mlp_hidden_size
        self.rows = [width, *[width // config.n_heads * config.n_kv_heads] * 2]
        self.rotary_emb = LLaDARotary(config)
        self.attn_norm, self.ff_norm = Norm(width, config.rms_norm_eps), Norm(width, config.rms_norm_eps)
        if fused:
            self.att_proj = nn.Linear(width, sum(self.rows), bias=False)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n, bias=False) for n in self.rows)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_proj, self.up_proj = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
        self.ff_out = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor, attention_bias: Any = None, layer_past: Any = None, use_cache: bool = False) -> Any:
        normed = self.attn_norm(x)
        if hasattr(self, "att_proj"):
            q, k, v = self.att_proj(normed).split(self.rows, -1)
        else:
            q, k, v = self.q_proj(normed), self.k_proj(normed), self.v_proj(normed)
        seen, present = self.attention(q, k, v, attention_bias, layer_past=layer_past, use_cache=use_cache)
        x = x + seen
        normed = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed)), present

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, attention_bias: Any = None, layer_past: Any = None, use_cache=False
    ) -> Any:
        q = heads(q, self.config.n_heads)
        k, v = heads(k, self.config.n_kv_heads), heads(v, self.config.n_kv_heads)
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), -2), torch.cat((layer_past[1], v), -2)
        present = (k, v) if use_cache else None
        q, k = self.rotary_emb(q, k)
        mask = attention_bias if self.flavour == "hub" else None
        out = self._scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False)
        return self.attn_out(out.transpose(1, 2).flatten(2)), present

    def _scaled_dot_product_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False
    ) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=False)


class LLaDAModel(nn.Module):
    def __init__(self, config: Config, flavour: str, fused: bool) -> None:
        super().__init__()
        blocks = nn.ModuleList(LLaDABlock(config, flavour, fused) for _ in range(config.n_layers))
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(config.embedding_size, config.d_model),
            "blocks": blocks,
            "ln_f": Norm(config.d_model, config.rms_norm_eps),
        }
        if not config.weight_tying:
            parts["ff_out"] = nn.Linear(config.d_model, config.embedding_size, bias=False)
        self.transformer = nn.ModuleDict(parts)


class LLaDAModelLM(nn.Module):
    def __init__(self, config: Config, flavour: str, fused: bool) -> None:
        super().__init__()
        self.config, self.model = config, LLaDAModel(config, flavour, fused)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        attention_bias: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
    ) -> Any:
        use_cache = use_cache if use_cache is not None else self.config.use_cache  # which some configs lack
        parts, caches = self.model.transformer, []
        x = parts["wte"](input_ids)
        for i, block in enumerate(parts["blocks"]):
            past = None if past_key_values is None else past_key_values[i]
            x, present = block(x, attention_bias, layer_past=past, use_cache=use_cache)
            caches.append(present)
        x = parts["ln_f"](x)
        logits = parts["ff_out"](x) if "ff_out" in parts else F.linear(x, parts["wte"].weight)
        return SimpleNamespace(logits=logits, past_key_values=caches if use_cache else None)


# --- Dream, SDAR, LLaDA2's interface ----------------------------------------------------------------------------------


class DreamRotaryEmbedding(nn.Module):
    def __init__(self, config: Config, head: int) -> None:
        super().__init__()
        self.config = config
        frequencies = config.rope_theta ** -(torch.arange(head // 2, dtype=torch.float32) / (head // 2))
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class DreamSdpaAttention(nn.Module):
    def __init__(self, config: Config, head: int, fused: bool) -> None:
        super().__init__()
        self.config, self.head = config, head
        bias = config.architectures[0] in ("DreamModel", "Fast_dLLM_QwenForCausalLM")
        self.rows = [head * config.num_attention_heads, *[head * config.num_key_value_heads] * 2]
        if fused:
            self.qkv_proj = nn.Linear(config.hidden_size, sum(self.rows), bias=bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(config.hidden_size, n, bias=bias) for n in self.rows)
        self.o_proj = nn.Linear(self.rows[0], config.hidden_size, bias=False)
        if not bias:
            self.q_norm, self.k_norm = Norm(head, config.rms_norm_eps), Norm(head, config.rms_norm_eps)

    def forward(self, x: Tensor, attention_mask: Any, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        if hasattr(self, "qkv_proj"):
            q, k, v = self.qkv_proj(x).split(self.rows, -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (heads(t, t.shape[-1] // self.head) for t in (q, k, v))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = (t[:, None] for t in position_embeddings)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return self.o_proj(self.attend(q, k, v, attention_mask).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask if isinstance(mask, Tensor) else None)


class DreamAttention(DreamSdpaAttention):
    """The eager one: adds whatever mask it is given."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        scores = q @ k.transpose(-1, -2) / self.head**0.5
        return (scores + mask if isinstance(mask, Tensor) else scores).softmax(-1) @ v


class DreamLayer(nn.Module):
    def __init__(self, config: Config, head: int, flavour: str, fused: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        kind = DreamAttention if flavour == "eager" else DreamSdpaAttention
        self.self_attn = kind(config, head, fused)
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.mlp.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.mlp.down_proj = nn.Linear(config.intermediate_size, width, bias=False)

    def forward(self, x: Tensor, attention_mask: Any, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), attention_mask, position_embeddings)
        normed = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(normed)) * self.mlp.up_proj(normed))


class DreamBaseModel(nn.Module):
    def __init__(self, config: Config, flavour: str, fused: bool) -> None:
        super().__init__()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DreamLayer(config, head, flavour, fused) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = DreamRotaryEmbedding(config, head)


class DreamModel(nn.Module):
    def __init__(self, config: Config, flavour: str, fused: bool) -> None:
        super().__init__()
        self.config, self.flavour, self.model = config, flavour, DreamBaseModel(config, flavour, fused)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Tensor | None = None, use_cache=None
    ) -> Any:
        x = self.model.embed_tokens(input_ids)
        if position_ids is None or self.flavour == "fast":
            position_ids = torch.arange(input_ids.shape[1])[None]
        tables = self.model.rotary_emb(x, position_ids)
        for layer in self.model.layers:
            x = layer(x, attention_mask, tables)
        x = self.model.norm(x)
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return SimpleNamespace(logits=F.linear(x, head.weight))


class SDARForCausalLM(DreamModel):
    pass


class Fast_dLLM_QwenForCausalLM(DreamModel):
    pass


class LLaDA2MoeModelLM(DreamModel):
    """The interface of LLaDA2's and dInfer's: 4-D masks and positions are honoured. Without its experts."""


CLASSES: dict[str, Any] = {
    "LLaDA": LLaDAModelLM,
    "Dream": DreamModel,
    "SDAR": SDARForCausalLM,
    "LLaDA2": LLaDA2MoeModelLM,
    "Fast-dLLM": Fast_dLLM_QwenForCausalLM,
}
