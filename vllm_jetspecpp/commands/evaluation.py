"""``jetspecpp calibrate``, ``acceptance`` and ``eval``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from vllm_jetspecpp.commands.common import DEMO_CHECKPOINT, DEMO_TARGET, Subcommands, counts


def add_round_options(parser: argparse.ArgumentParser, num_outcomes: int, max_new_tokens: int) -> None:
    """The shape of a round, under the names of the method."""
    for name, default, text in (
        ("jacobi", 1, "J, refinement passes"),
        ("refresh", 1, "R <= J + 1, context refreshes"),
        ("num-outcomes", num_outcomes, "B, outcomes drafted for"),
        ("max-new-tokens", max_new_tokens, "longest answer"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")


def add_common_eval(parser: argparse.ArgumentParser) -> None:
    """Where target and checkpoint are, and how to answer."""
    parser.add_argument("--target", default=None, help=f"default: $JETSPECPP_DEMO_TARGET or {DEMO_TARGET}")
    parser.add_argument("--limit", type=int, default=None, help="only the first so many prompts")
    parser.add_argument("--threads", type=int, default=1, help="processor cores (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", default=None, help="write the figures as JSON; - is standard output")


def eval_target(args: argparse.Namespace) -> str:
    """The target to evaluate; the demo's is made on first use."""
    if args.target:
        return args.target
    folder = Path(os.environ.get("JETSPECPP_DEMO_TARGET", DEMO_TARGET))
    from vllm_jetspecpp.demo.prepare import prepare

    return str(prepare(folder))


def write_json(value: dict[str, Any], where: str | None) -> None:
    """To a file, or to standard output for ``-``."""
    text = json.dumps(value, indent=2)
    if where == "-":
        print(text)
    elif where:
        Path(where).write_text(text + "\n")


