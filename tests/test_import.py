# SPDX-License-Identifier: Apache-2.0
"""What `import leap_kernels` may not do: be slow, touch a GPU, load triton or transformers, write files.

Each test looks at a fresh interpreter. Its code prints one JSON value, which the test judges.
"""

from __future__ import annotations

import doctest
import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import leap_kernels

HEAVY = ("triton", "transformers", "tokenizers", "safetensors", "rich")
BLOCK = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"
OPS_WORK = """
import torch
from leap_kernels import ops
i, f = torch.tensor([[4, 5, 6]]), torch.tensor([[0.95, 0.8, 0.75]])
column = torch.tensor([[0, 1, 2]], dtype=torch.int32)
q, none = torch.ones(1, 2, 3, 8), torch.full_like(column, -1)
rows = dict(q_pos=column, q_hide=none, q_kind=0 * column, q_slot=column, k_pos=column, k_kind=0 * column, k_hide=none)
results = [
    ops.top_eta(torch.tensor([[0.0, 2.0, 2.0, -1.0]]), 0.2).ids[0].tolist(),
    ops.superpose(i, column, column, i[..., None], column // 2, mask_id=9).kind[0].tolist(),
    ops.superposed_attention(q, q, q, **rows).out[0, 0, 0, 0].round(decimals=5).item(),
    ops.check_consistency(column, i, f, torch.tensor([[4, 5, 9]]), f).reason[0].tolist(),
    ops.row_kl(f.log(), f.log()).tolist(),
    ops.sample_rows(f, i[0, :1], i[0, :1], i[0, :1], temperature=0).token.tolist(),
]
"""
RESULTS = [[1, 2, -1, -1], [1, 1, 1, 2, -1, -1], 1.0, [1, 2, 0], [0.0], [0]]


