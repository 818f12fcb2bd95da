# SPDX-License-Identifier: Apache-2.0
"""`model.generate(ids, custom_generate=leap_kernels.generate)` is `decode`, in transformers' terms."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import warnings

import pytest
import torch
from random_models import SPEC, random_llama
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
)

import leap_kernels
from leap_kernels import DecodeConfig, decode
from leap_kernels.errors import ConfigError, InputError, LeapError
from leap_kernels.strategies import STRATEGIES

OURS = {"custom_generate": leap_kernels.generate}


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer, tiny_prompts):
    """One of each task, padded on the left."""
    texts = [tiny_tokenizer.decode(ids[3], skip_special_tokens=True) for ids in tiny_prompts.values()]
    return dict(tiny_tokenizer(texts, padding=True, return_tensors="pt"))


@pytest.fixture
def model():
    model = random_llama(3, sharpness=6.0)
    model.leap_spec = SPEC
    return model


def test_a_ragged_batch_gives_what_decode_gives(tiny, prompts):
    assert not prompts["attention_mask"].all()
    for settings in ({}, {"strategy": "threshold", "threshold": 0.6}, {"kv_cache": "dual", "tau": 0.9}):
        sequences = tiny.generate(**prompts, **OURS, max_new_tokens=96, **settings)
        if "kv_cache" in settings:
            settings = {"cache": "dual", "tau": 0.9}
        out = decode(tiny, **prompts, max_new_tokens=96, **settings)
        assert int(out.new_tokens.max()) < 96
        assert torch.equal(sequences, out.sequences[:, : sequences.shape[1]])
        assert sequences.shape[1] == prompts["input_ids"].shape[1] + int(out.new_tokens.max())


def test_every_setting_of_decode_gets_through(model):
    """All options of all strategies are named in the signature: transformers refuses names that are not."""
    ids = torch.tensor([[5, 6]])
    taken = {"max_new_tokens", "temperature", "eos_token_id", "pad_token_id", "cache", "strategy"}
    shared = [f.name for f in dataclasses.fields(DecodeConfig) if f.name not in taken]
    assert len(shared) > 5
    given = DecodeConfig(block_length=3, suppress_tokens=(4,), mask_token_id=0, backend="reference", early_stop=False)
    options = {name: getattr(given, name) for name in shared}
    for name, rule in STRATEGIES.items():
        defaults = {field.name: getattr(rule(), field.name) for field in dataclasses.fields(rule)}
        sequences = model.generate(ids, **OURS, max_new_tokens=6, strategy=name, **options, **defaults)
        out = decode(model, ids, config=given, max_new_tokens=6, strategy=name)
        assert torch.equal(sequences, out.sequences)
        with pytest.raises(ValueError, match="not used by the model"):
            model.generate(ids, **OURS, max_new_tokens=6, strategy=name, tauu=0.3)
    with pytest.raises(ConfigError, match="unknown argument tau for strategy 'threshold'"):
        model.generate(ids, **OURS, max_new_tokens=6, strategy="threshold", tau=0.3)


def test_eos_and_pad_ids(model):
    """The spec's, unless the caller names others; several; none."""
    ids = torch.tensor([[5, 6, 7], [8, 9, 10], [3, 3, 3]])
    canvas = decode(model, ids, max_new_tokens=12, block_length=4, early_stop=False).generated
    options = {**OURS, "max_new_tokens": 12, "block_length": 4}

    def expected(eos, pad):
        out = decode(model, ids, max_new_tokens=12, block_length=4, eos_token_id=eos, pad_token_id=pad)
        return out.sequences[:, : 3 + int(out.new_tokens.max())]

    assert torch.equal(model.generate(ids, **options), expected(None, None))
    several = [int(canvas[0, -1]), int(canvas[1, 5])]  # ends of different lengths
    pad = next(i for i in range(3, 23) if i not in canvas)
    found = model.generate(ids, **options, eos_token_id=several, pad_token_id=pad)
    assert torch.equal(found, expected(several, pad))
    assert found.shape[1] > 4
    assert pad in found
    assert 1 not in several
    model.generation_config.eos_token_id = several  # the model's own: its spec says more
    assert torch.equal(model.generate(ids, **options), expected(None, None))
    unstopped = model.generate(ids, **options, generation_config=GenerationConfig(eos_token_id=[22]), early_stop=False)
    assert torch.equal(unstopped[:, 3:], canvas)


