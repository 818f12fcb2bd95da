# SPDX-License-Identifier: Apache-2.0
"""Streaming: what was put is the output, nothing that was put changes, and the stream is always closed."""

from __future__ import annotations

import pytest
import torch
from random_models import SPEC, random_llama

import leap_kernels
from leap_kernels import Strategy, decode
from leap_kernels.errors import BadLogitsError, ConfigError, InputError, LeapError
from leap_kernels.strategies import STRATEGIES, Decision

PROMPT = torch.tensor([5, 6, 7])


class Recorder:
    """What transformers' streamers are: put and end, and here the order in which they were called."""

    def __init__(self) -> None:
        self.prompt: list | None = None
        self.chunks: list[list[int]] = []
        self.ended = 0
        self.calls: list[str] = []

    def put(self, ids: torch.Tensor) -> None:
        assert not self.ended
        assert ids.device.type == "cpu"
        assert ids.dtype == torch.int64
        self.calls.append("put")
        if self.prompt is None:
            self.prompt = ids.tolist()
        else:
            assert ids.dim() == 1
            self.chunks.append(ids.tolist())

    def end(self) -> None:
        self.calls.append("end")
        self.ended += 1

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_put_is_the_output(strategy):
    ends = set()
    for seed in range(6):
        options = {"spec": SPEC, "strategy": strategy, "max_new_tokens": 17, "block_length": 6}
        for early_stop in (True, False):
            got = Recorder()
            out = decode(random_llama(seed), PROMPT, streamer=got, early_stop=early_stop, **options)
            plain = decode(random_llama(seed), PROMPT, early_stop=early_stop, **options)
            assert torch.equal(out.sequences, plain.sequences)
            assert got.prompt == [PROMPT.tolist()]
            assert got.tokens == out.generated[0, : out.new_tokens[0] if early_stop else None].tolist()
            assert all(got.chunks)
            assert got.calls == ["put"] * (1 + len(got.chunks)) + ["end"]
            ends.add(int(out.new_tokens[0]))
    assert 17 in ends


def test_an_eos_ends_the_stream_at_once():
    """Fixed logits, surer on the left: token 4, EOS 1, then tokens 7. Nothing behind the EOS is put, if it ends."""
    table = torch.zeros(9, 8)
    table[torch.arange(9), torch.tensor([5, 4, 1, 7, 7, 7, 7, 7, 7])] = torch.arange(9, 0, -1.0)
    model = lambda ids, position_ids, attention_mask: table[position_ids]  # noqa: E731
    spec = leap_kernels.ModelSpec(mask_token_id=0, eos_token_ids=(1,), vocab_size=8)
    for early_stop in (True, False):
        got = Recorder()
        decode(model, torch.tensor([5]), spec=spec, streamer=got, max_new_tokens=8, block_length=4, strategy="full",
               early_stop=early_stop)  # fmt: skip
        assert got.chunks == [[4], [1]] + [[7]] * (0 if early_stop else 6)


def test_tokens_are_put_in_the_forward_that_makes_them_contiguous(tiny, tiny_prompts):
    prompt = torch.tensor(next(iter(tiny_prompts.values()))[0])
    got, shown, masks = Recorder(), [], {"before": set(range(96))}

    def watch(event):
        # Called before the stream follows: what it has shown is the state after the event before this one.
        shown.append((len(got.tokens), min(masks["before"], default=96)))
        masks["before"] -= set(event.index)

    out = decode(tiny, prompt, streamer=got, observers=[watch], strategy="leap")
    assert len(shown) == int(out.nfe)
    assert all(put == min(first, int(out.new_tokens)) for put, first in shown)
    assert len(got.chunks) > 1


def test_left_padding_is_not_part_of_the_prompt():
    got = Recorder()
    ids, mask = torch.tensor([[2, 2, 5, 6]]), torch.tensor([[0, 0, 1, 1]])
    decode(random_llama(), ids, mask, spec=SPEC, max_new_tokens=3, streamer=got)
    assert got.prompt == [[5, 6]]


