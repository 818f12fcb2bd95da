# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: transformers splits the stock class's layers among processes; here is what it must be asked."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ConfigError, expected
from .entry import Entry

__all__ = ["checked_plan", "plan_arguments"]


def checked_plan(tp_plan: Any, device: Any) -> torch.device:
    """The kind of device each process will use; ConfigError where `tp_plan` cannot be followed."""
    if tp_plan != "auto" and not isinstance(tp_plan, Mapping):
        raise ConfigError(expected("tp_plan", '"auto", a dict of rules, or None', repr(tp_plan)))
    if device is not None:
        raise ConfigError("device does not go with tp_plan: every process has a device of its own. Leave it out.")
    if not _has_accelerate():
        raise ConfigError("tp_plan needs the package accelerate, without which transformers splits nothing.")
    missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name not in os.environ]
    if missing and not torch.distributed.is_initialized():
        raise ConfigError(
            f"tp_plan is for processes that torchrun started, and {', '.join(missing)} is not set. Start with "
            "torchrun --nproc-per-node=N program.py, or leave tp_plan out."
        )
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _has_accelerate() -> bool:
    return importlib.util.find_spec("accelerate") is not None


def plan_arguments(tp_plan: Any, entry: Entry) -> dict[str, Any]:
    """What `from_pretrained` of any release 5 takes for `tp_plan`; ConfigError for weights that cannot be split."""
    if tp_plan is None:
        return {}
    if entry.fused:
        raise ConfigError(
            f"tp_plan cannot split {entry.family} checkpoints as they are published: queries, keys and values lie in "
            "one weight, of which each process would get a wrong part. Convert once, "
            "load(path).save_pretrained(folder), and load that folder."
        )
    config: Any = importlib.import_module("transformers.distributed").DistributedConfig
    if hasattr(config, "tp_plan"):  # since some release of 5; the argument itself is going away
        return {"distributed_config": config(tp_plan=tp_plan)}
    return {"tp_plan": tp_plan}
