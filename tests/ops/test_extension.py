# SPDX-License-Identifier: Apache-2.0
"""How the optional extension is found, judged and done without. No compiler is needed: the files are broken on purpose,
and what they would register is played by Python. tests/ops/test_extension_cpu.py has a real one."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import leap_kernels
from leap_kernels import DecodeConfig, env
from leap_kernels.errors import BackendError
from leap_kernels.ops import backends, check_consistency, extension, library, superpose, superposed_attention, top_eta

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[-1]
GPU = torch.device("cuda", 0)


def mark(package: str = leap_kernels.__version__, more: str = "") -> bytes:
    """What csrc/binding.h leaves in a file."""
    return (
        f"\x7fELF leap_kernels build: package {package}; torch >= 2.11; headers of torch 2.13.0{more};\0 end".encode()
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only place where the modules of the extension are found, in a process that has not looked yet."""
    find = extension._file

    def here(name: str) -> Path | None:
        file = find(name)
        return file if file and file.is_relative_to(tmp_path) else None

    for name in extension.MODULES.values():
        monkeypatch.delitem(sys.modules, f"leap_kernels.{name}", raising=False)
    monkeypatch.setattr(leap_kernels, "__path__", [str(tmp_path), *leap_kernels.__path__])
    monkeypatch.setattr(extension, "_file", here)
    extension._load.cache_clear()
    yield tmp_path
    extension._load.cache_clear()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("DEBUG", logger="leap_kernels")
    return caplog


def asked(tensor: torch.Tensor) -> str:
    """The message of check_consistency(backend="cuda") for tensors like this one."""
    with pytest.raises(BackendError) as caught:
        check_consistency(tensor.int(), tensor, tensor.float(), tensor, tensor.float(), backend="cuda")
    return str(caught.value)


def chosen() -> str:
    """The message for CUDA tensors, which need no GPU to be talked about."""
    with pytest.raises(BackendError) as caught:
        backends.choose("cuda", GPU, op="check_consistency")
    return str(caught.value)


def test_a_missing_extension_is_nothing_to_speak_of(folder: Path, log: pytest.LogCaptureFixture) -> None:
    """No log line; who asks for it by name is told how to build it, and the report says that this is fine."""
    assert chosen().startswith('backend="cuda", the optional CUDA extension, cannot run here; use backend="auto"')
    assert chosen().endswith(
        "optional CUDA extension not built (that is fine: Triton is used). To build, in the source tree: "
        "LEAP_KERNELS_BUILD_EXT=cuda pip install --no-build-isolation ."
    )
    assert extension.why_not("cpu").startswith("not built.")
    assert extension.status() == env.collect()["extension"] == extension.NOT_BUILT
    assert log.messages == []


def test_cuda_is_for_cuda_tensors(folder: Path) -> None:
    """CPU tensors are refused whatever is built; the CPU binding has a way of its own."""
    assert asked(torch.zeros(1, 2, dtype=torch.int64)).endswith("it needs CUDA tensors, these are on cpu")


@pytest.mark.parametrize("op", [op for op in library.SCHEMAS if op != "check_consistency"])
def test_the_other_ops_have_no_kernel_there(op: str, folder: Path) -> None:
    """Also not where the extension works."""
    with pytest.raises(BackendError, match=f"has a kernel for check_consistency and none for {op}. Use backend="):
        backends.choose("cuda", GPU, op=op)
    with pytest.raises(BackendError, match="check_consistency and not for the other ops"):
        DecodeConfig(backend="cuda")


