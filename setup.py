# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: the optional extension of csrc/, see docs/extension.md.

Nothing is compiled and torch is not imported unless LEAP_KERNELS_BUILD_EXT asks for it:

    LEAP_KERNELS_BUILD_EXT=cpu pip install --no-build-isolation .     # leap_kernels._C
    LEAP_KERNELS_BUILD_EXT=cuda pip install --no-build-isolation .    # and leap_kernels._C_cuda
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from setuptools import setup

TORCH = (2, 11)  # the oldest release whose stable ABI has what csrc/ needs
PYTHON = (3, 10)  # the oldest release whose limited API is used
ARCHITECTURES = ("80", "90a", "100", "120")
GIB_PER_COMPILER = 1  # measured: under half of it


def main() -> None:
    """Run setuptools, with the extension if it was asked for."""
    what = os.environ.get("LEAP_KERNELS_BUILD_EXT", "")
    if what not in ("", "cpu", "cuda"):
        refuse(f"LEAP_KERNELS_BUILD_EXT must be cpu, cuda, or empty for a pure Python package, got {what!r}.")
    setup(**(extension(what) if what else {}))


def refuse(message: str) -> NoReturn:
    """End with a message and no traceback."""
    raise SystemExit(f"leap_kernels: {message}")


def extension(what: str) -> dict[str, Any]:
    """The arguments of `setup` that build the CPU binding, and with "cuda" the CUDA kernels."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        refuse(
            f"LEAP_KERNELS_BUILD_EXT={what} compiles against the torch that is installed, and torch cannot be imported "
            f"here ({error}). Install torch first, then keep pip from building in an isolated environment: "
            f"LEAP_KERNELS_BUILD_EXT={what} pip install --no-build-isolation ."
        )
    if version_of(torch.__version__) < TORCH:
        refuse(f"the extension needs torch >= {TORCH[0]}.{TORCH[1]}, found {torch.__version__}.")
    common: dict[str, Any] = {
        "py_limited_api": True,
        "define_macros": macros(),
        "depends": sorted(map(str, Path("csrc").glob("*.*h"))),
    }
    hidden = [] if os.name == "nt" else ["-fvisibility=hidden"]
    modules = [
        cpp_extension.CppExtension("leap_kernels._C", ["csrc/consistency_cpu.cpp"], extra_compile_args=hidden, **common)
    ]
    decision = f"compiling leap_kernels._C against torch {torch.__version__}"
    if what == "cuda":
        if not torch.version.cuda:
            refuse(f"LEAP_KERNELS_BUILD_EXT=cuda needs a torch that is built for CUDA, found {torch.__version__}.")
        if cpp_extension.CUDA_HOME is None:
            refuse("LEAP_KERNELS_BUILD_EXT=cuda needs nvcc: put it on PATH, or set CUDA_HOME to the CUDA toolkit.")
        chosen = architectures()
        threads = processes("NVCC_THREADS", len(chosen) + 1)
        flags = ["-O2", f"--threads={threads}", *gencode(chosen), *(f"--compiler-options={flag}" for flag in hidden)]
        modules.append(
            cpp_extension.CUDAExtension(
                "leap_kernels._C_cuda",
                ["csrc/consistency_cuda.cu"],
                extra_compile_args={"cxx": hidden, "nvcc": flags},
                **common,
            )
        )
        decision += f", and leap_kernels._C_cuda for CUDA {torch.version.cuda}, architectures {' '.join(chosen)}"
        decision += f", {threads} at a time (NVCC_THREADS)"
    jobs = processes("MAX_JOBS", len(modules))
    decision += f"; files compiled at a time (MAX_JOBS): {jobs}; {resources()}"

    class BuildExtension(cpp_extension.BuildExtension):  # type: ignore[misc, valid-type]
        """torch's, which takes ninja where it finds it, with its decisions said aloud and a way out of its failures."""

        def build_extensions(self) -> None:
            os.environ["MAX_JOBS"] = str(jobs)
            print(f"leap_kernels: {decision}", flush=True)
            try:
                super().build_extensions()
            except Exception as error:
                refuse(
                    f"compiling the optional extension failed ({' '.join(map(str, error.args))}). The cause is the "
                    "first error above. leap_kernels works without it: unset LEAP_KERNELS_BUILD_EXT."
                )

    return {
        "ext_modules": modules,
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp{}{}".format(*PYTHON)}},
    }


def macros() -> list[tuple[str, str]]:
    """What csrc/ must be compiled with. torch adds Py_LIMITED_API and the C++ standard."""
    text = (Path(__file__).parent / "leap_kernels" / "version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.M)
    target = TORCH[0] << 56 | TORCH[1] << 48
    return [("TORCH_TARGET_VERSION", f"0x{target:016x}"), ("LEAP_KERNELS_VERSION", version)]


def architectures() -> list[str]:
    """LEAP_KERNELS_CUDA_ARCHS, such as "80;90a" or "8.0 9.0a", as nvcc writes them; all we know when it is not set."""
    asked = re.split(r"[;,\s]+", os.environ.get("LEAP_KERNELS_CUDA_ARCHS", "").strip())
    chosen = [re.sub(r"^(\d+)\.(\d)", r"\1\2", name) for name in asked if name] or list(ARCHITECTURES)
    for name in chosen:
        if not re.fullmatch(r"\d{2,3}[af]?", name) or number(name) < 80:
            refuse(
                "LEAP_KERNELS_CUDA_ARCHS must be architectures of at least 80 between semicolons, such as "
                f"{';'.join(ARCHITECTURES)}, got {name!r}."
            )
    return list(dict.fromkeys(chosen))


def number(architecture: str) -> int:
    return int(architecture.rstrip("af"))


def gencode(chosen: list[str]) -> list[str]:
    """Machine code for each architecture, and PTX of the lowest for all above that are not named."""
    least = min(map(number, chosen))
    return [
        *(f"-gencode=arch=compute_{name},code=sm_{name}" for name in chosen),
        f"-gencode=arch=compute_{least},code=compute_{least}",
    ]


def processes(variable: str, most: int) -> int:
    """How many compilers to run: what the variable says, or else `most`, the cores, or what fits into free memory."""
    asked = os.environ.get(variable, "")
    if not asked:
        return max(1, int(min(most, cores(), free_gib() // GIB_PER_COMPILER)))
    if not asked.isdigit() or int(asked) == 0:
        refuse(f"{variable} must be a whole number of at least 1, got {asked!r}.")
    return int(asked)


def resources() -> str:
    free = free_gib()
    memory = "memory unknown" if free == math.inf else f"{free:.1f} GiB free"
    return f"{cores()} cores, {memory}, {GIB_PER_COMPILER} GiB counted for a compiler"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_gib() -> float:
    """Memory left, in the machine and in a container with a limit of its own; infinite where nobody says."""
    free = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        (available,) = re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        free.append(int(available) / 2**20)
    with contextlib.suppress(OSError, ValueError):  # a container without a limit says "max"
        limit, used = (int(Path("/sys/fs/cgroup", f"memory.{name}").read_text()) for name in ("max", "current"))
        free.append((limit - used) / 2**30)
    return max(0.0, min(free))


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


if __name__ == "__main__":  # setuptools runs this file under that name
    main()
