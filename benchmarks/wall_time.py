# SPDX-License-Identifier: Apache-2.0
"""Wall time of `decode` beside plain decoders of the same algorithm: a CPU, batch 1, one run, the same weights.

    python benchmarks/wall_time.py [--csv benchmarks/results/wall_time.csv]     # some 4 minutes on two idle cores

All three decode by the threshold rule and must give the same tokens in the same number of forwards:

- `leap_kernels`: head and softmax, in float32, on the masked rows of the block
- `plain`: head and softmax, in float64, on the whole canvas, as public decoders have it
- `plain, rows sliced`: the same on the masked rows of the block

on two models: random weights with LLaDA's vocabulary (4 layers of 512, a canvas of 256 tokens, one block decoded), and
the bundled model on some of its problems. No cache anywhere: every forward computes every row. The contenders alternate
within a run, after one untimed decode each; the table shows every run, the median, and the median divided by that of
`leap_kernels`. Exits 1 when tokens or forwards differ; times decide nothing.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import leap_kernels
from leap_kernels import ModelSpec
from leap_kernels.bench.session import commit
from leap_kernels.models.tiny import problems

THRESHOLD, BLOCK = 0.9, 32
Decoded = tuple[list[int], int]
TARGETS = (("random weights", "plain", 4.0), ("random weights", "plain, rows sliced", 0.95),
           ("bundled", "plain, rows sliced", 0.95))  # fmt: skip


class Work(NamedTuple):
    """Prompts for one model."""

    name: str
    model: Any
    spec: ModelSpec
    prompts: list[Tensor]
    new: int


def random_weights(vocab: int, layers: int, hidden: int, canvas: int, new: int) -> Work:
    """A Llama that sees both ways, and one prompt of random tokens."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64), max_position_embeddings=canvas, is_causal=False, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    spec = ModelSpec(mask_token_id=vocab - 1, vocab_size=vocab)
    return Work("random weights", model, spec, [torch.randint(vocab - 1, (canvas - new,))], new)


def bundled(count: int) -> Work:
    model, tokenizer = leap_kernels.load("tiny"), leap_kernels.load_tokenizer("tiny")
    families = dict.fromkeys(problem.task for problem in problems())
    chosen = [p for group in zip(*(problems(family) for family in families), strict=False) for p in group][:count]
    prompts = [torch.tensor(tokenizer(problem.prompt)["input_ids"]) for problem in chosen]
    return Work("bundled", model, model.leap_spec, prompts, model.leap_spec.defaults["max_new_tokens"])


def ours(work: Work, prompt: Tensor) -> Decoded:
    out = leap_kernels.decode(
        work.model, prompt, spec=work.spec, strategy="threshold", threshold=THRESHOLD, max_new_tokens=work.new,
        block_length=BLOCK,
    )  # fmt: skip
    return out.generated[0, : out.new_tokens[0]].tolist(), int(out.nfe[0])


def plain(work: Work, prompt: Tensor, *, sliced: bool) -> Decoded:
    """Commit what is surer than the threshold, or the surest, block after block; stop behind a block with an EOS."""
    model, spec, start = work.model, work.spec, len(prompt)
    ids = torch.cat([prompt, torch.full((work.new,), spec.mask_token_id)])
    nfe = 0
    for first in range(start, len(ids), BLOCK):
        block = torch.arange(first, min(first + BLOCK, len(ids)))
        while len(masks := block[ids[block] == spec.mask_token_id]):
            hidden = model.model(input_ids=ids[None], use_cache=False, is_causal=False).last_hidden_state[0]
            logits = model.lm_head(hidden[masks] if sliced else hidden)
            logits[:, spec.mask_token_id] = float("-inf")
            token = logits.argmax(-1)
            confidence = logits.double().softmax(-1).gather(-1, token[:, None])[:, 0]
            if not sliced:
                token, confidence = token[masks], confidence[masks]
            take = confidence > THRESHOLD
            take[confidence.argmax()] = True
            ids[masks[take]] = token[take]
            nfe += 1
        ends = [i for i in block.tolist() if int(ids[i]) in spec.eos_token_ids]
        if ends:
            return ids[start : ends[0] + 1].tolist(), nfe
    return ids[start:].tolist(), nfe


CONTENDERS: dict[str, Callable[[Work, Tensor], Decoded]] = {
    "leap_kernels": ours,
    "plain": lambda work, prompt: plain(work, prompt, sliced=False),
    "plain, rows sliced": lambda work, prompt: plain(work, prompt, sliced=True),
}


def measure(work: Work, runs: int) -> tuple[dict[str, list[float]], int, bool]:
    """Seconds of each contender in each run, the forwards of one run, and whether all decoded alike."""
    decoded = {name: [call(work, prompt) for prompt in work.prompts] for name, call in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(runs):
        for name, call in CONTENDERS.items():
            began = time.perf_counter()
            for prompt in work.prompts:
                call(work, prompt)
            seconds[name].append(time.perf_counter() - began)
    own = decoded["leap_kernels"]
    return seconds, sum(nfe for _, nfe in own), all(other == own for other in decoded.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=126464)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--canvas", type=int, default=256, help="tokens of the canvas, prompt and new ones")
    parser.add_argument("--new", type=int, default=32, help="of these, new ones")
    parser.add_argument("--problems", type=int, default=9, help="of the bundled model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path, help="also write the table there")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    setting = {
        "commit": commit(), "leap_kernels": leap_kernels.__version__, "torch": torch.__version__,
        "transformers": transformers.__version__, "python": platform.python_version(),
        "machine": platform.machine(), "threads": args.threads, "dtype": "float32", "batch": 1,
        "vocab": args.vocab, "layers": args.layers, "hidden": args.hidden, "canvas": args.canvas, "new": args.new,
        "problems": args.problems,
    }  # fmt: skip
    print(", ".join(f"{key} {value}" for key, value in setting.items()))

    table, medians, good = [], {}, True
    with torch.inference_mode():
        for make in (
            lambda: random_weights(args.vocab, args.layers, args.hidden, args.canvas, args.new),
            lambda: bundled(args.problems),
        ):
            work = make()
            seconds, nfe, alike = measure(work, args.runs)
            good &= alike
            print(f"\n{work.name}: {nfe} forwards a run, tokens and forwards {'equal' if alike else 'DIFFER'}")
            own = statistics.median(seconds["leap_kernels"])
            for name, values in seconds.items():
                median = medians[work.name, name] = statistics.median(values)
                runs = " ".join(f"{value:8.3f}" for value in values)
                print(f"{name:20} runs{runs} s  median{median:8.3f} s  {1e3 * median / nfe:8.2f} ms a forward  "
                      f"{median / own:5.2f} x leap_kernels", flush=True)  # fmt: skip
                row = {"model": work.name, "contender": name, "forwards": nfe, "median_s": round(median, 4)}
                row |= {"ratio": round(median / own, 3), "runs_s": " ".join(f"{value:.4f}" for value in values)}
                table.append(row)
    print()
    for model, other, least in TARGETS:
        ratio = medians[model, other] / medians[model, "leap_kernels"]
        verdict = "reached" if ratio >= least else "MISSED"
        print(f"{model}: {ratio:.2f} times as fast as {other}, aim {least}: {verdict}")
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=[*table[0], *setting])
            writer.writeheader()
            writer.writerows({**row, **setting} for row in table)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