def add_eval(subcommands: Subcommands) -> None:
    """``jetspecpp eval``."""
    parser = subcommands.add_parser("eval", help="acceptance length and hit rate on benchmark prompts, without vLLM")
    parser.add_argument(
        "--method",
        default="jetspecpp",
        help="jetspecpp, dflash, jetspec, dspark, domino, ssd, ngram, plain or draft-only (default: %(default)s)",
    )
    parser.add_argument(
        "--bench", required=True, help="gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mtbench"
    )
    parser.add_argument(
        "--checkpoint",
        default=None,
        help=f"default: {DEMO_CHECKPOINT}, and for rivals checkpoints/rivals/METHOD",
    )
    add_common_eval(parser)
    add_round_options(parser, 4, 2048)
    for name, kind, default, text in (
        ("num-draft-tokens", int, 15, "γ, draft tokens a block; may exceed what the draft model was trained for"),
        ("selection", str, "auto", "auto, calibrated, conformal or uncalibrated"),
        ("states", str, "predicted", "what hits are drafted from: predicted, true, copied; or unpipelined"),
        ("temperature", float, 0.0, "0 is greedy"),
        ("seed", int, 0, "of sampling"),
        ("dtype", str, "float32", "of the target"),
        ("device", str, "cpu", "of target and drafter"),
        ("draft-weights", str, "plain", "plain, int8 (as a draft process on a CPU has them) or auto"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--no-replacement", action="store_true", help="context refresh without anchor replacement")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="let the target answer first, and read acceptance off its answers: the same rounds, several times as fast",
    )
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    """Evaluate one method on one benchmark."""
    import torch

    from vllm_jetspecpp.config import RoundConfig
    from vllm_jetspecpp.evaluation.acceptance import Bench, describe
    from vllm_jetspecpp.evaluation.answers import AnswerConfig
    from vllm_jetspecpp.evaluation.datasets import benchmark
    from vllm_jetspecpp.evaluation.methods import EvalConfig, default_checkpoint
    from vllm_jetspecpp.evaluation.provenance import provenance

    torch.set_num_threads(args.threads)
    prompts = benchmark(args.bench, args.limit)
    config = EvalConfig(
        eval_target(args),
        str(args.checkpoint or default_checkpoint(args.method, DEMO_CHECKPOINT) or ""),
        RoundConfig(
            args.num_draft_tokens,
            args.num_outcomes,
            args.jacobi,
            args.refresh,
            args.selection,
            anchor_replacement=not args.no_replacement,
        ),
        args.states,
        args.max_new_tokens,
        args.dtype,
        method=args.method,
        temperature=args.temperature,
        seed=args.seed,
        device=args.device,
        draft_weights=args.draft_weights,
    )
    bench = Bench(config)
    if args.follow:
        answers = bench.answerer(prompts, AnswerConfig(args.max_new_tokens, args.temperature, args.seed))
        figures = bench.follow(config, answers)
    else:
        figures = bench.run(config, prompts)
    verified_by = "recorded answers" if args.follow else "target"
    result = {**describe(config), "bench": args.bench, "verified_by": verified_by, **figures}
    write_json({**result, "made_by": provenance()}, args.json)
    if args.json != "-":
        print("\n".join(f"{name:24} {value}" for name, value in figures.items()))
    return 0


def add_calibrate(subcommands: Subcommands) -> None:
    """``jetspecpp calibrate``."""
    parser = subcommands.add_parser("calibrate", help="fit how outcomes are scored, on held-out prompts")
    parser.add_argument("--checkpoint", default=str(DEMO_CHECKPOINT), help="default: %(default)s")
    add_common_eval(parser)
    add_round_options(parser, 16, 256)
    parser.add_argument("--prompts", type=Path, default=None, help="default: the package's 56 calibration prompts")
    parser.add_argument("--num-draft-tokens", type=counts, default="7,15", help="every γ to fit for (default: 7,15)")
    parser.add_argument("--coverage", type=float, default=0.9, help="of the threshold (default: %(default)s)")

    def run(args: argparse.Namespace) -> int:
        import torch

        from vllm_jetspecpp.calibration.calibrate import calibrate
        from vllm_jetspecpp.config import RoundConfig
        from vllm_jetspecpp.evaluation.datasets import CALIBRATION, read_prompts
        from vllm_jetspecpp.evaluation.methods import EvalConfig

        if not 0 < args.coverage < 1:
            raise ValueError(f"coverage must lie between 0 and 1, got {args.coverage}")
        torch.set_num_threads(args.threads)
        shape = RoundConfig(max(args.num_draft_tokens), args.num_outcomes, args.jacobi, args.refresh)
        config = EvalConfig(
            eval_target(args), args.checkpoint, shape, max_new_tokens=args.max_new_tokens, dtype="bfloat16"
        )
        prompts = read_prompts(args.prompts or CALIBRATION, args.limit)
        made = calibrate(config, prompts, args.num_draft_tokens, args.coverage)
        write_json(made, args.json)
        if args.json != "-":
            for fit in made["found"]:
                print(f"γ = {fit['num_draft_tokens']}: {fit['rounds']} rounds, beta {fit['beta']:.3f}, hit rate by B:")
                for rule, rates in fit["hit_rate"].items():
                    print(f"  {rule:13}", "  ".join(f"{size}: {rate:.3f}" for size, rate in rates.items()))
        return 0

    parser.set_defaults(run=run)


def settings(text: str) -> tuple[tuple[int, int], ...]:
    """``0-0,1-1`` → ((0, 0), (1, 1)): J and R, for argparse."""
    pairs = [part.split("-") for part in text.split(",")]
    if not all(len(pair) == 2 and all(n.isdecimal() for n in pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"expected J-R pairs such as 0-0,1-1, got {text!r}")
    return tuple((int(passes), int(refreshes)) for passes, refreshes in pairs)


def add_acceptance(subcommands: Subcommands) -> None:
    """``jetspecpp acceptance``."""
    parser = subcommands.add_parser(
        "acceptance", help="record what a checkpoint's drafts are worth, for the planner, on held-out prompts"
    )
    parser.add_argument("--checkpoint", default=str(DEMO_CHECKPOINT), help="default: %(default)s")
    add_common_eval(parser)
    parser.add_argument("--prompts", type=Path, default=None, help="default: the package's 56 calibration prompts")
    parser.add_argument("--num-draft-tokens", type=int, default=15, help="γ, the checkpoint's longest (default: 15)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest answer (default: %(default)s)")
    parser.add_argument(
        "--settings",
        type=settings,
        default="0-0,0-1,1-0,1-1,2-2,3-3",
        metavar="J-R,...",
        help="every J and R to record (default: %(default)s)",
    )

    def run(args: argparse.Namespace) -> int:
        import torch

        from vllm_jetspecpp.calibration.acceptance import measure_acceptance
        from vllm_jetspecpp.config import RoundConfig
        from vllm_jetspecpp.evaluation.datasets import CALIBRATION, read_prompts
        from vllm_jetspecpp.evaluation.methods import EvalConfig

        torch.set_num_threads(args.threads)
        for passes, refreshes in args.settings:
            RoundConfig(args.num_draft_tokens, jacobi_passes=passes, context_refreshes=refreshes)
        shape = RoundConfig(args.num_draft_tokens)
        config = EvalConfig(
            eval_target(args), args.checkpoint, shape, max_new_tokens=args.max_new_tokens, dtype="bfloat16"
        )
        made = measure_acceptance(config, read_prompts(args.prompts or CALIBRATION, args.limit), args.settings)
        write_json(made.as_dict(), args.json)
        if args.json != "-":
            for passes, rounds in made.after_hit.items():
                rates = "  ".join(f"{b}: {1 - rounds.miss_rate(b):.3f}" for b in (1, 2, 4, 8, 16))
                print(f"J{passes[0]}-R{passes[1]}: {rounds.count:.0f} rounds after hits, hit rate there by B: {rates}")
        return 0

    parser.set_defaults(run=run)
