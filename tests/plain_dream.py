# SPDX-License-Identifier: Apache-2.0
"""A plain forward of a Dream checkpoint: LLaDA's plain one under Dream's names, with biases on q, k and v.

Row i - 1 predicts token i; that is the decoder's business, and the rows here are as the model computes them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from plain_llada import PlainLlada
from safetensors.torch import load_file
from torch import Tensor

# Dream's names -> LLaDA's.
NAMES = {
    "model.embed_tokens": "wte",
    "model.norm": "ln_f",
    "lm_head": "ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


class PlainDream(PlainLlada):
    """`model(input_ids, position_ids, mask) -> logits`, for a dense Dream checkpoint."""

    @classmethod
    def from_folder(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> PlainDream:
        folder = Path(path)
        raw = json.loads((folder / "config.json").read_text())
        config = {
            "n_layers": raw["num_hidden_layers"],
            "n_heads": raw["num_attention_heads"],
            "n_kv_heads": raw["num_key_value_heads"],
            "d_model": raw["hidden_size"],
            "rope_theta": raw["rope_theta"],
            "rms_norm_eps": raw["rms_norm_eps"],
        }
        weights: dict[str, Tensor] = {}
        biases: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            for name, value in load_file(file).items():
                layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
                inside = f"blocks.{layer[1]}.{NAMES[layer[2]]}" if layer else NAMES[name.removesuffix(".weight")]
                kept = biases if layer and layer[3] == "bias" else weights
                kept[f"model.transformer.{inside}.weight"] = value.to(dtype)
        model = cls(config, weights)
        model.biases = biases
        return model

    def linear(self, x: Tensor, name: str) -> Tensor:
        return super().linear(x, name) + self.biases.get(f"model.transformer.{name}.weight", 0)
