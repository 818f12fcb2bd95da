# SPDX-License-Identifier: Apache-2.0
"""Loading: the same function as the checkpoint's authors meant, or an error that says what is wrong."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import (
    DATA,
    edit_config,
    rewrite_weights,
    stored_weights,
    write_dream,
    write_llada,
    write_llama,
)
from families import LLADA, PUBLISHED
from plain import Plain
from torch import Tensor

import leap_kernels
from leap_kernels.errors import CheckpointError, ConfigError, LeapError, ModelError
from leap_kernels.models.registry import entry_for
from leap_kernels.models.tiny import problems

TINY = Path(leap_kernels.__file__).parent / "models" / "tiny"
LIMIT = 1e-5  # fp32, dense models (models.md section 3)


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def example(seed: int = 0, batch: int = 2, length: int = 13, vocab: int = 44) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, their plain positions, repeated positions, and a random mask in which every row sees itself."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (batch, length), generator=generator)
    plain = torch.arange(length).expand(batch, length)
    repeated = torch.randint(0, 30, (batch, length), generator=generator)
    mask = torch.rand((batch, 1, length, length), generator=generator) < 0.5
    return ids, plain, repeated, mask | torch.eye(length, dtype=torch.bool)


# --- LLaDA: the same logits as a plain implementation of the authors' model ----------------------------------------

LAYOUTS = {
    "one-file": {},
    "sharded": {"shards": 3},
    "grouped": {"n_kv_heads": 2},
    "sharded-one-kv-head": {"shards": 2, "n_kv_heads": 1},
    "tied": {"weight_tying": True},
    "sharded-tied-grouped": {"shards": 4, "n_kv_heads": 2, "weight_tying": True, "n_layers": 3},
    "no-embedding-size": {"embedding_size": None},
    "another-theta-and-eps": {"rope_theta": 10000.0, "rms_norm_eps": 1e-2},
}


@pytest.fixture(params=LAYOUTS, scope="module")
def llada(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = write_llada(tmp_path_factory.mktemp("llada"), seed=len(request.param), **LAYOUTS[request.param])
    return folder, leap_kernels.load(folder)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("repeated", [False, True], ids=["in-order", "repeated-positions"])
def test_llada_has_the_logits_of_the_plain_implementation(llada: Any, masked: bool, repeated: bool) -> None:
    """Names, head layout, RoPE, norms and the mask mean what they mean in the authors' model."""
    folder, model = llada
    ids, plain, again, mask = example()
    position_ids, visible = again if repeated else plain, mask if masked else None
    truth = Plain.from_folder(folder)(ids, position_ids, visible)
    with torch.inference_mode():
        logits = model(ids, position_ids=position_ids, attention_mask=visible).logits
    assert difference(logits, truth) <= LIMIT
    assert torch.equal(logits.argmax(-1), truth.argmax(-1))


def test_llada_positions_default_to_the_order_of_the_ids(llada: Any) -> None:
    """`model(ids)` alone is the authors' `model(ids)`: every row sees every row, positions 0..n-1."""
    folder, model = llada
    ids, plain, _, _ = example(1)
    with torch.inference_mode():
        logits = model(ids).logits
    assert difference(logits, Plain.from_folder(folder)(ids, plain)) <= LIMIT


OWN_NAMES = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


def parameter_of(model: Any, stored: str) -> Tensor:
    """The parameter that a name of a LLaDA file belongs to."""
    parts = stored.removeprefix("model.transformer.").removesuffix(".weight").split(".")
    if parts[0] == "blocks":
        return model.get_parameter(f"model.layers.{parts[1]}.{OWN_NAMES[parts[2]]}.weight")
    top = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}[parts[0]]
    return model.get_parameter(f"{top}.weight")


def test_llada_weights_are_the_bits_of_the_file(llada: Any) -> None:
    """Nothing is initialised, converted or left over: every tensor of the file is one parameter."""
    folder, model = llada
    stored = stored_weights(folder)
    assert len(stored) == len(list(model.parameters()))
    for name, value in stored.items():
        found = parameter_of(model, name)
        assert found.dtype == value.dtype, name
        assert torch.equal(found.detach(), value), name


def test_a_loaded_model_is_ready_to_decode(llada: Any) -> None:
    """Full attention (in the config too, where it survives saving), "leap" attention, eval mode, a ModelSpec."""
    _, model = llada
    assert type(model) is transformers.LlamaForCausalLM
    assert model.config.is_causal is False
    assert model.config._attn_implementation == "leap"
    assert not any(module.training for module in model.modules())
    assert isinstance(model.leap_spec, leap_kernels.ModelSpec)
    assert model.dtype == torch.float32
    assert model.device.type == "cpu"