def test_lengths(model):
    ids = torch.tensor([[5, 6, 7]])
    options = {**OURS, "early_stop": False}
    assert model.generate(ids, **options, max_new_tokens=5).shape == (1, 8)
    assert model.generate(ids, **options, max_length=9).shape == (1, 9)
    with pytest.warns(UserWarning, match="max_new_tokens"):
        assert model.generate(ids, **options).shape == (1, 23)  # transformers' default
    assert model.generate(ids, **options, generation_config=GenerationConfig(max_new_tokens=4)).shape == (1, 7)


def test_sampling_follows_torchs_generator(model):
    """Several sequences of one prompt differ; the same seed repeats them; temperature is transformers'."""
    ids = torch.tensor([[5, 6, 7]])
    options = {**OURS, "max_new_tokens": 12, "do_sample": True, "top_k": 0, "early_stop": False}

    def draw(state, **more):
        torch.manual_seed(state)
        return model.generate(ids, **{**options, "temperature": 2.0, "num_return_sequences": 4, **more})

    first = draw(0)
    assert len({tuple(row) for row in first.tolist()}) == 4
    assert torch.equal(first, draw(0))
    assert not torch.equal(first, draw(1))
    assert torch.equal(draw(0, seed=7), draw(1, seed=7))
    seeded = decode(model, ids, max_new_tokens=12, early_stop=False, temperature=2.0, seed=7).sequences
    assert torch.equal(draw(0, seed=7, num_return_sequences=1), seeded)
    cold = draw(0, temperature=1e-4)
    assert torch.equal(cold, decode(model, ids, max_new_tokens=12, early_stop=False).sequences.expand(4, -1))


@pytest.mark.parametrize(("limit", "off"), [({"top_k": 3}, {}), ({"top_p": 0.6}, {"top_k": 0})])
def test_top_k_and_top_p_are_decodes(model, limit, off):
    """transformers' own default, the 50 likeliest, is more than this vocabulary has."""
    ids, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 12, "early_stop": False, "temperature": 3.0, "seed": 4}
    drawn = model.generate(ids, **OURS, **options, do_sample=True, **limit, **off)
    assert torch.equal(drawn, decode(model, ids, **options, **limit).sequences)
    assert not torch.equal(drawn, decode(model, ids, **options).sequences)
    unlimited = model.generate(ids, **OURS, **options, do_sample=True)
    assert torch.equal(unlimited, decode(model, ids, **options).sequences)


def test_a_dictionary_is_returned_on_request(model):
    ids = torch.tensor([[5, 6, 7]])
    result = model.generate(ids, **OURS, max_new_tokens=9, return_dict_in_generate=True)
    out = decode(model, ids, max_new_tokens=9)
    assert torch.equal(result.sequences, model.generate(ids, **OURS, max_new_tokens=9))
    assert torch.equal(result["nfe"], out.nfe)
    assert torch.equal(result.token_forwards, out.token_forwards)


class Log:
    """What a streamer is given."""

    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, tokens):
        self.puts.append(tokens.flatten().tolist())

    @property
    def tokens(self):
        return [token for put in self.puts for token in put]

    def end(self):
        self.ended += 1


def test_a_streamer_is_decodes(model):
    """The prompt, then tokens while others are still masked; one prompt only."""
    ids, log, own, shown = torch.tensor([[5, 6, 7]]), Log(), Log(), []
    hook = model.model.register_forward_hook(lambda *args: shown.append(len(log.tokens)))
    options = {"max_new_tokens": 12, "block_length": 4, "early_stop": False}
    sequences = model.generate(ids, **OURS, **options, stream_to=log)
    hook.remove()
    decode(model, ids, **options, streamer=own)
    assert log.puts == own.puts
    assert log.puts[0] == [5, 6, 7]
    assert log.tokens == sequences[0].tolist()
    assert log.ended == 1
    assert shown[0] == 3
    assert shown[-1] > 3
    with pytest.raises(ConfigError, match="one prompt, got a batch of 2"):
        model.generate(ids.repeat(2, 1), **OURS, **options, stream_to=log)


