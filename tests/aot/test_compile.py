# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every supported GPU generation, without spilling and within its shared memory.

The launchers run on CPU tensors and a stand-in records what they launch; Triton's own binder then tells how it would
specialize those arguments, and its compiler makes the cubin. So what is compiled here is what a GPU would run.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from aot import figures
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from leap_kernels.ops.attention import kernel as attention
from leap_kernels.ops.candidates import kernel as candidates
from leap_kernels.ops.consistency import kernel as consistency
from leap_kernels.ops.divergence import kernel as divergence
from leap_kernels.ops.sampling import kernel as sampling
from leap_kernels.ops.superposition import kernel as superposition

pytestmark = pytest.mark.aot

if not isinstance(candidates._top_eta_split_kernel, JITFunction):
    raise RuntimeError("the kernels are interpreted: run tests/aot in a process without TRITON_INTERPRET=1")

ARCHITECTURES = (80, 90, 100, 120)
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
SHARED = 99 * 1024  # what a block can have on every GPU since sm_80 (least: sm_86, 89 and 120)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Call(NamedTuple):
    """What one launch hands to Triton for one architecture."""

    kernel: JITFunction
    options: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]

    @property
    def form(self) -> str:
        """Equal for launches that share one compiled kernel."""
        return repr((self.signature, self.constants, self.attributes, self.options))


class Compiled(NamedTuple):
    ptx: str
    shared: int
    registers: int
    stack: int