@pytest.mark.parametrize("folder", [TINY, DATA / "tiny_dream"], ids=["LLaDA", "Dream"])
def test_trained_models_equal_their_plain_implementation(folder: Path) -> None:
    """With padding: two prompts in one batch, each as if it were alone. The limit is for logits of order one, as
    random models have them; a trained model's are larger, and so is their rounding."""
    model, plain = leap_kernels.load(folder), Plain.from_folder(folder)
    words = leap_kernels.load_tokenizer("tiny")
    prompts = words([problems()[0].prompt, problems()[-1].prompt])["input_ids"]
    width = max(map(len, prompts)) + 20
    ids = torch.tensor([[0] * (width - 20 - len(p)) + p + [1] * 20 for p in prompts])
    valid = (ids != 0).long()
    with torch.inference_mode():
        logits = model(ids, position_ids=(valid.cumsum(1) - 1).clamp(min=0), attention_mask=valid).logits
    for row, prompt in enumerate(prompts):
        alone = torch.tensor([prompt + [1] * 20])
        truth = plain(alone, torch.arange(alone.shape[1])[None])[0]
        assert difference(logits[row, -alone.shape[1] :], truth) <= LIMIT * truth.abs().max().item()
        assert torch.equal(logits[row, -alone.shape[1] :].argmax(-1), truth.argmax(-1))


# --- dtypes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_auto_makes_half_precision_float32_on_a_cpu(tmp_path: Path, stored: str, key: str, device: Any) -> None:
    """The documented exception to "the checkpoint's own dtype", under the config key of either transformers era."""
    folder = write_llada(tmp_path, torch_dtype=stored)
    edit_config(folder, **{"torch_dtype": ..., key: stored})
    model = leap_kernels.load(folder, device=device)
    for name, value in stored_weights(folder).items():
        assert value.dtype == getattr(torch, stored)
        assert parameter_of(model, name).dtype == torch.float32
        assert torch.equal(parameter_of(model, name).detach(), value.float()), name


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_auto_keeps_half_precision_elsewhere_and_wide_types_everywhere(tmp_path: Path, key: str) -> None:
    """Only a CPU widens, and only what is narrower than float32 ("meta" stands for any other device)."""
    half, double = write_llada(tmp_path / "half", torch_dtype="bfloat16"), write_llada(tmp_path / "double")
    edit_config(half, **{"torch_dtype": ..., key: "bfloat16"})
    edit_config(double, **{"torch_dtype": ..., key: "float64"})
    assert leap_kernels.load(half, device="meta").dtype == torch.bfloat16
    assert leap_kernels.load(double).dtype == torch.float64


def test_float64_computes_in_float64(tmp_path: Path) -> None:
    """Tests of exactness rely on it: logits of a float64 model are float64 and within float32 error of float32's."""
    folder = write_llada(tmp_path)
    ids, positions, _, mask = example()
    with torch.inference_mode():
        wide = leap_kernels.load(folder, dtype="float64")(ids, position_ids=positions, attention_mask=mask).logits
    assert wide.dtype == torch.float64
    assert difference(wide, Plain.from_folder(folder)(ids, positions, mask).double()) <= LIMIT


# --- what is read from config.json ---------------------------------------------------------------------------------


def test_the_bundled_model_is_what_its_config_says() -> None:
    """Sizes, ids and recommended settings come from tiny/config.json, one by one."""
    raw = json.loads((TINY / "config.json").read_text())
    model = leap_kernels.load("tiny")
    config, spec = model.config, model.leap_spec
    assert config.vocab_size == raw["embedding_size"] == model.lm_head.weight.shape[0]
    assert config.hidden_size == raw["d_model"]
    assert config.intermediate_size == raw["mlp_hidden_size"]
    assert config.num_hidden_layers == raw["n_layers"] == len(model.model.layers)
    assert config.num_attention_heads == raw["n_heads"]
    assert config.num_key_value_heads == raw["n_kv_heads"]
    assert config.max_position_embeddings == raw["max_sequence_length"]
    assert config.rms_norm_eps == raw["rms_norm_eps"]
    assert config.rope_parameters["rope_theta"] == raw["rope_theta"]
    assert config.tie_word_embeddings == raw["weight_tying"]
    assert spec == leap_kernels.ModelSpec(
        mask_token_id=raw["mask_token_id"],
        eos_token_ids=(raw["eos_token_id"],),
        pad_token_id=raw["pad_token_id"],
        shift=0,
        block_causal_length=0,
        rope_fp32=True,
        max_positions=raw["max_sequence_length"],
        vocab_size=raw["embedding_size"],
        defaults=raw["leap_defaults"],
    )


