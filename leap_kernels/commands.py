# SPDX-License-Identifier: Apache-2.0
"""What each command does. They import what they need when they run, so that `--help` does not wait for torch."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import sys
from collections.abc import Container, Sequence
from typing import Any

from .errors import ConfigError, InputError, expected

__all__ = ["bench_command", "check_command", "decode_command", "demo_command", "encode", "env_command"]


def env_command(args: argparse.Namespace) -> int:
    from . import env

    return env.main(as_json=args.json)


def check_command(args: argparse.Namespace) -> int:
    from . import check

    return check.main(args.backend, as_json=args.json)


def bench_command(args: argparse.Namespace) -> int:
    from .bench import timing

    return timing.main(args.op, shape=args.shape, dtype=args.dtype, device=device_of(args.device), csv_file=args.csv)


def demo_command(args: argparse.Namespace) -> int:
    from . import demo

    return demo.main(
        console(),
        tasks=args.task,
        per_task=None if args.all else args.problems,
        path=args.model,
        device=device_of(args.device),
        batch=args.batch,
        more_strategies=args.all,
        show_trace=not args.no_trace,
        as_markdown=args.markdown,
        json_file=args.json,
    )


def decode_command(args: argparse.Namespace) -> int:
    from . import trace
    from .decoding import decode
    from .models.load import load, load_tokenizer

    options = _options(args, inspect.signature(decode).parameters)
    if args.prompt.count("-") > 1:
        raise ConfigError("--prompt - can be given once: stdin is one prompt.")
    texts = [sys.stdin.read().rstrip("\n") if text == "-" else text for text in args.prompt]
    if args.stream and (args.json or len(texts) > 1):
        raise ConfigError("--stream prints one text: it goes with one --prompt, and not with --json.")
    tokenizer = load_tokenizer(args.model)
    ids = encode(tokenizer, texts, args.model, chat=args.chat)
    model = load(args.model, dtype=args.dtype, device=device_of(args.device))
    streaming: dict[str, Any] = {"streamer": _Printer(tokenizer)} if args.stream else {}
    out = decode(model, [row.to(model.device) for row in ids], **options, **streaming)

    together = f" (all {len(texts)} prompts together)" if len(texts) > 1 else ""
    traces = [trace.to_json(out, tokenizer, i) for i in range(len(texts))]
    if args.json:
        samples = [{"prompt": text, **found} for text, found in zip(texts, traces, strict=True)]
        for i, sample in enumerate(samples):
            sample["tokens"] = out.generated[i, : sample["new_tokens"]].tolist()
            if not args.trace:
                del sample["steps"]
        settings = {"model": args.model, "device": str(model.device), "dtype": str(model.dtype), "options": options}
        print(json.dumps({**settings, "seconds": out.timing.total, "samples": samples}, indent=2))
        return 0
    for i, (text, found) in enumerate(zip(texts, traces, strict=True)):
        if len(texts) > 1:
            print(f"--- prompt {i + 1}: {' '.join(text.split())}")
        if args.trace:
            console().print(trace.render(out, tokenizer, i))
        if not args.stream:
            print(found["text"])
        per_forward = found["new_tokens"] / found["nfe"]
        numbers = f"tokens per forward {per_forward:.2f}, token forwards {found['token_forwards']}"
        print(f"NFE {found['nfe']}, {numbers}, seconds {out.timing.total:.2f}{together}")
    return 0


class _Printer:
    """Prints a text word by word. The last word waits: tokens to come may still change how it is written."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] | None = None
        self.printed = 0

    def put(self, ids: Any) -> None:
        if self.tokens is None:  # the prompt comes first
            self.tokens = []
            return
        self.tokens += ids.tolist()
        text = self._text()
        words = text.rstrip()
        self._print(text, max(words.rfind(" "), words.rfind("\n")))

    def end(self) -> None:
        text = self._text()
        self._print(text + "\n" * (self.tokens is not None), len(text) + 1)

    def _text(self) -> str:
        text: str = self.tokenizer.decode(self.tokens or [], skip_special_tokens=True)
        return text

    def _print(self, text: str, stop: int) -> None:
        if stop > self.printed:
            print(text[self.printed : stop], end="", flush=True)
            self.printed = stop


def _options(args: argparse.Namespace, reserved: Container[str]) -> dict[str, Any]:
    """The keywords for `decode`: only what was given, so that the model's defaults hold for the rest."""
    names = ["strategy", "max_new_tokens", "block_length", "threshold", "tau", "eta"]
    names += ["temperature", "top_p", "top_k", "seed", "cache"]
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for pair in args.set:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name or name in reserved:
            what = "KEY=VALUE, with KEY a field of DecodeConfig or an option of the strategy"
            raise ConfigError(expected("--set", what, repr(pair)))
        if name in options:
            raise ConfigError(f"{name} is given twice. Say it once, as its own flag or with --set.")
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


# --- what commands share --------------------------------------------------------------------------------------------


def console() -> Any:
    """Where results are drawn: as wide as the terminal, or wide enough for a table where there is none."""
    from rich.console import Console

    made = Console(highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 140
    return made


def device_of(name: str) -> str:
    """The device to load on; "auto" is the first GPU where there is one, else the CPU."""
    import torch

    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name == "auto":
        return gpus[0] if gpus else "cpu"
    if name.startswith("cuda") and name not in (gpus and ["cuda", *gpus]):
        there = ", ".join(["auto", "cpu", *gpus])
        raise ConfigError(expected("--device", f"one of {there}, which is what torch sees here", repr(name)))
    return name


def encode(tokenizer: Any, texts: Sequence[str], model: str, *, chat: bool = False) -> list[Any]:
    """Token ids of each text, 1-D int64; InputError names the words that a word-level tokenizer does not know."""
    import torch

    if chat:
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer of {model} has no chat template. Leave out --chat.")
        turns = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) for turn in turns]
    try:
        # A chat template writes the special tokens itself.
        rows = [tokenizer(text, add_special_tokens=not chat)["input_ids"] for text in texts]
    except Exception as error:  # what tokenizers raises for an unknown word is a bare Exception
        unknown = _unknown_words(tokenizer, texts)
        if not unknown:
            raise
        message = f"the tokenizer of {model} does not know {', '.join(map(repr, unknown))} and has no unknown token."
        if model == "tiny":
            from .models.tiny import problems

            message += f" It knows {len(tokenizer)} words and symbols; a prompt in them: {problems()[0].prompt!r}."
        raise InputError(message) from error
    return [torch.tensor(row, dtype=torch.int64) for row in rows]


def _unknown_words(tokenizer: Any, texts: Sequence[str]) -> list[str]:
    backend = tokenizer.backend_tokenizer

    def known(piece: str) -> bool:
        try:
            backend.encode(piece, add_special_tokens=False)
        except Exception:
            return False
        return True

    words = [word for text in texts for word in text.split() if not known(word)]
    pieces = [piece for word in words for piece, _ in backend.pre_tokenizer.pre_tokenize_str(word)]
    return list(dict.fromkeys(piece for piece in pieces if not known(piece)))
