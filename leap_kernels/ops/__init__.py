# SPDX-License-Identifier: Apache-2.0
"""The ops of a decoding step, each usable alone on CPU and CUDA.

| op | in | out |
| --- | --- | --- |
| `top_eta` | logits | per row: argmax, confidence, log-sum-exp, entropy, tokens with p >= eta |
| `superpose` | canvas, masked targets, candidates | appended rows (mask copies and candidates) |
| `superposed_attention` | q, k, v and row metadata | attention under the visibility rule, log-sum-exp |
| `check_consistency` | base statistics, the copies' argmax | which targets to commit, and why |
| `row_kl` | logits, the logits before | per row: KL of its softmax against the one before |
| `sample_rows` | logits, seeds, steps, positions | per row: a token drawn with temperature, its probability without |

`backend="auto"` runs the reference on CPU tensors and Triton on CUDA tensors; `"reference"` and `"triton"`, and for
`check_consistency` the optional extension as `"cuda"`, are taken at their word and never fall back.
"""

from . import library  # noqa: F401 - registers the operators
from .attention import Attention, Switches, superposed_attention
from .candidates import TopEta, max_candidates, top_eta
from .consistency import CONFIDENT, CONVERGED, FORCED, Consistency, check_consistency
from .divergence import row_kl
from .sampling import Sampled, sample_rows
from .superposition import BASE, BRANCH, CANDIDATE, COPY, PADDING, Superposed, superpose

__all__ = [
    "BASE",
    "BRANCH",
    "CANDIDATE",
    "CONFIDENT",
    "CONVERGED",
    "COPY",
    "FORCED",
    "PADDING",
    "Attention",
    "Consistency",
    "Sampled",
    "Superposed",
    "Switches",
    "TopEta",
    "check_consistency",
    "max_candidates",
    "row_kl",
    "sample_rows",
    "superpose",
    "superposed_attention",
    "top_eta",
]
