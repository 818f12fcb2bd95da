# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints on disk: LLaDA and Dream in their authors' names, masked Llamas saved by transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = [
    "DATA",
    "DREAM",
    "DREAM_7B",
    "LLADA",
    "LLADA_8B",
    "LLAMA",
    "edit_config",
    "llada_weights",
    "random_llama",
    "randomize",
    "rewrite_weights",
    "stored_weights",
    "write_dream",
    "write_llada",
    "write_llama",
]

DATA = Path(__file__).parent / "data"  # trained checkpoints that are not in the wheel

# A LLaDA config.json with the keys of the published ones; the sizes differ from each other so that a mix-up shows.
LLADA: dict[str, Any] = {
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

# What LLaDA-8B-Instruct publishes, as far as it matters here.
LLADA_8B: dict[str, Any] = {
    **LLADA,
    "d_model": 4096,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "torch_dtype": "bfloat16",
    "vocab_size": 126464,
}

# LlamaConfig arguments of a masked Llama; mask_token_id is the one key that makes it one.
LLAMA: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": [41, 42],
    "pad_token_id": 40,
    "mask_token_id": 43,
}


# A Dream config.json with the keys of the published ones.
DREAM: dict[str, Any] = {
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "bos_token_id": 40,
    "eos_token_id": 40,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 80,
    "mask_token_id": 43,
    "max_position_embeddings": 64,
    "max_window_layers": 28,
    "model_type": "Dream",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 40,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": 48,
}

# What Dream-v0-Instruct-7B publishes, as far as it matters here.
DREAM_7B: dict[str, Any] = {
    **DREAM,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "mask_token_id": 151666,
    "max_position_embeddings": 131072,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 151643,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}


def dream_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights in Dream's names, which are Qwen2's: biases on q, k and v only."""
    generator = torch.Generator().manual_seed(seed)
    width, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]

    def normal(*shape: int, scale: float = width**-0.5) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    weights = {
        "model.embed_tokens.weight": normal(vocab, width, scale=1.0),
        "model.norm.weight": norm(),
        "lm_head.weight": normal(vocab, width),
    }
    for layer in range(config["num_hidden_layers"]):
        inside = {
            "input_layernorm.weight": norm(),
            "self_attn.q_proj.weight": normal(width, width, scale=2 * width**-0.5),
            "self_attn.q_proj.bias": normal(width, scale=1.0),
            "self_attn.k_proj.weight": normal(kv, width, scale=2 * width**-0.5),
            "self_attn.k_proj.bias": normal(kv, scale=1.0),
            "self_attn.v_proj.weight": normal(kv, width),
            "self_attn.v_proj.bias": normal(kv, scale=1.0),
            "self_attn.o_proj.weight": normal(width, width),
            "post_attention_layernorm.weight": norm(),
            "mlp.gate_proj.weight": normal(wide, width),
            "mlp.up_proj.weight": normal(wide, width),
            "mlp.down_proj.weight": normal(width, wide, scale=wide**-0.5),
        }
        weights |= {f"model.layers.{layer}.{name}": value for name, value in inside.items()}
    dtype = getattr(torch, config["torch_dtype"])
    return {name: value.to(dtype) for name, value in weights.items()}


def write_dream(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A Dream checkpoint in `folder`, one file. `changes` go to config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**copy.deepcopy(DREAM), **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(dream_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def llada_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights in the authors' names and in the config's dtype, large enough that attention is not uniform."""
    generator = torch.Generator().manual_seed(seed)
    width, wide = config["d_model"], config["mlp_hidden_size"]
    kv = width // config["n_heads"] * (config.get("n_kv_heads") or config["n_heads"])
    vocab = config.get("embedding_size") or config["vocab_size"]

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    # A tied embedding is the head as well: logits of the same size either way.
    weights = {"wte": normal(vocab, width, scale=width**-0.5 if config.get("weight_tying") else 1.0), "ln_f": norm()}
    if not config.get("weight_tying"):
        weights["ff_out"] = normal(vocab, width, scale=width**-0.5)
    for layer in range(config["n_layers"]):
        weights |= {
            f"blocks.{layer}.attn_norm": norm(),
            f"blocks.{layer}.q_proj": normal(width, width, scale=2 * width**-0.5),
            f"blocks.{layer}.k_proj": normal(kv, width, scale=2 * width**-0.5),
            f"blocks.{layer}.v_proj": normal(kv, width, scale=width**-0.5),
            f"blocks.{layer}.attn_out": normal(width, width, scale=width**-0.5),
            f"blocks.{layer}.ff_norm": norm(),
            f"blocks.{layer}.ff_proj": normal(wide, width, scale=width**-0.5),
            f"blocks.{layer}.up_proj": normal(wide, width, scale=width**-0.5),
            f"blocks.{layer}.ff_out": normal(width, wide, scale=wide**-0.5),
        }
    dtype = getattr(torch, config["torch_dtype"])
    return {f"model.transformer.{name}.weight": value.to(dtype) for name, value in weights.items()}


def write_llada(folder: Path, *, shards: int = 1, seed: int = 0, **changes: Any) -> Path:
    """A LLaDA checkpoint in `folder`: one file, or `shards` files with an index. `changes` go to config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**copy.deepcopy(LLADA), **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = llada_weights(config, seed)
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
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
    return folder


def random_llama(*, seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    """A float32 LlamaForCausalLM in eval mode, `is_causal` unset. A key changed to ... is left out of the config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {key: value for key, value in {**copy.deepcopy(LLAMA), **changes}.items() if value is not ...}
    model = LlamaForCausalLM._from_config(LlamaConfig(**config), attn_implementation=attention)
    return randomize(model, seed).eval()


def randomize(model: nn.Module, seed: int = 0) -> Any:
    """Overwrite all parameters with random ones, large enough that attention is not uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.2 * noise if value.dim() == 1 else noise * scale * value.shape[1] ** -0.5)
    return model


def write_llama(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A masked Llama in `folder`, as `LlamaForCausalLM.save_pretrained` writes it."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    random_llama(seed=seed, **changes).to(dtype).save_pretrained(folder)
    if shown:
        logging.enable_progress_bar()
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Overwrite keys of config.json, weights untouched; a key changed to ... is removed."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def stored_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every safetensors file of a folder, in the names of the files."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def rewrite_weights(file: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace, add (a new name) or drop (None) tensors of one safetensors file."""
    weights: dict[str, Tensor | None] = {**load_file(file), **changes}
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, file, metadata={"format": "pt"})
