# SPDX-License-Identifier: Apache-2.0
"""What setup.py decides: nothing without being asked, and clear words where it cannot do what it was asked for."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from compilers import ROOT, sources

from leap_kernels import __version__


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """setup.py as a module, which sets nothing up; no variable of this shell has a say."""
    for name in ("LEAP_KERNELS_BUILD_EXT", "LEAP_KERNELS_CUDA_ARCHS", "MAX_JOBS", "NVCC_THREADS"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("leap_kernels_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_torch(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py where torch cannot be imported, as in pip's isolated environment."""
    (folder / "blocker").mkdir()
    (folder / "blocker" / "torch.py").write_text("raise ImportError('no torch in here')\n")
    (folder / "source").mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LEAP_KERNELS_")}
    environment |= {"PYTHONPATH": str(folder / "blocker"), **variables}
    return subprocess.run(
        [sys.executable, "setup.py", *arguments], cwd=sources(folder / "source"), env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_nothing_is_imported_or_compiled_unasked(tmp_path: Path) -> None:
    """No torch, no compiler; the build folder holds Python and data."""
    done = without_torch(tmp_path, "-q", "build", LEAP_KERNELS_CUDA_ARCHS="nonsense", MAX_JOBS="nonsense")
    assert done.returncode == 0, done.stderr
    built = list((tmp_path / "source" / "build").rglob("*"))
    assert any(path.name == "extension.py" for path in built)
    assert not [path for path in built if path.suffix in (".so", ".pyd", ".o")]


@pytest.mark.parametrize("what", ["cpu", "cuda"])
def test_without_torch_the_way_out_is_named(what: str, tmp_path: Path) -> None:
    """The usual trap: pip builds where the installed torch cannot be seen."""
    done = without_torch(tmp_path, "-q", "build", LEAP_KERNELS_BUILD_EXT=what)
    assert done.returncode == 1
    assert done.stderr.startswith(f"leap_kernels: LEAP_KERNELS_BUILD_EXT={what} compiles against the torch that is ")
    assert "torch cannot be imported here (no torch in here). Install torch first" in done.stderr
    assert f"LEAP_KERNELS_BUILD_EXT={what} pip install --no-build-isolation ." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("value", ["1", "gpu", "CUDA", "cpu,cuda"])
def test_unknown_values_are_refused(value: str, setup: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than taken for the nearest known one."""
    monkeypatch.setenv("LEAP_KERNELS_BUILD_EXT", value)
    with pytest.raises(SystemExit, match=f"LEAP_KERNELS_BUILD_EXT must be cpu, cuda, or empty .*, got '{value}'"):
        setup.main()


def test_what_torch_must_have(setup: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that is too old or without CUDA, and a machine without nvcc, before anything is compiled."""
    import torch
    from torch.utils import cpp_extension

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(SystemExit, match="needs nvcc: put it on PATH, or set CUDA_HOME"):
        setup.extension("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit, match="needs a torch that is built for CUDA, found "):
        setup.extension("cuda")
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu130")
    with pytest.raises(SystemExit, match=r"needs torch >= 2\.11, found 2\.10\.1\+cu130"):
        setup.extension("cpu")


def test_macros(setup: types.ModuleType) -> None:
    """kernels.md section 3: the oldest torch, as a number; and the version that the loader compares."""
    assert setup.macros() == [("TORCH_TARGET_VERSION", "0x020b000000000000"), ("LEAP_KERNELS_VERSION", __version__)]


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("", ["80", "90a", "100", "120"]),
        ("90a", ["90a"]),
        ("8.0 9.0a", ["80", "90a"]),
        ("100;80, 10.3f;80", ["100", "80", "103f"]),
    ],
)
def test_architectures(asked: str, chosen: list[str], setup: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAP_KERNELS_CUDA_ARCHS", asked)
    assert setup.architectures() == chosen


@pytest.mark.parametrize("asked", ["75", "7.5", "sm_90", "native", "80+PTX", "9", "80;x"])
def test_architectures_that_are_none(asked: str, setup: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the kernel does not run on."""
    monkeypatch.setenv("LEAP_KERNELS_CUDA_ARCHS", asked)
    with pytest.raises(SystemExit, match=r"LEAP_KERNELS_CUDA_ARCHS must be architectures of at least 80 .*, got '"):
        setup.architectures()


def test_every_gpu_has_code(setup: types.ModuleType) -> None:
    """Machine code for those that are named, and PTX for all others, which are newer than the oldest."""
    assert setup.gencode(["90a", "80"]) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    assert setup.gencode(["90a"])[-1] == "-gencode=arch=compute_90,code=compute_90"


@pytest.mark.parametrize(
    ("most", "cores", "free", "number"),
    [(2, 16, 64.0, 2), (8, 4, 64.0, 4), (8, 16, 3.7, 3), (8, 16, 0.2, 1), (5, 16, math.inf, 5)],
)
def test_compilers_at_a_time(
    most: int, cores: int, free: float, number: int, setup: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is to do, the cores and the free memory each set a limit; the variable is taken at its word."""
    monkeypatch.setattr(setup, "cores", lambda: cores)
    monkeypatch.setattr(setup, "free_gib", lambda: free)
    assert setup.processes("MAX_JOBS", most) == number
    monkeypatch.setenv("MAX_JOBS", "7")
    assert setup.processes("MAX_JOBS", most) == 7
    for wrong in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv("MAX_JOBS", wrong)
        with pytest.raises(SystemExit, match=f"MAX_JOBS must be a whole number of at least 1, got '{wrong}'"):
            setup.processes("MAX_JOBS", most)


def test_free_memory(setup: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the machine's and the container's, and no limit where nobody says."""
    files = {
        "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   8388608 kB\n",
        "/sys/fs/cgroup/memory.max": f"{6 * 2**30}\n",
        "/sys/fs/cgroup/memory.current": f"{2**30}\n",
    }

    def read(path: Path, *_: object, **__: object) -> str:
        if path.as_posix() not in files:
            raise FileNotFoundError(path)
        return files[path.as_posix()]

    monkeypatch.setattr(Path, "read_text", read)
    assert setup.free_gib() == 5
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert setup.free_gib() == 8
    files.clear()
    assert setup.free_gib() == math.inf
    assert "memory unknown" in setup.resources()
