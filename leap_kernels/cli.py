# SPDX-License-Identifier: Apache-2.0
"""The command line: what can be asked for. commands.py does it."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from . import commands
from .errors import LeapError
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
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(subparsers)
    _add_decode(subparsers)
    _add_env(subparsers)
    _add_check(subparsers)
    _add_bench(subparsers)
    return parser


def _command(subparsers: Any, name: str, description: str, examples: list[str]) -> argparse.ArgumentParser:
    options: dict[str, Any] = {
        "description": description,
        "epilog": "examples:\n" + "\n".join(f"  {example}" for example in examples),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    if subparsers is None:
        return argparse.ArgumentParser(prog=name, **options)
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=description, **options)
    return parser


def _add_demo(subparsers: Any) -> None:
    parser = _command(
        subparsers,
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
    parser.set_defaults(run=commands.demo_command)


def _add_decode(subparsers: Any) -> None:
    example = "leap-kernels decode --model tiny --prompt"
    parser = _command(
        subparsers,
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
    parser.set_defaults(run=commands.decode_command)


def _add_env(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        "env",
        "Report versions, devices, backends and settings; for issues and for puzzled users.",
        ["leap-kernels env", "leap-kernels env --json"],
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=commands.env_command)


def _add_check(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        "check",
        "Run each op on each backend against float64; exit 1 when a result is wrong.",
        ["leap-kernels check", "leap-kernels check --backend reference --json"],
    )
    parser.add_argument("--backend", metavar="NAME", help="this backend only (default: all that there are)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=commands.check_command)


def _add_bench(subparsers: Any) -> None:
    parser = _command(
        subparsers,
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
    parser.set_defaults(run=commands.bench_command)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)
