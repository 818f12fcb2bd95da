# SPDX-License-Identifier: Apache-2.0
"""How much memory loading a checkpoint takes beside the weights themselves; exits 1 above the limit.

python python/loading_memory.py                       # 1 GB each: a minute on a CPU, 1 GB of disk, 3 GB of memory
python python/loading_memory.py LLaDA-MoE --stored bfloat16 --megabytes 500   # becomes 1 GB in float32

For each family a random checkpoint is written in the authors' names and layout (four shards) and loaded in a process of
its own. A thread there reads the anonymous memory every 2 ms (RssAnon of /proc/self/status: what the process has made,
not what it has mapped of files). Its highest value, less that before the load, is divided by the bytes of the
loaded weights: 1 is one copy, 2 would be two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

import leap_kernels

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))  # the layouts of the checkpoints that the tests load
from families import FAMILIES, save, weights_of  # noqa: E402

LIMIT = 1.15
DTYPES = ("float32", "bfloat16")
LAYERS = 16  # so that one layer is a small part of the whole, as in published models


def sized(family: str, megabytes: float, dtype: str) -> dict[str, Any]:
    """A config of the family whose weights are `megabytes` large, to some percent: as wide as that takes."""
    config = {**FAMILIES[family], "torch_dtype": dtype}
    item = getattr(torch, dtype).itemsize
    mixture = "num_experts" in config
    experts = 32 if mixture else 0
    # Rows of d columns in a layer, as multiples of d: 4 of attention; 3 of each MLP matrix, wide in a dense model and a
    # quarter of d in an expert.
    per_layer = 4 + 3 * (experts * 0.25 + 1 if mixture else 3)
    width = int((megabytes * 1e6 / item / LAYERS / per_layer) ** 0.5) // 64 * 64 or 64
    inner = 3 * width
    if family == "LLaDA":
        return config | {"d_model": width, "mlp_hidden_size": inner, "n_layers": LAYERS}
    config |= {"hidden_size": width, "num_hidden_layers": LAYERS, "num_key_value_heads": 4}
    config |= {"head_dim": width // 4} if "head_dim" in config else {}
    config |= {key: inner for key in ("intermediate_size", "dense_intermediate_size") if key in config}
    config |= {key: width // 4 for key in ("moe_intermediate_size", "expert_intermediate_size") if key in config}
    config |= {"moe_layer_freq": [1] * LAYERS} if "moe_layer_freq" in config else {}
    return config | ({"num_experts": experts} if mixture else {})


def anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("RssAnon is not in /proc/self/status: this program needs Linux.")


def measure(folder: str, small: str, dtype: str) -> dict[str, int]:
    """Load `folder` in this process, after `small`, which brings in all code that loading needs."""
    leap_kernels.load(small, dtype=dtype)
    before = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = leap_kernels.load(folder, dtype=dtype)
    done.set()
    watcher.join()
    weights = {value.data_ptr(): value.numel() * value.element_size() for value in model.parameters()}
    return {"weights": sum(weights.values()), "peak": max(peak, anonymous()) - before}


def row(family: str, megabytes: float, stored: str, dtype: str, scratch: Path) -> tuple[str, float]:
    folders = []
    for name, config in (("large", sized(family, megabytes, stored)), ("small", sized(family, 1, stored))):
        folder = scratch / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save(folder, weights_of(config), shards=4)
        folders.append(str(folder))
    child = subprocess.run(
        [sys.executable, __file__, "--child", *folders, "--dtype", dtype], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(child.stdout)
    ratio = found["peak"] / found["weights"]
    return f"| {family} | {found['weights'] / 1e6:.0f} | {found['peak'] / 1e6:.0f} | {ratio:.3f} |", ratio


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="family", help=f"of {', '.join(FAMILIES)}; all unless given")
    parser.add_argument("--megabytes", type=float, default=1000.0, help="size of each checkpoint (1000)")
    parser.add_argument("--stored", choices=DTYPES, default="float32", help="dtype of the files (float32)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype to load them in (float32)")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"highest ratio that passes ({LIMIT})")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        print(json.dumps(measure(*given.child, given.dtype)))
        return 0
    unknown = [family for family in given.families if family not in FAMILIES]
    if unknown:
        parser.error(f"unknown family {', '.join(unknown)}; one of {', '.join(FAMILIES)}")
    print("| family | weights, MB | highest anonymous memory, MB | ratio |\n| --- | ---: | ---: | ---: |")
    worst = 0.0
    for family in given.families or FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            line, ratio = row(family, given.megabytes, given.stored, given.dtype, Path(scratch))
        print(line, flush=True)
        worst = max(worst, ratio)
    print(f"\nhighest ratio {worst:.3f}, limit {given.limit}: {'passed' if worst <= given.limit else 'FAILED'}")
    return int(worst > given.limit)


if __name__ == "__main__":
    sys.exit(main())
