# SPDX-License-Identifier: Apache-2.0
"""Train the bundled model, or a small shifted one.

    python python/train_tiny/train.py --out runs/tiny                     # resumes from runs/tiny/last.pt
    python python/train_tiny/train.py --out runs/dream --shifted
    python python/train_tiny/train.py --out runs/more --start leap_kernels/models/tiny --first-sample 1000000

Stock transformers classes run bidirectionally, LLaDA's objective (masking.py), Muon for matrices and AdamW for the
rest, bf16 autocast, warm-up, constant rate, linear decay. The data of step n depends on the seed and n only.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import FAMILIES, Sample, drill, training_sample, vocabulary
from masking import mask_batch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import leap_kernels

MASK, EOS = 1, 2
TALLIED = [*FAMILIES, "drill"]
EVERY = 25  # steps between two lines of the log
SAVE = 250  # steps between two checkpoints


@dataclass(frozen=True)
class Stage:
    """What a part of a run trains on."""

    until: int
    """The step at which it ends; the last one lasts to the end."""
    largest: int | None
    """Problems of 1 up to so many events, operations or items; None for problems as they are."""
    length: int
    """Tokens of a sequence: prompt, answer, EOS up to the end."""
    drills: float
    """Share of sequences that are nothing but arithmetic."""


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on."""

    shifted: bool = False
    """Dream's form: Qwen2, and the prediction for position i read at row i - 1. Else LLaDA's: Llama, no shift."""
    layers: int = 6
    width: int = 256
    heads: int = 8
    mlp: int = 640
    rows: int = 256
    """Embedding rows, at least the vocabulary."""
    rope_theta: float = 10000.0
    stages: tuple[Stage, ...] = (
        Stage(until=520, largest=1, length=56, drills=0.25),
        Stage(until=1170, largest=2, length=72, drills=0.2),
        Stage(until=2000, largest=4, length=116, drills=0.15),
        Stage(until=4100, largest=None, length=116, drills=0.1),
        Stage(until=4500, largest=None, length=136, drills=0.05),
    )
    """Copying is learned on problems of one part, or not for a long time; arithmetic where nothing else is at stake."""
    families: tuple[str, ...] = tuple(FAMILIES)
    """Families of training samples, in turn; one that is said more often is seen more often."""
    batch: int = 64
    steps: int = 4500
    warmup: int = 100
    decay: float = 0.6
    """Share of the steps in which the rate falls to nothing."""
    matrix_rate: float = 0.006
    """Muon's, for the matrices of the layers."""
    rest_rate: float = 4e-4
    """AdamW's, for embeddings, head and norms. Five times as much keeps words that stand in the same places from ever
    being told apart: their rows move at random faster than they learn."""
    weight_decay: float = 0.01
    window_share: float = 0.45
    """Share of samples masked as semi-autoregressive decoding meets them."""
    value_share: float = 0.75
    """Share of samples masked value by value instead of token by token."""
    seed: int = 0
    first_sample: int = 0
    """Number of the first training sample, so that a continued run sees new ones."""

    @classmethod
    def read(cls, run: Path) -> Settings:
        """The settings of a run."""
        found = json.loads((run / "settings.json").read_text())
        return cls(
            **{
                **found,
                "stages": tuple(Stage(**stage) for stage in found["stages"]),
                "families": tuple(found["families"]),
            }
        )


SHIFTED = Settings(
    shifted=True,
    layers=4,
    width=192,
    heads=6,
    mlp=512,
    steps=800,
    stages=(
        Stage(until=300, largest=1, length=56, drills=0.25),
        Stage(until=500, largest=2, length=72, drills=0.2),
        Stage(until=650, largest=4, length=116, drills=0.15),
        Stage(until=800, largest=None, length=116, drills=0.1),
    ),
)


