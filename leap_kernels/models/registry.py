# SPDX-License-Identifier: Apache-2.0
"""The table of checkpoints behind `load`, one `Entry` an architecture; docs/models.md is made from it.

Keyed on `architectures[0]`, never on `model_type`: "llada" names a dense and a mixture-of-experts model alike.
"""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError, ModelError, expected
from .entry import Entry, Ids, Key, Raw

__all__ = ["REGISTRY", "Entry", "entry_for"]


def entry_for(raw: Raw) -> tuple[str, Entry]:
    """The architecture a config.json declares, and its entry; ModelError when there is none."""
    name = (raw.get("architectures") or ["no architecture"])[0]
    if name not in REGISTRY:
        raise ModelError(
            f"no ModelSpec for {name}. leap_kernels.load knows: {', '.join(REGISTRY)}. A model that is loaded "
            "already can be decoded with decode(model, ids, spec=ModelSpec(mask_token_id=...))."
        )
    return name, REGISTRY[name]


# --- pieces that several entries share -----------------------------------------------------------------------------


def _rope(*, partial: float | None = None) -> Any:
    """`rope_parameters` of a stock config, from the names of either transformers era; plain RoPE only."""

    def translate(raw: Raw) -> dict[str, Any]:
        given = dict(raw.get("rope_parameters") or {})
        if given.get("rope_type", "default") != "default":
            raise CheckpointError(f"expected plain RoPE as in the published checkpoints, got {given}.")
        theta = given.get("rope_theta") or Key("rope_theta")(raw)
        rope = {"rope_type": "default", "rope_theta": float(theta)}
        if partial is not None:
            rope["partial_rotary_factor"] = given.get("partial_rotary_factor") or raw.get(
                "partial_rotary_factor", partial
            )
        return rope

    return translate


def _block_size(name: str, published: int) -> Any:
    """A block size from config.json; without one, that of the published checkpoints."""

    def read(raw: Raw) -> int:
        size = raw.get(name)
        if size is None:
            return published
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise CheckpointError(expected(f"{name} in config.json", "a whole number of at least 1", repr(size)))
        return size

    return read


