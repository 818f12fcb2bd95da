# SPDX-License-Identifier: Apache-2.0
"""What this package finds on a machine: the report to read, or to paste into an issue, when something is odd.

Every probe is guarded on its own: one that fails becomes "unknown (ErrorType: message)" and the rest still appears.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["collect", "render"]

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "rich")
PREFIXES = ("LEAP_KERNELS_", "TRITON_", "TORCH_", "CUDA_", "HF_")
MOUNTS = Path("/proc/mounts")
# How the types of filesystems that several hosts share begin, in /proc/mounts.
NETWORK = (
    "nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "glusterfs", "9p", "wekafs",
    "fuse.sshfs", "fuse.ceph", "fuse.gluster", "fuse.juicefs", "fuse.gcsfuse", "fuse.s3fs",
)  # fmt: skip


def collect() -> dict[str, Any]:
    """The whole report: strings, numbers, lists and dicts, ready for `json.dumps`. Raises nothing."""
    return {
        "versions": _guard(_versions),
        "machine": _guard(_machine),
        "gpus": _guard(_gpus),
        "backends": _guard(_backends),
        "extension": _guard(_extension),
        "triton cache": _guard(_triton_cache),
        "nvcc": _guard(_nvcc),
        "variables": _guard(_variables),
    }


def render(report: dict[str, Any]) -> str:
    """The report as indented text, one fact a line."""
    return "\n".join(_lines(report, ""))


def _lines(section: dict[str, Any], indent: str) -> list[str]:
    flat = {key: entry for key, entry in section.items() if not isinstance(entry, (dict, list))}
    width = max(map(len, flat), default=0) + 1
    lines = []
    for key, entry in section.items():
        if key in flat:
            lines.append(f"{indent}{key + ':':<{width}} {entry}")
            continue
        lines.append(f"{indent}{key}:")
        for item in entry if isinstance(entry, list) else [entry or "none"]:
            lines.extend(_lines(item, indent + "  ") if isinstance(item, dict) else [f"{indent}  {item}"])
    return lines


def _guard(probe: Callable[..., Any], *args: Any) -> Any:
    try:
        return probe(*args)
    except Exception as error:
        return f"unknown ({type(error).__name__}: {' '.join(str(error).split())})"


def _versions() -> dict[str, Any]:
    from .version import __version__

    return {
        "leap_kernels": __version__,
        "python": platform.python_version(),
        **{package: _guard(_version, package) for package in PACKAGES},
        "torch built for": _guard(_torch_built_for),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch_built_for() -> str:
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def _machine() -> dict[str, Any]:
    return {
        "platform": _guard(platform.platform),
        "processor cores": _guard(os.cpu_count),
        "torch threads": _guard(_torch_threads),
    }


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def _gpus() -> list[Any] | str:
    import torch

    if not torch.cuda.is_available():
        return "none (torch.cuda.is_available() is False)"
    return [_guard(_gpu, i) for i in range(torch.cuda.device_count())]


def _gpu(i: int) -> dict[str, Any]:
    import torch

    gpu: Any = torch.cuda.get_device_properties(i)
    return {
        "device": f"cuda:{i}",
        "name": gpu.name,
        "compute capability": f"{gpu.major}.{gpu.minor}",
        "SMs": gpu.multi_processor_count,
        "shared memory per block": _guard(lambda: f"{gpu.shared_memory_per_block_optin / 1024:g} KiB"),
        "memory": f"{gpu.total_memory / 2**30:.1f} GiB",
    }


def _backends() -> dict[str, Any]:
    """For each device: whether Triton kernels run there, and what backend="auto" takes for each op."""
    import torch

    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return {device: _guard(_backend, device) for device in devices}


def _backend(name: str) -> dict[str, Any]:
    import torch

    from .ops.backends import why_no_triton
    from .ops.library import SCHEMAS

    device = torch.device(name)
    reason = why_no_triton(device)
    triton = f"no: {reason}" if reason else "yes" if device.type == "cuda" else 'interpreted, for backend="triton"'
    return {"triton": triton} | {op: _guard(_automatic, op, not reason and device.type == "cuda") for op in SCHEMAS}


def _automatic(op: str, triton: bool) -> str:
    from . import ops

    folder = getattr(ops, op).__module__.rpartition(".")[0]
    if triton and importlib.util.find_spec(f"{folder}.kernel") is None:
        return "reference (no Triton kernel in this version)"
    return "triton" if triton else "reference"


def _extension() -> dict[str, str] | str:
    from .ops.extension import status

    return status()


def _triton_cache() -> dict[str, Any]:
    home = os.environ.get("TRITON_HOME") or str(Path.home())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")
    found = {"folder": str(folder), "exists": folder.is_dir()}
    return found | {"filesystem": _guard(_filesystem, folder)}


def _filesystem(folder: Path) -> str:
    """The filesystem's type, with a warning where processes on several hosts would race for the cache."""
    if not MOUNTS.exists():
        return "not looked up on this system"
    path, best = os.path.realpath(folder), ("", "unknown")
    for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        point, kind = line.split()[1:3]
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):  # the last one mounted at a point is the one in use
            best = (point, kind)
    if best[1].startswith(NETWORK):
        return f"{best[1]} - WARNING: on a network filesystem; set TRITON_CACHE_DIR to a local folder"
    return best[1]


def _nvcc() -> dict[str, Any] | str:
    path = _find_nvcc()
    if path is None:
        return "not found (not needed: kernels are compiled by triton)"
    return {"path": path, "version": _guard(_nvcc_version, path)}


def _find_nvcc() -> str | None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        root = os.environ.get(variable)
        found = shutil.which("nvcc", path=os.path.join(root, "bin")) if root else None
        if found:
            return found
    return shutil.which("nvcc")


def _nvcc_version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
    release = re.search(r"release [^\n]*", done.stdout)
    return release.group() if release else done.stdout.strip()


def _variables() -> dict[str, str]:
    return {name: _harmless(name, os.environ[name]) for name in sorted(os.environ) if name.startswith(PREFIXES)}


def _harmless(name: str, value: str) -> str:
    """The value as it may appear in a public issue: no tokens, no passwords."""
    if re.search("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", name):
        return "set, not shown"
    return re.sub(r"//[^/@\s]+@", "//***@", value)


def main(as_json: bool = False) -> int:
    """Print the report; always 0."""
    import json

    report = collect()
    sys.stdout.write((json.dumps(report, indent=2) if as_json else render(report)) + "\n")
    return 0
