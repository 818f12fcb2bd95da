# SPDX-License-Identifier: Apache-2.0
"""A whole decode with every op on its Triton kernel gives the reference's tokens."""

from __future__ import annotations

import importlib

import pytest
import torch
from random_models import random_llama

from leap_kernels import ModelSpec, decode
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


@pytest.mark.parametrize(
    ("cache", "shift", "block_causal", "options"),
    [
        ("none", 1, 0, {"temperature": 0.7, "top_k": 5}),
        ("dual", 0, 0, {"cache_refresh": 2}),
        ("delayed", 1, 0, {"candidates_see_candidates": False}),
        ("block", 1, 4, {"copies_see_copies": False, "keep_confident": False}),
    ],
)
def test_ragged_decodes_on_kernels_equal_the_reference(cache, shift, block_causal, options):
    """Every cache, shifted and block-causal models, ragged prompts and lengths: all integers of the result."""
    spec = ModelSpec(mask_token_id=0, eos_token_ids=(1,), vocab_size=23, shift=shift, block_causal_length=block_causal)
    model = random_llama(4, hidden=64, layers=1, dtype=torch.float32, sharpness=6.0)  # heads of 16
    # No empty prompt: a canvas of masks alone has the same logits everywhere, and rounding would rank its positions.
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([4]), torch.tensor([8, 9, 10, 11, 12])]
    settings = {"spec": spec, "cache": cache, "max_new_tokens": [4, 6, 2], "block_length": 4, "seed": [1, 2, 3]}
    if options.get("strategy", "leap") == "leap":
        settings |= {"eta": 0.1, "tau": 0.3}
    kernels, reference = (
        decode(model, prompts, backend=name, **settings, **options) for name in ("triton", "reference")
    )
    assert torch.equal(kernels.sequences, reference.sequences)
    for name in ("nfe", "token_forwards", "new_tokens"):
        assert torch.equal(getattr(kernels, name), getattr(reference, name))
    for name in ("step", "reason"):
        assert torch.equal(getattr(kernels.history, name), getattr(reference.history, name))
