# SPDX-License-Identifier: Apache-2.0
"""The optional extension of csrc/: loaded when first needed, and done without where it is missing or broken.

`leap_kernels._C` defines the operators `torch.ops.leap_ext.*` and their CPU kernels; `leap_kernels._C_cuda`, which no
CPU build of torch can load, adds the CUDA kernels. A missing module is nothing to speak of. One that is there and
cannot be used is reported once, in the log of the process that asks for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ..version import __version__

__all__ = ["NOT_BUILT", "OPS", "run", "status", "why_not"]

NAMESPACE = "leap_ext"  # apart from "leap", whose CUDA key belongs to Triton
OPS = ("check_consistency",)
MODULES = {"cpu": "_C", "cuda": "_C_cuda"}
MIN_TORCH = (2, 11)
HOW_TO_BUILD = "To build, in the source tree: LEAP_KERNELS_BUILD_EXT=cuda pip install --no-build-isolation ."
NOT_BUILT = f"optional CUDA extension not built (that is fine: Triton is used). {HOW_TO_BUILD}"

# Compiled into both modules (csrc/binding.h), so it can be read where they cannot be loaded.
_BUILD = re.compile(rb"leap_kernels build: package ([^;]+); (torch >= [\d.]+; [^\x00]+);")

_log = logging.getLogger("leap_kernels")


def why_not(device_type: str) -> str:
    """Why the extension cannot run on tensors of `device_type`, "cpu" or "cuda"; empty when it can.

    The first call loads it, and warns when there is one that does not work.
    """
    return _load(device_type)


# What torch.compiler.assume_constant_result sets, which would import the whole compiler: a compiled graph asks once.
why_not.__dict__["_dynamo_marked_constant"] = True


def run(op: str, args: tuple[Any, ...]) -> Any:
    """Operator `op` of the extension, with arguments and results as in its schema. `why_not` must have said nothing."""
    return getattr(getattr(torch.ops, NAMESPACE), op)(*args)


def status() -> dict[str, str] | str:
    """What `leap-kernels env` says about the extension; loads it where it is."""
    files = {device_type: _file(name) for device_type, name in MODULES.items()}
    if not any(files.values()):
        return NOT_BUILT
    return {
        MODULES[device_type]: why_not(device_type) or f"loaded, built for {_built_for(file)}"
        for device_type, file in files.items()
    }


@functools.cache
def _load(device_type: str) -> str:
    file = _file(MODULES[device_type])
    if file is None:
        return NOT_BUILT if device_type == "cuda" else f"not built. {HOW_TO_BUILD}"
    if device_type == "cuda" and _file(MODULES["cpu"]) is not None and (reason := _load("cpu")):
        return reason
    try:
        _check(device_type, file)
        _import(device_type)
    except Exception as error:  # whatever a broken file does, the package works without it
        reason = f"leap_kernels.{MODULES[device_type]} {' '.join(str(error).split())}"
        _log.warning("%s; continuing without it.", reason)
        return reason
    return ""


def _file(name: str) -> Path | None:
    """The file that `import leap_kernels.<name>` would load."""
    spec = importlib.util.find_spec(f"leap_kernels.{name}")
    return Path(spec.origin) if spec is not None and spec.origin else None


def _built_for(file: Path | None) -> str:
    build = _BUILD.search(file.read_bytes()) if file else None
    return build[2].decode() if build else "something else"


def _here() -> str:
    return f"torch {torch.__version__}" + (f", CUDA {torch.version.cuda}" if torch.version.cuda else " without CUDA")


def _check(device_type: str, file: Path) -> None:
    """Raise ImportError for a file that must not even be loaded, and say why."""
    build = _BUILD.search(file.read_bytes())
    if build is None:
        raise ImportError(f"({file}) is no build of this package's csrc/")
    if build[1].decode() != __version__:
        raise ImportError(f"was built for leap_kernels {build[1].decode()}, found {__version__}. Build it again")
    if tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) < MIN_TORCH:
        raise ImportError(f"was built for torch >= {'.'.join(map(str, MIN_TORCH))}, found {torch.__version__}")
    if device_type == "cuda" and torch.version.cuda is None:
        raise ImportError(f"was built for {build[2].decode()}, found {_here()}")
    if device_type == "cuda" and _file(MODULES["cpu"]) is None:
        raise ImportError(f"needs leap_kernels.{MODULES['cpu']}, which is missing. Build both again")


def _import(device_type: str) -> None:
    """Import the module; what it registers stays for the life of the process."""
    name = f"leap_kernels.{MODULES[device_type]}"
    new = name not in sys.modules
    if device_type == "cpu" and new and any(_registered(op) for op in OPS):
        # A second definition of an operator ends the process.
        raise ImportError(f"was not loaded: torch.ops.{NAMESPACE} belongs to another copy of it in this process")
    try:
        importlib.import_module(name)
    except ImportError as error:
        built_for = _built_for(_file(MODULES[device_type]))
        raise ImportError(f"was built for {built_for}, found {_here()}: {error}") from error
    if device_type == "cpu" and new:
        _join()


def _join() -> None:
    """Compare the schemas of the file with those of the package, and give the operators their fakes."""
    from . import library

    for op in OPS:
        theirs, ours = (
            str(getattr(getattr(torch.ops, namespace), op).default._schema).partition("::")[2]
            for namespace in (NAMESPACE, library.NAMESPACE)
        )
        if theirs != ours:
            raise ImportError(f"has {theirs}, expected {ours}. Build it again")
        torch.library.register_fake(f"{NAMESPACE}::{op}")(library.FAKES[op])


def _registered(op: str) -> bool:
    return hasattr(getattr(torch.ops, NAMESPACE), op)
