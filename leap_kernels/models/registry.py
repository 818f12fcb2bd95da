# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint becomes which stock transformers class: the table behind `load`.

Keyed on `architectures[0]`, never on `model_type`: "llada" names a dense and a mixture-of-experts model alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import CheckpointError, ModelError
from .spec import ModelSpec

__all__ = ["REGISTRY", "Entry", "entry_for"]

Raw = Mapping[str, Any]  # a config.json


@dataclass(frozen=True)
class Entry:
    """How checkpoints of one architecture are loaded."""

    model_class: str
    """Name of the stock class in transformers."""
    config: Callable[[Raw], dict[str, Any]]
    """config.json -> keyword arguments of that class's own config."""
    spec: Callable[[Raw], ModelSpec]
    """config.json -> ModelSpec."""
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    """Regular expression on a weight's name in the file -> its name in the stock class (one group at most)."""


def entry_for(raw: Raw) -> tuple[str, Entry]:
    """The architecture a config.json declares, and its entry; ModelError when there is none."""
    name = (raw.get("architectures") or ["no architecture"])[0]
    if name not in REGISTRY:
        raise ModelError(
            f"no ModelSpec for {name}. leap_kernels.load knows: {', '.join(REGISTRY)}. A model that is loaded "
            "already can be decoded with decode(model, ids, spec=ModelSpec(mask_token_id=...))."
        )
    return name, REGISTRY[name]


def _eos(raw: Raw) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _with_turn_end(raw: Raw, turn_end: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*_eos(raw), turn_end)))


def _mask_token_id(raw: Raw) -> int:
    if raw.get("mask_token_id") is None:
        raise ModelError(
            "config.json declares no mask_token_id: leap_kernels decodes masked-diffusion models only. "
            "An autoregressive model cannot be decoded; a masked one needs the id in its config."
        )
    return int(raw["mask_token_id"])


# --- LLaDA: a Llama without causality, with its own names (models.md section 3) ------------------------------------

_INSIDE = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
_OUTSIDE = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
# Anchored, because a block has an ff_out as well.
_LLADA_NAMES = {rf"^model\.transformer\.{a}\.": f"{b}." for a, b in _OUTSIDE.items()} | {
    rf"^model\.transformer\.blocks\.(\d+)\.{a}\.": rf"model.layers.\1.{b}." for a, b in _INSIDE.items()
}

# What a Llama is; a LLaDA config that says otherwise describes a model that this mapping would get wrong.
_LLADA_FIXED = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "attention_layer_norm": False,
    "scale_logits": False,
    "input_emb_norm": False,
}
_LLADA_VOCABULARY, _LLADA_TURN_END = 126464, 126348  # the published tokenizer's width and its <|eot_id|>


def _llada_width(raw: Raw) -> int:
    """Embedding rows, which may be more than the tokenizer has tokens."""
    return int(raw.get("embedding_size") or raw["vocab_size"])


def _llada_eos(raw: Raw) -> tuple[int, ...]:
    """End of text, and end of turn where the vocabulary is the published one."""
    return _with_turn_end(raw, _LLADA_TURN_END) if _llada_width(raw) == _LLADA_VOCABULARY else _eos(raw)


def _llada_config(raw: Raw) -> dict[str, Any]:
    wrong = {key: raw[key] for key, value in _LLADA_FIXED.items() if raw.get(key, value) != value}
    if wrong:
        raise CheckpointError(f"this LLaDA config is not Llama-shaped: {wrong}; expected {_LLADA_FIXED}.")
    hidden = raw["d_model"]
    return {
        "vocab_size": _llada_width(raw),
        "hidden_size": hidden,
        "intermediate_size": raw.get("mlp_hidden_size") or raw.get("mlp_ratio", 4) * hidden,
        "num_hidden_layers": raw["n_layers"],
        "num_attention_heads": raw["n_heads"],
        "num_key_value_heads": raw.get("n_kv_heads") or raw["n_heads"],
        "max_position_embeddings": raw["max_sequence_length"],
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "rope_parameters": {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10000.0)},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": raw.get("weight_tying", False),
        "pad_token_id": raw.get("pad_token_id"),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_id": list(_llada_eos(raw)) or None,
        # Kept in the config so that a saved model can be loaded again as a masked Llama.
        "mask_token_id": _mask_token_id(raw),
        "rope_fp32": raw.get("rope_full_precision", True),
        "leap_defaults": dict(raw.get("leap_defaults", {})),
        "is_causal": False,
        "use_cache": False,  # a causal model's cache is of no use, and some releases mix dtypes in it
    }


