# SPDX-License-Identifier: Apache-2.0
"""`leap-kernels env` reports what is there, hides what is secret, and survives whatever is broken."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from leap_kernels import __version__, env
from leap_kernels.cli import main
from leap_kernels.ops.extension import status
from leap_kernels.ops.library import SCHEMAS


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["env", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def boom(*_: Any, **__: Any) -> Any:
    raise RuntimeError("boom\nand more")


def test_the_report_names_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    versions = found["versions"]
    assert versions["leap_kernels"] == __version__
    assert versions["python"] == platform.python_version()
    for package in ("torch", "transformers", "tokenizers", "safetensors", "numpy"):
        assert versions[package] == importlib.metadata.version(package)
    assert found["machine"]["torch threads"] == torch.get_num_threads()
    assert found["extension"] == status()
    assert set(SCHEMAS) < set(found["backends"]["cpu"])
    assert all(found["backends"]["cpu"][op] == "reference" for op in SCHEMAS)
    assert found == env.collect()


def test_the_text_holds_every_fact_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    def leaves(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [leaf for key, entry in value.items() for leaf in [key, *leaves(entry)]]
        return [leaf for entry in value for leaf in leaves(entry)] if isinstance(value, list) else [str(value)]

    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert all(leaf in text for leaf in leaves(report(capsys)))


BREAKABLE = {
    "importlib.metadata.version": "versions",
    "platform.platform": "machine",
    "os.cpu_count": "machine",
    "torch.get_num_threads": "machine",
    "torch.cuda.is_available": "gpus",
    "torch.cuda.device_count": "backends",
    "leap_kernels.ops.backends.why_no_triton": "backends",
    "pathlib.Path.home": "triton cache",
    "os.path.realpath": "triton cache",
    "shutil.which": "nvcc",
    "leap_kernels.ops.extension.status": "extension",
    "leap_kernels.env._harmless": "variables",
    "leap_kernels.env._versions": "versions",
    "leap_kernels.env._machine": "machine",
    "leap_kernels.env._gpus": "gpus",
    "leap_kernels.env._backends": "backends",
    "leap_kernels.env._automatic": "backends",
}


@pytest.mark.parametrize("what", BREAKABLE)
def test_a_probe_that_fails_says_so_and_the_others_go_on(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEAP_KERNELS_TEST", "1")
    monkeypatch.delenv("TRITON_HOME", raising=False)
    whole = env.collect()
    monkeypatch.setattr(what, boom)
    assert main(["env"]) == 0
    assert "unknown (RuntimeError: boom and more)" in capsys.readouterr().out
    found = report(capsys)
    assert "unknown (RuntimeError: boom and more)" in json.dumps(found[BREAKABLE[what]])
    # torch.cuda.is_available is also quoted in the reason why Triton does not run.
    same = [key for key in whole if key != BREAKABLE[what] and not (key == "backends" and "cuda" in what)]
    assert {key: found[key] for key in same} == {key: whole[key] for key in same}


def test_everything_broken_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    probes = [name for name in vars(env) if name.startswith("_") and name not in ("_guard", "_lines")]
    for name in probes:
        if isinstance(getattr(env, name), types.FunctionType):
            monkeypatch.setattr(env, name, boom)
    found = report(capsys)
    assert [key for key in found if found[key] != "unknown (RuntimeError: boom and more)"] == []
    assert main(["env"]) == 0


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "PACKAGES", ("no-such-package-of-ours",))
    assert env.collect()["versions"]["no-such-package-of-ours"] == "not installed"


def fake_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    def properties(i: Any) -> Any:
        major, minor = capabilities[i]
        return types.SimpleNamespace(
            name=f"GPU of test {i}", major=major, minor=minor, multi_processor_count=132,
            shared_memory_per_block_optin=232448, total_memory=80 * 2**30,
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[torch.device(device).index])


def test_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    fake_gpus(monkeypatch, (9, 0), (7, 5))
    found = report(capsys)
    assert found["gpus"][0] == {
        "device": "cuda:0", "name": "GPU of test 0", "compute capability": "9.0", "SMs": 132,
        "shared memory per block": "227 KiB", "memory": "80.0 GiB",
    }  # fmt: skip
    assert found["gpus"][1]["device"] == "cuda:1"
    modern, old = found["backends"]["cuda:0"], found["backends"]["cuda:1"]
    assert modern["triton"] == "yes"
    assert old["triton"] == "no: cuda:1 has compute capability 7.5"
    assert {old[op] for op in SCHEMAS} == {"reference"}
    for op in SCHEMAS:
        assert modern[op] in ("triton", "reference (no Triton kernel in this version)")
    assert main(["env"]) == 0
    assert "GPU of test 1" in capsys.readouterr().out


def test_an_op_without_a_kernel_file_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert env._automatic("top_eta", False) == "reference"
    assert env._automatic("top_eta", True) == "reference (no Triton kernel in this version)"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert env._automatic("top_eta", True) == "triton"


def test_one_broken_gpu_does_not_hide_the_other(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fake_gpus(monkeypatch, (9, 0), (9, 0))
    properties = torch.cuda.get_device_properties
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: boom() if i == 0 else properties(i))
    found = report(capsys)
    assert found["gpus"][0] == "unknown (RuntimeError: boom and more)"
    assert found["gpus"][1]["name"] == "GPU of test 1"
    assert main(["env"]) == 0
    assert "GPU of test 1" in capsys.readouterr().out


def test_variables_are_shown_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shown = {"LEAP_KERNELS_LOG": "debug", "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "0,1", "HF_HOME": "/x"}
    secret = {"HF_TOKEN": "hf_verysecret", "TORCH_API_KEY": "verysecret", "HF_ENDPOINT": "https://me:verysecret@host/x"}
    for name, value in {**shown, **secret, "UNRELATED": "verysecret"}.items():
        monkeypatch.setenv(name, value)
    variables = report(capsys)["variables"]
    assert {name: variables[name] for name in shown} == shown
    assert variables["HF_ENDPOINT"] == "https://***@host/x"
    assert variables["HF_TOKEN"] == variables["TORCH_API_KEY"] == "set, not shown"
    main(["env"])
    assert "verysecret" not in capsys.readouterr().out


@pytest.mark.parametrize("variable", [None, "TRITON_HOME", "TRITON_CACHE_DIR"])
def test_the_cache_folder_is_the_one_triton_uses(
    variable: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    knobs = pytest.importorskip("triton.knobs")
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path))
    found = env.collect()["triton cache"]
    assert os.path.normpath(found["folder"]) == os.path.normpath(knobs.cache.dir)
    assert found["exists"] == os.path.isdir(knobs.cache.dir)


@pytest.mark.parametrize(
    ("kind", "warns"),
    [("ext4", False), ("overlay", False), ("fuseblk", False), ("nfs4", True), ("fuse.sshfs", True), ("lustre", True)],
)
def test_a_network_filesystem_is_warned_about(
    kind: str, warns: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "shared" / "cache"
    cache.mkdir(parents=True)
    mounts = tmp_path / "mounts"
    shared = os.path.realpath(tmp_path / "shared")
    mounts.write_text(
        f"disk / btrfs rw 0 0\nauto {shared} autofs rw 0 0\nx {shared} {kind} rw 0 0\nx {shared}/c nfs rw 0 0\n"
    )
    monkeypatch.setattr(env, "MOUNTS", mounts)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    filesystem = env.collect()["triton cache"]["filesystem"]
    assert filesystem.split()[0] == kind
    assert ("WARNING" in filesystem) == warns


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvcc is a shell script")
def test_nvcc_is_looked_for_in_cuda_home_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, says in (("home", "echo 'Cuda tools, release 99.1, V99.1.5'"), ("path", "exit 3")):
        nvcc = tmp_path / folder / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\n{says}\n")
        nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert env.collect()["nvcc"] == {
        "path": str(tmp_path / "home" / "bin" / "nvcc"), "version": "release 99.1, V99.1.5",
    }  # fmt: skip
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    found = env.collect()["nvcc"]
    assert found["path"] == str(tmp_path / "path" / "bin" / "nvcc")
    assert found["version"].startswith("unknown (CalledProcessError")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert env.collect()["nvcc"].startswith("not found")
