"""``jetspecpp bench``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_jetspecpp.commands.common import DEMO_CHECKPOINT, Subcommands, counts
from vllm_jetspecpp.commands.evaluation import eval_target, write_json

if TYPE_CHECKING:
    from vllm_jetspecpp.benchmarking.runner import BenchConfig

QUICK_BUDGET = 540.0
"""Seconds from the start within which a further repeat of the quick form must end, by the longest so far."""
RESULTS, HTTP_RESULTS = Path("benchmarks/results/serve"), Path("benchmarks/results/http")
HTTP_METHODS = ("plain", "plain_2", "dflash", "jetspecpp")
"""By default: a server is several processes, and all are kept alive."""


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
    """``jetspecpp bench serve`` and ``bench http``."""
    parser = subcommands.add_parser("bench", help="serving speed, method beside method")
    kinds = parser.add_subparsers(required=True, metavar="kind")
    serve = kinds.add_parser("serve", help="plain vLLM, its speculative methods and ours in one run, taking turns")
    add_options(serve, RESULTS)
    serve.set_defaults(run=run_serve)
    http = kinds.add_parser("http", help="the same behind vllm serve, measured with vLLM's own client")
    add_options(http, HTTP_RESULTS)
    http.set_defaults(run=run_http_bench)


def add_options(parser: argparse.ArgumentParser, results: Path) -> None:
    """What both kinds have in common."""
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
    parser.add_argument("--out", type=Path, default=None, help=f"report folder (default: {results}; quick: none)")


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


def bench_config(args: argparse.Namespace, defaults: Sequence[str], loaded: Sequence[str] | None) -> BenchConfig:
    """What was asked for.

    Args:
        defaults: methods unless ``--methods`` names them.
        loaded: methods that the quick form measures at more than batch 1.
    """
    from vllm_jetspecpp.benchmarking.methods import Choice
    from vllm_jetspecpp.benchmarking.runner import BenchConfig

    quick, changes = args.quick, method_changes(args)
    names = args.methods.split(",") if args.methods else [*defaults, *(name for name, _ in args.method_config)]
    levels = args.concurrency or ((1, 16) if quick else (1, 2, 4, 8, 16))
    return BenchConfig(
        Path(eval_target(args)),
        Choice(tuple(dict.fromkeys(names)), changes, args.checkpoint, args.rivals, two_cores(args.cores)),
        args.prompts or (2 if quick else 8),
        args.max_tokens or (96 if quick else 128),
        args.repeats or (3 if quick else 5),
        tuple(level for level in levels if level > 1),
        loaded if quick else None,
        dtype=args.dtype,
        compiled=args.compiled,
        budget=QUICK_BUDGET if quick else None,
        work=args.work,
    )


@contextmanager
def reporting(expected: int) -> Iterator[Callable[[str], None]]:
    """Yield what says on standard error how far it is: a bar on a terminal, else one line after the other.

    Args:
        expected: how often it will be called, about.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # Told to end, it must end what it started too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console, began = Console(stderr=True), time.monotonic()
    columns = TimeElapsedColumn(), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("preparing", total=expected)

        def say(text: str) -> None:
            progress.update(task, description=text, advance=1)
            if not console.is_terminal:
                print(f"{time.monotonic() - began:4.0f} s  {text}", file=sys.stderr, flush=True)

        yield say


def publish(result: dict[str, Any], args: argparse.Namespace, results: Path) -> None:
    """JSON, report folder, and the report for people unless standard output is for JSON."""
    from vllm_jetspecpp.benchmarking.report import markdown, write_report

    write_json(result, args.json)
    out = args.out or (None if args.quick else results)
    if out is not None:
        write_report(result, out)
    if args.json != "-":
        print(markdown(result))


def run_serve(args: argparse.Namespace) -> int:
    """Compare serving methods in this process's children."""
    from vllm_jetspecpp.benchmarking.answers import compare_answers
    from vllm_jetspecpp.benchmarking.measures import by_repeat
    from vllm_jetspecpp.benchmarking.methods import DEFAULTS
    from vllm_jetspecpp.benchmarking.result import build_result
    from vllm_jetspecpp.benchmarking.runner import run_bench

    config = bench_config(args, DEFAULTS, ("plain", "plain_2", "jetspecpp"))
    with reporting(config.num_reports) as say:
        outcome = run_bench(config, say)
        say("comparing answers")
        answers = compare_answers(config.target, outcome.workload, outcome.runs)
    publish(build_result(config, outcome, by_repeat(outcome.runs), answers), args, RESULTS)
    return 0


def run_http_bench(args: argparse.Namespace) -> int:
    """Compare servers with vLLM's client."""
    from vllm_jetspecpp.benchmarking.over_http import run_http
    from vllm_jetspecpp.benchmarking.result import build_result
    from vllm_jetspecpp.demo.server import ServerError

    config = bench_config(args, HTTP_METHODS, None)
    try:
        with reporting(config.num_reports) as say:
            outcome, table = run_http(config, say)
    except ServerError as error:
        print(f"jetspecpp bench: {error}", file=sys.stderr)
        return 1
    publish(build_result(config, outcome, table, {}), args, HTTP_RESULTS)
    return 0
