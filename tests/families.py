# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints of every supported architecture: config.json with the published keys, weights in the
authors' names, one file or shards with an index."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Config = dict[str, Any]

# Sizes differ from each other, so that a mix-up shows: width 32, 4 heads, inner 80, 48 rows of which 44 are tokens.
_IDS: Config = {"mask_token_id": 43, "eos_token_id": 41, "pad_token_id": 40}

LLADA: Config = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "alibi": False,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 32,
    "embedding_dropout": 0.0,
    "embedding_size": 48,
    "eos_token_id": 41,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 43,
    "max_sequence_length": 64,
    "mlp_hidden_size": 80,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "pad_token_id": 40,
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "torch_dtype": "float32",
    "vocab_size": 44,
    "weight_tying": False,
}

_QWEN: Config = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 48,
}

DREAM: Config = {
    **_QWEN,
    "architectures": ["DreamModel"],
    "bos_token_id": 40,
    "eos_token_id": 40,
    "mask_token_id": 43,
    "max_window_layers": 28,
    "model_type": "Dream",
    "pad_token_id": 40,
    "sliding_window": None,
    "use_sliding_window": False,
}

LLADA_MOE: Config = {
    **_QWEN,
    **_IDS,
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",  # as that of the dense model
    "dense_intermediate_size": 80,
    "expert_intermediate_size": 24,
    "shared_expert_intermediate_size": None,
    "moe_layer_freq": [1, 0, 1],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
}
del LLADA_MOE["intermediate_size"]

LLADA2: Config = {
    **_QWEN,
    **_IDS,
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "moe_router_enable_expert_bias": True,
    "n_group": 4,
    "norm_topk_prob": True,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000.0,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "topk_group": 2,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "block_size": 8,
}

SDAR: Config = {
    **_QWEN,
    **_IDS,
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "attention_bias": False,
    "block_size": 4,
    "head_dim": 16,
    "use_sliding_window": False,
}
del SDAR["pad_token_id"]

SDAR_MOE: Config = {
    **SDAR,
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}

FAST_DLLM: Config = {
    **_QWEN,
    **_IDS,
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "model_type": "Fast_dLLM_Qwen",
    "bd_size": 8,
    "use_sliding_window": False,
}

_BERT: Config = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "intermediate_size": 80,
    "layer_norm_eps": 1e-12,
    "mask_token_id": 43,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "vocab_size": 48,
}

BERT: Config = {**_BERT, "architectures": ["BertForMaskedLM"], "model_type": "bert"}

ROBERTA: Config = {
    **_BERT,
    "architectures": ["RobertaForMaskedLM"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 66,
    "model_type": "roberta",
    "pad_token_id": 1,
    "type_vocab_size": 1,
}

ESM: Config = {
    **_BERT,
    "architectures": ["EsmForMaskedLM"],
    "emb_layer_norm_before": False,
    "eos_token_id": 2,
    "is_folding_model": False,
    "layer_norm_eps": 1e-5,
    "model_type": "esm",
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "token_dropout": True,
}

MODERNBERT: Config = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 40,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "decoder_bias": True,
    "embedding_dropout": 0.0,
    "eos_token_id": 41,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "local_attention": 8,
    "local_rope_theta": 10000.0,
    "mask_token_id": 43,
    "max_position_embeddings": 64,
    "mlp_bias": False,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-5,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "pad_token_id": 42,
    "torch_dtype": "float32",
    "vocab_size": 48,
}

MASKED_LMS: dict[str, Config] = {"BERT": BERT, "RoBERTa": ROBERTA, "ModernBERT": MODERNBERT, "ESM": ESM}

FAMILIES: dict[str, Config] = {
    "LLaDA": LLADA,
    "Dream": DREAM,
    "LLaDA-MoE": LLADA_MOE,
    "LLaDA2": LLADA2,
    "SDAR": SDAR,
    "SDAR-MoE": SDAR_MOE,
    "Fast-dLLM": FAST_DLLM,
}

# --- what the published configs say, as far as it matters here ------------------------------------------------------


def _published(config: Config, *without: str, **changes: Any) -> Config:
    return {key: value for key, value in {**config, **changes}.items() if key not in without}


