"""``jetspecpp prepare-demo``, ``demo`` and ``doctor``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from vllm_jetspecpp.commands.common import DEMO_CHECKPOINT, DEMO_TARGET, Subcommands


def add_prepare_demo(subcommands: Subcommands) -> None:
    """``jetspecpp prepare-demo``."""
    parser = subcommands.add_parser("prepare-demo", help="write the demo's target as a Hugging Face model folder")
    parser.add_argument("--out", type=Path, default=DEMO_TARGET, help="folder (default: %(default)s)")

    def run(args: argparse.Namespace) -> int:
        from vllm_jetspecpp.demo.prepare import prepare

        print(f"the demo's target is in {prepare(args.out)}")
        return 0

    parser.set_defaults(run=run)


def add_demo(subcommands: Subcommands) -> None:
    """``jetspecpp demo``."""
    parser = subcommands.add_parser("demo", help="serve the demo's target with JetSpec++ and plain, and compare")
    parser.add_argument("--target", type=Path, default=None, help=f"default: $JETSPECPP_DEMO_TARGET or {DEMO_TARGET}")
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT, help="default: %(default)s")
    parser.add_argument("--prompts", type=Path, default=Path("examples/prompts.jsonl"), help="default: %(default)s")
    parser.add_argument("--limit", type=int, default=None, help="only the first so many prompts")
    parser.add_argument("--max-tokens", type=int, default=200, help="longest answer (default: %(default)s)")
    parser.add_argument("--num-speculative-tokens", type=int, default=7, help="γ, draft tokens a block (default: 7)")
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further options of --speculative-config (default: planned by measurement, with copied drafts)",
    )
    parser.add_argument("--logs", type=Path, default=Path(".cache/demo"), help="of the servers (default: %(default)s)")

    def run(args: argparse.Namespace) -> int:
        from vllm_jetspecpp.benchmarking.methods import BUILT_IN, OURS
        from vllm_jetspecpp.demo.run import DemoConfig, run_demo

        target = args.target or Path(os.environ.get("JETSPECPP_DEMO_TARGET", DEMO_TARGET))
        speculative = {
            **BUILT_IN[OURS],
            "model": str(args.checkpoint),
            "num_speculative_tokens": args.num_speculative_tokens,
            **args.options,
        }
        return run_demo(DemoConfig(target, speculative, args.prompts, args.limit, args.max_tokens, args.logs))

    parser.set_defaults(run=run)


def add_doctor(subcommands: Subcommands) -> None:
    """``jetspecpp doctor``."""
    parser = subcommands.add_parser("doctor", help="check that this vLLM is one the plugin knows")
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")

    def run(args: argparse.Namespace) -> int:
        from vllm_jetspecpp.vllm_plugin.doctor import doctor

        return doctor(json=args.json)

    parser.set_defaults(run=run)
