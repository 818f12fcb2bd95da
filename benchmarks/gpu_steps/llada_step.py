# SPDX-License-Identifier: Apache-2.0
"""One decode step at LLaDA-8B's shape: random weights, 1024 columns of which the last block of 32 is masked.

    plain              1024 base rows
    superposed         the same, 32 mask copies and 128 candidates behind them: 1184 rows
    superposed, block  only the block's and the appended rows (192), over a K/V store that a forward has filled

Random weights have no candidates, so the appended rows are made up: the step superposes what its own predictions give
and throws that away. The third is what `cache="dual"` computes in every forward of a block but its first. The decode
loop is timed beside them, on the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leap_kernels import Rows, decode
from leap_kernels.bench.cases import Cost
from leap_kernels.bench.device import Times
from leap_kernels.models.backbone import TransformersBackbone
from leap_kernels.models.registry import entry_for
from leap_kernels.ops import check_consistency, superpose, top_eta
from leap_kernels.store import Store, Stored

from .context import Context, Failed

__all__ = ["Steps", "run"]

# What LLaDA-8B-Instruct's config.json says, as far as it decides shapes.
LLADA_8B: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"], "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
    "mlp_hidden_size": 12288, "embedding_size": 126464, "vocab_size": 126464, "max_sequence_length": 4096,
    "rope_theta": 500000.0, "rope_full_precision": True, "mask_token_id": 126336, "eos_token_id": 126081,
    "pad_token_id": 126081,
}  # fmt: skip
SMALL = LLADA_8B | {
    "d_model": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 48, "embedding_size": 211,
    "vocab_size": 211, "max_sequence_length": 512, "mask_token_id": 200, "eos_token_id": 201, "pad_token_id": 201,
}  # fmt: skip

LABEL = "decode step at LLaDA-8B's shape, random weights"
ETA, PER_TARGET = 0.2, 4


class Steps:
    """The model and its steps; a context manager, because the loop's backbone is one."""

    def __init__(
        self, raw: dict[str, Any], device: torch.device, dtype: torch.dtype, backend: str, columns: int, block: int
    ) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        _, entry = entry_for(raw)
        self.spec, self.dtype, self.device, self.backend = entry.spec(raw), dtype, device, backend
        torch.manual_seed(0)
        with torch.device(device):
            self.model = LlamaForCausalLM._from_config(
                LlamaConfig(**entry.config(raw)), dtype=dtype, attn_implementation="sdpa"
            ).eval()
        self.backbone = TransformersBackbone(self.model, self.spec)

        g = torch.Generator().manual_seed(0)
        mask, vocab = self.spec.mask_token_id, raw["embedding_size"]
        ids = torch.randint(0, mask, (1, columns), generator=g)
        ids[:, -block:] = mask
        targets = torch.arange(columns - block, columns, dtype=torch.int32)[None]
        k = int((1 + 1e-5) / ETA)
        cand_ids = torch.randint(0, mask, (1, block, k), generator=g)
        self.ids, self.targets = ids.to(device), targets.to(device)
        self.suppress = torch.tensor([mask], device=device)
        self.plain_rows = Rows.plain(self.ids, self.spec)
        self.plain_rows.backend = backend
        counts = torch.full((1, block), PER_TARGET, dtype=torch.int32, device=device)
        extra = superpose(
            self.ids, self.plain_rows.pos, self.targets, cand_ids.to(device), counts, mask_id=mask, backend=backend
        )
        self.width = block * (1 + PER_TARGET)
        self.rows = self.plain_rows.append(extra, self.width)
        self.no_copy = (torch.full_like(self.targets, -1).long(), torch.zeros_like(self.targets, dtype=torch.float32))

        column = self.targets[0].long()
        self.deciding = torch.cat([column, columns + extra.copy_row[0].long()])
        self.masked, self.first = column, columns - block

        # The same rows as the "dual" cache has them: all of them once, which fills the store, then the block's.
        plain = self.plain_rows
        self.stored = Stored(Store(columns), plain.pos, plain.kind)
        everywhere = torch.arange(columns, device=device)[None]
        self.filling_rows = replace(plain, column=everywhere, stored=self.stored).append(extra, self.width)
        fields = ("token", "pos", "kind", "hide")
        of_block = {name: getattr(plain, name)[:, self.first :] for name in fields} | {"column": column[None]}
        self.block_rows = replace(plain, **of_block, base=block, stored=self.stored).append(extra, self.width)
        self.head_weights = vocab * raw["d_model"]
        # The embedding, as large as the head, is looked up and not read.
        self.body_weights = sum(p.numel() for p in self.model.parameters()) - 2 * self.head_weights

    @classmethod
    def small(cls, device: torch.device) -> Steps:
        """A few thousand parameters, and rows by the dozen."""
        return cls(SMALL, device, torch.float32, "triton", columns=40, block=4)

    @classmethod
    def llada(cls, device: torch.device) -> Steps:
        return cls(LLADA_8B, device, torch.bfloat16, "triton", columns=1024, block=32)

    def __enter__(self) -> Steps:
        self.backbone.__enter__()
        with torch.inference_mode():
            self.backbone.body(self.filling_rows)
        return self

    def __exit__(self, *error: object) -> None:
        self.backbone.__exit__(*error)

    # --- forwards: rows in, logits of the deciding rows out; fresh rows, because rows remember what they have derived

    def forward_plain(self) -> Tensor:
        return self.backbone.head(self.backbone.body(replace(self.plain_rows))[0, self.masked])

    def forward_superposed(self) -> Tensor:
        return self.backbone.head(self.backbone.body(replace(self.rows))[0, self.deciding])

    def forward_block(self) -> Tensor:
        return self.backbone.head(self.backbone.body(replace(self.block_rows))[0, self.deciding - self.first])

    # --- steps: a forward, then what decoding adds to it

    def decide(self, logits: Tensor, superposes: bool) -> Any:
        """Statistics, decision, commit and, for LEAP, the rows of the next forward."""
        n = self.targets.shape[1]
        top = top_eta(logits, ETA, suppress=self.suppress, backend=self.backend)
        copies = (top.top1[None, n:], top.prob1[None, n:]) if superposes else self.no_copy
        verdict = check_consistency(
            self.targets, top.top1[None, :n], top.prob1[None, :n], *copies, backend=self.backend
        )
        committed = verdict.reason > 0
        ids = self.ids.index_copy(1, self.masked, torch.where(committed, top.top1[None, :n], self.ids[:, self.masked]))
        if not superposes:
            return ids, verdict
        extra = superpose(
            ids, self.plain_rows.pos, torch.where(committed, -1, self.targets), top.ids[None, :n], top.counts[None, :n],
            mask_id=self.spec.mask_token_id, backend=self.backend,
        )  # fmt: skip
        return replace(self.plain_rows, token=ids).append(extra, self.width).token, verdict

    def torch_only(self) -> Any:
        """The plain loop in stock torch: SDPA without a mask, the head on the masked rows alone, softmax, threshold.

        (Without `leap=` the "leap" attention is transformers' own SDPA.)
        """
        hidden = self.model.base_model(input_ids=self.ids, use_cache=False, is_causal=False).last_hidden_state
        prob, token = torch.softmax(self.model.lm_head(hidden[0, self.masked]), -1, dtype=torch.float32).max(-1)
        commit = (prob > 0.9) | (prob == prob.max())
        return self.ids.index_copy(1, self.masked, torch.where(commit, token, self.ids[0, self.masked])[None])

    def all(self) -> dict[str, Callable[[], Any]]:
        return {
            "plain": lambda: self.decide(self.forward_plain(), False),
            "superposed": lambda: self.decide(self.forward_superposed(), True),
            "superposed, block over a filled store": lambda: self.decide(self.forward_block(), True),
        }

    def forwards(self) -> dict[str, Callable[[], Any]]:
        return {
            "plain": self.forward_plain,
            "superposed": self.forward_superposed,
            "superposed, block over a filled store": self.forward_block,
        }

    def work(self, name: str) -> tuple[dict[str, int], Cost]:
        """Rows, slots, and the least a forward of this kind does: weights once, K/V once, two operations a weight."""
        config = self.model.config
        slots = self.plain_rows.base if name.startswith("plain") else self.rows.pos.shape[1]
        rows = slots - self.first if "block" in name else slots
        deciding = len(self.masked if name.startswith("plain") else self.deciding)
        pairs = config.num_hidden_layers * config.hidden_size * rows * slots
        flops = 2 * self.body_weights * rows + 2 * self.head_weights * deciding + 4 * pairs
        size = torch.finfo(self.dtype).bits // 8
        kv = 2 * config.num_hidden_layers * slots * config.num_key_value_heads * config.head_dim
        return {"rows": rows, "slots": slots}, Cost((self.body_weights + self.head_weights + kv) * size, flops)


