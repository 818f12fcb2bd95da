# SPDX-License-Identifier: Apache-2.0
"""Compilers that a user's machine need not have, and marks that say so where a test is skipped for it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

__all__ = ["CXX", "ROOT", "TOOLKIT", "needs_cxx", "needs_nvcc", "sources"]

ROOT = Path(__file__).parents[1]
CXX = shutil.which(os.environ.get("CXX", "c++"))


def _toolkit() -> Path | None:
    """The CUDA toolkit: a folder with nvcc and its headers."""
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places.append(str(Path(os.path.realpath(nvcc)).parents[1]) if nvcc else None)
    for place in filter(None, places):
        if Path(place, "bin", "nvcc").is_file() and Path(place, "include", "cuda_runtime.h").is_file():
            return Path(place)
    return None


TOOLKIT = _toolkit()
HEADERS = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
needs_cxx = pytest.mark.skipif(
    CXX is None or not HEADERS, reason=f"needs a C++ compiler ({CXX or 'none found'}) and Python.h ({HEADERS})"
)
needs_nvcc = pytest.mark.skipif(
    TOOLKIT is None or CXX is None or not HEADERS,
    reason=f"needs the CUDA toolkit ({TOOLKIT or 'none found'}) and a C++ compiler ({CXX or 'none found'})",
)


def sources(folder: Path) -> Path:
    """A copy of what a build needs, without the bundled model; builds leave their traces there."""
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    unneeded = shutil.ignore_patterns("__pycache__", "*.so", "*.safetensors", "*.jsonl")
    for name in ("csrc", "leap_kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=unneeded)
    return folder