def fresh(code: str, *, cwd: Path | None = None, **environment: str) -> Any:
    """Run `code` in a new interpreter, with the package on its path as here, and return the JSON that it printed."""
    path = [str(Path(leap_kernels.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"PYTHONPATH": os.pathsep.join(filter(None, path))} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=cwd, env=variables, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_loads_nothing_heavy_and_touches_no_gpu(tmp_path: Path) -> None:
    """After torch, neither the package nor its ops load triton or any model library, call into torch.cuda, or open a
    file for writing."""
    seen = fresh(
        f"""
import json, sys, types
import torch
sys.dont_write_bytecode = True
before = set(sys.modules)
calls, written = [], []
for name, value in list(vars(torch.cuda).items()):
    if isinstance(value, types.FunctionType):
        def recorder(*args, _name=name, _call=value, **options):
            calls.append(_name)
            return _call(*args, **options)
        setattr(torch.cuda, name, recorder)
def audit(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        written.append(str(arguments[0]))
    if event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "socket.connect"):
        written.append(event)
sys.addaudithook(audit)
import leap_kernels
early = [name for name in {HEAVY!r} if name in sys.modules and name not in before]
import leap_kernels.ops
touched = list(calls)
torch.cuda.is_available()  # the recorder works
late = [name for name in {HEAVY!r} if name in sys.modules and name not in before]
lazy = [name for name in sys.modules if name.endswith((".kernel", "decoding", "models.load")) and "leap" in name]
print(json.dumps([early, late, lazy, touched, calls[:1], written, torch.cuda.is_initialized()]))
""",
        cwd=tmp_path,
        HOME=str(tmp_path),
    )
    early, late, lazy, touched, recorded, written, initialised = seen
    assert early == []
    assert late == []
    assert lazy == []
    assert touched == []
    assert recorded == ["is_available"]
    assert written == []
    assert not initialised
    assert list(tmp_path.iterdir()) == []


def test_import_time() -> None:
    """Less than 0.2 s above torch, ops included: the median of three processes."""
    code = """
import json, time
import torch
began = time.perf_counter()
import leap_kernels
leap_kernels.ops
print(json.dumps(time.perf_counter() - began))
"""
    times = [fresh(code) for _ in range(3)]
    assert statistics.median(times) < 0.2, times


@pytest.mark.parametrize("names", [["triton"], ["transformers"], list(HEAVY)], ids="-".join)
def test_ops_work_without(names: list[str]) -> None:
    """Missing libraries are no error on a CPU until something needs them; a missing triton is named when asked for."""
    code = BLOCK.format(names=names) + OPS_WORK
    code += """
import json
from leap_kernels.errors import BackendError
try:
    ops.top_eta(torch.zeros(1, 4), 0.2, backend="triton")
except BackendError as error:
    message = str(error)
print(json.dumps([results, message]))
"""
    results, message = fresh(code)
    assert results == RESULTS
    assert ("triton package is not installed" in message) == ("triton" in names)


def test_ops_results_with_everything_installed() -> None:
    """The same calls where nothing is missing: the comparison for the test above."""
    assert fresh(OPS_WORK + "import json; print(json.dumps(results))") == RESULTS


def test_decoding_imports_without_transformers() -> None:
    """A callable of one's own needs no transformers: `decode`, configuration and strategies resolve without it."""
    names = ["DecodeConfig", "DecodeOutput", "ModelSpec", "Rows", "Strategy", "decode", "errors", "ops"]
    code = BLOCK.format(names=["transformers", "triton"])
    code += f"import json, leap_kernels\nprint(json.dumps([hasattr(leap_kernels, name) for name in {names!r}]))"
    assert fresh(code) == [True] * len(names)


def test_public_names() -> None:
    """`__all__` is sorted, has no repeats, resolves, and is what `dir` shows; the version is a string in one place."""
    from leap_kernels.version import __version__

    assert leap_kernels.__all__ == sorted(set(leap_kernels.__all__))
    assert [name for name in leap_kernels.__all__ if not hasattr(leap_kernels, name)] == []
    assert dir(leap_kernels) == leap_kernels.__all__
    assert leap_kernels.__version__ == __version__
    assert {"decode", "load", "load_tokenizer", "ops", "errors"} <= set(leap_kernels.__all__)


def test_names_resolve_in_a_fresh_interpreter_in_any_order() -> None:
    """Each name works as the first thing that is asked of the package, also by `from leap_kernels import *`."""
    code = """
import json, sys
import leap_kernels
names = list(reversed(leap_kernels.__all__))
kinds = {name: type(getattr(leap_kernels, name)).__name__ for name in names}
scope = {}
exec("from leap_kernels import *", scope)
print(json.dumps([kinds, sorted(set(scope) - {"__builtins__"})]))
"""
    kinds, starred = fresh(code)
    assert kinds["decode"] == kinds["load"] == "function"
    assert kinds["ops"] == kinds["errors"] == "module"
    assert starred == leap_kernels.__all__


@pytest.mark.parametrize("name", ["decoder", "top_eta", "_home", "__wrapped__"])
def test_unknown_attribute(name: str) -> None:
    """An AttributeError that names both, so that `hasattr` and typos behave as with any module."""
    with pytest.raises(AttributeError, match=f"'leap_kernels' has no attribute '{name}'"):
        getattr(leap_kernels, name)


def test_the_root_logger_is_left_alone() -> None:
    """A library adds a NullHandler and nothing else."""
    code = """
import json, logging
import leap_kernels, leap_kernels.ops
own = logging.getLogger("leap_kernels")
print(json.dumps([[type(h).__name__ for h in own.handlers], own.level, own.propagate, logging.root.handlers]))
"""
    assert fresh(code) == [["NullHandler"], 0, True, []]


@pytest.mark.parametrize(
    "module",
    [
        "leap_kernels",
        "leap_kernels.decoding",
        "leap_kernels.ops.attention.api",
        "leap_kernels.ops.candidates.api",
        "leap_kernels.ops.consistency.api",
        "leap_kernels.ops.divergence.api",
        "leap_kernels.ops.sampling.api",
        "leap_kernels.ops.superposition.api",
    ],
)
def test_documented_examples(module: str) -> None:
    """The examples in docstrings run and print what they claim."""
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted >= 2
    assert result.failed == 0
