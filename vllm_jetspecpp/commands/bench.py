"""``jetspecpp bench``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from vllm_jetspecpp.commands.common import DEMO_CHECKPOINT, Subcommands, counts
from vllm_jetspecpp.commands.evaluation import eval_target, write_json

QUICK_BUDGET = 540.0
"""Seconds from the start within which a further repeat of the quick form must end, by the longest so far."""
RESULTS = Path("benchmarks/results/serve")


def auto_or_int(text: str) -> int | str:
    """``auto`` or a number, for argparse."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number or auto, got {text!r}")
    return text if text == "auto" else int(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, for argparse."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def method_config(text: str) -> tuple[str, dict[str, Any]]:
    """``NAME=JSON``, for argparse."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=JSON, got {text!r}")
    return name, json_object(value)


def core_pair(text: str) -> tuple[int, int]:
    """``0,1``, for argparse."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or parts[0] == parts[1]:
        raise argparse.ArgumentTypeError(f"expected two cores with a comma between them, got {text!r}")
    return int(parts[0]), int(parts[1])


def add_bench(subcommands: Subcommands) -> None:
    """``jetspecpp bench serve``."""
    parser = subcommands.add_parser("bench", help="serving speed, method beside method")
    kinds = parser.add_subparsers(required=True, metavar="kind")
    add_serve(kinds)


def add_serve(kinds: Subcommands) -> None:
    """``jetspecpp bench serve``."""
    parser = kinds.add_parser("serve", help="plain vLLM, its speculative methods and ours in one run, taking turns")
    parser.add_argument("--target", default=None, help="default: $JETSPECPP_DEMO_TARGET, or the demo's")
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT, help="default: %(default)s")
    parser.add_argument("--rivals", type=Path, default=Path("checkpoints/rivals"), help="default: %(default)s")
    parser.add_argument("--methods", default=None, metavar="A,B", help="default: all that run here")
    parser.add_argument("--quick", action="store_true", help="few prompts and 16 at a time: under ten minutes")
    for name, text in (
        ("prompts", "of each of GSM8K, HumanEval and MT-Bench (default: 8; quick: 2)"),
        ("max-tokens", "longest answer (default: 128; quick: 96)"),
        ("repeats", "(default: 5; quick: 3, fewer where time runs out)"),
    ):
        parser.add_argument(f"--{name}", type=int, default=None, help=text)
    parser.add_argument("--concurrency", type=counts, default=None, help="levels (default: 1,2,4,8,16; quick: 1,16)")
    parser.add_argument("--cores", type=core_pair, default=None, help="target's and the other (default: the first two)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: %(default)s")
    parser.add_argument("--compiled", action="store_true", help="compile all targets: over a minute more at start each")
    add_speculative_options(parser)
    parser.add_argument(
        "--work", type=Path, default=Path(".cache/bench"), help="logs and models (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", default=None, help="write the result as JSON; - is standard output")
    parser.add_argument("--out", type=Path, default=None, help=f"report folder (default: {RESULTS}; quick: none)")
    parser.set_defaults(run=run_serve)


def add_speculative_options(parser: argparse.ArgumentParser) -> None:
    """Options of ``--speculative-config``, for jetspecpp by name and for any method as JSON."""
    for flag, key, text in (
        ("num-speculative-tokens", "num_speculative_tokens", "γ"),
        ("num-outcomes", "num_outcomes", "B"),
        ("jacobi", "jacobi_passes", "J"),
        ("refresh", "context_refreshes", "R"),
    ):
        parser.add_argument(f"--{flag}", dest=key, type=auto_or_int, default=None, help=f"jetspecpp's {text}")
    parser.add_argument("--speculative-config", type=json_object, default={}, metavar="JSON", help="of jetspecpp")
    parser.add_argument(
        "--method-config",
        type=method_config,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="speculative options of another method, or a method of your own",
    )


def method_changes(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Speculative options by method, as given."""
    keys = ("num_speculative_tokens", "num_outcomes", "jacobi_passes", "context_refreshes")
    ours = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    changes = {"jetspecpp": {**ours, **args.speculative_config}}
    for name, options in args.method_config:
        changes[name] = {**changes.get(name, {}), **options}
    return {name: options for name, options in changes.items() if options}


def two_cores(given: tuple[int, int] | None) -> tuple[int, int]:
    """The cores to compare on.

    Raises:
        ValueError: they do not exist, or there is one only.
    """
    available = sorted(os.sched_getaffinity(0))
    if given is not None and not set(given) <= set(available):
        raise ValueError(f"--cores must be two of {available}, got {list(given)}")
    if given is None and len(available) < 2:
        raise ValueError(f"bench serve compares on two cores, this process may use {available}")
    return given or (available[0], available[1])


def run_serve(args: argparse.Namespace) -> int:
    """Compare serving methods in this process's children."""
    from rich.console import Console

    from vllm_jetspecpp.benchmarking.methods import DEFAULTS, Choice
    from vllm_jetspecpp.benchmarking.report import markdown, write_report
    from vllm_jetspecpp.benchmarking.result import build_result
    from vllm_jetspecpp.benchmarking.runner import BenchConfig, run_bench

    changes = method_changes(args)
    added = [name for name, _ in args.method_config if name not in DEFAULTS]
    names = args.methods.split(",") if args.methods else [*DEFAULTS, *added]
    quick = args.quick
    choice = Choice(tuple(dict.fromkeys(names)), changes, args.checkpoint, args.rivals, two_cores(args.cores))
    levels = args.concurrency or ((1, 16) if quick else (1, 2, 4, 8, 16))
    config = BenchConfig(
        Path(eval_target(args)),
        choice,
        args.prompts or (2 if quick else 8),
        args.max_tokens or (96 if quick else 128),
        args.repeats or (3 if quick else 5),
        tuple(level for level in levels if level > 1),
        ("plain", "plain_2", "jetspecpp") if quick else None,
        dtype=args.dtype,
        compiled=args.compiled,
        budget=QUICK_BUDGET if quick else None,
        work=args.work,
    )
    # Told to end, it must end its children too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console, began = Console(stderr=True), time.monotonic()
    with console.status("starting") as status:

        def say(text: str) -> None:
            line = f"{time.monotonic() - began:4.0f} s  {text}"
            status.update(line) if console.is_terminal else print(line, file=sys.stderr, flush=True)

        outcome = run_bench(config, say)
    result = build_result(config, outcome)
    write_json(result, args.json)
    out = args.out or (None if quick else RESULTS)
    if out is not None:
        write_report(result, out)
    if args.json != "-":
        print(markdown(result))
    return 0