BROKEN = {
    "text": (b"not a module at all", "is no build of this package's csrc/"),
    "foreign": (Path(torch._C.__file__).read_bytes()[:100_000], "is no build of this package's csrc/"),
    "other release": (mark("0.0.9"), f"was built for leap_kernels 0.0.9, found {leap_kernels.__version__}"),
    "does not load": (mark(), f"was built for torch >= 2.11; headers of torch 2.13.0, found torch {torch.__version__}"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_reported_once_and_ignored(what: str, folder: Path, log: pytest.LogCaptureFixture) -> None:
    content, reason = BROKEN[what]
    (folder / f"_C{SUFFIX}").write_bytes(content)
    (folder / f"_C_cuda{SUFFIX}").write_bytes(content)
    for _ in range(3):
        assert reason in extension.why_not("cpu")
        assert reason in extension.why_not("cuda")
        assert reason in chosen()
    (record,) = log.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("leap_kernels._C ")
    assert record.getMessage().endswith("; continuing without it.")
    assert reason in record.getMessage()
    assert reason in env.collect()["extension"]["_C"]
    # Everything else is as before.
    i = torch.tensor([[4, 5]])
    out = check_consistency(i.int(), i, torch.tensor([[0.95, 0.2]]), i, torch.ones(1, 2))
    assert out.reason.tolist() == [[1, 0]]


def test_torch_is_too_old(folder: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a file is not even opened by the loader."""
    (folder / f"_C{SUFFIX}").write_bytes(mark())
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    expected = "leap_kernels._C was built for torch >= 2.11, found 2.9.1+cu128"
    assert extension.why_not("cpu") == expected
    assert log.messages == [f"{expected}; continuing without it."]
    monkeypatch.setattr(torch, "__version__", "2.11.0a0+git123")
    extension._load.cache_clear()
    assert "found torch 2.11.0a0+git123" in extension.why_not("cpu")


def test_torch_has_no_cuda(folder: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a file could be opened by a lazy linker, and end the process at its first call."""
    (folder / f"_C_cuda{SUFFIX}").write_bytes(mark(more="; CUDA 13.0; architectures 800"))
    monkeypatch.setattr(torch.version, "cuda", None)
    expected = (
        "leap_kernels._C_cuda was built for torch >= 2.11; headers of torch 2.13.0; CUDA 13.0; architectures 800, "
        f"found torch {torch.__version__} without CUDA"
    )
    assert extension.why_not("cuda") == expected
    assert log.messages == [f"{expected}; continuing without it."]


def test_cuda_without_its_other_half(
    folder: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_C` defines the operators: alone, `_C_cuda` would register kernels of nothing."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (folder / f"_C_cuda{SUFFIX}").write_bytes(mark(more="; CUDA 13.0; architectures 800"))
    assert extension.why_not("cuda") == "leap_kernels._C_cuda needs leap_kernels._C, which is missing. Build both again"
    assert len(log.messages) == 1


def test_auto_and_the_others_never_load_it(
    folder: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who asks for it by name, and the report, look for it."""
    (folder / f"_C{SUFFIX}").write_bytes(b"broken")
    (folder / f"_C_cuda{SUFFIX}").write_bytes(b"broken")
    monkeypatch.setattr(backends, "why_no_triton", lambda device: "")
    i, f = torch.tensor([[4, 5]]), torch.ones(1, 2)
    for backend in ("auto", "reference"):
        check_consistency(i.int(), i, f, i, f, backend=backend)
    assert backends.choose("auto", GPU, op="check_consistency") == "triton"
    assert backends.choose("triton", GPU, op="check_consistency") == "triton"
    assert log.messages == []


def test_the_op_runs_the_extension_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments of the schema, and past Triton and the reference."""
    seen: list[Any] = []
    monkeypatch.setattr(extension, "why_not", lambda device_type: "")
    monkeypatch.setattr(extension, "run", lambda op, args: seen.append((op, args)) or ("reason", "left"))
    args = (*range(5), None, 0.9, 0.7, 0.0, True)
    assert backends.dispatch("check_consistency", "consistency", "cuda", GPU, args) == ("reason", "left")
    assert seen == [("check_consistency", args)]


def test_another_schema_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose operator has other arguments must not be called with ours."""
    monkeypatch.setattr(extension, "NAMESPACE", "leap_test_other_schema")
    torch.library.define("leap_test_other_schema::check_consistency", "(Tensor targets, float phi) -> Tensor")
    with pytest.raises(ImportError, match=r"has check_consistency\(Tensor targets, float phi\).*expected .*kappa"):
        extension._join()


@pytest.mark.parametrize("function", [top_eta, superpose, superposed_attention])
def test_docstrings_offer_what_there_is(function: Any) -> None:
    """Only the op with a kernel in the extension names it."""
    assert '"cuda"' not in function.__doc__
    assert '"cuda"' in check_consistency.__doc__
