# SPDX-License-Identifier: Apache-2.0
"""csrc/ built by setup.py for the CPU, loaded, and held to the reference bit for bit; and the CUDA kernel itself, run
with threads of the processor. What nvcc makes of it is in tests/ops/test_extension_cuda.py."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compilers import CXX, ROOT, needs_cxx, sources
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.consistency_cases import LAYOUTS, PROBS, THRESHOLDS, random_case, same
from torch import Tensor

import leap_kernels
from leap_kernels import env
from leap_kernels.ops import backends, check_consistency, extension

pytestmark = needs_cxx

_kept: dict[str, Any] = {}  # what a process builds and loads once: operators cannot be registered twice


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds where LEAP_KERNELS_BUILD_EXT=cpu, without a network."""
    if "wheel" not in _kept:
        top = tmp_path_factory.mktemp("extension")
        (top / "source").mkdir()
        variables = {"LEAP_KERNELS_BUILD_EXT": "cpu", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", str(top), "."]
        done = subprocess.run(
            command, cwd=sources(top / "source"), env=os.environ | variables, text=True, timeout=300, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        _kept["log"], (_kept["wheel"],) = done.stdout, top.glob("*.whl")
    return _kept["wheel"]


@pytest.fixture(scope="module")
def module(wheel: Path) -> Iterator[Path]:
    """The file of the module, unpacked where `leap_kernels._C` is looked for."""
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (file,) = folder.glob("leap_kernels/_C.*")
    with pytest.MonkeyPatch.context() as patch:
        if "module" in _kept:
            patch.setitem(sys.modules, "leap_kernels._C", _kept["module"])
        elif extension._registered("check_consistency"):
            pytest.skip("this process has loaded an extension that was built in place; remove leap_kernels/_C*")
        else:
            patch.delitem(sys.modules, "leap_kernels._C", raising=False)
        patch.setattr(leap_kernels, "__path__", [str(file.parent), *leap_kernels.__path__])
        extension._load.cache_clear()
        assert extension.why_not("cpu") == ""
        yield file
        _kept["module"] = sys.modules.get("leap_kernels._C")
    extension._load.cache_clear()


COLUMN = st.tuples(
    st.integers(-1, 1),
    st.integers(0, 1),
    st.sampled_from(PROBS.tolist()),
    st.integers(-1, 1),
    st.sampled_from(PROBS.tolist()),
    st.booleans(),
)
SAMPLES = st.tuples(st.integers(1, 3), st.integers(1, 5)).flatmap(
    lambda shape: st.lists(st.lists(COLUMN, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0])
)
DTYPES = (torch.int32, torch.int64, torch.float32, torch.int64, torch.float32, torch.bool)


def test_it_loads_and_says_what_it_is(module: Path) -> None:
    """The report names what it was built for, and the CUDA half is missing for a reason."""
    status = env.collect()["extension"]
    assert status["_C"] == f"loaded, built for torch >= 2.11; headers of torch {torch.__version__.partition('+')[0]}"
    assert status["_C_cuda"] == extension.why_not("cuda") == extension.NOT_BUILT
    assert sys.modules["leap_kernels._C"].__file__ == str(module)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(SAMPLES, st.sampled_from(list(LAYOUTS)), st.booleans(), st.booleans(), st.sampled_from(THRESHOLDS))
def test_small_cases(module: Path, samples: Any, layout: str, accept: bool, keep: bool, thresholds: Any) -> None:
    """Any contents, any strides, with and without a base rule, bit for bit."""
    rows = [list(zip(*sample, strict=True)) for sample in samples]
    tensors = [torch.tensor([row[i] for row in rows], dtype=dtype) for i, dtype in enumerate(DTYPES)]
    tensors = [LAYOUTS[layout](x) for x in tensors]
    args = (*tensors[:5], tensors[5] if accept else None, *thresholds, keep)
    same(extension.run("check_consistency", args), args)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", [1, 31, 32, 33, 256, 257, 700])
def test_long_rows(module: Path, t: int, layout: str) -> None:
    for seed in range(12):
        args = random_case(3, t, seed, layout)
        same(extension.run("check_consistency", args), args)


@pytest.mark.parametrize(("b", "t"), [(0, 0), (0, 3), (2, 0)])
def test_empty(module: Path, b: int, t: int) -> None:
    args = random_case(b, t, 1)
    same(extension.run("check_consistency", args), args)


def test_thresholds_are_rounded_to_float32(module: Path) -> None:
    """c = float32(x) is not above phi = x and is not below tau = x, although float64 may say so."""
    for x in (0.9, 0.7, 0.1, 1 / 3):
        y, c = torch.tensor([[4]]), torch.tensor([[x]])
        for copies, reason in ((torch.tensor([[4]]), 2), (torch.tensor([[5]]), 3)):
            args = (y.int(), y, c, copies, c, None, x, x, x, True)
            assert extension.run("check_consistency", args)[0].tolist() == [[reason]]


def test_the_op_takes_it_by_name(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the public function to the compiled code and back; only the device is not what the name says."""
    monkeypatch.setattr(backends, "choose", lambda *_, **__: "cuda")
    ran = []
    run = extension.run
    monkeypatch.setattr(extension, "run", lambda op, args: ran.append(op) or run(op, args))
    targets, top1, prob1, copy_top1, copy_prob1, accept, *_ = random_case(2, 40, 1)
    out = check_consistency(targets, top1, prob1, copy_top1, copy_prob1, base_accept=accept, backend="cuda")
    same(out, (targets, top1, prob1, copy_top1, copy_prob1, accept, 0.9, 0.7, 0.0, True))
    assert ran == ["check_consistency"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_opcheck(module: Path, layout: str, seed: int) -> None:
    """A real operator: schema, fake, no autograd, traceable with symbols; with and without the optional argument."""
    operator = torch.ops.leap_ext.check_consistency.default
    assert set(torch.library.opcheck(operator, random_case(2, 5, seed, layout)).values()) == {"SUCCESS"}


def test_compiles_as_one_graph(module: Path) -> None:
    """Also the question whether it is there, which loads files when it is asked for the first time."""

    def decide(*args: Any) -> Any:
        return args if extension.why_not("cpu") else extension.run("check_consistency", args)

    torch.compiler.reset()
    extension._load.cache_clear()
    compiled = torch.compile(decide, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, stance in ((4, "default"), (7, "default"), (11, "fail_on_recompile")):
        args = random_case(2, n, 0)
        with torch.compiler.set_stance(stance):
            same(compiled(*args), args)


REFUSED = {
    "targets must be int32, got int64": (0, lambda t: t.long()),
    "targets must have the shape (B, T), got (6)": (0, lambda t: t.flatten()),
    "top1 must be int64, got int32": (1, lambda t: t.int()),
    "prob1 must be float32, got bfloat16": (2, lambda t: t.bfloat16()),
    "copy_top1 must have the shape (2, 3) of targets, got (2, 2)": (3, lambda t: t[:, :2]),
    "copy_prob1 must have the shape (2, 3) of targets, got (3, 2)": (4, lambda t: t.t()),
    "base_accept must be bool, got uint8": (5, lambda t: t.to(torch.uint8)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_named(module: Path, message: str) -> None:
    """The raw operator has no Python in front of it that would look at them."""
    which, change = REFUSED[message]
    args = list(random_case(2, 3, 1))
    args[which] = change(args[which])
    with pytest.raises(RuntimeError, match=re.escape(message)):
        extension.run("check_consistency", tuple(args))


def test_a_second_copy_is_refused(module: Path, tmp_path: Path) -> None:
    """Registering an operator twice would end the process."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / module.name).write_bytes(module.read_bytes())
    code = f"""
import sys
import leap_kernels
from leap_kernels.ops import extension
for name in ("one", "two"):
    leap_kernels.__path__.insert(0, {str(tmp_path)!r} + "/" + name)
    print("said:", extension.why_not("cpu"))
    extension._load.cache_clear()
    sys.modules.pop("leap_kernels._C", None)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "said: "
    assert "torch.ops.leap_ext belongs to another copy of it in this process" in second


def test_the_wheel(wheel: Path) -> None:
    """For any Python from 3.10 on, with the module and without its sources; and pip -v tells what was decided."""
    assert f"leap_kernels-{leap_kernels.__version__}-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    binaries = [name for name in names if Path(name).suffix in (".so", ".pyd")]
    assert [name.partition(".")[0] for name in binaries] == ["leap_kernels/_C"]
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"leap_kernels"}
    assert re.search(
        r"leap_kernels: compiling leap_kernels\._C against torch \S+; files compiled at a time \(MAX_JOBS\): \d+; "
        r"\d+ cores, ", _kept["log"],
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file with nm")
def test_symbols(module: Path) -> None:
    """Nothing of torch but its C interface, nothing of Python but its stable one, and one name to the outside."""
    table = subprocess.run(["nm", "-D", "-C", module], capture_output=True, text=True, check=True).stdout
    assert not re.findall(r".*\b(?:c10|at|torch)::.*", table)
    undefined = re.findall(r"^ +U (\S+)$", table, re.M)
    assert {name for name in undefined if name.startswith(("Py", "_Py"))} == {"PyModule_Create2"}
    assert len([name for name in undefined if name.startswith(("aoti_torch_", "torch_"))]) > 10
    assert [name for name in re.findall(r" T (.+)$", table, re.M) if not name.startswith("_")] == ["PyInit__C"]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Tensor, Tensor]]:
    """The CUDA kernel with a thread of the processor for each of the GPU's."""
    library = tmp_path_factory.mktemp("emulated") / "kernel.so"
    source = Path(__file__).with_name("cuda_on_cpu.cpp")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'csrc'}"]
    subprocess.run([CXX, *flags, source, "-o", library], check=True, timeout=120)
    run = ctypes.CDLL(str(library)).check_consistency

    def launch(*args: Any) -> tuple[Tensor, Tensor]:
        tensors, (phi, tau, kappa, keep) = args[:6], args[6:]
        b, t = tensors[0].shape
        reason, left = torch.full((b, t), -77, dtype=torch.int32), torch.full((b,), -77, dtype=torch.int32)
        data = (ctypes.c_void_p * 6)(*(0 if x is None else x.data_ptr() for x in tensors))
        strides = (ctypes.c_int64 * 12)(*(s for x in tensors for s in ((0, 0) if x is None else x.stride())))
        outputs = (ctypes.c_void_p(reason.data_ptr()), ctypes.c_void_p(left.data_ptr()))
        sizes, thresholds = map(ctypes.c_int64, (b, t)), map(ctypes.c_float, (phi, tau, kappa))
        run(*sizes, data, strides, *thresholds, ctypes.c_bool(keep), *outputs)
        return reason, left

    return launch


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", [0, 1, 31, 32, 33, 64, 255, 256, 257, 700])
def test_the_cuda_kernel_itself(emulated: Callable[..., Any], t: int, layout: str) -> None:
    """Blocks of one warp and of several, more columns than threads: how the threads share a sample changes nothing."""
    for seed in range(4):
        args = random_case(2, t, seed, layout)
        same(emulated(*args), args)
