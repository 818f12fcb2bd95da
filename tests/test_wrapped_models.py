# SPDX-License-Identifier: Apache-2.0
"""Adapters and quantised weights: what works, and what is refused.

Stand-ins have the structure of peft, torchao and bitsandbytes; the tests marked `download` use peft and torchao
themselves: pip install --no-deps peft accelerate torchao psutil
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import edit_config
from families import write
from live_models import live
from oracle import decode_one
from random_models import plain_forward, random_llama
from torch import Tensor, nn

import leap_kernels
from leap_kernels import ModelSpec, decode
from leap_kernels.errors import CheckpointError, ModelError

IDS = torch.tensor([[5, 6, 7], [9, 10, 4]])
SPEC = ModelSpec(mask_token_id=0, vocab_size=23)
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "block_length": 6, "threshold": 0.8, "tau": 0.1, "eta": 0.1}


def replace_linears(model: nn.Module, make: Any) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, make(child))


def check_against_slow(model: Any, truth: Any, spec: ModelSpec = SPEC) -> None:
    """`decode(model)` gives the tokens that the slow decoder finds with the logits of `truth`."""
    out = decode(model, IDS, spec=spec, **SETTINGS)
    for i, prompt in enumerate(IDS.tolist()):
        slow = decode_one(plain_forward(truth), prompt, mask_id=0, **SETTINGS)
        assert out.generated[i].tolist() == slow.tokens
        assert out.nfe[i].item() == slow.nfe
    assert (out.history.reason == 2).any(), "nothing converged: LEAP did nothing"


# --- adapters --------------------------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """A layer of peft's: the original inside, a product of two small matrices beside it."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        make = lambda *shape: nn.Parameter(torch.randn(shape, generator=generator).to(base.weight) * 0.3)  # noqa: E731
        self.base_layer, self.down, self.up = base, make(2, base.in_features), make(base.out_features, 2)
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.down.T @ self.up.T

    def merged(self) -> nn.Linear:
        self.base_layer.weight.data += self.up @ self.down
        return self.base_layer


class PeftStandIn(nn.Module):
    """peft's outer class: a model that holds the one whose layers were replaced, and asks it for what it lacks."""

    def __init__(self, model: Any, config: Any) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.peft_config = {"default": config}

    def get_base_model(self) -> Any:
        return self.base_model.model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model.model, name)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.base_model.model(*args, **options)


def with_lora(seed: int) -> Any:
    model = random_llama(seed, sharpness=4.0)
    numbers = iter(range(100))
    replace_linears(model, lambda linear: LoraLinear(linear, next(numbers)))
    return PeftStandIn(model, SimpleNamespace(is_prompt_learning=False)).eval()


def test_adapters_in_layers_count() -> None:
    """Also the one on the head; and they differ from the model without."""
    wrapped, merged = with_lora(4), with_lora(4).get_base_model()
    for module in list(merged.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LoraLinear):
                setattr(module, name, child.merged())
    check_against_slow(wrapped, merged)
    plain = decode(random_llama(4, sharpness=4.0), IDS, spec=SPEC, **SETTINGS)
    assert not torch.equal(decode(wrapped, IDS, spec=SPEC, **SETTINGS).sequences, plain.sequences)
    with pytest.raises(ModelError, match="training mode"):
        decode(wrapped.train(), IDS, spec=SPEC, **SETTINGS)


def test_a_loaded_model_keeps_its_spec_inside(tmp_path: Path) -> None:
    model = leap_kernels.load(write(tmp_path, "Dream"))
    wrapped = PeftStandIn(model, SimpleNamespace()).eval()
    options = {"max_new_tokens": 9, "block_length": 3}
    assert torch.equal(decode(wrapped, IDS, **options).sequences, decode(model, IDS, **options).sequences)


@pytest.mark.parametrize("kind", ["is_prompt_learning", "is_adaption_prompt"])
def test_learned_tokens_in_front_are_refused(kind: str) -> None:
    """decode runs the model inside, which would leave them out without a word."""
    wrapped = PeftStandIn(random_llama(), SimpleNamespace(**{kind: True})).eval()
    with pytest.raises(ModelError, match=r"adapter 'default' \(SimpleNamespace\) puts learned tokens in front"):
        decode(wrapped, IDS, spec=SPEC, **SETTINGS)


def test_adapters_on_an_object_of_the_authors_must_be_merged() -> None:
    """The stock model on its tensors would have no place for them."""
    model = live("LLaDA")
    replace_linears(model, lambda linear: LoraLinear(linear, 0))
    with pytest.raises(ModelError, match=r"is an adapter's layer \(LoraLinear\). Call merge_and_unload"):
        decode(PeftStandIn(model, SimpleNamespace()).eval(), IDS, **SETTINGS)


