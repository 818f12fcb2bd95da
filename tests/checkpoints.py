# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints on disk (`families` has those in their authors' names) and ways to damage them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from families import DREAM, LLADA, write
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = [
    "DATA",
    "LLAMA",
    "edit_config",
    "random_llama",
    "randomize",
    "rewrite_weights",
    "stored_weights",
    "write_dream",
    "write_llada",
    "write_llama",
]

DATA = Path(__file__).parent / "data"  # trained checkpoints that are not in the wheel

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


def write_llada(folder: Path, **options: Any) -> Path:
    """A LLaDA checkpoint in `folder`; see `families.write`."""
    return write(folder, LLADA, **options)


def write_dream(folder: Path, **options: Any) -> Path:
    return write(folder, DREAM, **options)


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
