# SPDX-License-Identifier: Apache-2.0
"""A plain forward of every supported architecture, straight from the authors' config and weight names. Slow on purpose.

One transformer block with switches. It shares nothing with the package (no transformers class, no fused attention, no
batching of experts): it serves as a second opinion. Rows are as the model computes them: that row i - 1 predicts token
i in some models, and who sees whom in block-causal ones, is the caller's business.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """The switches: what one architecture does differently from another."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rotary: int = 0
    """How many of head_dim rotate; 0 for none."""
    theta: tuple[float, ...] = ()
    """Base of the rotation, one a layer."""
    rope_fp32: bool = False
    rms: bool = True
    """RMS norms, or layer norms."""
    norm_first: bool = True
    """Norms before attention and MLP, or behind the sums."""
    gated: bool = True
    activation: str = "silu"
    dense: tuple[int, ...] = ()
    """Layers without experts, in a model that has some."""
    experts: int = 0
    top_k: int = 0
    sigmoid: bool = False
    """Experts scored by sigmoid plus bias within groups, or by softmax."""
    normalise: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    window: tuple[int, ...] = ()
    """See positions at this distance at most, one a layer; -1 for all."""
    offset: int = 0
    """Row of the position table that belongs to position 0."""
    token_dropout: int = -1
    """Mask id whose embedding is zero, the others scaled by the share of masks (ESM); -1 for none."""
    names: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Regular expression on a stored name -> the name here."""
    ignored: tuple[str, ...] = field(default=(), repr=False)
    """Stored names without a use here."""


# --- pieces --------------------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    """In float32, or in float64 where it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) in float32, cast back, times the weight."""
    normed = wide(x) / torch.sqrt((wide(x) * wide(x)).mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps), times the weight, plus the bias."""
    centred = x - x.mean(dim=-1, keepdim=True)
    normed = centred / torch.sqrt((centred * centred).mean(dim=-1, keepdim=True) + eps)
    return normed * weight + (0 if bias is None else bias)


