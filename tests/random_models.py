# SPDX-License-Identifier: Apache-2.0
"""Small random models for decode tests: stock Llamas with opinions, and scripted callables."""

from __future__ import annotations

import torch
from torch import Tensor

from leap_kernels import ModelSpec


def random_llama(
    seed: int = 0,
    *,
    vocab: int = 23,
    kv_heads: int = 2,
    layers: int = 2,
    hidden: int = 32,
    dtype=torch.float64,
    sharpness: float = 12.0,
):
    """A LlamaForCausalLM with random weights whose head is scaled up, so that some predictions are confident."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=128, is_causal=False, initializer_range=0.3,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness / model.lm_head.weight.norm(dim=1).mean())
    return model


def plain_forward(model):
    """What the oracle calls: transformers' own SDPA forward with a dense 4-D mask."""

    def forward(input_ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        before = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        try:
            with torch.inference_mode():
                return model(input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
        finally:
            model.set_attn_implementation(before)

    return forward


SPEC = ModelSpec(mask_token_id=0, eos_token_ids=(1,), pad_token_id=2, vocab_size=23)
