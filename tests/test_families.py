# SPDX-License-Identifier: Apache-2.0
"""Every entry of the table of checkpoints, on a small random checkpoint in the authors' names, against a plain forward
that shares nothing with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from checkpoints import edit_config, rewrite_weights, stored_weights
from families import FAMILIES, MASKED_LMS, PUBLISHED, write
from oracle import decode_one
from plain import Plain, rotate
from random_models import plain_forward, random_llama
from torch import Tensor

import leap_kernels
from leap_kernels import ModelSpec, Rows
from leap_kernels.errors import CheckpointError, ConfigError, ModelError
from leap_kernels.models.registry import REGISTRY, entry_for

DENSE, MOE = 1e-5, 5e-5  # largest difference of float32 logits
SHIFTED = ("Dream", "Fast-dLLM")
BLOCKS = {"LLaDA2": 8, "SDAR": 4, "SDAR-MoE": 4, "Fast-dLLM": 8}


class Case(NamedTuple):
    family: str
    folder: Path
    model: Any
    plain: Plain
    limit: float


# What a layout changes: the number of files, the dtype they are in, and what configs of published variants differ in.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one-file": {},
    "sharded-bfloat16": {"torch_dtype": "bfloat16", "shards": 4},
    "other-sizes": {
        "shards": 2,
        "num_key_value_heads": 1,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-2,
        "tie_word_embeddings": True,
    },
}
OTHER_LLADA = {
    "shards": 2,
    "n_kv_heads": 1,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-2,
    "weight_tying": True,
}


def layout_of(family: str, name: str) -> dict[str, Any]:
    return OTHER_LLADA if (family, name) == ("LLaDA", "other-sizes") else LAYOUTS[name]


@pytest.fixture(params=[f"{family}-{name}" for family in FAMILIES for name in LAYOUTS], scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, name = next((f, n) for f in FAMILIES for n in LAYOUTS if f"{f}-{n}" == request.param)
    folder = write(tmp_path_factory.mktemp("case"), family, seed=len(request.param), **layout_of(family, name))
    limit = MOE if "num_experts" in FAMILIES[family] else DENSE
    return Case(family, folder, leap_kernels.load(folder), Plain.from_folder(folder, torch.float64), limit)


def compare(case: Case, logits: Tensor, truth: Tensor) -> None:
    assert logits.shape == truth.shape
    assert (logits - truth).abs().max().item() <= case.limit
    assert torch.equal(logits.argmax(-1), truth.argmax(-1))


def example(seed: int = 0, batch: int = 2, length: int = 13) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, their plain positions, repeated positions, and a random mask in which every row sees itself."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 44, (batch, length), generator=generator)
    plain = torch.arange(length).expand(batch, length)
    repeated = torch.randint(0, 30, (batch, length), generator=generator)
    mask = torch.rand((batch, 1, length, length), generator=generator) < 0.5
    return ids, plain, repeated, mask | torch.eye(length, dtype=torch.bool)


def block_causal(positions: Tensor, size: int) -> Tensor | None:
    """(B, 1, R, R): rows see their block and earlier ones."""
    block = positions // size if size else torch.zeros_like(positions)
    return (block[:, None, :] <= block[:, :, None])[:, None]


def test_every_entry_of_the_table_is_tested_here() -> None:
    published = {entry.architecture for entry in REGISTRY.values() if entry.checkpoints}
    assert published == {config["architectures"][0] for config in (*FAMILIES.values(), *MASKED_LMS.values())}


# --- the forward ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", ["full", "masked", "block-causal"])
@pytest.mark.parametrize("repeated", [False, True], ids=["in-order", "repeated-positions"])
def test_logits_are_those_of_the_plain_implementation(case: Case, seen: str, repeated: bool) -> None:
    """Names, head layout, biases, norms, RoPE, experts and the mask mean what they mean in the authors' model."""
    ids, plain, again, mask = example()
    positions = again if repeated else plain
    visible = {"full": None, "masked": mask, "block-causal": block_causal(positions, 4)}[seen]
    passed = torch.ones_like(mask) if visible is None else visible
    with torch.inference_mode():
        logits = case.model(ids, position_ids=positions, attention_mask=passed).logits
    compare(case, logits, case.plain(ids, positions, visible))


