# SPDX-License-Identifier: Apache-2.0
"""`DecodeOutput`: the tokens, and how they came about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["DecodeOutput", "History", "Observer", "StepEvent", "Timing"]


@dataclass(frozen=True, eq=False)
class History:
    """When and why each generated token was committed, B samples of N tokens."""

    step: Tensor
    """(B, N) int32: 1-based forward of the sample; 0 where no token was ever committed (behind an EOS or the end)."""
    reason: Tensor
    """(B, N) int32: 0 never committed, 1 confident, 2 converged, 3 forced."""
    confidence: Tensor
    """(B, N) float32: the token's probability when it was committed; 0 where it never was."""


@dataclass(frozen=True)
class Timing:
    """Where the seconds of one `decode` call went."""

    total: float
    """Wall time of the whole call."""
    body: float
    """In the model's body. On a GPU: until its work was queued, not until it was done."""
    head: float
    """In the model's head (rows to logits), likewise."""

    @property
    def overhead(self) -> float:
        """Share of the total spent outside the model's body and head, in [0, 1]. Meaningful on a CPU."""
        return 1 - (self.body + self.head) / self.total


@dataclass(frozen=True)
class StepEvent:
    """One forward, as observers see it: what was committed where, for all samples that took part."""

    step: int
    """1-based."""
    sample: list[int]
    """Index in the batch, one entry a committed token."""
    index: list[int]
    """Which generated token, counted from 0."""
    token: list[int]
    reason: list[int]
    confidence: list[float]
    appended: dict[int, int]
    """Rows appended to each sample that took part in this forward."""


Observer = Callable[[StepEvent], None]


@dataclass(frozen=True, eq=False, repr=False)
class DecodeOutput:
    """What `decode` returns for B samples, P prompt columns and N = max_new_tokens (the largest of several)."""

    sequences: Tensor
    """(B, P + N) int64: the prompt columns as given, then the generated tokens. Behind a sample's own `max_new_tokens`
    stands the pad token (without one the first EOS; without either token 0, or 1 where 0 is the mask)."""
    prompt_length: int
    """P, the first generated column."""
    nfe: Tensor
    """(B,) int64: forwards that worked on the sample (number of function evaluations)."""
    token_forwards: Tensor
    """(B,) int64: rows of all those forwards, padding left out."""
    new_tokens: Tensor
    """(B,) int64: generated tokens up to and including the first EOS."""
    history: History
    timing: Timing
    max_new_tokens: Tensor
    """(B,) int64: how many tokens each sample could have had."""
    infilled: bool = False
    """Whether masks inside the prompts were filled: there are no prompt columns then, and `new_tokens` counts masks."""

    def __repr__(self) -> str:
        return (
            f"DecodeOutput(sequences={tuple(self.sequences.shape)}, nfe={self.nfe.tolist()}, "
            f"new_tokens={self.new_tokens.tolist()}, token_forwards={self.token_forwards.tolist()}, "
            f"seconds={self.timing.total:.3f})"
        )

    @property
    def tokens_per_forward(self) -> Tensor:
        """(B,) float32: `new_tokens` / `nfe`."""
        return self.new_tokens / self.nfe.clamp(min=1)

    @property
    def generated(self) -> Tensor:
        """(B, N) int64: the sequences without their prompts."""
        return self.sequences[:, self.prompt_length :]

    def text(self, tokenizer: Any) -> list[str]:
        """The generated texts, up to the first EOS, without special tokens; infilled ones whole."""
        if self.infilled:
            whole: list[str] = tokenizer.batch_decode(self.sequences.tolist(), skip_special_tokens=True)
            return whole
        kept = [row[:n].tolist() for row, n in zip(self.generated, self.new_tokens.tolist(), strict=True)]
        texts: list[str] = tokenizer.batch_decode(kept, skip_special_tokens=True)
        return texts
