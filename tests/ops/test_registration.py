# SPDX-License-Identifier: Apache-2.0
"""The ops as torch operators: schemas, fakes, torch's own checks, compilation, and the way to them.

`opcheck` proves registration and never numbers; the numbers are in the other files of this folder.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from leap_kernels import ops
from leap_kernels.ops import (
    Switches,
    check_consistency,
    row_kl,
    sample_rows,
    superpose,
    superposed_attention,
    top_eta,
)

OPS = ("top_eta", "superpose", "superposed_attention", "check_consistency", "row_kl", "sample_rows")
HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
LAYOUTS = ("contiguous", "strided", "empty")
METADATA = ("q_pos", "q_hide", "q_kind", "q_slot", "k_pos", "k_kind", "k_hide")
UTILITIES = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}

# kernels.md section 7, by hand.
ARGUMENTS = {
    "top_eta": "Tensor logits, Tensor rows, float eta, int k, Tensor? suppress",
    "superpose": "Tensor ids, Tensor pos, Tensor targets, Tensor cand_ids, Tensor counts, int capacity, int shift, "
    "int mask_id",
    "superposed_attention": "Tensor q, Tensor k, Tensor v, Tensor q_pos, Tensor q_hide, Tensor q_kind, Tensor q_slot, "
    "Tensor k_pos, Tensor k_kind, Tensor k_hide, Tensor lengths, float scale, int block_causal, int window, "
    "int switches, int splits",
    "check_consistency": "Tensor targets, Tensor top1, Tensor prob1, Tensor copy_top1, Tensor copy_prob1, "
    "Tensor? base_accept, float phi, float tau, float kappa, bool keep_confident",
    "row_kl": "Tensor logits, Tensor previous, Tensor rows, Tensor previous_rows, Tensor? suppress",
    "sample_rows": "Tensor logits, Tensor rows, Tensor seeds, Tensor steps, Tensor positions, float temperature, "
    "Tensor? suppress",
}
RESULTS = {
    "top_eta": ("TopEta", "ids probs counts top1 prob1 lse entropy gap"),
    "superpose": ("Superposed", "token pos kind hide copy_row count"),
    "superposed_attention": ("Attention", "out lse"),
    "check_consistency": ("Consistency", "reason left"),
    "row_kl": (None, "kl"),
    "sample_rows": ("Sampled", "token prob"),
}


def raw(op: str) -> Any:
    return getattr(torch.ops.leap, op).default


def results(out: Any) -> tuple[Tensor, ...]:
    """What a function returned, a single tensor too."""
    return (out,) if isinstance(out, Tensor) else tuple(out)


def lay_out(t: Tensor, layout: str) -> Tensor:
    """The same values in memory of twice the row length, or the same tensor."""
    if layout == "contiguous":
        return t
    wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1] + 3), dtype=t.dtype)
    return wide[..., 1 : 1 + t.shape[-1]].copy_(t)


def top_eta_args(n: int, layout: str = "contiguous", dtype: torch.dtype = torch.float32, optional: bool = True) -> Any:
    logits = torch.randn(n + 1, 40, generator=torch.Generator().manual_seed(n)).to(dtype)
    rows = torch.arange(n).flip(0)
    suppress = torch.tensor([7, 2]) if optional else None
    return lay_out(logits, layout), rows, 0.2, 5, suppress


def superpose_args(n: int, layout: str = "contiguous", shift: int = 0) -> Any:
    ids = torch.arange(2 * n).reshape(2, n) + 3
    columns = torch.arange(n, dtype=torch.int32).repeat(2, 1)
    candidates = (torch.arange(2 * n * 3) % 11).reshape(2, n, 3)
    counts = torch.full((2, n), 2, dtype=torch.int32)
    return *(lay_out(t, layout) for t in (ids, columns, columns, candidates, counts)), 4 * n + 2, shift, 99


def attention_args(n: int, layout: str = "contiguous", dtype: torch.dtype = torch.float32) -> Any:
    g = torch.Generator().manual_seed(n)
    slots = n + 2 if n else 0
    q, k, v = (torch.randn(2, h, s, 8, generator=g).to(dtype) for h, s in ((4, n), (2, slots), (2, slots)))
    pos = torch.arange(slots, dtype=torch.int32).repeat(2, 1)
    kind, hide = pos % 3, torch.where(pos % 3 > 0, pos, -1)
    lengths = torch.tensor([slots, max(0, slots - 1)], dtype=torch.int32)
    metadata = [lay_out(t, layout) for t in (pos[:, :n], hide[:, :n], kind[:, :n], pos[:, :n], pos, kind, hide)]
    if layout == "strided":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        k, v = lay_out(k, layout), lay_out(v, layout)
    return q, k, v, *metadata, lengths, 0.5, 4, 0, Switches().bits, 1


def consistency_args(n: int, layout: str = "contiguous", optional: bool = True) -> Any:
    g = torch.Generator().manual_seed(n)
    targets = torch.randint(-1, 5, (2, n), generator=g, dtype=torch.int32)
    top1, copies = (torch.randint(0, 2, (2, n), generator=g) for _ in range(2))
    prob1, copy_prob1 = (torch.rand(2, n, generator=g) for _ in range(2))
    base = prob1 > 0.8 if optional else None
    tensors = [lay_out(t, layout) for t in (targets, top1, prob1, copies, copy_prob1)]
    return *tensors, base if base is None else lay_out(base, layout), 0.9, 0.2, 0.5, True


def row_kl_args(n: int, layout: str = "contiguous", dtype: torch.dtype = torch.float32, optional: bool = True) -> Any:
    logits, rows, _, _, suppress = top_eta_args(n, layout, dtype, optional)
    previous = lay_out(torch.randn(n + 3, 40, generator=torch.Generator().manual_seed(n + 1)).to(dtype), layout)
    return logits, previous, rows, rows + 2, suppress


def sample_rows_args(
    n: int, layout: str = "contiguous", dtype: torch.dtype = torch.float32, optional: bool = True
) -> Any:
    logits, rows, _, _, suppress = top_eta_args(n, layout, dtype, optional)
    return logits, rows, torch.arange(n) - 2, torch.arange(n) % 3, 5 * torch.arange(n), 0.8, suppress


MAKERS: dict[str, Callable[..., Any]] = dict(
    zip(
        OPS,
        (top_eta_args, superpose_args, attention_args, consistency_args, row_kl_args, sample_rows_args),
        strict=True,
    )
)


def public(op: str, args: Any) -> Any:
    """The public function on the arguments of the raw operator."""
    if op == "top_eta":
        logits, rows, eta, _, suppress = args
        return top_eta(logits, eta, rows=rows, suppress=suppress)
    if op == "superpose":
        return superpose(*args[:5], capacity=args[5], shift=args[6], mask_id=args[7])
    if op == "superposed_attention":
        names = [
            "q_pos",
            "q_hide",
            "q_kind",
            "q_slot",
            "k_pos",
            "k_kind",
            "k_hide",
            "lengths",
            "scale",
            "block_causal",
            "window",
        ]
        named = dict(zip(names, args[3:14], strict=True))
        switches = Switches(*(bool(args[14] >> bit & 1) for bit in range(4)))
        return superposed_attention(*args[:3], **named, switches=switches, splits=args[15])
    if op == "row_kl":
        return row_kl(*args[:2], rows=args[2], previous_rows=args[3], suppress=args[4])
    if op == "sample_rows":
        logits, rows, *words, temperature, suppress = args
        return sample_rows(logits, *words, rows=rows, temperature=temperature, suppress=suppress)
    names = ["base_accept", "phi", "tau", "kappa", "keep_confident"]
    return check_consistency(*args[:5], **dict(zip(names, args[5:], strict=True)))


@pytest.mark.parametrize("op", OPS)
def test_schemas(op: str) -> None:
    """Argument names, types and order, and the names of the results, are a public interface (kernels.md section 7)."""
    schema = raw(op)._schema
    assert (
        ", ".join(f"{a.type} {a.name}".replace("Optional[Tensor]", "Tensor?") for a in schema.arguments)
        == (ARGUMENTS[op])
    )
    assert not schema.is_mutable
    result, fields = RESULTS[op]
    assert result is None or getattr(ops, result)._fields == tuple(fields.split())
    # A result may carry a suffix where an argument has its name already.
    assert [r.name.removesuffix("_out") for r in schema.returns] == fields.split()
    assert {str(r.type) for r in schema.returns} == {"Tensor"}


def test_public_names_resolve() -> None:
    """Everything that `leap_kernels.ops` promises exists, and the functions are among it."""
    assert set(OPS) <= set(ops.__all__)
    assert [name for name in ops.__all__ if not hasattr(ops, name)] == []


def transposed(args: Any) -> Any:
    """The same values with strides that fall the other way."""
    return tuple(
        t.transpose(0, 1).contiguous().transpose(0, 1) if isinstance(t, Tensor) and t.dim() > 1 else t for t in args
    )


def cross_section() -> Iterator[Any]:
    for i, dtype in enumerate(HALF_AND_SINGLE):
        for j, layout in enumerate(LAYOUTS):
            name = f"{str(dtype).removeprefix('torch.')}-{layout}"
            n = 0 if layout == "empty" else 5
            how = "contiguous" if layout == "empty" else layout
            optional = (i + j) % 2 == 0
            yield pytest.param("top_eta", top_eta_args(n, how, dtype, optional), id=f"top_eta-{name}")
            yield pytest.param("superposed_attention", attention_args(n, how, dtype), id=f"attention-{name}")
            yield pytest.param("row_kl", row_kl_args(n, how, dtype, optional), id=f"row_kl-{name}")
            yield pytest.param("sample_rows", sample_rows_args(n, how, dtype, optional), id=f"sample_rows-{name}")
    for layout in LAYOUTS:
        n = 0 if layout == "empty" else 5
        how = "contiguous" if layout == "empty" else layout
        for flag in (0, 1):
            yield pytest.param("superpose", superpose_args(n, how, flag), id=f"superpose-{layout}-{flag}")
            yield pytest.param("check_consistency", consistency_args(n, how, bool(flag)), id=f"check-{layout}-{flag}")


@pytest.mark.parametrize(("op", "args"), list(cross_section()))
def test_opcheck(op: str, args: Any) -> None:
    """No hidden mutation or aliasing, a fake that agrees in shape, dtype and stride, and traceable with symbols."""
    assert torch.library.opcheck(raw(op), args) == dict.fromkeys(UTILITIES, "SUCCESS")


@pytest.mark.parametrize("op", OPS)
def test_opcheck_on_transposed_inputs(op: str) -> None:
    """Tensors whose strides fall the other way: outputs must not inherit them where the fake does not."""
    args = transposed(MAKERS[op](5))
    assert not args[0].is_contiguous()
    assert torch.library.opcheck(raw(op), args) == dict.fromkeys(UTILITIES, "SUCCESS")


def matrix() -> Iterator[Any]:
    """dtype x layout x length x optional arguments, as far as an op has the choice."""
    for op, make in MAKERS.items():
        choices = inspect.signature(make).parameters
        dtypes = [{"dtype": dtype} for dtype in HALF_AND_SINGLE] if "dtype" in choices else [{}]
        flags = [{name: flag} for name in ("optional", "shift") if name in choices for flag in (0, 1)] or [{}]
        for dtype, flag, layout, n in itertools.product(
            dtypes, flags, ("contiguous", "strided", "transposed"), (0, 1, 5)
        ):
            options = dtype | flag
            yield pytest.param(op, n, layout, options, id=f"{op}-{n}-{layout}-{'-'.join(map(str, options.values()))}")


@pytest.mark.slow
@pytest.mark.parametrize(("op", "n", "layout", "options"), list(matrix()))
def test_opcheck_matrix(op: str, n: int, layout: str, options: dict[str, Any]) -> None:
    args = MAKERS[op](n, "strided" if layout == "strided" else "contiguous", **options)
    if layout == "transposed":
        args = transposed(args)
    assert torch.library.opcheck(raw(op), args) == dict.fromkeys(UTILITIES, "SUCCESS")


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("op", OPS)
def test_raw_operator_equals_public_function(op: str, layout: str) -> None:
    """`torch.ops.leap.*` and the function are one computation, and "auto" on a CPU is the reference."""
    args = MAKERS[op](9, layout)
    for x, y in zip(results(raw(op)(*args)), results(public(op, args)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("n", [0, 6])
@pytest.mark.parametrize("op", OPS)
def test_meta_tensors_agree_with_real_ones(op: str, n: int) -> None:
    """Shapes, dtypes and strides without data, through the operator and through the public function."""
    args = MAKERS[op](n)
    meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in args)
    real = results(public(op, args))
    for made in (results(raw(op)(*meta)), results(public(op, meta))):
        assert [t.device.type for t in made] == ["meta"] * len(real)
        assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in real]
        if n:  # strides of an empty tensor mean nothing
            assert [t.stride() for t in made] == [t.stride() for t in real]


def attend(q: Tensor, k: Tensor, v: Tensor, *metadata: Tensor) -> Any:
    return superposed_attention(q, k, v, **dict(zip([*METADATA, "lengths"], metadata, strict=True)))


COMPILED: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "top_eta": (lambda logits: top_eta(logits, 0.2), lambda n: top_eta_args(n)[:1]),
    "top_eta with rows": (lambda logits, rows: top_eta(logits, 0.2, rows=rows), lambda n: top_eta_args(n)[:2]),
    "top_eta with suppress": (
        lambda logits, suppress: top_eta(logits, 0.2, suppress=suppress),
        lambda n: (top_eta_args(n)[0], torch.tensor([3])),
    ),
    "superpose": (lambda *tensors: superpose(*tensors, mask_id=99), lambda n: superpose_args(n)[:5]),
    "superpose with capacity": (
        lambda *tensors: superpose(*tensors, mask_id=99, capacity=64),
        lambda n: superpose_args(n)[:5],
    ),
    "superposed_attention": (attend, lambda n: attention_args(n)[:11]),
    "check_consistency": (lambda *tensors: check_consistency(*tensors), lambda n: consistency_args(n)[:5]),
    "row_kl": (lambda now, before: row_kl(now, before), lambda n: (row_kl_args(n)[0], row_kl_args(n)[1][2:])),
    "row_kl with rows": (
        lambda now, before, rows, previous_rows, suppress: row_kl(
            now, before, rows=rows, previous_rows=previous_rows, suppress=suppress
        ),
        row_kl_args,
    ),
    "sample_rows": (
        lambda logits, *words: sample_rows(logits[1:], *words, temperature=0.8),
        lambda n: (sample_rows_args(n)[0], *sample_rows_args(n)[2:5]),
    ),
    "sample_rows with rows": (
        lambda logits, rows, *words: sample_rows(logits, *words, rows=rows, temperature=0.8, suppress=[7]),
        lambda n: sample_rows_args(n)[:5],
    ),
}


@pytest.mark.parametrize("name", list(COMPILED))
def test_compiles_as_one_graph_without_recompiling(name: str) -> None:
    """The public function, checks included, in one graph; the third length must not compile again."""
    function, make = COMPILED[name]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, stance in ((4, "default"), (7, "default"), (11, "fail_on_recompile")):
        args = make(n)
        with torch.compiler.set_stance(stance):
            got = compiled(*args)
        for x, y in zip(results(got), results(function(*args)), strict=True):
            assert torch.equal(x, y)


def test_dispatch_keys() -> None:
    """Each operator has an implementation for both kinds of device, known without a GPU and without triton."""
    for op in OPS:
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"leap::{op}", key), (op, key)