def test_the_model_alone_sees_what_its_authors_let_it_see(case: Case) -> None:
    """`model(ids)`: full attention, or block-causal where the model is, positions 0..n-1; the same for `Rows.plain`."""
    ids, positions, _, _ = example(1, length=14)
    truth = case.plain(ids, positions, block_causal(positions, BLOCKS.get(case.family, 0)))
    rows = Rows.plain(ids, case.model.leap_spec)
    with torch.inference_mode():
        compare(case, case.model(ids).logits, truth)
        compare(case, case.model(rows.token, position_ids=rows.pos, leap=rows).logits, truth)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_move_the_blocks(case: Case, side: str) -> None:
    """A padded prompt has the logits it has alone: its blocks are counted from its own first token."""
    ids, positions, _, _ = example(2, batch=1, length=11)
    truth = case.plain(ids, positions, block_causal(positions, BLOCKS.get(case.family, 0)))
    pad = torch.full((1, 3), 7)
    padded = torch.cat([pad, ids] if side == "left" else [ids, pad], 1)
    valid = torch.zeros_like(padded)
    at = slice(3, None) if side == "left" else slice(11)
    valid[:, at] = 1
    with torch.inference_mode():
        shifted = (valid.cumsum(1) - 1).clamp(min=0)
        logits = case.model(padded, attention_mask=valid, position_ids=shifted).logits[:, at]
    compare(case, logits, truth)


def test_what_was_loaded_is_a_stock_model_ready_to_decode(case: Case) -> None:
    entry = entry_for(FAMILIES[case.family])[1]
    assert type(case.model).__name__ == entry.model_class
    assert type(case.model).__module__.startswith("transformers.")
    assert case.model.config.is_causal is False
    assert case.model.config._attn_implementation == "leap"
    assert not any(module.training for module in case.model.modules())
    assert case.model.dtype == torch.float32
    spec = case.model.leap_spec
    assert (spec.shift, spec.block_causal_length) == (case.family in SHIFTED, BLOCKS.get(case.family, 0))
    assert spec.rope_fp32 == (case.family == "LLaDA")


def test_nothing_of_the_file_is_left_over_or_made_up(case: Case) -> None:
    """As many numbers in the model as in the file, and none of them random."""
    stored = sum(value.numel() for value in stored_weights(case.folder).values())
    state = {value.data_ptr(): value.numel() for value in case.model.state_dict().values()}
    assert sum(state.values()) == stored


def test_a_saved_model_loads_again(case: Case, tmp_path: Path) -> None:
    """`save_pretrained` and back: same bits, same ModelSpec; and the folder is transformers' own."""
    case.model.save_pretrained(tmp_path)
    again = leap_kernels.load(tmp_path)
    ids, _, _, _ = example(3)
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, case.model(ids).logits)
    assert again.leap_spec == case.model.leap_spec
    state = case.model.state_dict()
    assert state.keys() == again.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    own, info = type(case.model).from_pretrained(tmp_path, output_loading_info=True)
    assert {what: keys for what, keys in info.items() if keys} == {}
    assert all(torch.equal(value, state[name]) for name, value in own.state_dict().items())


def test_leap_decodes_to_the_tokens_of_the_slow_decoder(case: Case) -> None:
    """Dense masks, the plain forward and lists of numbers, against `decode` with the settings of the checkpoint."""
    spec = case.model.leap_spec
    options = {"max_new_tokens": 21, "threshold": 0.4, "tau": 0.06, "eta": 0.05, "suppress_tokens": (40, 44, 45)}
    block = spec.defaults.get("block_length", 8)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15]]
    out = leap_kernels.decode(
        case.model, [torch.tensor(p, dtype=torch.int64) for p in prompts], block_length=block, **options
    )
    suppress = options.pop("suppress_tokens")
    for i, prompt in enumerate(prompts):
        oracle = decode_one(
            case.plain, prompt, mask_id=43, eos_ids=spec.eos_token_ids, pad_id=spec.pad_token_id, block_length=block,
            shift=int(case.family in SHIFTED), block_causal=BLOCKS.get(case.family, 0), suppress=suppress,
            free_first_token=case.family == "Fast-dLLM", **options,
        )  # fmt: skip
        assert out.generated[i].tolist() == oracle.tokens
        assert out.nfe[i].item() == oracle.nfe
        assert out.token_forwards[i].item() == oracle.token_forwards
        assert out.history.step[i].tolist() == oracle.steps
    assert (out.history.reason == 2).any(), "no token converged: the example shows nothing of LEAP"


