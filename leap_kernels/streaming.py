# SPDX-License-Identifier: Apache-2.0
"""Streaming at commit time: what stands finished at the left of the canvas is handed on while the rest is decoded."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError, InputError, LeapError, expected

__all__ = ["Stream"]


class Stream:
    """The streamer of one `decode` call, as transformers' `generate` treats it, or None for none.

    `put` gets the prompt, (1, P), first, which `TextStreamer(skip_prompt=True)` leaves out; then the generated tokens
    as they become contiguous from the left, (n,) each, with `early_stop` up to the first EOS. `end` is called once,
    also after an error.
    """

    def __init__(self, streamer: Any) -> None:
        if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
            raise InputError(expected("streamer", "an object with put(ids) and end()", repr(streamer)))
        self._streamer = streamer
        self._shown: list[int] = []
        self._over = False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._streamer is not None:
            self._streamer.end()

    def __bool__(self) -> bool:
        return self._streamer is not None

    def begin(self, prompts: list[Tensor], *, infill: bool) -> None:
        """Put the prompt, without its padding; in infilling nothing, since what follows is the whole text."""
        if self._streamer is None:
            return
        if len(prompts) != 1:
            raise ConfigError(
                f"streamer takes one prompt, got a batch of {len(prompts)}. Decode one prompt a call, or pass "
                "observers=[f]: f gets a StepEvent with what was committed to each sample."
            )
        self._streamer.put(prompts[0][None, : 0 if infill else None].cpu())

    def follow(self, generated: Tensor, mask_id: int, ends: Tensor) -> None:
        """Put what is new in front of the first mask of (n,) generated tokens; `ends` says which of them are EOS."""
        tokens, is_end = torch.stack([generated, ends.long()]).tolist()
        before = len(self._shown)
        if tokens[:before] != self._shown:
            raise LeapError(
                "the strategy changed a token that was streamed already. A strategy that does so declares "
                "revises = True, and is streamed block by block."
            )
        now = before
        while not self._over and now < len(tokens) and tokens[now] != mask_id:
            self._over = bool(is_end[now])
            now += 1
        if now > before:
            self._shown = tokens[:now]
            self._streamer.put(torch.tensor(tokens[before:now]))