# Config keys that mean the same in Qwen's family and in the stock classes.
_QWEN: dict[str, Any] = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "intermediate_size": Key("intermediate_size"),
    "num_hidden_layers": Key("num_hidden_layers"),
    "num_attention_heads": Key("num_attention_heads"),
    "num_key_value_heads": Key("num_key_value_heads", "num_attention_heads"),
    "max_position_embeddings": Key("max_position_embeddings"),
    "rms_norm_eps": Key("rms_norm_eps", default=1e-6),
    "rope_parameters": _rope(),
    "tie_word_embeddings": Key("tie_word_embeddings", default=False),
}
_WITH_HEAD_DIM = {"head_dim": Key("head_dim", default=lambda raw: raw["hidden_size"] // raw["num_attention_heads"])}
_QWEN2: dict[str, Any] = {**_QWEN, "use_sliding_window": False}
_QWEN3: dict[str, Any] = {**_QWEN2, **_WITH_HEAD_DIM, "attention_bias": False}
_QWEN_FIXED = {"hidden_act": "silu", "use_sliding_window": False, "rope_scaling": None}

_SDAR_FIXED = {**_QWEN_FIXED, "attention_bias": False, "use_regular_causal": False}
_SDAR_BLOCK = _block_size("block_size", 4)
_SDAR_IDS = Ids((151936,), mask=151669, eos=151643, turn_end=151645, positions="32768")


def _block_by_block(raw: Raw) -> dict[str, Any]:
    return {"block_length": _SDAR_BLOCK(raw), "threshold": 0.85}


# --- LLaDA: a Llama without causality, with its own names ----------------------------------------------------------

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

_LLADA = Entry(
    architecture="LLaDAModelLM",
    family="LLaDA",
    model_class="LlamaForCausalLM",
    translation={
        "vocab_size": Key("embedding_size", "vocab_size"),
        "hidden_size": Key("d_model"),
        "intermediate_size": Key("mlp_hidden_size", default=lambda raw: raw.get("mlp_ratio", 4) * raw["d_model"]),
        "num_hidden_layers": Key("n_layers"),
        "num_attention_heads": Key("n_heads"),
        "num_key_value_heads": Key("n_kv_heads", "n_heads"),
        "max_position_embeddings": Key("max_sequence_length"),
        "rms_norm_eps": Key("rms_norm_eps", default=1e-5),
        "rope_parameters": lambda raw: {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10000.0)},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": Key("weight_tying", default=False),
    },
    # What a Llama is; a config that says otherwise describes a model that this mapping would get wrong.
    fixed={
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
    },
    # Anchored, because a block has an ff_out as well.
    names={rf"^model\.transformer\.{a}\.": f"{b}." for a, b in _OUTSIDE.items()}
    | {rf"^model\.transformer\.blocks\.(\d+)\.{a}\.": rf"model.layers.\1.{b}." for a, b in _INSIDE.items()},
    ids=Ids((126464,), mask=126336, eos=126081, turn_end=126348, pad=126081, positions="4096"),
    rope_fp32=Key("rope_full_precision", default=True),
    checkpoints=(
        "GSAI-ML/LLaDA-8B-Base",
        "GSAI-ML/LLaDA-8B-Instruct",
        "GSAI-ML/LLaDA-1.5",
        "Zigeng/dParallel-LLaDA-8B-instruct",
    ),
    licence="MIT",
    citation="Nie et al., Large Language Diffusion Models, arXiv:2502.09992; LLaDA-1.5: Zhu et al., arXiv:2505.19223; "
    "dParallel: Chen et al., arXiv:2509.26488",
    note="Rotates queries and keys in float32 whatever the dtype. dParallel differs in its weights only.",
)

# --- Dream: a Qwen2 without causality whose row i - 1 predicts token i ---------------------------------------------

_DREAM = Entry(
    architecture="DreamModel",
    family="Dream",
    model_class="Qwen2ForCausalLM",
    translation={
        **_QWEN2,
        "rope_parameters": lambda raw: _rope()({"rope_theta": 1e6, **raw}),
    },
    fixed=_QWEN_FIXED,
    ids=Ids((152064,), mask=151666, eos=151643, turn_end=151645, pad=151643, positions="131072 (Dream documents 2048)"),
    shift=1,
    checkpoints=(
        "Dream-org/Dream-v0-Base-7B",
        "Dream-org/Dream-v0-Instruct-7B",
        "Dream-org/Dream-Coder-v0-Instruct-7B",
        "apple/DiffuCoder-7B-Instruct",
        "apple/DiffuCoder-7B-cpGRPO",
        "Zigeng/dParallel_Dream_7B_Instruct",
    ),
    licence="Apache-2.0 (DiffuCoder: Apple's own, see its card)",
    citation="Ye et al., Dream 7B: Diffusion Large Language Models, arXiv:2508.15487; DiffuCoder: Gong et al., "
    "arXiv:2506.20639; Dream-Coder: Xie et al., arXiv:2509.01142; dParallel: Chen et al., arXiv:2509.26488",
    note="The mask id stands in the model's config; generation_config.json has a null in its place.",
)

# --- LLaDA-MoE: a Qwen3-MoE with other config keys -----------------------------------------------------------------


def _dense_layers(raw: Raw) -> list[int]:
    """The layers without experts: those where moe_layer_freq is 0."""
    frequency = raw.get("moe_layer_freq", 1)
    each = frequency if isinstance(frequency, list) else [frequency] * raw["num_hidden_layers"]
    return [layer for layer, sparse in enumerate(each) if not sparse]


_LLADA_MOE = Entry(
    architecture="LLaDAMoEModelLM",
    family="LLaDA-MoE",
    model_class="Qwen3MoeForCausalLM",
    translation={
        **_QWEN3,
        "rms_norm_eps": Key("rms_norm_eps", default=1e-5),
        "intermediate_size": Key("dense_intermediate_size", "intermediate_size"),
        "moe_intermediate_size": Key("expert_intermediate_size"),
        "num_experts": Key("num_experts"),
        "num_experts_per_tok": Key("num_experts_per_tok"),
        "norm_topk_prob": Key("norm_topk_prob", default=False),
        "decoder_sparse_step": 1,
        "mlp_only_layers": _dense_layers,
    },
    fixed={**_QWEN_FIXED, "qk_layernorm": True, "shared_expert_intermediate_size": None, "attention_bias": False},
    ids=Ids((157184,), mask=156895, eos=156892, turn_end=156892, pad=156892, positions="8192"),
    checkpoints=("inclusionAI/LLaDA-MoE-7B-A1B-Base", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"),
    licence="Apache-2.0",
    citation="Zhu et al., LLaDA-MoE: A Sparse MoE Diffusion Language Model, arXiv:2509.24389",
    note='model_type is "llada", as that of the dense model. config.json names no mask token.',
)

# --- LLaDA2: a GLM4-MoE that sees blocks of 32 ---------------------------------------------------------------------

_LLADA2 = Entry(
    architecture="LLaDA2MoeModelLM",
    family="LLaDA2",
    model_class="Glm4MoeForCausalLM",
    translation={
        **_QWEN,
        **_WITH_HEAD_DIM,
        "rope_parameters": _rope(partial=0.5),
        "attention_bias": False,
        "use_qk_norm": True,
        "moe_intermediate_size": Key("moe_intermediate_size"),
        "n_routed_experts": Key("num_experts"),
        "n_shared_experts": Key("num_shared_experts", default=1),
        "num_experts_per_tok": Key("num_experts_per_tok"),
        "n_group": Key("n_group", default=8),
        "topk_group": Key("topk_group", default=4),
        "routed_scaling_factor": Key("routed_scaling_factor", default=2.5),
        "norm_topk_prob": Key("norm_topk_prob", default=True),
        "first_k_dense_replace": Key("first_k_dense_replace", default=0),
        "num_mtp_layers": 0,
    },
    fixed={
        **_QWEN_FIXED,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "norm_head": False,
        "using_split_qkv_in_self_attention": False,
    },
    names={
        r"^model\.word_embeddings\.": "model.embed_tokens.",
        r"^model\.layers\.(\d+)\.attention\.dense\.": r"model.layers.\1.self_attn.o_proj.",
        r"^model\.layers\.(\d+)\.attention\.query_layernorm\.": r"model.layers.\1.self_attn.q_norm.",
        r"^model\.layers\.(\d+)\.attention\.key_layernorm\.": r"model.layers.\1.self_attn.k_norm.",
        r"^model\.layers\.(\d+)\.mlp\.gate\.expert_bias$": r"model.layers.\1.mlp.gate.e_score_correction_bias",
    },
    fused={
        "attention.query_key_value.weight": (
            "self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
            "self_attn.v_proj.weight",
        )
    },
    ids=Ids((157184,), mask=156895, eos=156892, turn_end=156892, pad=156892, positions="mini 32768, flash 16384"),
    block_causal=_block_size("block_size", 32),
    defaults=lambda raw: {"block_length": _block_size("block_size", 32)(raw), "threshold": 0.95},
    checkpoints=(
        "inclusionAI/LLaDA2.0-mini",
        "inclusionAI/LLaDA2.0-flash",
        "inclusionAI/LLaDA2.1-mini",
        "inclusionAI/LLaDA2.1-flash",
    ),
    licence="Apache-2.0",
    citation="Bie et al., LLaDA2.0: Scaling Up Diffusion Language Models to 100B, arXiv:2512.15745; LLaDA2.1: "
    "Bie et al., arXiv:2602.08676",
    note="Queries, keys and values are stored in one piece and are split on loading. LLaDA2.1 corrects itself when "
    "told to: `edit_threshold=0.9` (its config.json is that of LLaDA2.0, so this is no recommended setting).",
)

# --- SDAR: a Qwen3 that sees blocks --------------------------------------------------------------------------------

_SDAR = Entry(
    architecture="SDARForCausalLM",
    family="SDAR",
    model_class="Qwen3ForCausalLM",
    translation=_QWEN3,
    fixed=_SDAR_FIXED,
    ids=_SDAR_IDS,
    block_causal=_SDAR_BLOCK,
    defaults=_block_by_block,
    checkpoints=("JetLM/SDAR-1.7B-Chat", "JetLM/SDAR-4B-Chat", "JetLM/SDAR-8B-Chat"),
    licence="MIT",
    citation="Cheng et al., SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation, "
    "arXiv:2510.06303",
    note="Blocks of `block_size` positions where config.json names it, else of 4; variants of 8 to 64 exist. A config "
    "without it needs spec=dataclasses.replace(model.leap_spec, block_causal_length=...) for those.",
)

_SDAR_MOE = Entry(
    architecture="SDARMoeForCausalLM",
    family="SDAR-MoE",
    model_class="Qwen3MoeForCausalLM",
    translation={
        **_QWEN3,
        "moe_intermediate_size": Key("moe_intermediate_size"),
        "num_experts": Key("num_experts"),
        "num_experts_per_tok": Key("num_experts_per_tok"),
        "norm_topk_prob": Key("norm_topk_prob", default=True),
        "decoder_sparse_step": Key("decoder_sparse_step", default=1),
        "mlp_only_layers": Key("mlp_only_layers", default=lambda raw: []),
    },
    fixed=_SDAR_FIXED,
    ids=_SDAR_IDS,
    block_causal=_SDAR_BLOCK,
    defaults=_block_by_block,
    checkpoints=("JetLM/SDAR-30B-A3B-Chat",),
    licence="MIT",
    citation=_SDAR.citation,
    note="As SDAR, with experts.",
)

# --- Fast-dLLM v2: a shifted Qwen2 that sees blocks of 32, decoded in sub-blocks of 8 ------------------------------

_FAST_DLLM = Entry(
    architecture="Fast_dLLM_QwenForCausalLM",
    family="Fast-dLLM v2",
    model_class="Qwen2ForCausalLM",
    translation=_QWEN2,
    fixed=_QWEN_FIXED,
    ids=Ids((152064, 151936), mask=151665, eos=151645, turn_end=151645, pad=151645, positions="32768"),
    shift=1,
    block_causal=_block_size("bd_size", 32),
    defaults=lambda raw: {"block_length": min(8, _block_size("bd_size", 32)(raw)), "free_first_token": True},
    checkpoints=("Efficient-Large-Model/Fast_dLLM_v2_1.5B", "Efficient-Large-Model/Fast_dLLM_v2_7B"),
    licence="Apache-2.0",
    citation="Wu et al., Fast-dLLM v2: Efficient Block-Diffusion LLM, arXiv:2509.26328",
    note="Row i - 1 predicts token i. The first token of a block is read in the block before it, where nothing can "
    "change it any more: `free_first_token` commits it at once. Sub-blocks are `block_length`, a divisor of the block.",
)

# --- stock classes with a mask token, as `save_pretrained` writes what was loaded ----------------------------------


def _declared(what: str, meaning: str) -> Any:
    """A key of LEAP's own that nothing in the weights could stand in for."""

    def read(raw: Raw) -> int:
        if raw.get(what) is None:
            name = (raw.get("architectures") or ["model"])[0]
            raise ModelError(f"config.json of this masked {name} declares no {what}. {meaning}")
        return int(raw[what])

    return read


_SHIFT = _declared("logits_shift", "Write 1 where row i - 1 predicts token i (Dream), 0 where row i does.")
_BLOCK = _declared("block_causal_length", "Write the block size, or 0 where every row sees every row.")
_FP32 = Key("rope_fp32", default=False)

_STOCK = (
    Entry(
        architecture="LlamaForCausalLM",
        family="masked Llama",
        model_class="LlamaForCausalLM",
        shift=Key("logits_shift", default=0),
        block_causal=Key("block_causal_length", default=0),
        rope_fp32=_FP32,
    ),
    *(
        Entry(
            architecture=f"{name}ForCausalLM",
            family=f"masked {name}",
            model_class=f"{name}ForCausalLM",
            shift=_SHIFT,
            block_causal=Key("block_causal_length", default=0) if name == "Qwen2" else _BLOCK,
            rope_fp32=_FP32,
        )
        for name in ("Qwen2", "Qwen3", "Qwen3Moe", "Glm4Moe")
    ),
)

# --- masked language models of transformers, which fill masks inside a text ----------------------------------------

_NO_DECODER = {"is_decoder": False, "add_cross_attention": False}


def _behind_padding(raw: Raw) -> int:
    """RoBERTa and its relatives number their learned positions from the padding id on."""
    return int(raw.get("pad_token_id", 1)) + 1


_MASKED_LMS = (
    Entry(
        architecture="BertForMaskedLM",
        family="BERT",
        model_class="BertForMaskedLM",
        fixed={**_NO_DECODER, "position_embedding_type": "absolute"},
        rope_fp32=None,
        unused=(r"^bert\.pooler\.", r"^cls\.seq_relationship\.", r"\.position_ids$"),
        ids=Ids((30522, 28996, 21128, 119547, 105879), mask=103, pad=0, positions="512"),
        masked_lm=True,
        defaults={"infill": True},
        head=("cls",),
        checkpoints=("google-bert/bert-base-uncased", "google-bert/bert-large-cased"),
        licence="Apache-2.0",
        citation="Devlin et al., BERT, arXiv:1810.04805",
        note="Learned positions, no RoPE. The pooler and the head for next sentences are left in the file.",
    ),
    Entry(
        architecture="RobertaForMaskedLM",
        family="RoBERTa",
        model_class="RobertaForMaskedLM",
        fixed={**_NO_DECODER, "position_embedding_type": "absolute"},
        rope_fp32=None,
        unused=(r"^roberta\.pooler\.", r"\.position_ids$"),
        ids=Ids((50265,), mask=50264, eos=2, pad=1, positions="512"),
        position_offset=_behind_padding,
        masked_lm=True,
        defaults={"infill": True},
        head=("lm_head",),
        checkpoints=("FacebookAI/roberta-base", "FacebookAI/roberta-large"),
        licence="MIT",
        citation="Liu et al., RoBERTa, arXiv:1907.11692",
        note="Positions count from the padding id + 1, so 2 of the 514 cannot be used.",
    ),
    Entry(
        architecture="ModernBertForMaskedLM",
        family="ModernBERT",
        model_class="ModernBertForMaskedLM",
        ids=Ids((50368,), mask=50284, eos=50282, pad=50283, positions="8192"),
        window=lambda raw: raw.get("local_attention", 128) // 2 + 1,
        masked_lm=True,
        defaults={"infill": True},
        head=("head", "decoder"),
        checkpoints=("answerdotai/ModernBERT-base", "answerdotai/ModernBERT-large"),
        licence="Apache-2.0",
        citation="Warner et al., Smarter, Better, Faster, Longer, arXiv:2412.13663",
        note="Two layers in three see positions at most local_attention / 2 away, appended rows included.",
    ),
    Entry(
        architecture="EsmForMaskedLM",
        family="ESM-2",
        model_class="EsmForMaskedLM",
        fixed={**_NO_DECODER, "is_folding_model": False},
        unused=(r"^esm\.pooler\.", r"\.position_ids$", r"\.position_embeddings\.weight$"),
        ids=Ids((33,), mask=32, eos=2, pad=1, positions="1026"),
        position_offset=lambda raw: (
            _behind_padding(raw) if raw.get("position_embedding_type", "absolute") == "absolute" else 0
        ),
        masked_lm=True,
        defaults={"infill": True},
        head=("lm_head",),
        checkpoints=("facebook/esm2_t12_35M_UR50D", "facebook/esm2_t33_650M_UR50D"),
        licence="MIT",
        citation="Lin et al., Evolutionary-scale prediction of atomic-level protein structure, "
        "doi:10.1126/science.ade2574",
        note="Embeddings are scaled by the share of masks (token_dropout), which we count over base rows only.",
    ),
)

REGISTRY: dict[str, Entry] = {
    entry.architecture: entry
    for entry in (_LLADA, _DREAM, _LLADA_MOE, _LLADA2, _SDAR, _SDAR_MOE, _FAST_DLLM, *_STOCK, *_MASKED_LMS)
}