# --- shifted and block-causal: Fast-dLLM v2 -------------------------------------------------------------------------

RECOMMENDED = {"block_length": 8, "free_first_token": True}


@pytest.mark.parametrize("length", [3, 31, 32, 40])
@pytest.mark.parametrize("strategy", ["leap", "threshold", "full"])
def test_fast_dllm_in_sub_blocks_of_a_block_of_32(tmp_path: Path, length: int, strategy: str) -> None:
    """Prompts that end inside a block, at its end and behind it, decoded with the recommended settings."""
    folder = write(tmp_path, "Fast-dLLM", bd_size=32, max_position_embeddings=128, seed=length)
    model, plain = leap_kernels.load(folder), Plain.from_folder(folder, torch.float64)
    assert model.leap_spec.defaults == RECOMMENDED
    options: dict[str, Any] = {"leap": {"threshold": 0.3, "tau": 0.05, "eta": 0.05}, "threshold": {"threshold": 0.3}}
    options = options.get(strategy, {})
    prompt = torch.randint(0, 40, (length,), generator=torch.Generator().manual_seed(length))
    out = leap_kernels.decode(model, prompt, strategy=strategy, max_new_tokens=44, early_stop=False, **options)
    oracle = decode_one(
        plain, prompt.tolist(), mask_id=43, max_new_tokens=44, shift=1, block_causal=32, strategy=strategy,
        early_stop=False, **RECOMMENDED, **options,
    )  # fmt: skip
    assert out.generated[0].tolist() == oracle.tokens
    assert out.history.step[0].tolist() == oracle.steps
    assert (out.nfe[0].item(), out.token_forwards[0].item()) == (oracle.nfe, oracle.token_forwards)
    # The first token of a block goes with the first forward on it, and so saves one where it would have been the last.
    for first in (i for i in range(44) if (length + i) % 32 == 0):
        assert oracle.steps[first] == max(oracle.steps[:first], default=0) + 1