@pytest.fixture
def record(monkeypatch):
    """record(arch, launch, *args): the calls that launch(*args) makes on an architecture, in order."""
    calls: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []
    for module in (attention, candidates, consistency, divergence, sampling, superposition):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):

                def run(*args, grid, warmup, _kernel=kernel, **kwargs):
                    assert all(0 < n < 65_536 for n in grid[1:]), f"grid {grid} is out of bounds"
                    calls.append((_kernel, args, kwargs))

                monkeypatch.setattr(kernel, "run", run)

    def recorded(architecture, launch, *args):
        calls.clear()
        monkeypatch.setattr(attention, "_generation", lambda device: architecture // 10)
        launch(*args)
        backend = make_backend(GPUTarget("cuda", architecture, 32))
        bound_calls = []
        for kernel, positional, keywords in calls:
            keywords = {"debug": False, **keywords}
            bound, specialization, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(
                *positional, **keywords
            )
            bound_calls.append(Call(kernel, *kernel._pack_args(backend, keywords, bound, specialization, None)))
        return bound_calls

    return recorded


def compiled(call: Call, architecture: int, folder: Path) -> Compiled:
    source = ASTSource(call.kernel, call.signature, call.constants, call.attributes)
    result = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=vars(call.options))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(result.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    (registers,), (stack,) = (re.findall(rf"{what}:(\d+)", usage) for what in ("REG", "STACK"))
    return Compiled(result.asm["ptx"], result.metadata.shared, int(registers), int(stack))


@pytest.fixture
def check(request, tmp_path):
    """check(call, architecture, form, registers=ceiling): compile; nothing spilled, shared memory and registers within
    bounds and as docs/kernels.md says. Returns the PTX."""
    writing = request.config.getoption("--write-figures")

    def checked(call: Call, architecture: int, form: str, *, registers: int) -> str:
        ptx, figure = check_bounds(call, architecture, tmp_path, registers)
        kernel = call.kernel.__name__.strip("_").removesuffix("_kernel")
        what = (kernel, form, registers, architecture, figure)
        if writing:
            figures.note(*what)
        else:
            figures.check(*what)
        return ptx

    return checked


def check_bounds(call: Call, architecture: int, folder: Path, registers: int) -> tuple[str, figures.Figure]:
    """No spilled register, no local memory, shared memory and registers within bounds."""
    out = compiled(call, architecture, folder)
    name = f"{call.kernel.__name__} for sm_{architecture}"
    assert out.stack == 0, f"{name} has {out.stack} bytes of stack at {out.registers} registers"
    assert "ld.local" not in out.ptx, name
    assert "st.local" not in out.ptx, name
    assert out.shared <= SHARED, f"{name} needs {out.shared} bytes of shared memory"
    assert out.registers <= registers, f"{name} needs {out.registers} registers"
    return out.ptx, figures.Figure(out.registers, out.shared)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def aligned_logits(vocab: int, dtype: torch.dtype, rows: int = 3) -> Tensor:
    """Rows of any length whose starts are aligned, as an lm_head with padded columns gives them."""
    return torch.empty(rows, triton.cdiv(vocab, 16) * 16, dtype=dtype)[:, :vocab]


def check_wide_loads(ptx: str, call: Call, size: int) -> None:
    """A block of `size` bytes is loaded 16 bytes at a time by every thread."""
    wide = re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", ptx)
    loads = size // 16 // (32 * call.options.num_warps)
    assert len(wide) >= loads, f"{len(wide)} wide loads, expected {loads}"


def attention_arguments(size: int, dtype: torch.dtype, n_q: int = 33, n_k: int = 97, b: int = 2) -> list[Any]:
    def ints(n: int) -> Tensor:
        return torch.empty(b, n, dtype=torch.int32)

    q, k, v = (torch.empty(b, n, h, size, dtype=dtype).transpose(1, 2) for n, h in ((n_q, 4), (n_k, 2), (n_k, 2)))
    metadata = [*(ints(n_q) for _ in range(4)), *(ints(n_k) for _ in range(3)), torch.empty(b, dtype=torch.int32)]
    return [q, k, v, *metadata, 0.1, 0, 0, 15]


TOP_ETA = [(5, dtype, arch) for dtype in DTYPES for arch in ARCHITECTURES]
TOP_ETA += [(k, torch.bfloat16, 90) for k in (1, 2, 10, 16)]


@pytest.mark.parametrize(("k", "dtype", "architecture"), TOP_ETA)
def test_top_eta(k, dtype, architecture, record, check):
    """At an odd V the full blocks still load 16 bytes at a time, and only the tail does not."""
    for suppress in (None, torch.tensor([1])):
        calls = record(
            architecture, candidates.launch, aligned_logits(126_465, dtype), torch.arange(3), 0.2, k, suppress
        )
        split, merge = calls
        form = f"{named(dtype)}, K {k}{', suppressed ids' if suppress is not None else ''}"
        ptx = check(split, architecture, form, registers=112)  # two blocks of 256 threads an SM
        check_wide_loads(ptx, split, candidates.BLOCK * dtype.itemsize)
    check(merge, architecture, f"K {k}, 16 splits", registers=64)


def test_top_eta_merges_the_largest_vocabulary_we_know(record, check):
    merge = record(90, candidates.launch, aligned_logits(262_144, torch.bfloat16), torch.arange(3), 1 / 16, 16)[1]
    check(merge, 90, "K 16, 32 splits", registers=80)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_kl(dtype, architecture, record, check):
    """Both sides load 16 bytes at a time at an odd V; three blocks of 256 threads an SM at 80 registers."""
    rows = torch.arange(3)
    for suppress in (None, torch.tensor([1])):
        now, before = aligned_logits(126_465, dtype), aligned_logits(126_465, dtype, rows=5)
        split, merge = record(architecture, divergence.launch, now, before, rows, rows, suppress)
        form = f"{named(dtype)}{', suppressed ids' if suppress is not None else ''}"
        ptx = check(split, architecture, form, registers=80)
        check_wide_loads(ptx, split, 2 * divergence.BLOCK * dtype.itemsize)
    check(merge, architecture, "31 splits", registers=40)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_rows(dtype, architecture, record, check):
    """16-byte loads at an odd V; the hash is 32-bit arithmetic, whose only 64-bit products are row offsets."""
    rows = torch.arange(3)
    for suppress in (None, torch.tensor([1])):
        arguments = (aligned_logits(126_465, dtype), rows, rows, rows, rows, 0.7, suppress)
        split, merge = record(architecture, sampling.launch, *arguments)
        form = f"{named(dtype)}{', suppressed ids' if suppress is not None else ''}"
        ptx = check(split, architecture, form, registers=112)
        check_wide_loads(ptx, split, sampling.BLOCK * dtype.itemsize)
        assert len(re.findall(r"mul\.lo\.s64|mad\.lo\.s64", ptx)) < 16
        # Two in `_mix`; the third, of a token id, becomes sums.
        assert ptx.count("mul.lo.s32") >= 2 * sampling.BLOCK // (32 * split.options.num_warps)
    check(merge, architecture, f"{named(dtype)}, 31 splits", registers=40)


def test_merges_of_the_largest_vocabulary_we_know(record, check):
    rows, x = torch.arange(3), aligned_logits(262_144, torch.bfloat16)
    for module, arguments in ((divergence, (x, x, rows, rows)), (sampling, (x, *[rows] * 4, 0.7))):
        check(record(90, module.launch, *arguments)[1], 90, "bfloat16, 64 splits", registers=48)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_superpose(architecture, record, check):
    ints = torch.empty(2, 32, dtype=torch.int32)
    arguments = (torch.empty(2, 200, dtype=torch.int64), torch.empty(2, 200, dtype=torch.int32), ints)
    arguments += (torch.empty(2, 32, 5, dtype=torch.int64), ints, 192, 1, 9)
    (call,) = record(architecture, superposition.launch, *arguments)
    check(call, architecture, "any", registers=72)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("keep_confident", [True, False])
@pytest.mark.parametrize("with_accept", [True, False])
def test_check_consistency(with_accept, keep_confident, architecture, record, check):
    f, i = torch.empty(2, 32), torch.empty(2, 32, dtype=torch.int64)
    accept = torch.empty(2, 32, dtype=torch.bool) if with_accept else None
    arguments = (i.int(), i, f, i, f, accept, 0.9, 0.7, 0.0, keep_confident)
    (call,) = record(architecture, consistency.launch, *arguments)
    forms = [] if keep_confident else ["agreement alone"]
    check(call, architecture, ", ".join(forms + ["own base rule"] * with_accept) or "any", registers=48)


# All of sm_90, and everywhere the head size of LLaDA and one that is padded; the rest takes a few minutes.
FIRST = ((128, torch.bfloat16), (96, torch.bfloat16))
ATTENTION = [
    pytest.param(
        arch,
        dtype,
        size,
        id=f"sm_{arch}-{str(dtype).removeprefix('torch.')}-{size}",
        marks=[] if arch == 90 or (size, dtype) in FIRST else pytest.mark.slow,
    )
    for arch in ARCHITECTURES
    for dtype in DTYPES
    for size in (16, 32, 64, 96, 128, 256)
]


@pytest.mark.parametrize(("architecture", "dtype", "size"), ATTENTION)
def test_superposed_attention(architecture, dtype, size, record, check):
    """Tensor cores for half precision; bounds of the tiles before, and the merge of the splits behind, come along."""
    for splits in (1, 2) if (size, architecture) == (128, 90) else (1,):
        bounds, tile, *merge = record(architecture, attention.launch, *attention_arguments(size, dtype), splits)
        bm, bn = (tile.constants[(tile.kernel.arg_names.index(name),)] for name in ("BM", "BN"))
        check(bounds, architecture, f"tiles of {bm} rows and {bn} keys", registers=80)
        form = f"{named(dtype)}, head size {size}{', in splits' * (splits > 1)}"
        ptx = check(tile, architecture, form, registers=255)
        if dtype in HALVES:
            instruction = {9: "wgmma.mma_async", 10: "tcgen05.mma"}.get(architecture // 10, "mma.sync")
            assert instruction in ptx
            copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, 0x(\w+)", ptx)
            assert copies
            # A tile of smaller heads has too few values for all threads.
            assert "10" in copies or size < 32, f"keys and values are not copied 16 bytes at a time: {set(copies)}"
        for call in merge:
            check(call, architecture, f"{named(dtype)}, head size {size}", registers=48)


@pytest.mark.parametrize("size", [16, 32, 64, 96, 128, 256])
def test_attention_merge(size, record, check):
    call = record(90, attention.launch, *attention_arguments(size, torch.bfloat16), 2)[-1]
    check(call, 90, f"bfloat16, head size {size}", registers=48)


def test_lengths_and_settings_do_not_compile_again(record):
    """One form each, whatever the numbers of rows, slots, samples, targets, splits and parts."""

    def forms(launch, *many) -> int:
        return len({tuple(call.form for call in record(90, launch, *arguments)) for arguments in many})

    lengths = [(1, 1, 1), (16, 16, 1), (33, 97, 2), (224, 1216, 16), (1, 0, 1), (17, 4096, 3)]
    calls = []
    for n_q, n_k, b in lengths:
        arguments = attention_arguments(128, torch.bfloat16, n_q, n_k, b)
        for block_causal, window, switches in ((0, 0, 15), (32, 1, 0), (1, 16, 7)):
            calls.append((*arguments[:-3], block_causal, window, switches, 1))
    assert forms(attention.launch, *calls) == 1
    assert forms(attention.launch, *((*call[:-1], splits) for call in calls for splits in (2, 3, 16))) == 1

    def superposed(b: int, t: int, k: int, shift: int, capacity: int) -> tuple[Any, ...]:
        ints = torch.empty(b, t, dtype=torch.int32)
        ids = torch.empty(b, 7 * t + 1, dtype=torch.int64)
        return ids, ids.int(), ints, torch.empty(b, t, k, dtype=torch.int64), ints, capacity, shift, 9

    assert (
        forms(
            superposition.launch, superposed(1, 1, 1, 1, 2), superposed(4, 32, 5, 0, 192), superposed(3, 7, 16, 1, 120)
        )
        == 1
    )

    def checked(b: int, t: int, phi: float) -> tuple[Any, ...]:
        f, i = torch.empty(b, t), torch.empty(b, t, dtype=torch.int64)
        return i.int(), i, f, i, f, None, phi, 0.7, 1.0, True

    assert forms(consistency.launch, checked(1, 1, 1.0), checked(4, 32, 0.9), checked(3, 7, 0.0)) == 1

    logits = aligned_logits(126_464, torch.bfloat16, rows=300)
    assert (
        forms(candidates.launch, *((logits, torch.arange(r), eta, 5) for r in (1, 16, 33, 300) for eta in (0.2, 0.25)))
        == 1
    )

    before = aligned_logits(126_464, torch.bfloat16, rows=40)
    many = [(logits, before, torch.arange(r), torch.arange(r)) for r in (1, 16, 33, 300)]
    assert forms(divergence.launch, *many) == 1
    many = [(logits, *[torch.arange(r)] * 4, t) for r in (1, 16, 33, 300) for t in (0, 0.7, 1, 1.0, 16)]
    assert forms(sampling.launch, *many) == 1