def new_model(settings: Settings) -> Any:
    """The untrained stock model; float32."""
    torch.manual_seed(settings.seed)
    shape = {
        "vocab_size": settings.rows,
        "hidden_size": settings.width,
        "intermediate_size": settings.mlp,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},
        "tie_word_embeddings": False,
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": EOS,
    }
    _register_bidirectional()
    model_class, config = (
        (Qwen2ForCausalLM, Qwen2Config(**shape)) if settings.shifted else (LlamaForCausalLM, LlamaConfig(**shape))
    )
    return model_class._from_config(config, attn_implementation="bidirectional")


def _register_bidirectional() -> None:
    """Attention without any mask: every sequence is full, and every token sees every other.

    Written out, since the backward pass of torch's fused attention takes most of a step's time on a CPU.
    """

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        with torch.autocast(q.device.type, enabled=False):  # which would keep the shares in float32
            q, k = q.to(v.dtype), k.to(v.dtype)
            return (torch.softmax(q * scaling @ k.transpose(2, 3), -1) @ v).transpose(1, 2), None

    AttentionInterface.register("bidirectional", attend)
    AttentionMaskInterface.register("bidirectional", lambda *_, **__: None)


class Batches:
    """Training batches as tensors; batch n depends on the settings and n only."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._ids = settings, vocabulary()

    def at(self, step: int) -> tuple[Tensor, ...]:
        """ids, masked ids, weights, hard (B, S) and family (B,)."""
        s = self._settings
        stage = next((stage for stage in s.stages if step < stage.until), s.stages[-1])
        length, first, drills = stage.length, s.first_sample + step * s.batch, round(stage.drills * s.batch)
        samples = [training_sample(s.seed, first + i, stage.largest, s.families) for i in range(s.batch - drills)]
        samples += [drill(s.seed, first + i, length) for i in range(drills)]
        ids = np.full((s.batch, length), EOS)
        group = np.zeros((s.batch, length), dtype=np.int64)
        for i, sample in enumerate(samples):
            start, end = self._spans(sample)
            ids[i, :end] = [self._ids[token] for token in (*sample.prompt, *sample.answer)]
            group[i, start:end] = sample.group
        starts, ends = np.array([self._spans(sample) for sample in samples]).T
        rng = np.random.default_rng((s.seed, first))
        masked, weight = mask_batch(rng, starts, ends, group, s.window_share, s.value_share)
        seen = np.where(masked, MASK, ids)
        family = np.array([TALLIED.index(sample.family) for sample in samples])
        return tuple(torch.from_numpy(array) for array in (ids, seen, weight, group > 0, family))

    @staticmethod
    def _spans(sample: Sample) -> tuple[int, int]:
        return len(sample.prompt), len(sample.prompt) + len(sample.answer)


def loss_of(model: Any, ids: Tensor, seen: Tensor, weight: Tensor, shifted: bool) -> tuple[Tensor, Tensor]:
    """The weighted cross entropy a sample, and where the argmax is right (B, S)."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=seen).logits
    if shifted:  # row i - 1 predicts token i; token 0 is never masked
        logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)
    logits = logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(weight)
    return (losses * weight).sum() / len(ids), logits.argmax(-1) == ids