def test_model_spec_of_a_llada_checkpoint(tmp_path: Path) -> None:
    """Every field; ids beyond the tokenizer but inside the embedding are legal."""
    spec = leap_kernels.load(write_llada(tmp_path, mask_token_id=46, leap_defaults={"tau": 0.5})).leap_spec
    assert spec == leap_kernels.ModelSpec(
        mask_token_id=46,
        eos_token_ids=(41,),
        pad_token_id=40,
        rope_fp32=True,
        max_positions=64,
        vocab_size=48,
        defaults={"tau": 0.5},
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"eos_token_id": [41, 42]}, (41, 42)), ({"eos_token_id": None}, ()), ({"eos_token_id": 0}, (0,))],
    ids=["several", "none", "id-zero"],
)
def test_eos_ids_are_those_of_the_config(given: dict[str, Any], expected: tuple[int, ...]) -> None:
    """One id, several or none; an id of 0 is an id."""
    raw = {**LLADA, **given}
    assert entry_for(raw)[1].spec(raw).eos_token_ids == expected


def test_the_published_llada_ends_at_its_turn_end_too() -> None:
    """LLaDA-8B's config names one EOS; its chats end at 126348. Small vocabularies have no such id."""
    spec = entry_for(PUBLISHED["LLaDA-8B"])[1].spec(PUBLISHED["LLaDA-8B"])
    assert spec.mask_token_id == 126336
    assert spec.eos_token_ids == (126081, 126348)
    assert spec.pad_token_id == 126081
    assert spec.vocab_size == 126464
    assert spec.max_positions == 4096
    assert entry_for(LLADA)[1].spec(LLADA).eos_token_ids == (41,)


@pytest.mark.parametrize(
    "raw", [LLADA, PUBLISHED["LLaDA-8B"], {**LLADA, "leap_defaults": {"tau": 0.6}}], ids=["small", "8b", "tau"]
)
def test_the_config_that_is_saved_describes_the_same_model(raw: dict[str, Any]) -> None:
    """A LLaDA's config, saved as the Llama it became, gives the same ModelSpec: no id is lost on the way."""
    entry = entry_for(raw)[1]
    saved = transformers.LlamaConfig(**entry.config(raw)).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    assert entry_for(saved)[1].spec(saved) == entry.spec(raw)


def test_a_llada_that_rotates_in_its_own_dtype_says_so() -> None:
    """`rope_full_precision: false` is the authors' switch for RoPE in the model's dtype."""
    raw = {**LLADA, "rope_full_precision": False}
    assert entry_for(raw)[1].spec(raw).rope_fp32 is False


# --- Dream: a Qwen2 whose row i - 1 predicts token i ------------------------------------------------------------------


def test_model_spec_of_a_dream_checkpoint(tmp_path: Path) -> None:
    """Every field; the published vocabulary adds its end of turn."""
    assert leap_kernels.load(write_dream(tmp_path, leap_defaults={"tau": 0.5})).leap_spec == leap_kernels.ModelSpec(
        mask_token_id=43,
        eos_token_ids=(40,),
        pad_token_id=40,
        shift=1,
        max_positions=64,
        vocab_size=48,
        defaults={"tau": 0.5},
    )
    spec = entry_for(PUBLISHED["Dream-7B"])[1].spec(PUBLISHED["Dream-7B"])
    assert (spec.mask_token_id, spec.eos_token_ids, spec.shift) == (151666, (151643, 151645), 1)


@pytest.mark.parametrize(
    "changes", [{"hidden_act": "gelu"}, {"use_sliding_window": True}, {"rope_scaling": {"type": "yarn", "factor": 4.0}}]
)
def test_a_dream_config_that_is_no_plain_qwen2_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not Qwen2-shaped"):
        leap_kernels.load(write_dream(tmp_path, **changes))


def test_a_masked_qwen2_must_say_where_its_predictions_stand(tmp_path: Path) -> None:
    """Both kinds exist, and nothing in the weights tells them apart."""
    leap_kernels.load(write_dream(tmp_path / "dream")).save_pretrained(tmp_path / "saved")
    assert leap_kernels.load(tmp_path / "saved").leap_spec.shift == 1
    edit_config(tmp_path / "saved", logits_shift=0)
    assert leap_kernels.load(tmp_path / "saved").leap_spec.shift == 0
    edit_config(tmp_path / "saved", logits_shift=...)
    with pytest.raises(ModelError, match="declares no logits_shift"):
        leap_kernels.load(tmp_path / "saved")