PUBLISHED: dict[str, Config] = {
    "LLaDA-8B": _published(
        LLADA, d_model=4096, embedding_size=126464, eos_token_id=126081, mask_token_id=126336,
        max_sequence_length=4096, mlp_hidden_size=12288, n_heads=32, n_kv_heads=32, n_layers=32, pad_token_id=126081,
        torch_dtype="bfloat16", vocab_size=126464,
    ),
    "Dream-7B": _published(
        DREAM, bos_token_id=151643, eos_token_id=151643, hidden_size=3584, intermediate_size=18944,
        mask_token_id=151666, max_position_embeddings=131072, num_attention_heads=28, num_hidden_layers=28,
        num_key_value_heads=4, pad_token_id=151643, torch_dtype="bfloat16", vocab_size=152064,
    ),
    "LLaDA-MoE-7B-A1B": _published(
        LLADA_MOE, "mask_token_id", dense_intermediate_size=8192, eos_token_id=156892, expert_intermediate_size=1024,
        hidden_size=2048, max_position_embeddings=8192, moe_layer_freq=[1] * 16, num_attention_heads=16,
        num_experts=64, num_experts_per_tok=8, num_hidden_layers=16, num_key_value_heads=16, pad_token_id=156892,
        torch_dtype="bfloat16", vocab_size=157184,
    ),
    "LLaDA2.0-mini": _published(
        LLADA2, "mask_token_id", "block_size", eos_token_id=156892, head_dim=128, hidden_size=2048,
        intermediate_size=5120, max_position_embeddings=32768, moe_intermediate_size=512, n_group=8,
        num_attention_heads=16, num_experts=256, num_experts_per_tok=8, num_hidden_layers=20, num_key_value_heads=4,
        pad_token_id=156892, topk_group=4, torch_dtype="bfloat16", vocab_size=157184,
    ),
    "SDAR-4B": _published(
        SDAR, "mask_token_id", "block_size", eos_token_id=151643, head_dim=128, hidden_size=2560,
        intermediate_size=9728, max_position_embeddings=32768, num_attention_heads=32, num_hidden_layers=36,
        num_key_value_heads=8, torch_dtype="bfloat16", vocab_size=151936,
    ),
    "Fast-dLLM-v2-7B": _published(
        FAST_DLLM, "mask_token_id", bd_size=32, eos_token_id=151645, hidden_size=3584, intermediate_size=18944,
        max_position_embeddings=32768, num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4,
        pad_token_id=151645, torch_dtype="bfloat16", vocab_size=152064,
    ),
}  # fmt: skip


# --- random weights ------------------------------------------------------------------------------------------------


