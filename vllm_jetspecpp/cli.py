"""The ``jetspecpp`` command. One function per subcommand adds its parser; what it runs is imported when it runs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_jetspecpp import __version__

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]

DEMO_TARGET = Path(".cache/smollm2-135m-instruct")
DEMO_CHECKPOINT = Path("checkpoints/smollm2-135m-instruct")
DEMO_OPTIONS = {
    "num_outcomes": 6,
    "jacobi_passes": 3,
    "context_refreshes": 3,
    "fallback_passes": 3,
    "fallback_refreshes": 3,
}
"""The demo shows what is accepted and foreseen, so it refines much; two CPU cores cannot hide that much drafting."""
USER_ERROR = 2
"""Exit status when what was asked for cannot be: argparse's own."""


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
        default=DEMO_OPTIONS,
        metavar="JSON",
        help=f"further options of --speculative-config (default: {json.dumps(DEMO_OPTIONS)})",
    )
    parser.add_argument("--logs", type=Path, default=Path(".cache/demo"), help="of the servers (default: %(default)s)")

    def run(args: argparse.Namespace) -> int:
        from vllm_jetspecpp.demo.run import DemoConfig, run_demo

        target = args.target or Path(os.environ.get("JETSPECPP_DEMO_TARGET", DEMO_TARGET))
        speculative = {
            "method": "jetspecpp",
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


def shard(text: str) -> tuple[int, int]:
    """``i/n`` with 0 ≤ i < n, for argparse."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"expected i/n with 0 <= i < n, got {text!r}")
    return int(index), int(count)


def add_regenerate(subcommands: Subcommands) -> None:
    """``jetspecpp regenerate``."""
    parser = subcommands.add_parser("regenerate", help="let the target answer training prompts")
    parser.add_argument("target", help="folder or hub name of the target")
    parser.add_argument("prompts", type=Path, help="JSON lines with the key 'prompt', gzip or plain")
    parser.add_argument("out", type=Path, help="folder for the answers")
    parser.add_argument("--limit", type=int, required=True, help="only the first so many prompts")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="i/n", help="every n-th prompt from the i-th on")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: greedy")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further part after this time")

    def run(args: argparse.Namespace) -> int:
        from vllm_jetspecpp.training.regenerate import regenerate

        options = {name: getattr(args, name) for name in ("limit", "shard", "max_tokens", "temperature", "seconds")}
        regenerate(args.target, args.prompts, args.out, **options)
        return 0

    parser.set_defaults(run=run)


def layer_counts(text: str) -> tuple[int, ...]:
    """``2,3,1`` → (2, 3, 1), for argparse."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers above 0 with commas between them, got {text!r}")
    return tuple(map(int, parts))


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """An option for every field of a dataclass whose fields carry their help text."""
    for f in fields(config):
        about: dict[str, Any] = dict(f.metadata)
        text = about.pop("help")
        if f.default is False:
            about["action"] = "store_true"
        else:
            about.setdefault("type", type(f.default))
            text += "" if f.default is None else " (default: %(default)s)"
        parser.add_argument(f"--{f.name.replace('_', '-')}", default=f.default, help=text, **about)


def add_train(subcommands: Subcommands) -> None:
    """``jetspecpp train``: the recipe's steps over one work folder."""
    from vllm_jetspecpp.training.config import AdapterConfig, DraftConfig

    parser = subcommands.add_parser("train", help="train a draft model and an adapter on the target's answers")
    steps = parser.add_subparsers(required=True, metavar="step")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("target", help="folder or hub name of the target")
    common.add_argument("work", type=Path, help="folder for states, weights and records")
    for name, kind, default, text in (
        ("block-size", int, 16, "longest block, anchor included"),
        ("num-draft-layers", int, 3, "layers of the draft model"),
        ("num-taps", int, 5, "tapped target layers"),
        ("layers-per-module", layer_counts, "1", "layers of the adapter's modules, one number or one for each"),
        ("draft-vocab-size", int, 8192, "tokens that can be drafted, 0 for all"),
    ):
        common.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: %(default)s)")

    states = steps.add_parser("states", parents=[common], help="step 1: the target's states over its answers")
    states.add_argument("answers", type=Path, help="what `jetspecpp regenerate` wrote")
    states.add_argument("--limit", type=int, default=None, help="use the first so many answers")
    states.add_argument("--max-length", type=int, default=640, help="longer sequences are cut (default: %(default)s)")
    states.add_argument("--shard", type=shard, default=(0, 1), metavar="i/n", help="every n-th batch from the i-th on")
    states.add_argument("--tokens-only", action="store_true", help="for training with --live-states: no states on disk")
    for part, config in (("draft", DraftConfig), ("adapter", AdapterConfig)):
        step = steps.add_parser(part, parents=[common], help=f"step 2: the {part}; both can run at once")
        add_options(step, config)
        step.add_argument("--threads", type=int, default=1, help="processor cores (default: %(default)s)")
        step.set_defaults(config=config)
    pack = steps.add_parser("pack", parents=[common], help="step 3: join both into a checkpoint")
    pack.add_argument("out", type=Path, help="folder of the checkpoint")
    pack.add_argument("--target-name", default=None, help="the target's name in the manifest")
    for name, step in steps.choices.items():
        step.set_defaults(run=run_train, step=name)


def run_train(args: argparse.Namespace) -> int:
    """Run one step of the recipe."""
    import torch

    from vllm_jetspecpp.training import recipe

    sizes = recipe.Sizes(**{f.name: getattr(args, f.name) for f in fields(recipe.Sizes)})
    if args.step == "states":
        recipe.begin(args.target, args.answers, args.work, sizes, args.limit, args.max_length)
        if not args.tokens_only:
            recipe.states(args.target, args.work, sizes, args.shard)
    elif args.step == "pack":
        recipe.pack(args.target, args.target_name or Path(args.target).name, args.work, args.out, sizes)
    else:
        torch.set_num_threads(args.threads)
        config = args.config(**{f.name: getattr(args, f.name) for f in fields(args.config)})
        recipe.train_part(args.step, args.target, args.work, sizes, config)
    return 0


SUBCOMMANDS: tuple[Callable[[Subcommands], None], ...] = (
    add_prepare_demo,
    add_demo,
    add_doctor,
    add_regenerate,
    add_train,
)
"""In the order in which ``--help`` shows them."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="jetspecpp", description="JetSpec++ for vLLM: foresight parallel drafting.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(required=True, metavar="command")
    for add in SUBCOMMANDS:
        add(subcommands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every request of the demo
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"jetspecpp: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