# --- masked Llamas, as they are ------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4, "tie_word_embeddings": True}], ids=["gqa", "tied"])
def test_a_masked_llama_equals_transformers_own_bidirectional_forward(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Truth: transformers' eager attention with an explicit additive mask in which nothing is hidden."""
    folder = write_llama(tmp_path, **changes)
    model = leap_kernels.load(folder)
    own = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids, _, _, mask = example()
    additive = torch.zeros(mask.shape)
    with torch.inference_mode():
        assert difference(model(ids).logits, own(ids, attention_mask=additive).logits) <= LIMIT
        additive = additive.masked_fill(~mask, float("-inf"))
        assert difference(model(ids, attention_mask=mask).logits, own(ids, attention_mask=additive).logits) <= LIMIT
    assert model.config.is_causal is False
    assert model.config._attn_implementation == "leap"
    assert model.leap_spec == leap_kernels.ModelSpec(
        mask_token_id=43, eos_token_ids=(41, 42), pad_token_id=40, max_positions=64, vocab_size=48
    )
    for name, value in own.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_masked_llama_in_bfloat16_rotates_as_transformers_does(tmp_path: Path) -> None:
    """The float32 rotation is LLaDA's alone: a Llama in bfloat16 has the bits of transformers' own forward."""
    folder = write_llama(tmp_path, dtype=torch.bfloat16)
    model = leap_kernels.load(folder, dtype=torch.bfloat16)
    own = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    ids = example(length=40)[0]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, own.eval()(ids, is_causal=False).logits)


# --- saving and loading again --------------------------------------------------------------------------------------


def write_example(folder: Path, family: str) -> Path:
    if family == "llama":
        return write_llama(folder, leap_defaults={"tau": 0.6})
    return write_llada(folder, leap_defaults={"tau": 0.6}, n_kv_heads=2, weight_tying=family == "llada-tied")


@pytest.mark.parametrize("family", ["llada", "llada-tied", "llama"])
def test_a_saved_model_loads_again(tmp_path: Path, family: str) -> None:
    """`load(model.save_pretrained(...))` gives the same bits, the same logits, the same ModelSpec."""
    model = leap_kernels.load(write_example(tmp_path / "first", family))
    model.save_pretrained(tmp_path / "second")
    again = leap_kernels.load(tmp_path / "second")
    ids = example()[0]
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.leap_spec == model.leap_spec
    assert again.config._attn_implementation == "leap"
    state = model.state_dict()
    assert state.keys() == again.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("family", ["llada", "llada-tied", "llama"])
def test_transformers_itself_loads_what_was_saved(tmp_path: Path, family: str) -> None:
    """The saved folder declares LlamaForCausalLM, so transformers must find a Llama's weights there."""
    model = leap_kernels.load(write_example(tmp_path / "first", family))
    model.save_pretrained(tmp_path / "second")
    own, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "second", output_loading_info=True)
    assert {what: keys for what, keys in info.items() if keys} == {}
    ids = example()[0]
    with torch.inference_mode():
        assert difference(own.eval()(ids).logits, model(ids).logits) <= LIMIT


def test_a_saved_half_precision_llada_still_rotates_in_float32(tmp_path: Path) -> None:
    """bfloat16 logits keep their bits across saving, RoPE rule included."""
    model = leap_kernels.load(write_llada(tmp_path / "first", torch_dtype="bfloat16"), dtype="bfloat16")
    model.save_pretrained(tmp_path / "second")
    again = leap_kernels.load(tmp_path / "second", dtype="bfloat16")
    ids = example(length=40)[0]
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, model(ids).logits)


# --- refusals ------------------------------------------------------------------------------------------------------

QUERY = "model.transformer.blocks.1.q_proj.weight"
SHARD_TWO = "model-00002-of-00003.safetensors"


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def missing(folder: Path) -> None:
    write_llada(folder)
    rewrite_weights(folder / "model.safetensors", {QUERY: None})


def missing_in_shard(folder: Path) -> None:  # the index still lists it
    write_llada(folder, shards=3)
    rewrite_weights(shard_of(folder, QUERY), {QUERY: None})


def extra(folder: Path) -> None:
    write_llada(folder)
    rewrite_weights(folder / "model.safetensors", {QUERY.replace("weight", "bias"): torch.zeros(32)})