class Random:
    """Tensors that are large enough for attention not to be uniform and for predictions to differ."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float | None = None) -> Tensor:
        """Rows whose products with a normalised vector have the size `scale` * sqrt(columns), 1 unless told."""
        scale = shape[-1] ** -0.5 if scale is None else scale
        return torch.randn(shape, generator=self.generator) * scale

    def sharp(self, *shape: int) -> Tensor:
        """For queries and keys."""
        return self.normal(*shape, scale=2 * shape[-1] ** -0.5)

    def norm(self, width: int) -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=self.generator)

    def embedding(self, rows: int, width: int, tied: bool) -> Tensor:
        """A tied embedding is the head as well: logits of the same size either way."""
        return self.normal(rows, width, scale=width**-0.5 if tied else 1.0)


def llada_weights(config: Config, random: Random) -> dict[str, Tensor]:
    width, wide = config["d_model"], config["mlp_hidden_size"]
    kv = width // config["n_heads"] * (config.get("n_kv_heads") or config["n_heads"])
    vocab, tied = config.get("embedding_size") or config["vocab_size"], bool(config.get("weight_tying"))
    weights = {"wte": random.embedding(vocab, width, tied), "ln_f": random.norm(width)}
    if not tied:
        weights["ff_out"] = random.normal(vocab, width)
    for layer in range(config["n_layers"]):
        weights |= {
            f"blocks.{layer}.attn_norm": random.norm(width),
            f"blocks.{layer}.q_proj": random.sharp(width, width),
            f"blocks.{layer}.k_proj": random.sharp(kv, width),
            f"blocks.{layer}.v_proj": random.normal(kv, width),
            f"blocks.{layer}.attn_out": random.normal(width, width),
            f"blocks.{layer}.ff_norm": random.norm(width),
            f"blocks.{layer}.ff_proj": random.normal(wide, width),
            f"blocks.{layer}.up_proj": random.normal(wide, width),
            f"blocks.{layer}.ff_out": random.normal(width, wide),
        }
    return {f"model.transformer.{name}.weight": value for name, value in weights.items()}


def gated(random: Random, prefix: str, width: int, inner: int) -> dict[str, Tensor]:
    return {
        f"{prefix}.gate_proj.weight": random.normal(inner, width),
        f"{prefix}.up_proj.weight": random.normal(inner, width),
        f"{prefix}.down_proj.weight": random.normal(width, inner),
    }


def qwen_weights(config: Config, random: Random) -> dict[str, Tensor]:
    """Every family with Qwen's names: biases on q, k and v in Qwen2's relatives, norms of heads in Qwen3's."""
    width, vocab, tied = config["hidden_size"], config["vocab_size"], config["tie_word_embeddings"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    rows = {"q": head * config["num_attention_heads"], "k": head * config["num_key_value_heads"]}
    rows["v"] = rows["k"]
    with_bias = config["architectures"][0] in ("DreamModel", "Fast_dLLM_QwenForCausalLM")
    weights = {
        "model.embed_tokens.weight": random.embedding(vocab, width, tied),
        "model.norm.weight": random.norm(width),
    }
    if not tied:
        weights["lm_head.weight"] = random.normal(vocab, width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {f"{at}.input_layernorm.weight": random.norm(width)}
        for name, number in rows.items():
            make = random.normal if name == "v" else random.sharp
            weights[f"{at}.self_attn.{name}_proj.weight"] = make(number, width)
            if with_bias:
                weights[f"{at}.self_attn.{name}_proj.bias"] = random.normal(number, scale=1.0)
            elif name != "v":
                weights[f"{at}.self_attn.{name}_norm.weight"] = random.norm(head)
        weights |= {
            f"{at}.self_attn.o_proj.weight": random.normal(width, rows["q"]),
            f"{at}.post_attention_layernorm.weight": random.norm(width),
        }
        dense = (
            layer < config.get("first_k_dense_replace", 0) or not config.get("moe_layer_freq", [1] * (layer + 1))[layer]
        )
        if "num_experts" not in config or dense:
            inner = config.get("dense_intermediate_size") or config["intermediate_size"]
            weights |= gated(random, f"{at}.mlp", width, inner)
            continue
        inner = config.get("expert_intermediate_size") or config["moe_intermediate_size"]
        weights[f"{at}.mlp.gate.weight"] = random.sharp(config["num_experts"], width)
        for expert in range(config["num_experts"]):
            weights |= gated(random, f"{at}.mlp.experts.{expert}", width, inner)
    return weights


def llada2_weights(config: Config, random: Random) -> dict[str, Tensor]:
    """Qwen's layout in LLaDA2's names: queries, keys and values in one piece, a bias of the router, a shared expert."""
    weights = qwen_weights(config, random)
    weights["model.word_embeddings.weight"] = weights.pop("model.embed_tokens.weight")
    for layer in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.attention"
        fused = [weights.pop(f"{old}.{name}_proj.weight") for name in "qkv"]
        weights[f"{new}.query_key_value.weight"] = torch.cat(fused)
        weights[f"{new}.dense.weight"] = weights.pop(f"{old}.o_proj.weight")
        weights[f"{new}.query_layernorm.weight"] = weights.pop(f"{old}.q_norm.weight")
        weights[f"{new}.key_layernorm.weight"] = weights.pop(f"{old}.k_norm.weight")
        if layer >= config["first_k_dense_replace"]:
            mlp, width = f"model.layers.{layer}.mlp", config["hidden_size"]
            weights[f"{mlp}.gate.expert_bias"] = random.normal(config["num_experts"], scale=0.3)
            shared = config["moe_intermediate_size"] * config["num_shared_experts"]
            weights |= gated(random, f"{mlp}.shared_experts", width, shared)
    return weights


def layer(random: Random, name: str, rows: int, columns: int, *, sharp: bool = False) -> dict[str, Tensor]:
    """A linear layer with a bias."""
    make = random.sharp if sharp else random.normal
    return {f"{name}.weight": make(rows, columns), f"{name}.bias": random.normal(rows, scale=0.5)}


def norm(random: Random, name: str, width: int) -> dict[str, Tensor]:
    return {f"{name}.weight": random.norm(width), f"{name}.bias": random.normal(width, scale=0.2)}


def bert_weights(config: Config, random: Random) -> dict[str, Tensor]:
    """BERT and its relatives, with what published files hold beside it: pooler, next-sentence head, position ids."""
    width, inner, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    vocab, positions = config["vocab_size"], config["max_position_embeddings"]
    weights = {
        f"{kind}.embeddings.word_embeddings.weight": random.embedding(vocab, width, True) * 1.5,
        f"{kind}.embeddings.position_embeddings.weight": random.normal(positions, width, scale=0.5),
        f"{kind}.embeddings.position_ids": torch.arange(positions)[None].float(),
    }
    if kind != "esm":
        weights |= norm(random, f"{kind}.embeddings.LayerNorm", width)
        weights[f"{kind}.embeddings.token_type_embeddings.weight"] = random.normal(config["type_vocab_size"], width)
        weights |= layer(random, f"{kind}.pooler.dense", width, width)
    norms = (
        ("attention.LayerNorm", "LayerNorm") if kind == "esm" else ("attention.output.LayerNorm", "output.LayerNorm")
    )
    for number in range(config["num_hidden_layers"]):
        at = f"{kind}.encoder.layer.{number}"
        for name in ("query", "key", "value"):
            weights |= layer(random, f"{at}.attention.self.{name}", width, width, sharp=name != "value")
        weights |= layer(random, f"{at}.attention.output.dense", width, width)
        weights |= layer(random, f"{at}.intermediate.dense", inner, width)
        weights |= layer(random, f"{at}.output.dense", width, inner)
        for name in norms:
            weights |= norm(random, f"{at}.{name}", width)
    if kind == "esm":
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        weights |= norm(random, "esm.encoder.emb_layer_norm_after", width)
        weights |= layer(random, "esm.contact_head.regression", 1, layers * heads)
        if config.get("emb_layer_norm_before"):
            weights |= norm(random, "esm.embeddings.layer_norm", width)
        if config["position_embedding_type"] == "rotary":
            half = width // heads // 2
            for number in range(layers):
                frequencies = 1 / 10000 ** (torch.arange(half, dtype=torch.float32) / half)
                weights[f"esm.encoder.layer.{number}.attention.self.rotary_embeddings.inv_freq"] = frequencies
    head = "cls.predictions.transform" if kind == "bert" else "lm_head"
    weights |= layer(random, f"{head}.dense", width, width)
    weights |= norm(random, f"{head}.{'LayerNorm' if kind == 'bert' else 'layer_norm'}", width)
    weights["cls.predictions.bias" if kind == "bert" else "lm_head.bias"] = random.normal(vocab, scale=0.5)
    if kind == "bert":
        weights |= layer(random, "cls.seq_relationship", 2, width)
    return weights


def modernbert_weights(config: Config, random: Random) -> dict[str, Tensor]:
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    weights = {
        "model.embeddings.tok_embeddings.weight": random.embedding(vocab, width, True) * 1.5,
        "model.embeddings.norm.weight": random.norm(width),
        "model.final_norm.weight": random.norm(width),
        "head.dense.weight": random.normal(width, width),
        "head.norm.weight": random.norm(width),
        "decoder.bias": random.normal(vocab, scale=0.5),
    }
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}"
        fused = [random.sharp(width, width), random.sharp(width, width), random.normal(width, width)]
        weights |= {
            f"{at}.attn.Wqkv.weight": torch.cat(fused),
            f"{at}.attn.Wo.weight": random.normal(width, width),
            f"{at}.mlp_norm.weight": random.norm(width),
            f"{at}.mlp.Wi.weight": random.normal(2 * inner, width),
            f"{at}.mlp.Wo.weight": random.normal(width, inner),
        }
        if number:
            weights[f"{at}.attn_norm.weight"] = random.norm(width)
    return weights


WEIGHTS: dict[str, Callable[[Config, Random], dict[str, Tensor]]] = {
    "LLaDAModelLM": llada_weights,
    "LLaDA2MoeModelLM": llada2_weights,
    "BertForMaskedLM": bert_weights,
    "RobertaForMaskedLM": bert_weights,
    "EsmForMaskedLM": bert_weights,
    "ModernBertForMaskedLM": modernbert_weights,
}


def weights_of(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """Random weights in the authors' names and in the config's dtype."""
    make = WEIGHTS.get(config["architectures"][0], qwen_weights)
    dtype = getattr(torch, config["torch_dtype"])
    weights = make(config, Random(seed))
    return {name: value if name.endswith("inv_freq") else value.to(dtype) for name, value in weights.items()}


# --- files ---------------------------------------------------------------------------------------------------------


def write(folder: Path, config: Config | str, *, shards: int = 1, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint of a family in `folder`: one file, or `shards` files with an index. `changes` go to config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {**FAMILIES, **MASKED_LMS}
    config = {**copy.deepcopy(known[config] if isinstance(config, str) else config), **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save(folder, weights_of(config, seed), shards)
    return folder


def save(folder: Path, weights: dict[str, Tensor], shards: int = 1) -> None:
    """model.safetensors, or model-00001-of-... with an index."""
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    parts = [names[part::shards] for part in range(shards)]
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(value.numel() * value.element_size() for value in weights.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text)
