# SPDX-License-Identifier: Apache-2.0
"""What the public functions refuse: the error's class, and a message that names the argument, what came, and what
was expected. Each case changes one argument of a call that works."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from leap_kernels.errors import BackendError, ConfigError, InputError, LeapError
from leap_kernels.ops import (
    backends,
    check_consistency,
    max_candidates,
    row_kl,
    sample_rows,
    superpose,
    superposed_attention,
    top_eta,
)

NAN, INF = float("nan"), float("inf")


def int32(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def int64(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def valid(function: Callable[..., Any]) -> dict[str, Any]:
    """Arguments that work: B = 2, L = 7, T = 3, K = 2; N = 4, V = 9; H = 4, Hkv = 2, Q = 5, S = 6, D = 16."""
    if function is top_eta:
        return {"logits": torch.zeros(4, 9), "eta": 0.2, "rows": torch.tensor([0, 3]), "suppress": torch.tensor([8])}
    if function is row_kl:
        rows = {"rows": torch.tensor([0, 3]), "previous_rows": torch.tensor([5, 0])}
        return {"logits": torch.zeros(4, 9), "previous": torch.zeros(6, 9), **rows, "suppress": torch.tensor([8])}
    if function is sample_rows:
        words = {"seeds": int64(2), "steps": int64(2), "positions": int64(2)}
        rows = {"rows": torch.tensor([0, 3]), "suppress": torch.tensor([8])}
        return {"logits": torch.zeros(4, 9), **words, "temperature": 0.7, **rows}
    if function is superpose:
        return {
            "ids": int64(2, 7),
            "pos": int32(2, 7),
            "targets": torch.tensor([[0, 1, 2], [3, 4, -1]], dtype=torch.int32),
            "cand_ids": int64(2, 3, 2),
            "counts": int32(2, 3) + 1,
            "mask_id": 5,
        }
    if function is superposed_attention:
        queries = {name: int32(2, 5) for name in ("q_pos", "q_hide", "q_kind", "q_slot")}
        keys = {name: int32(2, 6) for name in ("k_pos", "k_kind", "k_hide")}
        q, k, v = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, 6, 16), torch.zeros(2, 2, 6, 16)
        return {"q": q, "k": k, "v": v, **queries, **keys, "lengths": int32(2)}
    return {
        "targets": int32(2, 3),
        "top1": int64(2, 3),
        "prob1": torch.zeros(2, 3),
        "copy_top1": int64(2, 3),
        "copy_prob1": torch.zeros(2, 3),
        "base_accept": torch.zeros(2, 3, dtype=torch.bool),
    }


FUNCTIONS = (top_eta, superpose, superposed_attention, check_consistency, row_kl, sample_rows)
OVER_LOGITS = (top_eta, row_kl, sample_rows)
TENSORS = [(f, name) for f in FUNCTIONS for name, value in valid(f).items() if isinstance(value, Tensor)]
OPTIONAL = ("rows", "previous_rows", "suppress", "lengths", "base_accept")


def label(value: object) -> str:
    if isinstance(value, dict):
        return "-".join(value)
    return value.__name__ if callable(value) else str(value)


def refused(function: Callable[..., Any], error: type[LeapError], *fragments: str, **changed: Any) -> str:
    """Call with `changed`; the error must be exactly of the class `error` and say everything in `fragments`."""
    with pytest.raises(LeapError) as caught:
        function(**(valid(function) | changed))
    assert type(caught.value) is error
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is not in {message!r}"
    return message


@pytest.mark.parametrize("function", FUNCTIONS, ids=label)
def test_the_unchanged_call_works(function: Callable[..., Any]) -> None:
    """Without this every other test here could pass for the wrong reason."""
    out = function(**valid(function))
    assert all(t.shape[0] == 2 for t in ([out] if isinstance(out, Tensor) else out))


def test_errors_are_also_what_python_expects() -> None:
    """`except ValueError` and `except RuntimeError` catch what they would in any other library."""
    for error, parent in ((InputError, ValueError), (ConfigError, ValueError), (BackendError, RuntimeError)):
        assert issubclass(error, LeapError)
        assert issubclass(error, parent)


@pytest.mark.parametrize(("function", "name"), [t for t in TENSORS if t[1] != "suppress"], ids=label)
def test_not_a_tensor(function: Callable[..., Any], name: str) -> None:
    """Lists, arrays, numbers, and None where a tensor is required (`suppress` may be a list, see below)."""
    wrong: list[Any] = [3.5, "text", [[1, 2]], valid(function)[name].numpy()]
    if name not in OPTIONAL:
        wrong.append(None)
    for value in wrong:
        refused(function, InputError, f"{name} must be a torch.Tensor", f"got {type(value).__name__}", **{name: value})


@pytest.mark.parametrize(("function", "name"), TENSORS, ids=label)
def test_dtypes(function: Callable[..., Any], name: str) -> None:
    """Everything outside the documented dtypes, bool and complex included; the message lists what is allowed."""
    value = valid(function)[name]
    allowed = {value.dtype}
    if name in ("logits", "previous", "q", "k", "v"):
        allowed = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    if name in ("rows", "previous_rows", "seeds", "steps", "positions"):
        allowed = {torch.int32, torch.int64}
    every = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16)
    every += (torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn)
    tried = [dtype for dtype in every if dtype not in allowed]
    assert len(tried) >= 8
    for dtype in tried:
        message = refused(function, InputError, name, str(dtype).removeprefix("torch."), **{name: value.to(dtype)})
        for good in allowed:
            assert str(good).removeprefix("torch.") in message


def test_q_k_and_v_must_share_a_dtype() -> None:
    """No silent upcast of the cache."""
    for name in ("q", "k", "v"):
        value = valid(superposed_attention)[name].half()
        refused(superposed_attention, InputError, "q, k and v", "float16", "float32", **{name: value})


@pytest.mark.parametrize(("function", "name"), TENSORS, ids=label)
def test_number_of_dimensions(function: Callable[..., Any], name: str) -> None:
    """One dimension more and one fewer; the message names the shape that came."""
    value = valid(function)[name]
    for wrong in (value[None], value[0]):
        refused(function, InputError, f"{name}.shape must be (", f"got {tuple(wrong.shape)}", **{name: wrong})


@pytest.mark.parametrize(
    ("function", "name", "dim", "expected"),
    [
        (superpose, "pos", 0, "(2, 7)"),
        (superpose, "pos", 1, "(2, 7)"),
        (superpose, "targets", 0, "(2, T)"),
        (superpose, "cand_ids", 0, "(2, 3, K)"),
        (superpose, "cand_ids", 1, "(2, 3, K)"),
        (superpose, "counts", 0, "(2, 3)"),
        (superpose, "counts", 1, "(2, 3)"),
        (superposed_attention, "k", 0, "(2, Hkv, S, 16)"),
        (superposed_attention, "k", 3, "(2, Hkv, S, 16)"),
        (superposed_attention, "v", 0, "(2, 2, 6, 16)"),
        (superposed_attention, "v", 1, "(2, 2, 6, 16)"),
        (superposed_attention, "v", 2, "(2, 2, 6, 16)"),
        (superposed_attention, "v", 3, "(2, 2, 6, 16)"),
        *[(superposed_attention, f"q_{n}", dim, "(2, 5)") for n in ("pos", "hide", "kind", "slot") for dim in (0, 1)],
        *[(superposed_attention, name, dim, "(2, 6)") for name in ("k_pos", "k_kind", "k_hide") for dim in (0, 1)],
        (superposed_attention, "lengths", 0, "(2,)"),
        *[
            (check_consistency, name, dim, "(2, 3)")
            for name in ("top1", "prob1", "copy_top1", "copy_prob1", "base_accept")
            for dim in (0, 1)
        ],
        (row_kl, "previous", 1, "(M, 9)"),
        (row_kl, "previous_rows", 0, "(2,)"),
        *[(sample_rows, name, 0, "(2,)") for name in ("seeds", "steps", "positions")],
    ],
    ids=label,
)
def test_sizes_that_contradict_each_other(function: Callable[..., Any], name: str, dim: int, expected: str) -> None:
    """One size wrong, by one more and down to one (which broadcasting would swallow)."""
    value = valid(function)[name]
    for n in (value.shape[dim] + 1, 1):
        shape = list(value.shape)
        shape[dim] = n
        wrong = torch.zeros(shape, dtype=value.dtype)
        refused(function, InputError, f"{name}.shape must be {expected}, got {tuple(shape)}", **{name: wrong})


@pytest.mark.parametrize("function", OVER_LOGITS, ids=label)
def test_no_vocabulary(function: Callable[..., Any]) -> None:
    """V = 0 has no argmax and no distribution."""
    refused(function, InputError, "logits.shape", "V >= 1", "(4, 0)", logits=torch.zeros(4, 0), suppress=None)


def test_previous_of_other_rows_needs_an_index() -> None:
    """Without `previous_rows` a row stands at the same index in both, which different numbers of rows contradict."""
    fragments = ("previous.shape must be (4, 9) where previous_rows is None", "got (6, 9)")
    refused(row_kl, InputError, *fragments, previous_rows=None)
    refused(row_kl, InputError, *fragments, rows=None, previous_rows=None)
    row_kl(**(valid(row_kl) | {"previous": torch.zeros(4, 9), "previous_rows": None}))


@pytest.mark.parametrize("temperature", [-1e-9, -1.0, 1e6 + 1, NAN, INF, -INF])
def test_temperature_range(temperature: float) -> None:
    """Outside [0, 1e6], NaN included; both ends belong to it."""
    refused(sample_rows, ConfigError, "temperature must be in [0, 1e6]", f"got {temperature}", temperature=temperature)
    for end in (0, 0.0, 1e6):
        sample_rows(**(valid(sample_rows) | {"temperature": end}))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (2, 4), (4, 0)])
def test_heads_must_divide(heads: int, kv_heads: int) -> None:
    """Grouped heads: H a multiple of Hkv, at least one key head."""
    k = torch.zeros(2, kv_heads, 6, 16)
    q = torch.zeros(2, heads, 5, 16)
    fragments = ("q's heads", "multiple of k's heads", f"{heads} and {kv_heads}")
    refused(superposed_attention, InputError, *fragments, q=q, k=k, v=k)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        *((function, "logits") for function in OVER_LOGITS),
        (row_kl, "previous"),
        *((superposed_attention, name) for name in ("q", "k", "v")),
    ],
    ids=label,
)
def test_last_stride(function: Callable[..., Any], name: str) -> None:
    """kernels.md section 13: the message of the table, word for word; nothing is copied in silence."""
    value = valid(function)[name]
    transposed = value.mT.contiguous().mT
    spaced = torch.zeros(*value.shape[:-1], 2 * value.shape[-1])[..., ::2]
    for wrong in (transposed, spaced):
        refused(
            function,
            InputError,
            f"{name} must have stride 1 in the last dimension, got stride {tuple(wrong.stride())}. "
            "Call .contiguous() or pass the untransposed tensor.",
            **{name: wrong},
        )


def test_last_stride_of_one_element_does_not_matter() -> None:
    """A single column has no stride to complain about."""
    one = torch.zeros(4, 6)[:, ::6]
    assert one.stride() == (6, 6)
    assert top_eta(one, 0.2).top1.tolist() == [0] * 4


@pytest.mark.parametrize(("function", "name"), TENSORS, ids=label)
def test_two_devices(function: Callable[..., Any], name: str) -> None:
    """One tensor elsewhere: the message lists every tensor's device, as kernels.md section 13 has it."""
    arguments = valid(function)
    message = refused(
        function,
        InputError,
        "all tensors must be on one device: ",
        f"{name} meta",
        **{name: arguments[name].to("meta")},
    )
    for other, value in arguments.items():
        if isinstance(value, Tensor) and other != name:
            assert f"{other} cpu" in message