def test_streaming_ends_with_the_eos(tiny, tiny_tokenizer, tiny_prompts):
    for prompts in tiny_prompts.values():
        ids = torch.tensor([prompts[0]])
        log = Log()
        sequences = tiny.generate(ids, **OURS, max_new_tokens=96, block_length=16, stream_to=log)
        assert log.tokens == sequences[0].tolist()
        assert log.puts[-1][-1] == 2
        assert len(log.puts) > 2
        streamer = TextIteratorStreamer(tiny_tokenizer, skip_prompt=True, skip_special_tokens=True)
        tiny.generate(ids, **OURS, max_new_tokens=96, block_length=16, stream_to=streamer)
        text = tiny_tokenizer.decode(sequences[0, ids.shape[1] :], skip_special_tokens=True)
        assert "".join(streamer) == text


@pytest.mark.parametrize(
    "options",
    [{"strategy": "dream"}, {"strategy": "wino", "threshold": 0.1}, {"strategy": "lopa", "skip_threshold": 0.3}],
)
def test_streaming_of_strategies_that_go_back_or_ahead(model, options):
    """No blocks, masks again, several blocks at once: what is shown is what stays."""
    for start in range(3, 9):
        log, ids = Log(), torch.arange(start, start + 3)[None]
        length = {"max_new_tokens": 24} | ({} if options["strategy"] == "dream" else {"block_length": 4})
        sequences = model.generate(ids, **OURS, **length, **options, early_stop=False, stream_to=log)
        assert log.tokens == sequences[0].tolist()


def test_a_streamer_that_transformers_hands_over_gets_no_second_prompt(model):
    """As releases do that pass `streamer` on."""
    log, ids = Log(), torch.tensor([[5, 6, 7]])
    seen = {}

    def grab(model, input_ids, **given):
        seen.update(given)
        return input_ids

    model.generate(ids, custom_generate=grab, max_new_tokens=8)
    sequences = leap_kernels.generate(model, ids, **seen, streamer=log, early_stop=False, block_length=4)
    assert log.tokens == sequences[0, 3:].tolist()
    assert log.ended == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"infill": True}, ConfigError, "Use leap_kernels.decode.model, ids, infill=True"),
        ({"num_beams": 2}, ConfigError, "beam search has no counterpart"),
        ({"do_sample": True, "top_k": 5, "top_p": 0.9}, ConfigError, "top_k=5 together with top_p=0.9.*top_k=0"),
        ({"do_sample": True, "top_k": 0, "min_p": 0.1}, ConfigError, "MinPLogitsWarper cannot be applied"),
        ({"repetition_penalty": 1.2}, ConfigError, "RepetitionPenaltyLogitsProcessor cannot be applied"),
        ({"min_new_tokens": 3}, ConfigError, "cannot be honoured. suppress_tokens"),
        ({"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])}, ConfigError, "cannot be applied"),
        ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1.0)])}, ConfigError, "MaxTimeCriteria cannot"),
        ({"max_time": 3.0}, ConfigError, "MaxTimeCriteria cannot be honoured"),
        ({"prompt_lookup_num_tokens": 3}, ConfigError, "assisted generation has no counterpart"),
        ({"output_scores": True, "return_dict_in_generate": True}, ConfigError, "output_scores=True is not supported"),
        ({"output_hidden_states": True}, ConfigError, "output_hidden_states"),
        ({"cache_implementation": "static"}, ConfigError, "cache_implementation='static'.*kv_cache=\"prefix\""),
        ({"position_ids": torch.tensor([[1, 2, 3]])}, InputError, "position_ids differ from 0, 1, 2"),
        ({"max_new_tokens": 400}, InputError, "positions, the model has 128"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else None,
)
def test_what_cannot_be_honoured_is_refused_before_the_first_forward(model, options, error, message):
    calls = []
    model.model.register_forward_pre_hook(lambda *args: calls.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=message):
            model.generate(torch.tensor([[5, 6, 7]]), **{**OURS, "max_new_tokens": 6, **options})
    assert not calls


def test_a_filled_cache_is_refused(model):
    ids = torch.tensor([[5, 6, 7]])
    cache = DynamicCache()
    model(ids[:, :2], past_key_values=cache, use_cache=True)
    with pytest.raises(InputError, match="holds keys and values already"):
        model.generate(ids, **OURS, max_new_tokens=6, past_key_values=cache)


def test_called_on_its_own_it_says_how_to_call_it(model):
    with pytest.raises(ConfigError, match="custom_generate=leap_kernels"):
        leap_kernels.generate(model, torch.tensor([[5]]))
    assert issubclass(ConfigError, LeapError)


def test_documented_example():
    result = doctest.testmod(importlib.import_module("leap_kernels.generation"))
    assert result.attempted >= 3
    assert result.failed == 0