def _llada_spec(raw: Raw) -> ModelSpec:
    return ModelSpec(
        mask_token_id=_mask_token_id(raw),
        eos_token_ids=_llada_eos(raw),
        pad_token_id=raw.get("pad_token_id"),
        rope_fp32=raw.get("rope_full_precision", True),
        max_positions=raw["max_sequence_length"],
        vocab_size=_llada_width(raw),
        defaults=raw.get("leap_defaults", {}),
    )


# --- Llama-shaped masked models, as they are -----------------------------------------------------------------------


def _llama_config(raw: Raw) -> dict[str, Any]:
    _mask_token_id(raw)
    return {**raw, "is_causal": False, "use_cache": False}


def _llama_spec(raw: Raw) -> ModelSpec:
    return ModelSpec(
        mask_token_id=_mask_token_id(raw),
        eos_token_ids=_eos(raw),
        pad_token_id=raw.get("pad_token_id"),
        rope_fp32=raw.get("rope_fp32", False),
        max_positions=raw.get("max_position_embeddings"),
        vocab_size=raw["vocab_size"],
        defaults=raw.get("leap_defaults", {}),
    )


# --- Dream: a Qwen2 without causality whose row i - 1 predicts token i; the names are Qwen2's own ------------------

_DREAM_VOCABULARY, _DREAM_TURN_END = 152064, 151645  # the published embedding rows and the tokenizer's <|im_end|>


def _dream_eos(raw: Raw) -> tuple[int, ...]:
    return _with_turn_end(raw, _DREAM_TURN_END) if raw["vocab_size"] == _DREAM_VOCABULARY else _eos(raw)


def _dream_config(raw: Raw) -> dict[str, Any]:
    if raw.get("hidden_act", "silu") != "silu" or raw.get("use_sliding_window") or raw.get("rope_scaling"):
        raise CheckpointError(
            "this Dream config is not Qwen2-shaped as published: expected hidden_act silu, use_sliding_window false "
            "and no rope_scaling."
        )
    return {
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_hidden_layers": raw["num_hidden_layers"],
        "num_attention_heads": raw["num_attention_heads"],
        "num_key_value_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "max_position_embeddings": raw["max_position_embeddings"],
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": raw.get("rope_theta", 1e6)},
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "use_sliding_window": False,
        "pad_token_id": raw.get("pad_token_id"),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_id": list(_dream_eos(raw)) or None,
        # Kept in the config so that a saved model can be loaded again as a masked Qwen2.
        "mask_token_id": _mask_token_id(raw),
        "logits_shift": 1,
        "leap_defaults": dict(raw.get("leap_defaults", {})),
        "is_causal": False,
        "use_cache": False,
    }


def _dream_spec(raw: Raw) -> ModelSpec:
    return replace(_llama_spec(raw), shift=1, eos_token_ids=_dream_eos(raw))


def _qwen2_spec(raw: Raw) -> ModelSpec:
    if raw.get("logits_shift") not in (0, 1):
        raise ModelError(
            "config.json of this masked Qwen2 declares no logits_shift. Write 1 where row i - 1 predicts token i "
            "(Dream), 0 where row i does."
        )
    return replace(_llama_spec(raw), shift=raw["logits_shift"])


REGISTRY: dict[str, Entry] = {
    "LLaDAModelLM": Entry("LlamaForCausalLM", _llada_config, _llada_spec, _LLADA_NAMES),
    "LlamaForCausalLM": Entry("LlamaForCausalLM", _llama_config, _llama_spec),
    "DreamModel": Entry("Qwen2ForCausalLM", _dream_config, _dream_spec),
    "Qwen2ForCausalLM": Entry("Qwen2ForCausalLM", _llama_config, _qwen2_spec),
}