def test_transformers_streamers_print_the_text(tiny, tiny_tokenizer, tiny_prompts, capsys):
    from transformers import TextStreamer

    prompt = torch.tensor(next(iter(tiny_prompts.values()))[0])
    streamer = TextStreamer(tiny_tokenizer, skip_prompt=True, skip_special_tokens=True)
    out = decode(tiny, prompt, streamer=streamer)
    assert capsys.readouterr().out == out.text(tiny_tokenizer)[0] + "\n"


class AllButOne(Strategy):
    """Commits 7 at all targets but the last, then 8 at that one."""

    def __init__(self, revises: bool = False) -> None:
        self.revises = revises  # type: ignore[misc]

    def max_forwards(self, canvas):
        return 100

    def accept(self, stats, view, state):
        first = view.canvas.forwards[0] == 0
        column = view.targets.long()
        if first:
            column = column.clone()
            column[:, -1] = -1
        return Decision(torch.full_like(column, 7 if first else 8), (column >= 0).int(), column=column)


class Retracting(AllButOne):
    """In the second forward of a block, writes 8 over everything of it."""

    def accept(self, stats, view, state):
        if view.canvas.forwards[0] == 0:
            return super().accept(stats, view, state)
        start, stop = view.canvas.span(0, view.canvas.block[0])
        column = view.canvas.prompt + torch.arange(start, stop)[None]
        token = torch.full_like(column, 8)
        return Decision(token, torch.ones_like(token, dtype=torch.int32), torch.ones(column.shape), column)


def test_a_strategy_that_revises_is_streamed_by_blocks():
    options = {"spec": SPEC, "max_new_tokens": 10, "block_length": 4}
    got = Recorder()
    out = decode(random_llama(), PROMPT, strategy=Retracting(True), streamer=got, **options)
    assert out.generated.tolist() == [[8] * 10]
    assert got.chunks == [[8] * 4, [8] * 4, [8] * 2]

    got = Recorder()
    with pytest.raises(LeapError, match=r"changed a token that was streamed already.*revises = True"):
        decode(random_llama(), PROMPT, strategy=Retracting(False), streamer=got, **options)
    assert got.chunks == [[7] * 3]
    assert got.ended == 1


def test_a_strategy_that_does_not_revise_streams_inside_the_block():
    got = Recorder()
    decode(random_llama(), PROMPT, strategy=AllButOne(), streamer=got, spec=SPEC, max_new_tokens=4, block_length=4)
    assert got.chunks == [[7] * 3, [8]]


def test_the_stream_is_closed_once_after_an_error():
    def poisoned(ids, position_ids, attention_mask):
        logits = torch.zeros(*ids.shape, 23)
        logits[..., 4] = 1.0
        return logits if int((ids == 0).sum()) > 2 else logits * float("nan")

    got = Recorder()
    with pytest.raises(BadLogitsError):
        decode(poisoned, PROMPT, spec=SPEC, strategy="full", max_new_tokens=4, streamer=got)
    assert (got.tokens, got.ended) == ([4, 4], 1)

    got = Recorder()  # who waits for tokens in another thread must not wait for ever
    with pytest.raises(ConfigError, match="block_length"):
        decode(random_llama(), PROMPT, spec=SPEC, block_length=0, streamer=got)
    assert got.calls == ["end"]

    class Full(Recorder):
        def put(self, ids):
            super().put(ids)
            if self.chunks:
                raise OSError("disk full")

    got = Full()
    with pytest.raises(OSError, match="disk full"):
        decode(random_llama(), PROMPT, spec=SPEC, max_new_tokens=4, streamer=got)
    assert got.ended == 1


def test_batches_and_things_that_are_no_streamers_are_refused():
    got = Recorder()
    with pytest.raises(ConfigError, match=r"streamer takes one prompt, got a batch of 2\. Decode one .* observers="):
        decode(random_llama(), [PROMPT, PROMPT], spec=SPEC, max_new_tokens=4, streamer=got)
    assert got.calls == ["end"]
    for wrong in (print, 3, object()):
        with pytest.raises(InputError, match=r"streamer must be an object with put\(ids\) and end\(\)"):
            decode(random_llama(), PROMPT, spec=SPEC, streamer=wrong)