@pytest.mark.parametrize(
    ("function", "name"),
    [(f, name) for f, name in TENSORS if valid(f)[name].is_floating_point()],
    ids=label,
)
def test_gradients(function: Callable[..., Any], name: str) -> None:
    """Ops have no backward: an input that requires grad is refused, unless gradients are off."""
    leaf = valid(function)[name].requires_grad_()
    fix = "leap ops are inference-only; use torch.inference_mode() or detach the inputs."
    for wrong in (leaf, leaf * 2):
        refused(function, InputError, name, "requires grad", fix, **{name: wrong})
    with torch.no_grad():
        function(**(valid(function) | {name: leaf}))
    function(**(valid(function) | {name: leaf.detach()}))


@pytest.mark.parametrize("eta", [0.0, -0.2, 1 / 64 - 1e-9, 1 + 1e-9, 2.0, NAN, INF, -INF])
def test_eta_range(eta: float) -> None:
    """Outside [1/64, 1], NaN included; both ends belong to it."""
    refused(top_eta, ConfigError, "eta must be in [1/64, 1]", f"got {eta}", eta=eta)
    for end in (1 / 64, 1.0):
        top_eta(**(valid(top_eta) | {"eta": end}))


@pytest.mark.parametrize("name", ["phi", "tau", "kappa"])
@pytest.mark.parametrize("value", [-1e-9, -0.5, 1 + 1e-9, 2.0, NAN, INF, -INF])
def test_threshold_ranges(name: str, value: float) -> None:
    """Outside [0, 1], NaN included; both ends belong to it."""
    refused(check_consistency, ConfigError, f"{name} must be in [0, 1], got {value}", **{name: value})
    for end in (0.0, 1.0):
        check_consistency(**(valid(check_consistency) | {name: end}))


