# SPDX-License-Identifier: Apache-2.0
"""What stands in a checkpoint's files, read from their headers; and the refusals that transformers leaves to us."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .entry import Entry

__all__ = ["differences", "refuse_broken_index", "refuse_own_head", "refuse_pickle", "stock_name"]


def refuse_pickle(folder: str) -> None:
    path = Path(folder)
    if path.is_dir() and not list(path.glob("*.safetensors")):
        found = sorted(p.name for p in path.glob("*.bin")) + sorted(p.name for p in path.glob("*.pt*"))
        what = f"only pickle files ({', '.join(found)})" if found else "no weights"
        raise CheckpointError(
            f"{folder} holds {what}; leap_kernels loads safetensors only, since a pickle can run any code. "
            "Convert it once: load it where you trust it and save with save_pretrained()."
        )


def refuse_broken_index(folder: str) -> None:
    """A sharded checkpoint's index must name shards that exist."""
    index = Path(folder, "model.safetensors.index.json")
    if not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of shards: {type(error).__name__}: {error}") from error
    missing = sorted(shard for shard in shards if not Path(folder, shard).is_file())
    if missing:
        raise CheckpointError(f"{index} names shards that are not there: {', '.join(missing)}.")


def refuse_own_head(folder: str, model: Any, entry: Entry) -> None:
    """A config that ties the head to the embeddings contradicts a file in which the head has values of its own."""
    head, weight = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    of_head = {name for name, value in model.named_parameters(remove_duplicate=False) if value is head}
    for file, path in _opened(folder):
        for key in file.keys():  # noqa: SIM118 - not a dict
            stock = stock_name(key, entry.names)
            if stock in of_head and not torch.equal(file.get_tensor(key).to(weight.dtype), weight.cpu()):
                raise CheckpointError(
                    f"{folder} ties {stock} to the embeddings in its config, but {key} in {path.name} holds other "
                    "values."
                )


def differences(folder: str, entry: Entry, model_class: Any, config: Any) -> dict[str, list[str]]:
    """Weights that are missing, foreign or misshapen, by the names in the files, for classes that merge weights.

    transformers counts the experts of a layer and neither looks at their numbers nor says which one is wrong.
    """
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in model_class._from_config(config).state_dict().items()}
    experts = {name for name in wanted if re.fullmatch(r".+\.mlp\.experts\.(gate_up|down)_proj", name)}
    if not experts and not entry.fused:
        return {}
    stored = {key: tuple(file.get_slice(key).get_shape()) for file, _ in _opened(folder) for key in file.keys()}  # noqa: SIM118
    problems: dict[str, list[str]] = defaultdict(list)
    expected: dict[str, tuple[int, ...]] = {}  # by stock name, but merged weights apart
    for name, shape in wanted.items():
        expected |= dict(_apart(name, shape)) if name in experts else {name: shape}
    for fused, pieces in entry.fused.items():
        first = pieces[0]
        for name in [n for n in expected if n.endswith(first)]:
            parts = [expected.pop(name.removesuffix(first) + piece) for piece in pieces]
            expected[name.removesuffix(first) + fused] = (sum(p[0] for p in parts), *parts[0][1:])
    for key, shape in stored.items():
        name = stock_name(key, entry.names)
        merged = wanted.get(name) if name in experts else None
        found = merged if merged is not None else expected.pop(name, None)
        for part, _ in _apart(name, merged) if merged is not None else ():  # some releases save experts merged
            expected.pop(part, None)
        if found is None:
            problems["unexpected"].append(key)
        elif found != shape:
            problems["misshapen"].append(f"{key} is {shape}, expected {found}")
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    problems["missing"] = sorted(expected.keys() - tied)
    return {what: names for what, names in problems.items() if names}


def _apart(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The experts' own weights, of which a stock class makes one."""
    prefix, _, kind = name.rpartition(".")
    rows = shape[1] // 2 if kind == "gate_up_proj" else shape[1]
    for number in range(shape[0]):
        for part in ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",):
            yield f"{prefix}.{number}.{part}.weight", (rows, shape[2])


def stock_name(key: str, names: Mapping[str, str]) -> str:
    return next((re.sub(a, b, key) for a, b in names.items() if re.search(a, key)), key)


def _opened(folder: str) -> Iterator[tuple[Any, Path]]:
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    for path in sorted(Path(str(cached_file(folder, "config.json"))).parent.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            yield file, path