# --- quantised weights -----------------------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """Weights in eight bits, a scale for every row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def wide(self) -> Tensor:
        return self.weight.to(self.scale.dtype) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.wide(), self.bias)


class PackedLinear(Int8Linear):
    """bitsandbytes': one column of bytes, whose length says nothing of the layer's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.shape = self.weight.shape
        self.weight = nn.Parameter(self.weight.view(torch.uint8).reshape(-1, 1), requires_grad=False)

    def wide(self) -> Tensor:
        return self.weight.view(torch.int8).view(self.shape).to(self.scale.dtype) * self.scale


class DynamicLinear(Int8Linear):
    """torch's own: `weight` is a method."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.inside = self.weight
        del self.weight
        self.weight = lambda: self.inside

    def wide(self) -> Tensor:
        return self.inside.to(self.scale.dtype) * self.scale


@pytest.mark.parametrize("kind", [Int8Linear, PackedLinear, DynamicLinear])
def test_quantised_layers_decode_as_their_weights_made_wide(kind: Any) -> None:
    """On a transformers model; no part of decode looks at weights, so none needs them to be floating-point."""
    quantised, wide = random_llama(4, sharpness=4.0), random_llama(4, sharpness=4.0)
    replace_linears(quantised, kind)
    replace_linears(wide, kind)
    for module in list(wide.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, kind):
                linear = nn.Linear(child.in_features, child.out_features, bias=False, dtype=torch.float64)
                linear.weight.data = child.wide()
                setattr(module, name, linear)
    check_against_slow(quantised, wide)
    check_against_slow(quantised, wide, ModelSpec(mask_token_id=0))


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    """In the authors' names and in stock ones, before a weight is read."""
    folder = write(tmp_path / "authors", "LLaDA")
    leap_kernels.load(folder).save_pretrained(tmp_path / "stock")
    for path in (folder, tmp_path / "stock"):
        edit_config(path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
        with pytest.raises(CheckpointError, match=r"declares quantised weights \(bitsandbytes\), which load does not"):
            leap_kernels.load(path)


class Scaled(Tensor):
    """torchao's way: a tensor of another class. This one only is one."""


def test_fused_weights_of_another_tensor_class_are_refused() -> None:
    model = live("Dream", fused=True)
    for name, parameter in list(model.named_parameters()):
        if "qkv_proj" in name or "att_proj" in name or "query_key_value" in name:
            owner, _, leaf = name.rpartition(".")
            value = parameter.detach().as_subclass(Scaled)
            model.get_submodule(owner)._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    with pytest.raises(ModelError, match=r"is a Scaled, of which queries, keys and values are no slices"):
        decode(model, IDS, **SETTINGS)


# --- the packages themselves -----------------------------------------------------------------------------------------


@pytest.mark.download
def test_peft_itself(tmp_path: Path) -> None:
    import peft

    folder = write(tmp_path, "LLaDA")
    options = {**SETTINGS, "suppress_tokens": (40, 41)}
    plain = decode(leap_kernels.load(folder, dtype="float64"), IDS, **options).sequences
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "up_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(leap_kernels.load(folder, dtype="float64"), lora).eval()
    adapted = decode(model, IDS, **options).sequences
    assert not torch.equal(adapted, plain)
    with model.disable_adapter():
        assert torch.equal(decode(model, IDS, **options).sequences, plain)
    assert torch.equal(decode(model.merge_and_unload().eval(), IDS, **options).sequences, adapted)

    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ModelError, match=r"PromptTuningConfig\) puts learned tokens in front"):
        decode(peft.get_peft_model(leap_kernels.load(folder), tuning).eval(), IDS, **options)


@pytest.mark.download
def test_torchao_itself(tmp_path: Path) -> None:
    """On a loaded model, on one that transformers quantised while loading, and on an object of the authors'."""
    import transformers
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    folder = write(tmp_path / "authors", "LLaDA")
    model = leap_kernels.load(folder)
    model.save_pretrained(tmp_path / "stock")
    plain = decode(model, IDS, **SETTINGS).sequences
    quantize_(model, Int8WeightOnlyConfig())
    ours = decode(model, IDS, **SETTINGS).sequences
    assert (ours == plain).float().mean() > 0.8
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "stock", quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig())
    ).eval()
    assert (decode(theirs, IDS, **SETTINGS).sequences == plain).float().mean() > 0.8
    theirs.save_pretrained(tmp_path / "quantised")
    assert "quantization_config" in json.loads((tmp_path / "quantised/config.json").read_text())
    with pytest.raises(CheckpointError, match=r"declares quantised weights \(torchao\)"):
        leap_kernels.load(tmp_path / "quantised")

    alive = live("Dream")
    before = decode(alive, IDS, **SETTINGS).sequences
    quantize_(alive, Int8WeightOnlyConfig())
    assert (decode(alive, IDS, **SETTINGS).sequences == before).float().mean() > 0.8