def extra_in_shard(folder: Path) -> None:  # not in the index, but in a file that the index names
    write_llada(folder, shards=3)
    rewrite_weights(folder / SHARD_TWO, {"model.transformer.wpe.weight": torch.zeros(64, 32)})


def extra_and_foreign(folder: Path) -> None:
    write_llama(folder)
    rewrite_weights(folder / "model.safetensors", {"value_head.weight": torch.zeros(1, 32)})


def misshapen(folder: Path) -> None:
    write_llada(folder)
    rewrite_weights(folder / "model.safetensors", {QUERY: torch.zeros(32, 31)})


def misshapen_in_shard(folder: Path) -> None:
    write_llada(folder, shards=3)
    rewrite_weights(shard_of(folder, QUERY), {QUERY: torch.zeros(31, 32)})


def missing_shard(folder: Path) -> None:
    write_llada(folder, shards=3)
    (folder / SHARD_TWO).unlink()


def missing_index(folder: Path) -> None:
    write_llada(folder, shards=3)
    (folder / "model.safetensors.index.json").unlink()


def index_without_json(folder: Path) -> None:
    write_llada(folder, shards=3)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')


def index_without_map(folder: Path) -> None:
    write_llada(folder, shards=3)
    (folder / "model.safetensors.index.json").write_text("{}")


def other(**changes: Any) -> Any:
    """A LLaDA whose config is changed behind the weights' back."""

    def make(folder: Path) -> None:
        edit_config(write_llada(folder, n_kv_heads=2), **changes)

    return make


def tied_but_own_head(folder: Path) -> None:
    edit_config(write_llada(folder), weight_tying=True)


def untied_without_head(folder: Path) -> None:
    edit_config(write_llada(folder, weight_tying=True), weight_tying=False)