def rotate(x: Tensor, position_ids: Tensor, theta: float, width: int | None = None) -> Tensor:
    """Half-rotation RoPE of the first `width` of d in float32, cast back. x (B, heads, R, d), position_ids (B, R)."""
    width = x.shape[-1] if width is None else width
    half = width // 2
    inverse_frequencies = 1.0 / theta ** (torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = position_ids[:, None, :, None].float() * inverse_frequencies  # (B, 1, R, width / 2)
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = wide(x)[..., :half], wide(x)[..., half:width], wide(x)[..., width:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention by hand. mask (B, 1, R, R), True = visible; a row that sees nothing gives 0."""
    scores = (wide(q) @ wide(k).transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    mask = mask.expand(scores.shape)
    scores = scores.masked_fill(~mask, float("-inf"))
    highest = scores.amax(dim=-1, keepdim=True)
    highest = torch.where(highest == float("-inf"), torch.zeros_like(highest), highest)
    weights = torch.exp(scores - highest)
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / torch.where(total == 0, torch.ones_like(total), total)
    return (weights @ wide(v)).to(v.dtype)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": gelu}


# --- the model -----------------------------------------------------------------------------------------------------


class Plain:
    """`model(input_ids, position_ids, mask) -> logits`, for a checkpoint of any supported architecture."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor]) -> None:
        """`weights` in the names of this file: "embed.weight", "3.q.weight", "3.expert.5.up.weight", ..."""
        self.shape, self.weights = shape, weights
        self.act = ACTIVATIONS[shape.activation]
        found, missing = set(weights), self.needed() - set(weights)
        unexpected = {name for name in found if not any(re.fullmatch(pattern, name) for pattern in KNOWN)}
        if missing or unexpected:
            raise ValueError(f"missing {sorted(missing)}, unexpected {sorted(unexpected)}")

    @classmethod
    def from_folder(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> Plain:
        """Read config.json and every *.safetensors of a folder."""
        folder = Path(path)
        config = json.loads((folder / "config.json").read_text())
        shape = SHAPES[config["architectures"][0]](config)
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            for name, value in load_file(file).items():
                if any(re.search(pattern, name) for pattern in shape.ignored):
                    continue
                for own, part in unfused(renamed(name, shape), value, shape).items():
                    weights[own] = part.to(dtype)
        if config.get("weight_tying") or config.get("tie_word_embeddings", config["architectures"][0] in TIED):
            weights["head.weight"] = weights["embed.weight"]  # some files store the tied head a second time
        return cls(shape, weights)

    def needed(self) -> set[str]:
        """Names without which nothing can be computed."""
        shape, needed = self.shape, {"embed.weight", "head.weight"}
        for layer in range(shape.layers):
            needed |= {f"{layer}.{name}.weight" for name in ("q", "k", "v", "o", "norm2")}
            if shape.experts and layer not in shape.dense:
                needed |= {f"{layer}.router.weight"}
                needed |= {
                    f"{layer}.expert.{e}.{n}.weight" for e in range(shape.experts) for n in ("gate", "up", "down")
                }
            else:
                needed |= {f"{layer}.{name}.weight" for name in (("gate",) if shape.gated else ()) + ("up", "down")}
        return needed

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights.get(f"{name}.weight")
        if weight is None:  # ModernBERT's first layer has no norm before attention
            return x
        if self.shape.rms:
            return rms_norm(x, weight, self.shape.eps)
        return layer_norm(x, weight, self.weights.get(f"{name}.bias"), self.shape.eps)

    def heads(self, x: Tensor, number: int) -> Tensor:
        """(B, R, number * d) -> (B, number, R, d)"""
        return x.view(x.shape[0], x.shape[1], number, self.shape.head_dim).transpose(1, 2)

    def turn(self, x: Tensor, position_ids: Tensor, layer: int) -> Tensor:
        if not self.shape.rotary:
            return x
        return rotate(x, position_ids, self.shape.theta[layer], self.shape.rotary)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attend(q, k, v, mask)

    def attention(self, x: Tensor, position_ids: Tensor, mask: Tensor | None, layer: int) -> Tensor:
        shape = self.shape
        q, k, v = (
            self.heads(self.linear(x, f"{layer}.{name}"), number)
            for name, number in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        )
        if f"{layer}.q_norm.weight" in self.weights:
            q, k = self.norm(q, f"{layer}.q_norm"), self.norm(k, f"{layer}.k_norm")
        q, k = self.turn(q, position_ids, layer), self.turn(k, position_ids, layer)
        group = shape.heads // shape.kv_heads  # query head h reads key head h // group
        k, v = (torch.stack([t[:, head // group] for head in range(shape.heads)], dim=1) for t in (k, v))
        if shape.window and shape.window[layer] >= 0:
            distance = (position_ids[:, None, :, None] - position_ids[:, None, None, :]).abs()
            near = distance <= shape.window[layer]
            mask = near if mask is None else mask & near
        out = self.attend(q, k, v, mask).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
        return self.linear(out, f"{layer}.o")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        up = self.linear(x, f"{name}.up")
        up = self.act(self.linear(x, f"{name}.gate")) * up if self.shape.gated else self.act(up)
        return self.linear(up, f"{name}.down")

    def shares(self, x: Tensor, layer: int) -> Tensor:
        """(B, R, experts): how much of each expert a row takes, 0 for most."""
        shape = self.shape
        weight = self.weights[f"{layer}.router.weight"]
        logits = wide(x) @ wide(weight).T if shape.sigmoid else x @ weight.T
        scores = torch.sigmoid(logits) if shape.sigmoid else torch.softmax(wide(logits), dim=-1)
        ranked = scores
        if shape.sigmoid:
            ranked = scores + wide(self.weights[f"{layer}.router_bias"])
            size = shape.experts // shape.groups
            by_group = ranked.unflatten(-1, (shape.groups, size))
            worth = by_group.sort(dim=-1, descending=True).values[..., :2].sum(-1)
            best = worth.sort(dim=-1, descending=True).indices[..., : shape.top_groups]
            chosen = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, best, True)
            ranked = ranked.masked_fill(~chosen.repeat_interleave(size, dim=-1), float("-inf"))
        taken = ranked.sort(dim=-1, descending=True).indices[..., : shape.top_k]
        shares = torch.zeros_like(scores).scatter(-1, taken, scores.gather(-1, taken))
        if shape.normalise:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares * shape.scale

    def experts(self, x: Tensor, layer: int) -> Tensor:
        shares = self.shares(x, layer).to(x.dtype)
        out = sum(
            self.mlp(x, f"{layer}.expert.{number}") * shares[..., number, None] for number in range(self.shape.experts)
        )
        return out + self.mlp(x, f"{layer}.shared") if f"{layer}.shared.up.weight" in self.weights else out

    def embed(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None) -> Tensor:
        shape = self.shape
        x = self.weights["embed.weight"][input_ids]
        if shape.token_dropout >= 0:
            masked = input_ids == shape.token_dropout
            # Appended rows do not count, and what row 0 sees are the rows that were not appended.
            counted = torch.ones_like(masked) if mask is None else mask[:, 0, 0]
            share = (masked & counted).sum(1) / counted.sum(1)
            x = x.masked_fill(masked[..., None], 0) * ((1 - 0.15 * 0.8) / (1 - share))[:, None, None]
        if "type.weight" in self.weights:
            x = x + self.weights["type.weight"][0]
        if "position.weight" in self.weights:
            x = x + self.weights["position.weight"][position_ids + shape.offset]
        return self.norm(x, "embed_norm") if "embed_norm.weight" in self.weights else x

    def logits(self, x: Tensor) -> Tensor:
        if "head_dense.weight" in self.weights:
            x = self.norm(gelu(self.linear(x, "head_dense")), "head_norm")
        return self.linear(x, "head")

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """input_ids, position_ids (B, R), mask bool (B, 1, R, R) or None = everything visible -> logits (B, R, V)."""
        shape = self.shape
        x = self.embed(input_ids, position_ids, mask)
        for layer in range(shape.layers):
            sparse = shape.experts and layer not in shape.dense
            inner = (lambda y, n=layer: self.experts(y, n)) if sparse else (lambda y, n=layer: self.mlp(y, str(n)))
            if shape.norm_first:
                x = x + self.attention(self.norm(x, f"{layer}.norm1"), position_ids, mask, layer)
                x = x + inner(self.norm(x, f"{layer}.norm2"))
            else:
                x = self.norm(x + self.attention(x, position_ids, mask, layer), f"{layer}.norm1")
                x = self.norm(x + inner(x), f"{layer}.norm2")
        return self.logits(self.norm(x, "final_norm"))


KNOWN = (
    r"(embed|type|position|head)\.weight",
    r"(embed_norm|final_norm|head_dense|head_norm)\.(weight|bias)",
    r"head\.bias",
    r"\d+\.(norm1|norm2|q|k|v|o|q_norm|k_norm|gate|up|down)\.(weight|bias)",
    r"\d+\.(router\.weight|router_bias)",
    r"\d+\.(shared|expert\.\d+)\.(gate|up|down)\.weight",
)


# --- the authors' names and configs --------------------------------------------------------------------------------


def renamed(name: str, shape: Shape) -> str:
    for pattern, own in shape.names:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, own, name)
    return name


def unfused(name: str, value: Tensor, shape: Shape) -> dict[str, Tensor]:
    """Weights stored in one piece: queries, keys and values below each other, ModernBERT's two halves of an MLP."""
    layer, _, part = name.partition(".")
    if part.startswith("qkv."):
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        pieces = dict(zip("qkv", value.split([q, kv, kv]), strict=True))
        return {f"{layer}.{which}.{part[4:]}": piece for which, piece in pieces.items()}
    if part.startswith("gate_up."):
        gate, up = value.chunk(2)
        return {f"{layer}.gate.{part[8:]}": gate, f"{layer}.up.{part[8:]}": up}
    return {name: value}


def refuse(config: dict[str, Any], **wanted: Any) -> None:
    for key, value in wanted.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"config.json: {key} = {config[key]!r}, this file only knows {value!r}")


LLADA = (
    (r"model\.transformer\.wte\.(.+)", r"embed.\1"),
    (r"model\.transformer\.ln_f\.(.+)", r"final_norm.\1"),
    (r"model\.transformer\.ff_out\.(.+)", r"head.\1"),
    (r"model\.transformer\.blocks\.(\d+)\.attn_norm\.(.+)", r"\1.norm1.\2"),
    (r"model\.transformer\.blocks\.(\d+)\.ff_norm\.(.+)", r"\1.norm2.\2"),
    (r"model\.transformer\.blocks\.(\d+)\.([qkv])_proj\.(.+)", r"\1.\2.\3"),
    (r"model\.transformer\.blocks\.(\d+)\.attn_out\.(.+)", r"\1.o.\2"),
    (r"model\.transformer\.blocks\.(\d+)\.ff_proj\.(.+)", r"\1.gate.\2"),
    (r"model\.transformer\.blocks\.(\d+)\.up_proj\.(.+)", r"\1.up.\2"),
    (r"model\.transformer\.blocks\.(\d+)\.ff_out\.(.+)", r"\1.down.\2"),
)


def llada(config: dict[str, Any]) -> Shape:
    refuse(
        config, rope=True, alibi=False, layer_norm_type="rms", activation_type="silu", block_type="llama",
        include_bias=False, include_qkv_bias=False, attention_layer_norm=False, input_emb_norm=False,
        scale_logits=False, bias_for_layer_norm=False,
    )  # fmt: skip
    layers, heads = config["n_layers"], config["n_heads"]
    head_dim = config["d_model"] // heads
    return Shape(
        layers, heads, config.get("n_kv_heads") or heads, head_dim, config.get("rms_norm_eps", 1e-5),
        rotary=head_dim, theta=(float(config.get("rope_theta", 10000.0)),) * layers, rope_fp32=True, names=LLADA,
    )  # fmt: skip


QWEN = (
    (r"model\.embed_tokens\.(.+)", r"embed.\1"),
    (r"model\.norm\.(.+)", r"final_norm.\1"),
    (r"lm_head\.(.+)", r"head.\1"),
    (r"model\.layers\.(\d+)\.input_layernorm\.(.+)", r"\1.norm1.\2"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.(.+)", r"\1.norm2.\2"),
    (r"model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.(.+)", r"\1.\2.\3"),
    (r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.(.+)", r"\1.\2_norm.\3"),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(.+)", r"\1.\2.\3"),
    (r"model\.layers\.(\d+)\.mlp\.gate\.(.+)", r"\1.router.\2"),
    (r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(.+)", r"\1.expert.\2.\3.\4"),
)


def qwen(config: dict[str, Any], **switches: Any) -> Shape:
    """Dream, SDAR and Fast-dLLM v2, and what of LLaDA-MoE and LLaDA2 is as there."""
    refuse(config, hidden_act="silu", use_sliding_window=False, rope_scaling=None, attention_bias=False)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    given = {
        "kv_heads": config.get("num_key_value_heads") or heads,
        "eps": config["rms_norm_eps"],
        "rotary": head_dim,
        "theta": (float(config["rope_theta"]),) * layers,
        "names": QWEN,
    }
    return Shape(layers=layers, heads=heads, head_dim=head_dim, **{**given, **switches})


def with_experts(config: dict[str, Any], **switches: Any) -> Shape:
    return qwen(
        config, experts=config["num_experts"], top_k=config["num_experts_per_tok"],
        normalise=config.get("norm_topk_prob", False), **switches,
    )  # fmt: skip


def llada_moe(config: dict[str, Any]) -> Shape:
    refuse(config, qk_layernorm=True, shared_expert_intermediate_size=None)
    dense = tuple(layer for layer, sparse in enumerate(config["moe_layer_freq"]) if not sparse)
    return with_experts(config, dense=dense)


LLADA2 = (
    (r"model\.word_embeddings\.(.+)", r"embed.\1"),
    (r"model\.layers\.(\d+)\.attention\.query_key_value\.(.+)", r"\1.qkv.\2"),
    (r"model\.layers\.(\d+)\.attention\.dense\.(.+)", r"\1.o.\2"),
    (r"model\.layers\.(\d+)\.attention\.query_layernorm\.(.+)", r"\1.q_norm.\2"),
    (r"model\.layers\.(\d+)\.attention\.key_layernorm\.(.+)", r"\1.k_norm.\2"),
    (r"model\.layers\.(\d+)\.mlp\.gate\.expert_bias", r"\1.router_bias"),
    (r"model\.layers\.(\d+)\.mlp\.shared_experts\.(gate|up|down)_proj\.(.+)", r"\1.shared.\2.\3"),
    *QWEN,
)


def llada2(config: dict[str, Any]) -> Shape:
    refuse(config, score_function="sigmoid", moe_router_enable_expert_bias=True, use_qk_norm=True, use_qkv_bias=False)
    return with_experts(
        config, names=LLADA2, dense=tuple(range(config["first_k_dense_replace"])), sigmoid=True,
        groups=config["n_group"], top_groups=config["topk_group"], scale=config["routed_scaling_factor"],
        rotary=int(config["head_dim"] * config["partial_rotary_factor"]),
    )  # fmt: skip


HEAD = (
    (r"lm_head\.dense\.(.+)", r"head_dense.\1"),
    (r"lm_head\.layer_norm\.(.+)", r"head_norm.\1"),
    (r"lm_head\.decoder\.(.+)", r"head.\1"),
    (r"lm_head\.bias", "head.bias"),
)
BERT = (
    (r"\w+\.embeddings\.word_embeddings\.(.+)", r"embed.\1"),
    (r"\w+\.embeddings\.position_embeddings\.(.+)", r"position.\1"),
    (r"\w+\.embeddings\.token_type_embeddings\.(.+)", r"type.\1"),
    (r"\w+\.embeddings\.(?:LayerNorm|layer_norm)\.(.+)", r"embed_norm.\1"),
    (r"\w+\.encoder\.layer\.(\d+)\.attention\.self\.([qkv])(?:uery|ey|alue)\.(.+)", r"\1.\2.\3"),
    (r"\w+\.encoder\.layer\.(\d+)\.attention\.output\.dense\.(.+)", r"\1.o.\2"),
    (r"\w+\.encoder\.layer\.(\d+)\.attention(?:\.output)?\.LayerNorm\.(.+)", r"\1.norm1.\2"),
    (r"\w+\.encoder\.layer\.(\d+)\.intermediate\.dense\.(.+)", r"\1.up.\2"),
    (r"\w+\.encoder\.layer\.(\d+)\.output\.dense\.(.+)", r"\1.down.\2"),
    (r"\w+\.encoder\.layer\.(\d+)(?:\.output)?\.LayerNorm\.(.+)", r"\1.norm2.\2"),
    (r"\w+\.encoder\.emb_layer_norm_after\.(.+)", r"final_norm.\1"),
    (r"cls\.predictions\.transform\.dense\.(.+)", r"head_dense.\1"),
    (r"cls\.predictions\.transform\.LayerNorm\.(.+)", r"head_norm.\1"),
    (r"cls\.predictions\.decoder\.(.+)", r"head.\1"),
    (r"cls\.predictions\.bias", "head.bias"),
    *HEAD,
)


def bert(config: dict[str, Any], **switches: Any) -> Shape:
    """BERT, RoBERTa and ESM: query, key and value apart, an MLP without gate, a head with a layer of its own."""
    refuse(config, hidden_act="gelu", is_decoder=False)
    heads = config["num_attention_heads"]
    given = {
        "norm_first": False,
        "names": BERT,
        "ignored": (r"pooler", r"seq_relationship", r"position_ids", r"contact_head", r"inv_freq"),
    }
    return Shape(
        config["num_hidden_layers"], heads, heads, config["hidden_size"] // heads, config["layer_norm_eps"], rms=False,
        gated=False, activation="gelu", **{**given, **switches},
    )  # fmt: skip


def esm(config: dict[str, Any]) -> Shape:
    rotary = config["position_embedding_type"] == "rotary"
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    switches: dict[str, Any] = {"norm_first": True}
    if rotary:
        ignored = (r"pooler", r"position_ids", r"contact_head", r"inv_freq", r"position_embeddings")
        switches |= {"rotary": head_dim, "theta": (10000.0,) * config["num_hidden_layers"], "ignored": ignored}
    else:
        switches |= {"offset": config["pad_token_id"] + 1}
    if config["token_dropout"]:
        switches["token_dropout"] = config["mask_token_id"]
    return bert(config, **switches)


MODERNBERT = (
    (r"model\.embeddings\.tok_embeddings\.(.+)", r"embed.\1"),
    (r"model\.embeddings\.norm\.(.+)", r"embed_norm.\1"),
    (r"model\.final_norm\.(.+)", r"final_norm.\1"),
    (r"model\.layers\.(\d+)\.attn_norm\.(.+)", r"\1.norm1.\2"),
    (r"model\.layers\.(\d+)\.mlp_norm\.(.+)", r"\1.norm2.\2"),
    (r"model\.layers\.(\d+)\.attn\.Wqkv\.(.+)", r"\1.qkv.\2"),
    (r"model\.layers\.(\d+)\.attn\.Wo\.(.+)", r"\1.o.\2"),
    (r"model\.layers\.(\d+)\.mlp\.Wi\.(.+)", r"\1.gate_up.\2"),
    (r"model\.layers\.(\d+)\.mlp\.Wo\.(.+)", r"\1.down.\2"),
    (r"head\.dense\.(.+)", r"head_dense.\1"),
    (r"head\.norm\.(.+)", r"head_norm.\1"),
    (r"decoder\.(.+)", r"head.\1"),
)


def modernbert(config: dict[str, Any]) -> Shape:
    refuse(config, hidden_activation="gelu", classifier_activation="gelu")
    layers, heads, every = (
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["global_attn_every_n_layers"],
    )
    local = [bool(layer % every) for layer in range(layers)]
    head_dim = config["hidden_size"] // heads
    return Shape(
        layers, heads, heads, head_dim, config["norm_eps"], rms=False, activation="gelu", rotary=head_dim,
        theta=tuple(float(config["local_rope_theta" if near else "global_rope_theta"]) for near in local),
        window=tuple(config["local_attention"] // 2 if near else -1 for near in local), names=MODERNBERT,
    )  # fmt: skip


SHAPES: dict[str, Callable[[dict[str, Any]], Shape]] = {
    "BertForMaskedLM": bert,
    "RobertaForMaskedLM": lambda config: bert(config, offset=config["pad_token_id"] + 1),
    "ModernBertForMaskedLM": modernbert,
    "EsmForMaskedLM": esm,
    "LLaDAModelLM": llada,
    "DreamModel": qwen,
    "LLaDAMoEModelLM": llada_moe,
    "LLaDA2MoeModelLM": llada2,
    "SDARForCausalLM": qwen,
    "SDARMoeForCausalLM": with_experts,
    "Fast_dLLM_QwenForCausalLM": qwen,
}
TIED = ("BertForMaskedLM", "RobertaForMaskedLM", "ModernBertForMaskedLM", "EsmForMaskedLM")