def run(context: Context) -> str:
    """Milliseconds of each step, eager and in a graph, and the share that is not the model's forward."""
    told, problems = list[str](), list[str]()

    def attempt(name: str, measure: Callable[[], str]) -> None:
        try:
            told.append(f"{name} {measure()}")
            print(told[-1])
        except Exception as error:  # the others can be measured all the same
            problems.append(f"NOT MEASURED: {name} {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            print(problems[-1])

    device = context.device
    made = Steps.small(device.torch) if context.dry else Steps.llada(device.torch)
    with torch.inference_mode(), made as steps:
        full, part = (forward().float() for forward in (steps.forward_superposed, steps.forward_block))
        off = (full - part).abs().max() / full.abs().max()
        print(
            f"logits of the block over a filled store against the full forward: off by {float(off):.2g} of the largest"
        )
        every = {"plain, torch only": steps.torch_only, **steps.all()}
        for name, step in every.items():
            attempt(f"{name}, eager:", partial(_times, context, steps, name, step, "eager", device.times))
        for cache in ("none", "dual"):
            attempt(f"the decode loop, threshold, cache {cache}:", partial(_loop, context, steps, cache))
        # Graphs last: a capture that fails may leave the GPU in no state to go on.
        for name, step in every.items():
            in_graph = partial(_in_graph, context)
            attempt(f"{name}, in a graph:", partial(_times, context, steps, name, step, "graph", in_graph))
    if problems:
        raise Failed("\n".join([*told, *problems]))
    return "\n".join(told)


def _in_graph(context: Context, call: Callable[[], Any]) -> Times:
    return context.device.graph_times([call], rounds=2)


def _times(
    context: Context, steps: Steps, name: str, step: Callable[[], Any], how: str, measure: Callable[..., Times]
) -> str:
    """Rows for the step and for its forward alone; what to say of them."""
    (shape, cost), forwards = steps.work(name), steps.forwards()
    whole = measure(step)
    context.session.add(LABEL, name, shape, steps.dtype, how, whole, cost)
    if name not in forwards:
        return f"{whole.median / 1e3:.3g} ms"
    forward = measure(forwards[name])
    context.session.add(LABEL, f"{name}: forward alone", shape, steps.dtype, how, forward, cost)
    return f"{whole.median / 1e3:.3g} ms ({1 - forward.median / whole.median:.1%} not the forward)"


def _loop(context: Context, steps: Steps, cache: str) -> str:
    """`decode` itself on the same model and length: one block, wall time over forwards."""
    new = len(steps.masked)
    prompt = steps.ids[0, :-new]
    options = {"strategy": "threshold", "max_new_tokens": new, "block_length": new, "cache": cache, "early_stop": False}
    if not context.dry:
        decode(steps.model, prompt, spec=steps.spec, **options)
    out = decode(steps.model, prompt, spec=steps.spec, **options)
    spent = out.timing.total / int(out.nfe[0]) * 1e6
    what, shape = f"the decode loop, threshold, cache {cache}, a forward", steps.work("plain")[0]
    context.session.add(LABEL, what, shape, steps.dtype, "host", Times(spent, spent, spent))
    return f"{spent / 1e3:.3g} ms a forward"
