# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: two processes with half of every layer each decode what one process decodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write

import leap_kernels
from leap_kernels.errors import ConfigError
from leap_kernels.models import parallel

# Run by every process. The first writes what it decoded, the others compare it with theirs.
WORKER = """
import json, os, sys
import torch
import torch.distributed as dist
import leap_kernels

folder, report = sys.argv[1:]
prompts = [torch.tensor([5, 6, 7, 8, 9]), torch.tensor([10, 11])]
settings = {"max_new_tokens": 21, "block_length": 8, "threshold": 0.4}
leap = {"tau": 0.06, "eta": 0.05}

found, split = {}, None
model = leap_kernels.load(folder, dtype="float64", tp_plan="auto" if "RANK" in os.environ else None)
if "RANK" in os.environ:
    weight = model.model.layers[0].self_attn.q_proj.weight
    split = [dist.get_world_size(), weight.numel(), weight.to_local().numel()]
for strategy, options in (("leap", leap), ("threshold", {})):
    for cache in ("none", "block" if model.leap_spec.block_causal_length else "prefix"):
        out = leap_kernels.decode(model, prompts, strategy=strategy, cache=cache, **settings, **options)
        shown = [out.sequences.tolist(), out.nfe.tolist(), out.token_forwards.tolist(), out.history.reason.tolist()]
        found[f"{strategy}, {cache}"] = shown
json.dump({"split": split, "found": found}, open(report, "w"))
"""


def start(folder: Path, report: Path, **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), str(report)],
        env={**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def reports(processes: list[subprocess.Popen[str]], files: list[Path]) -> list[Any]:
    try:
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["LLaDA", "Dream", "SDAR-MoE"])
def test_two_processes_decode_the_tokens_of_one(tmp_path: Path, family: str) -> None:
    """As torchrun starts them, over gloo, in float64; each must really hold half of a layer."""
    folder = write(tmp_path / "model", family, **({"block_size": 8} if family == "SDAR-MoE" else {}))
    files = [tmp_path / f"{name}.json" for name in ("alone", "first", "second")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    (alone,) = reports([start(folder, files[0])], files[:1])
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"} for rank in ("0", "1")]
    both = reports(
        [start(folder, file, **rank, **address) for rank, file in zip(ranks, files[1:], strict=True)], files[1:]
    )
    for report in both:
        processes, whole, own = report["split"]
        assert (processes, own * 2) == (2, whole)
        assert report["found"] == alone["found"]
    if family == "LLaDA":
        assert any(2 in sample for sample in alone["found"]["leap, none"][3]), "nothing converged: LEAP did nothing"


# --- what cannot be split, in one process ----------------------------------------------------------------------------


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a process that torchrun started, and accelerate as if it were installed."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel, "_has_accelerate", lambda: True)
    return monkeypatch


def test_without_torchrun_the_message_says_how_to_start(tmp_path: Path, torchrun: pytest.MonkeyPatch) -> None:
    torchrun.delenv("RANK")
    with pytest.raises(ConfigError, match=r"processes that torchrun started, and RANK is not set. Start with torchrun"):
        leap_kernels.load(write(tmp_path, "LLaDA"), tp_plan="auto")


def test_without_accelerate_it_is_named(tmp_path: Path, torchrun: pytest.MonkeyPatch) -> None:
    torchrun.setattr(parallel, "_has_accelerate", lambda: False)
    with pytest.raises(ConfigError, match="tp_plan needs the package accelerate"):
        leap_kernels.load(write(tmp_path, "LLaDA"), tp_plan="auto")


def test_fused_weights_are_not_split_wrongly(tmp_path: Path, torchrun: pytest.MonkeyPatch) -> None:
    """A row-wise half of queries, keys and values in one piece is not the half of each."""
    with pytest.raises(ConfigError, match=r"LLaDA2 checkpoints as they are published.*load\(path\).save_pretrained"):
        leap_kernels.load(write(tmp_path, "LLaDA2"), tp_plan="auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_plan": "colwise"}, "tp_plan.*'colwise'"),
        ({"tp_plan": True}, "tp_plan.*True"),
        ({"tp_plan": "auto", "device": "cpu"}, "device does not go with tp_plan"),
    ],
    ids=["name", "flag", "device"],
)
def test_plans_that_are_none_are_refused(
    tmp_path: Path, torchrun: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        leap_kernels.load(write(tmp_path, "LLaDA"), **options)


def test_the_dtype_is_that_of_the_device_of_the_processes(torchrun: pytest.MonkeyPatch) -> None:
    """bfloat16 stays on GPUs, though `device` is left out."""
    torchrun.setattr(torch.cuda, "is_available", lambda: True)
    assert parallel.checked_plan("auto", None).type == "cuda"
    torchrun.setattr(torch.cuda, "is_available", lambda: False)
    assert parallel.checked_plan({}, None).type == "cpu"