@pytest.mark.parametrize("rows", [[4, 0], [-1, 0], [0, 99], [1, -4]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("function", OVER_LOGITS, ids=label)
def test_rows_out_of_range(function: Callable[..., Any], rows: list[int], dtype: torch.dtype) -> None:
    """Negative indices do not count from the end."""
    got = f"values from {min(rows)} to {max(rows)}"
    refused(function, InputError, "rows must be in [0, 4)", got, rows=torch.tensor(rows, dtype=dtype))


@pytest.mark.parametrize("rows", [[6, 0], [-1, 0]])
def test_previous_rows_out_of_range(rows: list[int]) -> None:
    """They count the rows of `previous`, which are more here."""
    got = f"values from {min(rows)} to {max(rows)}"
    refused(row_kl, InputError, "previous_rows must be in [0, 6)", got, previous_rows=torch.tensor(rows))


@pytest.mark.parametrize("suppress", [[9], [-1], [0, 1000]])
@pytest.mark.parametrize("function", OVER_LOGITS, ids=label)
def test_suppress_out_of_range(function: Callable[..., Any], suppress: list[int]) -> None:
    """A mask id of another tokenizer would otherwise suppress nothing, or the wrong token."""
    got = f"values from {min(suppress)} to {max(suppress)}"
    for form in (suppress, tuple(suppress), torch.tensor(suppress)):
        refused(function, InputError, "suppress must be in [0, 9)", got, suppress=form)


@pytest.mark.parametrize("function", OVER_LOGITS, ids=label)
def test_rows_of_an_empty_batch(function: Callable[..., Any]) -> None:
    """No logits have no row 0."""
    refused(function, InputError, "rows must be in [0, 0)", logits=torch.zeros(0, 9), rows=torch.tensor([0, 0]))


@pytest.mark.parametrize("shift", [2, -1, 0.5, None, "1"])
def test_shift(shift: object) -> None:
    """Only models with and without a shift of one row exist."""
    refused(superpose, InputError, f"shift must be 0 or 1, got {shift!r}", shift=shift)


@pytest.mark.parametrize("capacity", [8, 0, -1])
def test_capacity_too_small(capacity: int) -> None:
    """T * (1 + K) rows can come up; whether they do is known on the device only."""
    refused(superpose, InputError, "capacity must be at least T * (1 + K) = 9", f"got {capacity}", capacity=capacity)
    assert superpose(**(valid(superpose) | {"capacity": 9})).token.shape == (2, 9)


@pytest.mark.parametrize(
    ("name", "value", "least"), [("block_causal", -1, 0), ("window", -3, 0), ("splits", 0, 1), ("splits", -2, 1)]
)
def test_negative_sizes(name: str, value: int, least: int) -> None:
    """Sizes of blocks, windows and parts."""
    refused(superposed_attention, InputError, f"{name} must be at least {least}, got {value}", **{name: value})


@pytest.mark.parametrize("function", FUNCTIONS, ids=label)
def test_unknown_backend(function: Callable[..., Any]) -> None:
    """A misspelt backend is a wrong setting; the message lists the right ones."""
    known = "backend must be one of auto, reference, triton, cuda"
    for name in ("Triton", "cpu", "", None, 1):
        refused(function, ConfigError, known, f"got {name!r}", backend=name)


@pytest.mark.parametrize("function", FUNCTIONS, ids=label)
def test_cuda_backend_on_a_cpu(function: Callable[..., Any]) -> None:
    """The optional extension is no silent alias of anything."""
    refused(function, BackendError, 'backend="cuda"', "optional CUDA extension", 'backend="auto"', backend="cuda")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: Triton runs on CPU tensors")
@pytest.mark.parametrize("function", FUNCTIONS, ids=label)
def test_triton_on_a_cpu(function: Callable[..., Any]) -> None:
    """A backend asked for by name never falls back: cause and fix instead (kernels.md section 13, "no GPU")."""
    need = 'backend="triton" needs a CUDA GPU with compute capability >= 8.0'
    message = refused(function, BackendError, need, backend="triton")
    assert "CPU" in message or "not installed" in message
    if "CPU" in message:
        assert f"torch.cuda.is_available() is {torch.cuda.is_available()}" in message
    assert message.endswith('Use backend="reference" or "auto".')


@pytest.mark.parametrize(
    ("function", "changed", "cause"),
    [
        (top_eta, {"logits": torch.zeros(4, 9, dtype=torch.float64)}, "float64"),
        (top_eta, {"logits": torch.zeros(4, 90), "eta": 1 / 20}, "at most 16"),
        (row_kl, {"logits": torch.zeros(4, 9, dtype=torch.float64)}, "float64"),
        (row_kl, {"previous": torch.zeros(6, 9, dtype=torch.float64)}, "float64"),
        (sample_rows, {"logits": torch.zeros(4, 9, dtype=torch.float64)}, "float64"),
        (superposed_attention, {n: torch.zeros(2, 2, 5 + (n != "q"), 9) for n in ("q", "k", "v")}, "head sizes"),
        (
            superposed_attention,
            {n: torch.zeros(2, 2, 5 + (n != "q"), 16, dtype=torch.float64) for n in ("q", "k", "v")},
            "float64",
        ),
    ],
    ids=label,
)
def test_triton_says_what_its_kernels_cannot_do(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], changed: dict, cause: str
) -> None:
    """Where Triton could run, a limit of the kernel is named as such; "auto" takes the reference for the same input."""
    monkeypatch.setattr("leap_kernels.ops.backends.why_no_triton", lambda device: "")
    refused(function, BackendError, 'backend="triton"', cause, backend="triton", **changed)
    function(**(valid(function) | changed))


@pytest.mark.parametrize(("why", "limit"), [("no GPU of that kind", ""), ("", "the kernel takes no such thing")])
def test_auto_falls_back_on_a_gpu_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str, limit: str
) -> None:
    """Only "auto" may fall back, and never in silence; a hundred calls are one line in the log."""
    monkeypatch.setattr(backends, "why_no_triton", lambda device: why)
    gpu = torch.device("cuda", 0)
    with caplog.at_level("WARNING", logger="leap_kernels"):
        assert {backends.choose("auto", gpu, limit=limit) for _ in range(100)} == {"reference"}
    assert [why + limit in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(BackendError, match=why + limit):
        backends.choose("triton", gpu, limit=limit)
    monkeypatch.setattr(backends, "why_no_triton", lambda device: "")
    assert backends.choose("auto", gpu) == "triton"


@pytest.mark.parametrize("targets", [[0, 1, 7], [0, 1, 2**31 - 1]])
def test_targets_beyond_the_canvas(targets: list[int]) -> None:
    """A column that the canvas does not have."""
    wrong = torch.tensor([targets, [0, 1, 2]], dtype=torch.int32)
    refused(superpose, InputError, "targets", str(targets[-1]), "7", targets=wrong)


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (top_eta, "eta", "0.2"),
        (top_eta, "eta", None),
        (top_eta, "eta", 0.2j),
        *[(function, "suppress", wrong) for function in OVER_LOGITS for wrong in (3, "ab", [1.7], [2**70])],
        (sample_rows, "temperature", "0.7"),
        (sample_rows, "temperature", None),
        (sample_rows, "temperature", True),
        (superpose, "mask_id", None),
        (superpose, "mask_id", 1.5),
        (superpose, "mask_id", "[MASK]"),
        (superpose, "mask_id", 2**70),
        (superpose, "capacity", 12.5),
        (superpose, "capacity", "12"),
        (superpose, "shift", 1.0),
        (superposed_attention, "scale", "a"),
        (superposed_attention, "block_causal", "a"),
        (superposed_attention, "block_causal", 4.5),
        (superposed_attention, "window", 1.5),
        (superposed_attention, "splits", 1.5),
        (superposed_attention, "switches", 15),
        (superposed_attention, "switches", {"copy_sees_original": False}),
        (check_consistency, "phi", "0.9"),
        (check_consistency, "tau", None),
        (check_consistency, "kappa", 0.5j),
        (check_consistency, "keep_confident", "no"),
    ],
    ids=label,
)
def test_scalars_of_a_wrong_type(function: Callable[..., Any], name: str, value: object) -> None:
    """Refused by name, not by a TypeError from the middle of a comparison or a message of the dispatcher."""
    with pytest.raises((InputError, ConfigError), match=name):
        function(**(valid(function) | {name: value}))


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (superpose, "mask_id", -4),
        (superposed_attention, "scale", NAN),
        (superposed_attention, "scale", INF),
        (superposed_attention, "switches", {}),
        (check_consistency, "keep_confident", None),
    ],
    ids=label,
)
def test_nonsense_is_not_accepted_in_silence(function: Callable[..., Any], name: str, value: object) -> None:
    """Values no caller can mean: they would make padding rows, outputs or decisions that look like results."""
    with pytest.raises((InputError, ConfigError), match=name):
        function(**(valid(function) | {name: value}))


def test_head_size_zero() -> None:
    """D = 0 has no default scale."""
    empty = {name: torch.zeros(2, 2, 5 + (name != "q"), 0) for name in ("q", "k", "v")}
    with pytest.raises(InputError, match="q"):
        superposed_attention(**(valid(superposed_attention) | empty))


@pytest.mark.parametrize(("eta", "vocab"), [(0.0, 9), (-1.0, 9), (NAN, 9), (2.0, 9), (0.2, 0), (0.2, -3)])
def test_max_candidates_refuses_what_top_eta_refuses(eta: float, vocab: int) -> None:
    """Public on its own, so it says what is wrong instead of dividing by zero or returning a negative K."""
    with pytest.raises((InputError, ConfigError), match="eta" if vocab > 0 else "vocab"):
        max_candidates(eta, vocab)
