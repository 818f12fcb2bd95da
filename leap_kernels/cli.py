# SPDX-License-Identifier: Apache-2.0
"""The command line. Commands import what they need when they run, so that `--help` does not wait for torch."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import sys
import warnings
from collections.abc import Container, Sequence
from typing import Any

from .errors import ConfigError, InputError, LeapError, expected
from .version import __version__

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0 when it worked, 2 for an error that has a one-line message."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character shows "?", and nothing fails
            stream.reconfigure(errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return _run(argv)
            finally:
                sys.stdout.flush()  # a reader that is gone is noticed here, not while the interpreter shuts down
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (LeapError, OSError) as error:
        print(f"leap-kernels: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.run is None:
        parser.print_help(sys.stderr)
        return 2
    code: int = args.run(args)
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"leap-kernels: warning: {' '.join(str(message).split())}", file=sys.stderr)


# --- what can be asked for ------------------------------------------------------------------------------------------


_STORY = "Ben has 16 books. He buys 7. He sells 3. How many books does Ben have?"
# Those of strategies.STRATEGIES, whose import would have `--help` wait for torch.
_STRATEGIES = (
    "leap (default), full, threshold, factor, entropy, entropy_threshold, klass, prophet, credit, dream, wino, lopa"
)
_CODE = "Write a function that adds 3, doubles it, subtracts 4, and test it twice."


def _parser() -> argparse.ArgumentParser:
    parser = _command(
        None,
        "leap-kernels",
        "Decode diffusion language models in fewer forwards (LEAP), on a GPU or a CPU.",
        ["leap-kernels demo", f'leap-kernels decode --model tiny --prompt "{_STORY}" --trace', "leap-kernels env"],
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
    _add_decode(commands)
    _add_env(commands)
    _add_check(commands)
    _add_bench(commands)
    return parser


def _command(commands: Any, name: str, description: str, examples: list[str]) -> argparse.ArgumentParser:
    options: dict[str, Any] = {
        "description": description,
        "epilog": "examples:\n" + "\n".join(f"  {example}" for example in examples),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    if commands is None:
        return argparse.ArgumentParser(prog=name, **options)
    parser: argparse.ArgumentParser = commands.add_parser(name, help=description, **options)
    return parser


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands,
        "demo",
        "Solve the bundled problems by full, threshold and LEAP, and compare them.",
        ["leap-kernels demo", "leap-kernels demo --problems 20 --no-trace", "leap-kernels demo --all --markdown"],
    )
    add = parser.add_argument
    add("--all", action="store_true", help="all bundled problems, and threshold 0.7 as well (some minutes on a CPU)")
    add("--problems", type=_count, default=5, metavar="N", help="problems of each task (default %(default)s)")
    add("--task", nargs="+", metavar="T", help="these tasks only (default: all)")
    add("--model", default="tiny", metavar="PATH", help="a model that knows the problems' words (default %(default)s)")
    add("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    add("--batch", type=_count, default=1, metavar="N", help="problems decoded together (default %(default)s)")
    add("--no-trace", action="store_true", help="do not show a decode step by step first")
    add("--markdown", action="store_true", help="print the table, and nothing else, as Markdown")
    add("--json", metavar="FILE", help="write what each strategy made of each problem to FILE")
    parser.set_defaults(run=_demo)


def _add_decode(commands: Any) -> None:
    example = "leap-kernels decode --model tiny --prompt"
    parser = _command(
        commands,
        "decode",
        "Decode prompts with a model.",
        [f'{example} "{_STORY}" --trace',
         f'{example} "{_CODE}" --strategy threshold --threshold 0.8',
         f'{example} "{_CODE}" --set keep_confident=false --stream',
         "leap-kernels decode --model GSAI-ML/LLaDA-8B-Instruct --chat --device cuda --prompt - < question.txt"],
    )  # fmt: skip
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help='checkpoint folder, Hugging Face repository, or "tiny"')
    add(
        "--prompt",
        required=True,
        action="append",
        metavar="TEXT",
        help="what to decode; - reads all of stdin as one prompt; repeat --prompt for several",
    )
    add("--chat", action="store_true", help="put each prompt into the model's chat template")
    add("--strategy", metavar="NAME", help=f"decoding rule: {_STRATEGIES}; its options with --set")
    add("--max-new-tokens", type=int, metavar="N", help="tokens to generate (default: the model's)")
    add("--block-length", type=int, metavar="N", help="positions decoded together (default: the model's)")
    add("--threshold", type=float, metavar="P", help="threshold, leap: confidence above which a token is committed")
    add("--tau", type=float, metavar="P", help="LEAP: confidence from which agreement with the mask copy commits")
    add("--eta", type=float, metavar="P", help="LEAP: probability from which a token is a candidate")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default)")
    add("--top-p", type=float, metavar="P", help="with a temperature: draw from the likeliest tokens, up to this sum")
    add("--top-k", type=int, metavar="K", help="with a temperature: draw from this many of the likeliest tokens")
    add("--seed", type=int, metavar="N", help="seed of the draws with a temperature")
    add("--cache", metavar="NAME", help="which rows a forward recomputes (default none: all of them)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any other option of decode; repeatable")
    add("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", help="auto (default), float32, bfloat16, ...")
    add("--stream", action="store_true", help="print the text while it is decoded (one prompt)")
    add("--trace", action="store_true", help="show which tokens appeared at which step, and why")
    add("--json", action="store_true", help="print everything as JSON; with --trace, every step as well")
    parser.set_defaults(run=_decode)


def _add_env(commands: Any) -> None:
    parser = _command(
        commands,
        "env",
        "Report versions, devices, backends and settings; for issues and for puzzled users.",
        ["leap-kernels env", "leap-kernels env --json"],
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_env)


def _add_check(commands: Any) -> None:
    parser = _command(
        commands,
        "check",
        "Run each op on each backend against float64; exit 1 when a result is wrong.",
        ["leap-kernels check", "leap-kernels check --backend reference --json"],
    )
    parser.add_argument("--backend", metavar="NAME", help="this backend only (default: all that there are)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_check)


def _add_bench(commands: Any) -> None:
    parser = _command(
        commands,
        "bench",
        "Time an op beside its fair baselines, and what a call of it costs the host.",
        ["leap-kernels bench top_eta", "leap-kernels bench top_eta --shape rows=64 vocab=151936 --csv times.csv",
         "leap-kernels bench superposed_attention --shape full --device cuda", "leap-kernels bench all"],
    )  # fmt: skip
    add = parser.add_argument
    add("op", metavar="OP", help="top_eta, superpose, ...: a function of leap_kernels.ops; or all")
    add(
        "--shape",
        nargs="+",
        default=[],
        metavar="NAME|DIM=N",
        help="a named shape of the op, and changes to it (default: LLaDA-8B's; on a GPU all named ones)",
    )
    add("--dtype", default="auto", help="auto (default: bfloat16 on a GPU, float32 on a CPU), float16, ...")
    add("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    add("--csv", metavar="FILE", help="append what was measured to FILE")
    parser.set_defaults(run=_bench)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


# --- what is done ---------------------------------------------------------------------------------------------------


def _env(args: argparse.Namespace) -> int:
    from . import env

    return env.main(as_json=args.json)


def _check(args: argparse.Namespace) -> int:
    from . import check

    return check.main(args.backend, as_json=args.json)


def _bench(args: argparse.Namespace) -> int:
    from .bench import timing

    return timing.main(args.op, shape=args.shape, dtype=args.dtype, device=device_of(args.device), csv_file=args.csv)


def _demo(args: argparse.Namespace) -> int:
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


def _decode(args: argparse.Namespace) -> int:
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
