# SPDX-License-Identifier: Apache-2.0
"""Lookahead decoding kernels for diffusion language models.

>>> import leap_kernels
>>> model = leap_kernels.load("tiny")                      # or "GSAI-ML/LLaDA-8B-Instruct"
>>> tokenizer = leap_kernels.load_tokenizer("tiny")
>>> prompt = "Ben has 16 books. He buys 7. He sells 3. How many books does Ben have?"
>>> out = leap_kernels.decode(model, **tokenizer(prompt, return_tensors="pt"))
>>> out.text(tokenizer)[0].split("Answer: ")[1]
'20 books.'

Importing this package touches no GPU and imports neither triton nor transformers: names are resolved when used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import attention, compat, errors, ops
    from .config import DecodeConfig
    from .decoding import decode
    from .generation import generate
    from .models.load import load, load_tokenizer
    from .models.spec import ModelSpec
    from .output import DecodeOutput, StepEvent
    from .patching import patch
    from .rows import Rows
    from .strategies import Strategy

__all__ = [
    "DecodeConfig",
    "DecodeOutput",
    "ModelSpec",
    "Rows",
    "StepEvent",
    "Strategy",
    "__version__",
    "attention",
    "compat",
    "decode",
    "errors",
    "generate",
    "load",
    "load_tokenizer",
    "ops",
    "patch",
]

_HOME = {
    "DecodeConfig": "config",
    "DecodeOutput": "output",
    "ModelSpec": "models.spec",
    "Rows": "rows",
    "StepEvent": "output",
    "Strategy": "strategies",
    "decode": "decoding",
    "generate": "generation",
    "load": "models.load",
    "load_tokenizer": "models.load",
    "patch": "patching",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
