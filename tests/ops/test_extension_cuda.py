# SPDX-License-Identifier: Apache-2.0
"""What nvcc makes of csrc/: registers, stack and spills on every architecture, and the module as setup.py builds it.

No GPU is needed, but for the last test. Where torch is a CPU build, it is dressed up as a CUDA build for setup.py, and
a library of three empty functions stands in for its CUDA half; nothing is launched.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from compilers import CXX, ROOT, TOOLKIT, needs_nvcc, sources
from ops.consistency_cases import LAYOUTS, random_case, same

from leap_kernels.ops import check_consistency, extension

ARCHITECTURES = ("80", "90a", "100", "120")
REGISTERS = 64  # four blocks of 256 threads an SM, and far more of them than a decode has samples
SHARED = 1024

STUBS = """
extern "C" {
int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }
int torch_c10_cuda_check_msg(int, const char*, const char*, unsigned, bool, char**) { return 1; }
void torch_c10_cuda_free_error_msg(char*) {}
}
"""
DRESS_UP = """
import runpy, sys, torch
if torch.version.cuda is None:
    torch.version.cuda = {cuda!r}
    torch.cuda._is_compiled, torch.cuda.is_available = lambda: True, lambda: False
sys.argv = ["setup.py", "bdist_wheel", "--dist-dir", {folder!r}]
runpy.run_path("setup.py", run_name="__main__")
"""
LOAD = """
import json, logging, sys
import torch
import leap_kernels
from leap_kernels.ops import extension
if {dressed}:
    torch.version.cuda = "13.0"
logging.basicConfig(stream=sys.stdout, format="logged: %(message)s")
leap_kernels.__path__.insert(0, {folder!r})
print("said:", extension.why_not("cuda"), extension.why_not("cuda"))
print("cpu:", extension.why_not("cpu"))
print("registered:", torch._C._dispatch_has_kernel_for_dispatch_key("leap_ext::check_consistency", "CUDA"))
"""


def test_the_architectures_are_those_of_setup() -> None:
    spec = importlib.util.spec_from_file_location("leap_kernels_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    assert setup.ARCHITECTURES == ARCHITECTURES


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_resources(architecture: str, tmp_path: Path) -> None:
    """No stack, no spilled register, and few enough registers that a block always fits."""
    source = tmp_path / "kernel.cu"
    source.write_text('#include "consistency_kernel.cuh"\n')
    flags = ["-std=c++17", "-O2", "-cubin", f"-arch=sm_{architecture}", "-Xptxas=-v", "-Werror=all-warnings"]
    done = subprocess.run(
        [TOOLKIT / "bin" / "nvcc", *flags, f"-I{ROOT / 'csrc'}", source, "-o", tmp_path / "kernel.cubin"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    (used,) = re.findall(r"Compiling entry function '\w*check_consistency_kernel\w*' for 'sm_(\w+)'", said)
    assert used == architecture
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    (registers,), (shared,) = re.findall(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes smem", said)
    assert int(registers) <= REGISTERS
    assert int(shared) <= SHARED


@needs_nvcc
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="links with ELF stand-ins for libtorch_cuda")
def test_the_module_as_setup_builds_it(tmp_path: Path) -> None:
    """Both modules in one wheel; the CUDA one without a C++ symbol of torch, with code for all architectures; refused
    in a sentence where torch has no CUDA, registered where it has."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "stubs.cpp").write_text(STUBS)
    for name in ("libtorch_cuda.so", "libc10_cuda.so"):
        command = [CXX, "-shared", "-fPIC", f"-Wl,-soname,{name}", stubs / "stubs.cpp", "-o", stubs / name]
        subprocess.run(command, check=True, timeout=60)
    version = subprocess.run([TOOLKIT / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    cuda = re.search(r"release ([\d.]+)", version)[1]
    libraries = os.pathsep.join([str(stubs), str(TOOLKIT / "lib64")])
    (tmp_path / "source").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", DRESS_UP.format(cuda=cuda, folder=str(tmp_path))],
        cwd=sources(tmp_path / "source"),
        env=os.environ | {
            "LEAP_KERNELS_BUILD_EXT": "cuda", "CUDA_HOME": str(TOOLKIT), "NVCC_THREADS": "2", "MAX_JOBS": "1",
            "LIBRARY_PATH": libraries,
        },
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert re.search(
        r"leap_kernels: compiling leap_kernels\._C against torch \S+, and leap_kernels\._C_cuda for CUDA [\d.]+, "
        r"architectures 80 90a 100 120, 2 at a time \(NVCC_THREADS\); files compiled at a time \(MAX_JOBS\): 1; ",
        done.stdout,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    folder = tmp_path / "unpacked" / "leap_kernels"
    assert sorted(path.name for path in folder.glob("*.so")) == ["_C.abi3.so", "_C_cuda.abi3.so"]

    table = subprocess.run(
        ["nm", "-D", "-C", folder / "_C_cuda.abi3.so"], capture_output=True, text=True, check=True
    ).stdout
    assert not re.findall(r".*\b(?:c10|at|torch)::.*", table)
    assert "U aoti_torch_get_current_cuda_stream" in table
    assert "T PyInit__C_cuda" in table
    built_for = f"torch >= 2.11; headers of torch {torch.__version__.partition('+')[0]}; CUDA {cuda}; architectures "

    def load(dressed: bool, path: str) -> list[str]:
        loaded = subprocess.run(
            [sys.executable, "-c", LOAD.format(dressed=dressed, folder=str(folder))],
            env=os.environ | {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": path},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert loaded.returncode == 0, loaded.stderr
        return loaded.stdout.splitlines()

    if torch.version.cuda is None:
        reason = f"leap_kernels._C_cuda was built for {built_for}800,900,1000,1200, found torch {torch.__version__}"
        logged, said, *rest = load(dressed=False, path="")
        assert logged == f"logged: {reason} without CUDA; continuing without it."
        assert said == f"said: {reason} without CUDA {reason} without CUDA"
        assert rest == ["cpu: ", "registered: False"]
        logged, said, *rest = load(dressed=True, path="")  # a torch of CUDA, whose libraries are not those of the build
        assert logged.startswith(f"logged: {reason}, CUDA 13.0: ")
        assert "cannot open shared object file" in logged
        assert rest == ["cpu: ", "registered: False"]
        assert load(dressed=True, path=libraries) == ["said:  ", "cpu: ", "registered: True"]
    else:
        assert load(dressed=False, path="") == ["said:  ", "cpu: ", "registered: True"]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_gpu(layout: str) -> None:
    """The installed extension against the reference: on a stream of its own, on the last GPU, and in a CUDA graph."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if reason := extension.why_not("cuda"):
        pytest.skip(reason)
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    for t in (0, 1, 31, 32, 33, 256, 257, 700):
        for seed in range(12):
            args = random_case(3, t, seed, layout)
            there = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
            names = ("base_accept", "phi", "tau", "kappa", "keep_confident")
            options = dict(zip(names, there[5:], strict=True))
            with torch.cuda.stream(torch.cuda.Stream(device)):
                out = check_consistency(*there[:5], **options, backend="cuda")
                same([x.cpu() for x in out], args)
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = check_consistency(*there[:5], **options, backend="cuda")
        for x in out:
            x.fill_(-77)
        graph.replay()
        torch.cuda.synchronize()
    same([x.cpu() for x in out], args)
