# SPDX-License-Identifier: Apache-2.0
"""Write a training run as a checkpoint folder: LLaDA's or Dream's names, float16 weights, tokenizer, held-out problems.

python python/train_tiny/export.py runs/tiny leap_kernels/models/tiny
python python/train_tiny/export.py runs/tiny runs/tiny32 --dtype float32     # to compare the two
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from data import CANVAS, Sample, held_out
from safetensors.torch import save_file
from tokenizer import tokenizer
from train import EOS, MASK, Settings
from transformers import PreTrainedTokenizerFast

from leap_kernels.models.tiny.checks import CHECKS

DEFAULTS = {"max_new_tokens": CANVAS, "block_length": 32}

# transformers' names of a Llama -> LLaDA's.
LLADA_NAMES = {
    r"model\.embed_tokens": "model.transformer.wte",
    r"model\.norm": "model.transformer.ln_f",
    r"lm_head": "model.transformer.ff_out",
    r"model\.layers\.(\d+)\.input_layernorm": r"model.transformer.blocks.\1.attn_norm",
    r"model\.layers\.(\d+)\.post_attention_layernorm": r"model.transformer.blocks.\1.ff_norm",
    r"model\.layers\.(\d+)\.self_attn\.([qkv]_proj)": r"model.transformer.blocks.\1.\2",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": r"model.transformer.blocks.\1.attn_out",
    r"model\.layers\.(\d+)\.mlp\.gate_proj": r"model.transformer.blocks.\1.ff_proj",
    r"model\.layers\.(\d+)\.mlp\.up_proj": r"model.transformer.blocks.\1.up_proj",
    r"model\.layers\.(\d+)\.mlp\.down_proj": r"model.transformer.blocks.\1.ff_out",
}


def ids_and_dtype(dtype: str) -> dict[str, Any]:
    """What both kinds of config say alike."""
    return {
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "torch_dtype": dtype,
        "leap_defaults": DEFAULTS,
    }


def llada_config(settings: Settings, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": settings.width,
        "n_heads": settings.heads,
        "n_kv_heads": settings.heads,
        "n_layers": settings.layers,
        "mlp_hidden_size": settings.mlp,
        "vocab_size": settings.rows,
        "embedding_size": settings.rows,
        "max_sequence_length": 256,
        "rope": True,
        "rope_theta": settings.rope_theta,
        "rope_full_precision": True,
        "rms_norm_eps": 1e-5,
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "block_type": "llama",
        "include_bias": False,
        "include_qkv_bias": False,
        "weight_tying": False,
        **ids_and_dtype(dtype),
    }


def dream_config(settings: Settings, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "hidden_size": settings.width,
        "intermediate_size": settings.mlp,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "vocab_size": settings.rows,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "rope_theta": settings.rope_theta,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        **ids_and_dtype(dtype),
    }


def llada_name(name: str) -> str:
    for pattern, own in LLADA_NAMES.items():
        found, count = re.subn(rf"^{pattern}\.weight$", rf"{own}.weight", name)
        if count:
            return found
    raise KeyError(f"{name} has no name in LLaDA's checkpoints")


def problem_line(words: PreTrainedTokenizerFast, number: int, sample: Sample) -> dict[str, str]:
    """A held-out sample as `leap_kernels.models.tiny` reads it."""
    ids = words.get_vocab()
    prompt, reference = (words.decode([ids[token] for token in text]) for text in (sample.prompt, sample.answer))
    return {
        "id": f"{sample.family}-{number:03d}",
        "task": sample.family,
        "prompt": prompt,
        "reference": reference,
        "answer": CHECKS[sample.family](reference) or "",
    }


def export(run: Path, out: Path, dtype: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings.read(run)
    weights = torch.load(run / "last.pt", weights_only=True)["model"]
    named = {name if settings.shifted else llada_name(name): value for name, value in weights.items()}
    stored = {name: value.to(getattr(torch, dtype)).contiguous() for name, value in named.items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # which save_file keeps to its owner
    config = (dream_config if settings.shifted else llada_config)(settings, dtype)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    words = tokenizer()
    words.save_pretrained(out)
    lines = [problem_line(words, i, s) for samples in held_out().values() for i, s in enumerate(samples, 1)]
    (out / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    arguments = parser.parse_args()
    export(arguments.run, arguments.out, arguments.dtype)
