# SPDX-License-Identifier: Apache-2.0
"""Objects of the authors' own model classes: a stock model on the very same tensors, made when `decode` meets one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import NAME, register
from ..errors import CheckpointError, ModelError
from .backbone import unwrapped
from .entry import Entry
from .files import stock_name
from .registry import REGISTRY
from .spec import ModelSpec

__all__ = ["adopted"]

# How code that fuses them names queries, keys and values in one piece, rows below each other in this order.
_FUSED = ("att_proj", "qkv_proj", "query_key_value")
_PIECES = ("q_proj", "k_proj", "v_proj")

_made: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def adopted(model: Any) -> Any:
    """`model`, or for an object of the authors' LLaDA, Dream, SDAR or Fast-dLLM v2 code the stock model it becomes.

    The stock model holds the object's own parameters (slices of them where queries, keys and values are fused), so no
    weight is copied, and the object itself is not touched. Raises ModelError where the object is not what its class
    and config say, and for mixtures of experts.
    """
    given, model = model, unwrapped(model)
    name = type(model).__name__
    entry = REGISTRY.get(name)
    if not isinstance(model, nn.Module) or entry is None or type(model).__module__.startswith("transformers."):
        return given
    if "Moe" in entry.model_class:
        raise ModelError(
            f"{name}: the authors' code keeps each expert apart, the stock class all experts in one tensor, so the "
            "weights of this object cannot be used where they are. Use leap_kernels.load(path)."
        )
    attached = getattr(model, "leap_spec", None)
    with _lock:
        # Anything that replaces or moves a weight, or changes the config, shows in this list, and then the stock model
        # is made again.
        parameters = model.named_parameters(remove_duplicate=False)
        described = repr(vars(getattr(model, "config", object)))
        state = [attached, described, *((key, id(p), p.data_ptr(), p.dtype) for key, p in parameters)]
        if model not in _made or _made[model][0] != state:
            _made[model] = (state, _stock(model, name, entry, attached))
        stock = _made[model][1]
    return stock.train(model.training)


def _stock(model: nn.Module, name: str, entry: Entry, attached: ModelSpec | None) -> Any:
    import transformers

    _refuse_wrapped(model, name)
    raw = _raw_config(model, name)
    register()
    model_class = getattr(transformers, entry.model_class)
    try:
        config = model_class.config_class(**entry.config(raw))
        spec = entry.spec(raw)
    except KeyError as error:
        raise ModelError(f"the config of this {name} has no {error}. Use leap_kernels.load(path).") from error
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    with torch.device("meta"):
        stock = model_class._from_config(config, attn_implementation=NAME)

    tensors = dict(_parameters(model, entry, config))
    if config.tie_word_embeddings and "model.embed_tokens.weight" in tensors:
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    wanted = dict(stock.named_parameters(remove_duplicate=False))
    problems = {
        "missing": sorted(wanted.keys() - tensors.keys()),
        "unexpected": sorted(tensors.keys() - wanted.keys()),
        "other shapes": sorted(k for k in wanted.keys() & tensors.keys() if wanted[k].shape != tensors[k].shape),
    }
    problems = {what: keys for what, keys in problems.items() if keys}
    if problems:
        shown = {what: keys[:4] + ["..."] * (len(keys) > 4) for what, keys in problems.items()}
        raise ModelError(f"this {name} does not match {entry.model_class}: {shown}. Use leap_kernels.load(path).")
    for key, tensor in tensors.items():
        owner, _, leaf = key.rpartition(".")
        stock.get_submodule(owner)._parameters[leaf] = tensor
    device = tensors["model.embed_tokens.weight"].device
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config).to(device)  # the one thing with buffers
    stock.leap_spec = spec if attached is None else attached
    return stock


def _parameters(model: nn.Module, entry: Entry, config: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The object's parameters under the stock class's names; fused ones in slices, which share their memory."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = [head * n for n in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        fused = next((part for part in _FUSED if f".{part}." in name), None)
        if fused is None or parameter.shape[0] != sum(rows):
            yield stock_name(name, entry.names), parameter
            continue
        if type(parameter.data) is not Tensor:
            raise ModelError(
                f"{name} is a {type(parameter.data).__name__}, of which queries, keys and values are no slices. "
                "Quantise the stock model instead: leap_kernels.load(path)."
            )
        for piece, part in zip(_PIECES, parameter.detach().split(rows), strict=True):
            own = stock_name(name.replace(f".{fused}.", f".{piece}."), entry.names)
            yield own, nn.Parameter(part, requires_grad=False)


def _raw_config(model: Any, name: str) -> dict[str, Any]:
    config = getattr(model, "config", None)
    if config is None:
        raise ModelError(f"this {name} has no config, which says how wide its heads are. Use leap_kernels.load(path).")
    known: dict[str, Any] = {}
    for source in (config.to_dict() if hasattr(config, "to_dict") else {}, vars(config)):
        known |= {key: value for key, value in source.items() if value is not None}
    return known | {"architectures": [name]}


def _refuse_wrapped(model: nn.Module, name: str) -> None:
    """What a stock model on the same tensors would leave out, or could not compute with."""
    for path, module in model.named_modules():
        at = f"{name}.{path}" if path else name
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            raise ModelError(
                f"{at} has hooks (of accelerate, or registered by you), which a stock model on its tensors would not "
                "run. Remove them, or use leap_kernels.load(path, device=...)."
            )
        if hasattr(module, "base_layer"):
            raise ModelError(f"{at} is an adapter's layer ({type(module).__name__}). Call merge_and_unload() first.")
        if any(isinstance(m, Tensor) and not m.is_floating_point() for m in module._parameters.values()):
            raise ModelError(
                f"{at} has quantised weights ({type(module).__name__}), which the stock class's layers cannot read. "
                "Quantise the stock model instead: leap_kernels.load(path)."
            )
        if any(isinstance(m, Tensor) and m.is_meta for m in module._parameters.values()):
            raise ModelError(f"{at} has weights on the meta device, so no values. Load the model completely.")