def test_the_first_token_of_a_block_cannot_change() -> None:
    """Why it is free: its row lies in the finished block before, so all forwards on its block predict the same."""
    model = random_llama(3)
    inner, seen = plain_forward(model), []

    def spying(input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = inner(input_ids, position_ids, attention_mask)
        if input_ids.shape[1] > 8 and not (input_ids[0, :8] == 0).any():
            seen.append(logits[0, 7:9].clone())
        return logits

    spec = ModelSpec(mask_token_id=0, shift=1, block_causal_length=8, vocab_size=23)
    prompt = torch.tensor([[5, 6, 7]])
    leap_kernels.decode(spying, prompt, spec=spec, max_new_tokens=13, block_length=8, strategy="full")
    assert len(seen) == 8
    assert all(torch.allclose(rows[0], seen[0][0], atol=1e-9) for rows in seen)
    assert not torch.allclose(seen[0][1], seen[-1][1], atol=1e-3), "the other rows do change"


@pytest.mark.parametrize("options", [{"shift": 1}, {"block_causal_length": 8}, {}])
def test_a_free_first_token_is_refused_where_it_could_change(options: dict[str, int]) -> None:
    spec = ModelSpec(mask_token_id=0, vocab_size=23, **options)
    with pytest.raises(ConfigError, match="free_first_token=True is for models that are shifted and block-causal"):
        leap_kernels.decode(random_llama(), torch.tensor([[5]]), spec=spec, max_new_tokens=8, free_first_token=True)


# --- half precision ------------------------------------------------------------------------------------------------


class Half(Plain):
    """The authors' arithmetic in half precision: RoPE in float32 and cast back, or, `narrow`, in the model's dtype."""

    narrow = False

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.shape.eps)
        return self.weights[f"{name}.weight"] * wide.to(x.dtype)

    def turn(self, x: Tensor, position_ids: Tensor, layer: int) -> Tensor:
        theta = self.shape.theta[layer]
        if not self.narrow:
            return rotate(x, position_ids, theta)
        half = x.shape[-1] // 2
        frequencies = 1.0 / theta ** (torch.arange(half, dtype=torch.float32) / half)
        angles = position_ids[:, None, :, None].float() * torch.cat((frequencies, frequencies))
        other_half = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * angles.cos().to(x.dtype) + other_half * angles.sin().to(x.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate = F.silu(self.linear(x, f"{name}.gate"))
        return self.linear(gate * self.linear(x, f"{name}.up"), f"{name}.down")


@pytest.mark.parametrize("family", ["LLaDA", "Dream", "SDAR", "Fast-dLLM"])
@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "float16"], ids=str)
def test_half_precision_rotates_in_the_precision_of_the_authors(tmp_path: Path, family: str, dtype: Any) -> None:
    """LLaDA's RoPE is float32 whatever the dtype, the others' is rounded to it; nobody's frequencies are rounded."""
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    kv_heads = {"n_kv_heads": 2} if family == "LLaDA" else {}
    folder = write(tmp_path, family, torch_dtype=str(wanted).removeprefix("torch."), **kv_heads)
    model = leap_kernels.load(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32

    ids, positions, _, _ = example(length=40)
    plain = Half.from_folder(folder, wanted)
    results = []
    for plain.narrow in (False, True):
        results.append(plain(ids, positions).float())
    right, wrong = results if family == "LLaDA" else results[::-1]
    with torch.inference_mode():
        full = torch.ones((1, 1, 40, 40), dtype=torch.bool)
        logits = model(ids, position_ids=positions, attention_mask=full).logits
    assert logits.dtype == wanted
    # The same operations in the same order; one float32 sum may fall on the other side of a half-precision rounding.
    assert (logits.float() - right).abs().max() < 0.25 * (logits.float() - wrong).abs().max()
    assert (logits.float() == right).float().mean() > 0.95


@pytest.mark.parametrize("family", ["LLaDA-MoE", "LLaDA2", "SDAR-MoE"])
def test_experts_in_half_precision_stay_in_it(tmp_path: Path, family: str) -> None:
    """All weights in the dtype asked for, but for LLaDA2's router, whose small steps choose experts."""
    folder = write(tmp_path, family, torch_dtype="bfloat16")
    model = leap_kernels.load(folder, dtype="bfloat16")
    wide = {name for name, value in model.state_dict().items() if value.dtype != torch.bfloat16}
    assert all(name.endswith(("gate.weight", "e_score_correction_bias")) for name in wide)
    assert not wide or family == "LLaDA2"
    ids, positions, _, mask = example()
    with torch.inference_mode():
        logits = model(ids, position_ids=positions, attention_mask=mask).logits
    truth = Plain.from_folder(folder)(ids, positions, mask)
    # bfloat16 has 8 bits, and a row may go to other experts for a rounding: most rows are near the float32 truth.
    far = (logits.float() - truth).abs().amax(-1) > 0.2
    assert far.float().mean() < 0.25


# --- what is read from config.json ---------------------------------------------------------------------------------

FACTS = {
    "LLaDA-8B": (126336, (126081, 126348), 126081, 0, 0, True, 4096, 126464),
    "Dream-7B": (151666, (151643, 151645), 151643, 1, 0, False, 131072, 152064),
    "LLaDA-MoE-7B-A1B": (156895, (156892,), 156892, 0, 0, False, 8192, 157184),
    "LLaDA2.0-mini": (156895, (156892,), 156892, 0, 32, False, 32768, 157184),
    "SDAR-4B": (151669, (151643, 151645), None, 0, 4, False, 32768, 151936),
    "Fast-dLLM-v2-7B": (151665, (151645,), 151645, 1, 32, False, 32768, 152064),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_specs_of_published_checkpoints(name: str) -> None:
    """Ids that config.json leaves out are known for the published vocabulary."""
    mask, eos, pad, shift, block, fp32, positions, width = FACTS[name]
    spec = entry_for(PUBLISHED[name])[1].spec(PUBLISHED[name])
    assert spec == ModelSpec(
        mask_token_id=mask, eos_token_ids=eos, pad_token_id=pad, shift=shift, block_causal_length=block,
        rope_fp32=fp32, max_positions=positions, vocab_size=width, defaults=spec.defaults,
    )  # fmt: skip
    if block:
        assert block % spec.defaults["block_length"] == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_stock_configs_of_published_checkpoints_have_their_sizes(name: str) -> None:
    """The stock class would hold as many parameters as the authors publish (in billions, embeddings included)."""
    import transformers

    published = {
        "LLaDA-8B": 8.0, "Dream-7B": 7.6, "LLaDA-MoE-7B-A1B": 7.4, "LLaDA2.0-mini": 16.3, "SDAR-4B": 4.4,
        "Fast-dLLM-v2-7B": 7.6,
    }  # fmt: skip
    entry = entry_for(PUBLISHED[name])[1]
    stock = getattr(transformers, entry.model_class)
    with torch.device("meta"):
        model = stock._from_config(stock.config_class(**entry.config(PUBLISHED[name])))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(published[name], abs=0.06)


@pytest.mark.parametrize("family", ["LLaDA-MoE", "LLaDA2", "SDAR", "SDAR-MoE", "Fast-dLLM"])
def test_a_small_vocabulary_must_name_its_mask_token(tmp_path: Path, family: str) -> None:
    """The published ids mean nothing in another vocabulary."""
    folder = write(tmp_path, family)
    edit_config(folder, mask_token_id=...)
    with pytest.raises(ModelError, match=r"declares no mask_token_id.*masked-diffusion models only"):
        leap_kernels.load(folder)


@pytest.mark.parametrize("size", [4, 8, 16, 64])
def test_sdar_has_blocks_of_the_size_its_config_names(tmp_path: Path, size: int) -> None:
    spec = leap_kernels.load(write(tmp_path, "SDAR", block_size=size)).leap_spec
    assert spec.block_causal_length == spec.defaults["block_length"] == size


def test_a_config_of_transformers_5_names_its_rope_otherwise(tmp_path: Path) -> None:
    """`rope_parameters` in place of rope_theta and rope_scaling; anything but plain RoPE is refused."""
    folder = write(tmp_path, "SDAR")
    plain = Plain.from_folder(folder)
    edit_config(folder, rope_theta=..., rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    ids, positions, _, mask = example()
    with torch.inference_mode():
        logits = leap_kernels.load(folder)(ids, position_ids=positions, attention_mask=mask).logits
    assert (logits - plain(ids, positions, mask)).abs().max() <= DENSE
    edit_config(folder, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0})
    with pytest.raises(CheckpointError, match="plain RoPE"):
        leap_kernels.load(folder)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Dream", {"hidden_act": "gelu"}),
        ("SDAR", {"use_sliding_window": True}),
        ("SDAR", {"use_regular_causal": True}),
        ("SDAR", {"attention_bias": True}),
        ("SDAR-MoE", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
        ("LLaDA-MoE", {"qk_layernorm": False}),
        ("LLaDA-MoE", {"shared_expert_intermediate_size": 24}),
        ("LLaDA2", {"score_function": "softmax"}),
        ("LLaDA2", {"moe_router_enable_expert_bias": False}),
        ("LLaDA2", {"use_qkv_bias": True}),
        ("LLaDA2", {"use_qk_norm": False}),
        ("Fast-dLLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ],
    ids=str,
)
def test_a_config_that_the_stock_class_would_get_wrong_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """Such a model would load without complaint and compute something else."""
    ((key, value),) = changes.items()
    with pytest.raises(CheckpointError, match=r"is not \w+-shaped") as caught:
        leap_kernels.load(write(tmp_path, family, **changes))
    assert key in str(caught.value)
    assert str(value) in str(caught.value)


FUSED = "model.layers.1.attention.query_key_value.weight"


@pytest.mark.parametrize(
    ("family", "weight", "value", "fragments"),
    [
        ("LLaDA2", FUSED, None, ["missing", "layers.1.attention.query_key_value.weight"]),
        ("LLaDA2", FUSED, torch.zeros(120, 32), ["query_key_value", "128", "120"]),
        ("LLaDA2", FUSED.replace("weight", "bias"), torch.zeros(128), ["unexpected", "query_key_value.bias"]),
        ("LLaDA2", "model.layers.1.mlp.gate.expert_bias", None, ["missing", "e_score_correction_bias"]),
        ("LLaDA2", "model.layers.1.mlp.experts.3.up_proj.weight", None, ["missing", "layers.1.mlp.experts.3.up_proj"]),
        ("LLaDA-MoE", "model.layers.2.mlp.experts.7.down_proj.weight", None, ["missing", "experts"]),
        ("LLaDA-MoE", "model.layers.2.mlp.experts.8.down_proj.weight", torch.zeros(32, 24), ["experts"]),
        (
            "LLaDA-MoE",
            "model.layers.2.mlp.experts.5.gate_proj.weight",
            torch.zeros(25, 32),
            ["misshapen", "5.gate_proj"],
        ),
        ("SDAR-MoE", "model.layers.0.mlp.gate.weight", torch.zeros(7, 32), ["mlp.gate.weight", "7"]),
        ("SDAR-MoE", "model.layers.0.mlp.shared_expert.up_proj.weight", torch.zeros(24, 32), ["unexpected", "shared"]),
        ("SDAR", "model.layers.0.self_attn.q_norm.weight", None, ["missing", "q_norm"]),
        ("SDAR", "model.layers.0.self_attn.q_proj.bias", torch.zeros(64), ["unexpected", "q_proj.bias"]),
        ("Fast-dLLM", "model.layers.0.self_attn.q_proj.bias", None, ["missing", "q_proj.bias"]),
    ],
    ids=lambda value: value.split("layers.")[-1] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_broken_checkpoint_is_refused(
    tmp_path: Path, family: str, weight: str, value: Tensor | None, fragments: list[str], shards: int
) -> None:
    """Missing, foreign and misshapen tensors, fused ones and experts among them: CheckpointError that names them."""
    folder = write(tmp_path / "case", family, shards=shards)
    file = folder / "model.safetensors"
    if shards > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        file = folder / index.get(weight, "model-00001-of-00003.safetensors")
    rewrite_weights(file, {weight: value})
    with pytest.raises(CheckpointError) as caught:
        leap_kernels.load(folder)
    for fragment in [str(folder), *fragments]:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("family", ["LLaDA-MoE", "LLaDA2", "SDAR-MoE"])
def test_experts_are_told_apart_by_their_numbers(tmp_path: Path, family: str) -> None:
    """Expert 2 under the number 99: as many experts as there should be, and every one behind it in a wrong place."""
    folder = write(tmp_path, family)
    renamed: dict[str, Tensor | None] = {}
    for name, value in stored_weights(folder).items():
        if ".2.mlp.experts.2." in name or ".1.mlp.experts.2." in name:
            renamed |= {name: None, name.replace("experts.2.", "experts.99."): value}
    rewrite_weights(folder / "model.safetensors", renamed)
    with pytest.raises(CheckpointError, match=r"unexpected.*experts\.99\..*missing.*experts\.2\."):
        leap_kernels.load(folder)


def test_loading_leaves_transformers_table_of_conversions_as_it_was(tmp_path: Path) -> None:
    """The way to split a fused weight is known for the length of one load, also when that load fails."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    before = repr(get_checkpoint_conversion_mapping("glm4_moe"))
    folder = write(tmp_path, "LLaDA2")
    leap_kernels.load(folder)
    assert repr(get_checkpoint_conversion_mapping("glm4_moe")) == before
    rewrite_weights(folder / "model.safetensors", {FUSED: None})
    with pytest.raises(CheckpointError):
        leap_kernels.load(folder)
    assert repr(get_checkpoint_conversion_mapping("glm4_moe")) == before
