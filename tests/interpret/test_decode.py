# SPDX-License-Identifier: Apache-2.0
"""A whole decode with every op on its Triton kernel gives the reference's tokens."""

from __future__ import annotations

import importlib

import pytest
import torch

from leap_kernels import decode
from leap_kernels.ops import backends

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize(("strategy", "temperature"), [("leap", 0), ("threshold", 0), ("threshold", 1.0)])
def test_short_decode_on_kernels_equals_the_reference(tiny, tiny_prompts, strategy, temperature, monkeypatch):
    """Block 8, 8 new tokens, two prompts of different lengths in one batch."""
    by_length = {len(p): p for group in tiny_prompts.values() for p in group}
    prompts = [torch.tensor(by_length[n]) for n in sorted(by_length)[:2]]  # short ones: the interpreter is slow
    options = {"max_new_tokens": 8, "block_length": 8, "strategy": strategy, "early_stop": False}
    options |= {"temperature": temperature, "seed": 3}
    if strategy == "leap":
        options |= {"eta": 0.1}
    reference = decode(tiny, prompts, backend="reference", **options)

    ran = []
    for folder in ("candidates", "superposition", "attention", "consistency", "sampling"):
        kernel = importlib.import_module(f"leap_kernels.ops.{folder}.kernel")

        def spy(*args, _launch=kernel.launch, _folder=folder):
            ran.append(_folder)
            return _launch(*args)

        monkeypatch.setattr(kernel, "launch", spy)
    kernels = decode(tiny, prompts, backend="triton", **options)

    assert backends.INTERPRETED
    expected = {"candidates", "attention", "consistency"} | ({"superposition"} if strategy == "leap" else set())
    expected |= {"sampling"} if temperature else set()
    assert set(ran) == expected
    assert torch.equal(kernels.sequences, reference.sequences)
    assert torch.equal(kernels.nfe, reference.nfe)
    assert torch.equal(kernels.history.step, reference.history.step)
    assert torch.equal(kernels.history.reason, reference.history.reason)
    assert torch.equal(kernels.token_forwards, reference.token_forwards)
