"""``jetspecpp trace``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm_jetspecpp.commands.common import DEMO_CHECKPOINT, DEMO_TARGET, Subcommands

RECORDING = "recording"
DEFAULT_BENCH = "gsm8k,humaneval,mtbench"


def add_trace(subcommands: Subcommands) -> None:
    """``jetspecpp trace``."""
    parser = subcommands.add_parser("trace", help="record what target and draft process do, as a trace and a picture")
    parser.add_argument("--out", type=Path, required=True, help="folder for trace.json, timeline.png and summary.json")
    parser.add_argument(
        "--from",
        dest="recordings",
        type=Path,
        default=None,
        metavar="DIR",
        help="show what a server with option trace_directory recorded there, instead of running vLLM",
    )
    parser.add_argument("--recording", default=None, metavar="NAME", help="of --from, where DIR has several")
    parser.add_argument("--rounds", type=int, default=300, help="rounds to record at least (default: %(default)s)")
    parser.add_argument("--show", type=int, default=6, help="rounds in the picture (default: %(default)s)")
    parser.add_argument("--prompt", action="append", default=None, metavar="TEXT", help="to answer; may be repeated")
    parser.add_argument("--bench", default=DEFAULT_BENCH, help="whose first prompts to answer (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each benchmark (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=200, help="longest answer (default: %(default)s)")
    parser.add_argument("--target", default=None, help=f"default: $JETSPECPP_DEMO_TARGET or {DEMO_TARGET}")
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT, help="default: %(default)s")
    for option, text in (
        ("num-speculative-tokens", "γ, draft tokens a block"),
        ("num-outcomes", "B, outcomes drafted for"),
        ("jacobi", "J, refinement passes"),
        ("refresh", "R <= J + 1, context refreshes"),
    ):
        parser.add_argument(f"--{option}", type=int, default=None, help=f"{text} (default: the method's)")
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help="further options of --speculative-config"
    )
    parser.add_argument(
        "--json", metavar="FILE", default=None, help="also write the summary there; - is standard output"
    )
    parser.set_defaults(run=run_trace)


def run_trace(args: argparse.Namespace) -> int:
    """Record, unless that is done, and show."""
    from rich.console import Console

    from vllm_jetspecpp.commands.evaluation import write_json
    from vllm_jetspecpp.config import check_range
    from vllm_jetspecpp.evaluation.provenance import provenance
    from vllm_jetspecpp.tracing.capture import CaptureError
    from vllm_jetspecpp.tracing.report import render
    from vllm_jetspecpp.tracing.summary import WARM_UP_ROUNDS, print_summary

    for name, low in (("rounds", WARM_UP_ROUNDS + 2), ("show", 1), ("limit", 1), ("max_tokens", 2)):
        check_range(f"--{name.replace('_', '-')}", getattr(args, name), low, 1 << 20)
    console = Console(stderr=args.json == "-", width=None if sys.stdout.isatty() else 140)
    if args.recordings is None:
        try:
            record(args, console)
        except CaptureError as error:
            print(f"jetspecpp trace: {error}", file=sys.stderr)
            return 1
    summary = render(args.recordings or args.out / RECORDING, args.out, provenance(), args.recording, args.show)
    print_summary(console, summary)
    console.print(f"trace.json (for ui.perfetto.dev), timeline.png and summary.json are in {args.out}")
    write_json(summary, args.json)
    return 0


def record(args: argparse.Namespace, console: Any) -> None:
    """Run vLLM on the prompts, with progress."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from vllm_jetspecpp.commands.evaluation import eval_target
    from vllm_jetspecpp.demo.run import split_cores
    from vllm_jetspecpp.evaluation.datasets import benchmark
    from vllm_jetspecpp.tracing.capture import CaptureJob, capture

    names = args.bench.split(",")
    prompts = args.prompt or [prompt.turns[0] for name in names for prompt in benchmark(name, args.limit)]
    target = eval_target(args)
    folder = args.out / RECORDING
    folder.mkdir(parents=True, exist_ok=True)
    job = CaptureJob(str(target), speculative_options(args, folder), prompts, args.rounds, args.max_tokens)
    setting = split_cores(os.sched_getaffinity(0))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("vLLM starts", total=args.rounds)
        for state in capture(job, len(setting.target_cores), args.out / "vllm.log"):
            speed = state["tokens"] / state["seconds"]
            progress.update(task, completed=min(state["rounds"], args.rounds), description=f"{speed:.1f} tokens/s")


def speculative_options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """For ``--speculative-config``; what was not given is the method's own default."""
    given = {
        "num_speculative_tokens": args.num_speculative_tokens,
        "num_outcomes": args.num_outcomes,
        "jacobi_passes": args.jacobi,
        "context_refreshes": args.refresh,
    }
    return {
        "method": "jetspecpp",
        "model": str(args.checkpoint),
        **{name: value for name, value in given.items() if value is not None},
        **args.options,
        "trace_directory": str(folder.resolve()),
    }
