"""``jetspecpp regenerate`` and ``train``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm_jetspecpp.commands.common import Subcommands, counts


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
    parser.add_argument("--limit", type=int, default=None, help="only the first so many prompts")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="i/n", help="every n-th prompt from the i-th on")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--part-size", type=int, default=256, help="prompts answered together (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="Ray actors that share the work; default: this process")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further part after this time")

    def run(args: argparse.Namespace) -> int:
        from vllm_jetspecpp.training.regenerate import AnswerConfig, regenerate

        names = ("target", "prompts", "out", "limit", "shard", "max_tokens", "temperature", "part_size")
        regenerate(AnswerConfig(**{name: getattr(args, name) for name in names}), args.workers, args.seconds)
        return 0

    parser.set_defaults(run=run)


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
    from vllm_jetspecpp.training.config import AdapterConfig, DecoderConfig, DraftConfig

    parser = subcommands.add_parser("train", help="train a draft model and an adapter on the target's answers")
    steps = parser.add_subparsers(required=True, metavar="step")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("target", help="folder or hub name of the target")
    common.add_argument("work", type=Path, help="folder for states, weights and records")
    for name, kind, default, text in (
        ("block-size", int, 16, "longest block, anchor included"),
        ("num-draft-layers", int, 3, "layers of the draft model"),
        ("num-taps", int, 5, "tapped target layers"),
        ("layers-per-module", counts, "1", "layers of the adapter's modules, one number or one for each"),
        ("draft-vocab-size", int, 8192, "tokens that can be drafted, 0 for all"),
    ):
        common.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: %(default)s)")

    states = steps.add_parser("states", parents=[common], help="step 1: the target's states over its answers")
    states.add_argument("answers", type=Path, help="what `jetspecpp regenerate` wrote")
    states.add_argument("--limit", type=int, default=None, help="use the first so many answers")
    states.add_argument("--max-length", type=int, default=640, help="longer sequences are cut (default: %(default)s)")
    states.add_argument("--shard", type=shard, default=(0, 1), metavar="i/n", help="every n-th batch from the i-th on")
    states.add_argument("--tokens-only", action="store_true", help="for training with --live-states: no states on disk")
    parts = {
        "draft": (DraftConfig, "step 2: the draft model; it and the adapter can be trained at once"),
        "adapter": (AdapterConfig, "step 2: the adapter"),
        "decoder": (DecoderConfig, "for comparison: a copy of the decoder, fine-tuned over the adapter's predictions"),
    }
    for part, (config, text) in parts.items():
        step = steps.add_parser(part, parents=[common], help=text)
        add_options(step, config)
        step.add_argument("--threads", type=int, default=1, help="processor cores (default: %(default)s)")
        step.set_defaults(config=config)
    pack = steps.add_parser("pack", parents=[common], help="step 3: join both into a checkpoint")
    pack.add_argument("out", type=Path, help="folder of the checkpoint")
    pack.add_argument("--target-name", default=None, help="the target's name in the manifest")
    pack.add_argument("--weights", choices=["bf16", "int8"], default="bf16", help="default: %(default)s")
    pack.add_argument(
        "--delta-of", type=Path, default=None, metavar="CHECKPOINT", help="a rival as small differences from another"
    )
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
        name = args.target_name or Path(args.target).name
        recipe.pack(args.target, name, args.work, args.out, sizes, args.weights, args.delta_of)
    else:
        torch.set_num_threads(args.threads)
        config = args.config(**{f.name: getattr(args, f.name) for f in fields(args.config)})
        recipe.train_part(args.step, args.target, args.work, sizes, config)
    return 0