def pickled(folder: Path) -> None:
    weights = stored_weights(write_llada(folder))
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    (write_llada(folder) / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    file = write_llada(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def truncated_shard(folder: Path) -> None:
    file = write_llada(folder, shards=3) / SHARD_TWO
    file.write_bytes(file.read_bytes()[:-100])


def garbage(folder: Path) -> None:
    (write_llada(folder) / "model.safetensors").write_bytes(b"not a tensor in sight" * 10)


def pointer(folder: Path) -> None:  # what git leaves without LFS
    file = write_llada(folder) / "model.safetensors"
    file.write_text("version git-lfs\noid sha256:0\nsize 16000000000\n")


def no_config(folder: Path) -> None:
    (write_llada(folder) / "config.json").unlink()


def config_without_json(folder: Path) -> None:
    (write_llada(folder) / "config.json").write_text("{")


def nowhere(folder: Path) -> None:
    """The folder is not made."""


BROKEN: dict[str, tuple[Any, list[str]]] = {
    "missing-weight": (missing, ["missing", "layers.1.self_attn.q_proj.weight"]),
    "missing-in-shard": (missing_in_shard, ["missing", "layers.1.self_attn.q_proj.weight"]),
    "extra-weight": (extra, ["unexpected", "q_proj.bias"]),
    "extra-in-shard": (extra_in_shard, ["unexpected", "wpe.weight"]),
    "extra-in-llama": (extra_and_foreign, ["unexpected", "value_head.weight"]),
    "misshapen-weight": (misshapen, ["q_proj.weight", "31"]),
    "misshapen-in-shard": (misshapen_in_shard, ["q_proj.weight", "31"]),
    "missing-shard": (missing_shard, [SHARD_TWO]),
    "missing-index": (missing_index, ["model.safetensors"]),
    "index-not-json": (index_without_json, ["index.json"]),
    "index-without-map": (index_without_map, ["weight_map"]),
    "config-larger-vocabulary": (other(embedding_size=50), ["embed_tokens.weight", "50", "48"]),
    "config-smaller-vocabulary": (other(embedding_size=46), ["embed_tokens.weight", "46", "48"]),
    "config-more-heads": (other(n_heads=8), ["k_proj.weight"]),
    "config-more-kv-heads": (other(n_kv_heads=4), ["k_proj.weight"]),
    "config-odd-heads": (other(n_heads=5), ["5"]),
    "config-more-layers": (other(n_layers=3), ["missing", "layers.2."]),
    "config-fewer-layers": (other(n_layers=1), ["unexpected", "layers.1."]),
    "config-wider": (other(d_model=64), ["embed_tokens.weight", "64"]),
    "config-without-sizes": (other(d_model=...), ["d_model"]),
    "config-without-layers": (other(n_layers=...), ["n_layers"]),
    "tied-but-own-head": (tied_but_own_head, ["lm_head.weight"]),
    "untied-without-head": (untied_without_head, ["missing", "lm_head.weight"]),
    "pickle-only": (pickled, ["pytorch_model.bin", "safetensors", "save_pretrained"]),
    "no-weights": (no_weights, ["no weights", "safetensors"]),
    "truncated-file": (truncated, ["truncated-file"]),
    "truncated-shard": (truncated_shard, ["truncated-shard"]),
    "not-safetensors": (garbage, ["not-safetensors"]),
    "lfs-pointer": (pointer, ["lfs-pointer"]),
    "no-config": (no_config, ["no config.json", "checkpoint folder"]),
    "config-not-json": (config_without_json, ["config.json", "JSON"]),
    "no-folder": (nowhere, ["config.json"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused(tmp_path: Path, case: str) -> None:
    """CheckpointError that names the folder and the weight, file or key; never a model, never a bare library error."""
    break_it, fragments = BROKEN[case]
    break_it(tmp_path / case)
    with pytest.raises(CheckpointError) as caught:
        leap_kernels.load(tmp_path / case)
    message = str(caught.value)
    for fragment in [str(tmp_path / case), *fragments]:
        assert fragment in message
    assert "above" not in message, "refers to a report that was never printed"


@pytest.mark.parametrize(
    "changes",
    [
        {"alibi": True},
        {"rope": False},
        {"include_bias": True},
        {"include_qkv_bias": True},
        {"attention_layer_norm": True},
        {"input_emb_norm": True},
        {"scale_logits": True},
        {"layer_norm_type": "low_precision"},
        {"activation_type": "gelu"},
        {"block_type": "sequential"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_llada_config_that_is_no_llama_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Such a model would load without complaint and compute something else."""
    ((key, value),) = changes.items()
    folder = write_llada(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=f"not Llama-shaped.*{key}.*{value}"):
        leap_kernels.load(folder)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LLaDAModelLM", "LlamaForCausalLM"]),
        ({"architectures": ["LLaDAOModelLM"]}, ["LLaDAOModelLM"]),
        ({"architectures": ...}, ["architecture", "LLaDAModelLM"]),
        ({"architectures": []}, ["architecture", "LLaDAModelLM"]),
        ({"mask_token_id": ...}, ["mask_token_id", "masked-diffusion models only"]),
        ({"mask_token_id": 48}, ["mask_token_id", "48"]),
        ({"mask_token_id": -1}, ["mask_token_id", "-1"]),
        ({"mask_token_id": 41}, ["mask_token_id", "41", "EOS"]),
        ({"mask_token_id": 40}, ["mask_token_id", "40", "pad"]),
        ({"eos_token_id": 48}, ["eos_token_ids[0]", "48"]),
        ({"eos_token_id": [41, 99]}, ["eos_token_ids[1]", "99"]),
        ({"pad_token_id": 48}, ["pad_token_id", "48"]),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_decoded_is_refused(
    tmp_path: Path, changes: dict[str, Any], fragments: list[str]
) -> None:
    """ModelError before any weight is read: unknown architectures (one calls itself "llada" too) and impossible ids."""
    folder = write_llada(tmp_path)
    edit_config(folder, **changes)
    (folder / "model.safetensors").write_bytes(b"")  # would fail if it were read
    with pytest.raises(ModelError) as caught:
        leap_kernels.load(folder)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_an_autoregressive_llama_is_refused(tmp_path: Path) -> None:
    """No mask token, no masked-diffusion model; the message says which models are meant."""
    folder = write_llama(tmp_path, mask_token_id=...)
    with pytest.raises(ModelError, match=r"mask_token_id.*masked-diffusion models only"):
        leap_kernels.load(folder)


@pytest.mark.parametrize("dtype", ["float31", "int64", "Tensor", torch.int64, torch.bool, None, 16], ids=str)
def test_a_dtype_that_is_none_is_refused(tmp_path: Path, dtype: Any) -> None:
    """Names and objects alike: only floating-point types."""
    with pytest.raises(ConfigError, match=r"dtype must be .*floating-point"):
        leap_kernels.load(write_llada(tmp_path), dtype=dtype)


@pytest.mark.parametrize("device", ["nonsense", "cpu:x", object()], ids=["name", "index", "object"])
def test_a_device_that_is_none_is_refused(tmp_path: Path, device: Any) -> None:
    with pytest.raises(ConfigError, match="device must be"):
        leap_kernels.load(write_llada(tmp_path), device=device)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A GPU that this machine does not have: a setting that cannot be, said before the weights are read."""
    folder = write_llada(tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"device.*cuda:99"):
        leap_kernels.load(folder, device="cuda:99")


# --- silence -------------------------------------------------------------------------------------------------------

QUIET = """
import sys
import leap_kernels, transformers
def marked(what, make):
    for stream in (sys.stdout, sys.stderr):
        print("<" + what + ">", file=stream, flush=True)
    try:
        make()
    except leap_kernels.errors.CheckpointError:
        assert what == "broken"
log = transformers.utils.logging
before = log.get_verbosity(), log.is_progress_bar_enabled()
assert before == (log.WARNING, True)
for what, folder in zip(("tiny", "one-file", "sharded", "broken"), sys.argv[1:]):
    marked(what, lambda: leap_kernels.load(folder))
marked("words-tiny", lambda: leap_kernels.load_tokenizer("tiny"))
marked("words-llada", lambda: leap_kernels.load_tokenizer(sys.argv[2]))
assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What loading prints on stdout and stderr, in a process of its own with transformers' own settings."""
    folder = tmp_path_factory.mktemp("quiet")
    one, sharded, broken = write_llada(folder / "one"), write_llada(folder / "sharded", shards=3), folder / "broken"
    missing(broken)
    leap_kernels.load_tokenizer("tiny").save_pretrained(one)
    environment = {name: value for name, value in os.environ.items() if name not in SPEAKING}
    environment["PYTHONWARNINGS"] = "ignore:transformers"  # a release newer than the tests have seen is warned of
    done = subprocess.run(
        [sys.executable, "-c", QUIET, "tiny", str(one), str(sharded), str(broken)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    sections: dict[str, str] = {}
    for stream in (done.stdout, done.stderr):
        for section in stream.split("<")[1:]:
            what, text = section.split(">\n", 1)
            sections[what] = sections.get(what, "") + text
    return sections


SPEAKING = ("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS", "HF_HUB_DISABLE_PROGRESS_BARS")


@pytest.mark.parametrize("what", ["tiny", "one-file", "sharded", "broken", "words-tiny", "words-llada"])
def test_loading_prints_nothing(printed: dict[str, str], what: str) -> None:
    """No progress bar, no report, no warning: what is wrong is raised."""
    assert printed[what] == ""


@pytest.mark.parametrize("shown", [True, False])
def test_verbosity_and_progress_bars_are_left_as_found(tmp_path: Path, shown: bool) -> None:
    """Also when loading fails."""
    log = transformers.utils.logging
    found = log.get_verbosity(), log.is_progress_bar_enabled()
    good = write_llada(tmp_path / "good")
    missing_shard(tmp_path / "bad")  # fails while the weights are read
    try:
        log.set_verbosity_debug()
        (log.enable_progress_bar if shown else log.disable_progress_bar)()
        leap_kernels.load(good)
        assert (log.get_verbosity(), log.is_progress_bar_enabled()) == (log.DEBUG, shown)
        with pytest.raises(CheckpointError):
            leap_kernels.load(tmp_path / "bad")
        assert (log.get_verbosity(), log.is_progress_bar_enabled()) == (log.DEBUG, shown)
    finally:
        log.set_verbosity(found[0])
        (log.enable_progress_bar if found[1] else log.disable_progress_bar)()


# --- tokenizers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return leap_kernels.load_tokenizer("tiny")


def test_the_first_models_tokenizer_reads_every_prompt_as_trained() -> None:
    """The ids of tiny_v0/problems.jsonl were written by its training code, which the tokenizer must reproduce."""
    folder = DATA / "tiny_v0"
    listed = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    assert len(listed) == 300
    words = leap_kernels.load_tokenizer(folder)
    assert words([p["prompt"] for p in listed])["input_ids"] == [p["prompt_ids"] for p in listed]


def test_decoding_gives_the_text_back(tokenizer: Any) -> None:
    """Prompts and references survive the round trip character by character, line breaks included."""
    for problem in problems():
        for text in (problem.prompt, problem.reference):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_spaces_do_not_matter_and_numbers_are_one_token(tokenizer: Any) -> None:
    """A full stop may touch its word or not; any indent is the one indent there is."""
    assert len(tokenizer("16")["input_ids"]) == 1
    assert tokenizer("Ben has 16 books.")["input_ids"] == tokenizer(" Ben  has 16 books . ")["input_ids"]
    one, other = "def f(x):\n    return x", "def f ( x ) :  \n\treturn x"
    assert tokenizer(one)["input_ids"] == tokenizer(other)["input_ids"]


@pytest.mark.parametrize("text", ["Ben has 3 zeppelins.", "Ben has 160 books."])
def test_an_unknown_word_is_an_error(tokenizer: Any, text: str) -> None:
    """The vocabulary has no [UNK]: a guess would be a wrong prompt."""
    with pytest.raises(Exception, match="UNK"):
        tokenizer(text)


def test_the_tokenizer_pads_on_the_left_and_fits_decode(tokenizer: Any) -> None:
    """`decode(model, **tokenizer(texts, padding=True, return_tensors="pt"))` takes what comes out, and nothing else."""
    batch = tokenizer(["Ben has 16 books. He buys 7.", "Ben buys"], padding=True, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"].tolist() == [[1] * 9, [0] * 7 + [1] * 2]
    spec = leap_kernels.load("tiny").leap_spec
    assert batch["input_ids"][1].tolist() == [spec.pad_token_id] * 7 + tokenizer("Ben buys")["input_ids"]
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id, (tokenizer.eos_token_id,)) == (
        spec.mask_token_id,
        spec.pad_token_id,
        spec.eos_token_ids,
    )


TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}? {% endif %}"


@pytest.mark.parametrize("where", ["llada", "llama", "alone"])
def test_a_saved_tokenizer_keeps_its_template_and_is_set_up_for_decode(
    tmp_path: Path, where: str, tokenizer: Any
) -> None:
    """Beside LLaDA or Llama weights, or alone; padding side and pad token do not depend on what the folder says."""
    folder = {"llada": write_llada, "llama": write_llama, "alone": lambda path: path}[where](tmp_path / where)
    other = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="[EOS]",
        padding_side="right",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    other.chat_template = TEMPLATE
    other.save_pretrained(folder)
    loaded = leap_kernels.load_tokenizer(folder)
    assert loaded.chat_template == TEMPLATE
    ids = loaded.apply_chat_template(
        [{"role": "user", "content": "Ben has"}], add_generation_prompt=True, return_dict=False, tokenize=True
    )
    assert ids == tokenizer("Ben has ?")["input_ids"]
    batch = loaded(["Ben has", "Ben"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"] == [[1, 1], [0, 1]]
    assert loaded.pad_token == "[EOS]"  # it had none


@pytest.mark.parametrize("where", ["llada", "llama", "nowhere"])
def test_a_folder_without_tokenizer_is_refused(tmp_path: Path, where: str) -> None:
    folder = {"llada": write_llada, "llama": write_llama, "nowhere": lambda path: path}[where](tmp_path / where)
    with pytest.raises(CheckpointError, match=r"no tokenizer in|no folder") as caught:
        leap_kernels.load_tokenizer(folder)
    assert str(folder) in str(caught.value)


def test_every_refusal_is_a_leap_error_and_a_value_error() -> None:
    """One except clause catches them all."""
    for error in (CheckpointError, ConfigError, ModelError):
        assert issubclass(error, LeapError)
        assert issubclass(error, ValueError)


def test_a_loaded_model_can_be_copied_and_pickled() -> None:
    """The float32 rotary table follows the copy, and belongs to it."""
    model = leap_kernels.load("tiny")
    ids = torch.arange(3, 12)[None]
    expected = model(ids).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.model.rotary_emb.forward.args[0] is twin.model.rotary_emb
        assert torch.equal(twin(ids).logits, expected)
        assert torch.equal(leap_kernels.decode(twin, ids).sequences, leap_kernels.decode(model, ids).sequences)


def test_float32_rope_keeps_the_scaling_of_its_kind() -> None:
    """Yarn scales cos and sin; a table that changes with the length cannot be kept."""
    from leap_kernels.models.rope import keep_float32

    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=128, rope_parameters=rope,
    )  # fmt: skip
    rotary = transformers.LlamaForCausalLM(config).model.rotary_emb
    x, pos = torch.zeros(1, 1), torch.arange(90)[None]
    expected = rotary(x, pos)
    assert rotary.attention_scaling != 1
    keep_float32(rotary)
    for a, b in zip(rotary(x, pos), expected, strict=True):
        assert torch.equal(a, b)
    del rotary.forward
    rotary.rope_type = "dynamic"
    with pytest.raises(ModelError, match="rope_fp32 does not go with rope_type 'dynamic'"):
        keep_float32(rotary)