def optimisers_of(model: Any, settings: Settings) -> list[torch.optim.Optimizer]:
    body = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]
    rest = [p for name, p in model.named_parameters() if not (p.dim() == 2 and "layers" in name)]
    return [
        torch.optim.Muon(body, lr=settings.matrix_rate, weight_decay=settings.weight_decay, momentum=0.95),
        torch.optim.AdamW(rest, lr=settings.rest_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate_at(settings: Settings, step: int) -> float:
    """Warm-up, constant, linear decay; as a share of the full rate."""
    left = (settings.steps - step) / max(1, round(settings.decay * settings.steps))
    return min(1.0, (step + 1) / settings.warmup, left)


def train(settings: Settings, out: Path, start: Path | None = None, *, compiled: bool = True) -> None:
    """Train to the last step: on from `out`'s checkpoint, from the weights of the folder `start`, or from nothing."""
    out.mkdir(parents=True, exist_ok=True)
    model, last = new_model(settings), out / "last.pt"
    optimisers = optimisers_of(model, settings)
    step, minutes = 0, 0.0
    if last.exists():
        saved = torch.load(last, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimiser, state in zip(optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        step, minutes = saved["step"], saved["minutes"]
    elif start is not None:
        model.load_state_dict(leap_kernels.load(start, dtype="float32").state_dict())
    (out / "settings.json").write_text(json.dumps(asdict(settings), indent=1) + "\n")
    rates = settings.matrix_rate, settings.rest_rate  # of the optimisers, in their order

    loss_fn = torch.compile(loss_of, dynamic=False) if compiled else loss_of  # one form for each stage
    batches, tally, began = Batches(settings), _Tally(), time.monotonic() - 60 * minutes
    bar = tqdm(total=settings.steps, initial=step, unit="step", smoothing=0.02)
    while step < settings.steps:
        ids, seen, weight, hard, family = batches.at(step)
        loss, right = loss_fn(model, ids, seen, weight, settings.shifted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, rate in zip(optimisers, rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * rate_at(settings, step)
            optimiser.step()
            optimiser.zero_grad()
        step += 1
        # Judged where decoding would: computed tokens that are masked, inside the scope.
        tally.add(loss, right, hard & (weight > FAINTEST), family)
        bar.update()
        if step % EVERY == 0 or step == settings.steps:
            minutes = (time.monotonic() - began) / 60
            line = {"step": step, "minutes": round(minutes, 2), **tally.line()}
            bar.set_postfix({key: value for key, value in line.items() if key not in ("step", "minutes")})
            with (out / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
        if step % SAVE == 0 or step == settings.steps:
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimisers": [optimiser.state_dict() for optimiser in optimisers],
                    "step": step,
                    "minutes": (time.monotonic() - began) / 60,
                },
                out / "next.pt",
            )
            (out / "next.pt").replace(last)
    bar.close()
    draw(out)


FAINTEST = 1e-3  # above the weight of tokens behind a window


class _Tally:
    """Mean loss and right computed tokens of a family since the last line."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._right = torch.zeros(len(TALLIED))
        self._all = torch.zeros(len(TALLIED))

    def add(self, loss: Tensor, right: Tensor, where: Tensor, family: Tensor) -> None:
        self._losses.append(loss.item())
        self._right.index_add_(0, family, (right & where).sum(1).float())
        self._all.index_add_(0, family, where.sum(1).float())

    def line(self) -> dict[str, float]:
        shares = (self._right / self._all.clamp(min=1)).tolist()
        line = {"loss": round(float(np.mean(self._losses)), 4)}
        line |= {name: round(share, 4) for name, share in zip(TALLIED, shares, strict=True)}
        self.__init__()
        return line


def draw(out: Path) -> None:
    """The loss curve, and the share of computed tokens that are right."""
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    left.plot(steps, [line["loss"] for line in lines], lw=1)
    left.set(xlabel="step", ylabel="loss", yscale="log")
    for family in TALLIED:
        right.plot(steps, [line[family] for line in lines], lw=1, label=family)
    right.set(xlabel="step", ylabel="computed tokens right")
    right.legend()
    figure.savefig(out / "curve.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; a run in it is resumed")
    parser.add_argument(
        "--start", type=Path, help="checkpoint folder (of export.py) whose weights this run begins with"
    )
    parser.add_argument("--shifted", action="store_true", help="the small shifted model instead of the bundled one")
    parser.add_argument("--threads", type=int, default=2)
    for name in ("steps", "batch", "seed", "first_sample"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), help="in turn; repeat one to see more of it")
    args = vars(parser.parse_args())
    torch.set_num_threads(args["threads"])
    given = {name: args[name] for name in ("steps", "batch", "seed", "first_sample") if args[name] is not None}
    if args["families"]:
        given["families"] = tuple(args["families"])
    if args["start"] is not None:  # it knows the small ones
        given["stages"] = tuple(stage for stage in Settings().stages if stage.largest is None)[:1]
    train(replace(SHIFTED if args["shifted"] else Settings(), **given), args["out"], args["start"])


if __name__ == "__main__":
    main()
