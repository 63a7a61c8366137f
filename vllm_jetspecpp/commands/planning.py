"""``jetspecpp plan``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from vllm_jetspecpp.commands.common import DEMO_CHECKPOINT, DEMO_TARGET, Subcommands, counts
from vllm_jetspecpp.commands.evaluation import eval_target, write_json

MAX_BATCH = 64


def add_plan(subcommands: Subcommands) -> None:
    """``jetspecpp plan``."""
    parser = subcommands.add_parser(
        "plan", help="measure this machine, and show which γ, B, J and R pay here, if any, for each batch size"
    )
    parser.add_argument("--target", default=None, help=f"default: $JETSPECPP_DEMO_TARGET or {DEMO_TARGET}")
    parser.add_argument("--checkpoint", default=str(DEMO_CHECKPOINT), help="default: %(default)s")
    parser.add_argument("--batch", type=counts, default="1,2,4,8,16", help="batch sizes (default: %(default)s)")
    parser.add_argument("--num-speculative-tokens", type=int, default=None, help="longest γ (default: all)")
    parser.add_argument("--copy-drafts", action="store_true", help="with copied drafts (docs/planning.md)")
    parser.add_argument("--profile", default=None, metavar="FILE", help="times saved before, instead of measuring")
    parser.add_argument("--save", type=Path, default=None, metavar="FILE", help="keep the times for `plan_profile`")
    parser.add_argument("--json", metavar="FILE", default=None, help="write all as JSON; - is standard output")
    parser.add_argument(
        "--validate", type=int, default=1, metavar="N", help="serve the first N batch sizes and compare (default: 1)"
    )
    parser.add_argument("--prompts", type=int, default=3, help="answers a request when comparing (default: 3)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each (default: %(default)s)")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Measure, plan, compare."""
    from rich.console import Console

    from vllm_jetspecpp.evaluation.planned_serving import PlanConfig, planned_engine, read_plan

    if max(args.batch) > MAX_BATCH:
        raise ValueError(f"--batch sizes must be from 1 to {MAX_BATCH}, got {max(args.batch)}")
    for name, low in (("validate", 0), ("prompts", 1), ("max_tokens", 8)):
        if getattr(args, name) < low:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(args, name)}")
    config = PlanConfig(
        eval_target(args),
        args.checkpoint,
        args.batch,
        args.num_speculative_tokens,
        args.max_tokens,
        args.prompts,
        args.profile,
        args.copy_drafts,
    )
    console = Console(stderr=True)
    with console.status("starting vLLM and measuring"), planned_engine(config) as llm:
        result = _make(llm, read_plan(llm), config, args)
    result["target"], result["checkpoint"] = Path(config.target).name, Path(config.checkpoint).name
    write_json(result, args.json)
    if args.json != "-":
        _print(Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140), result)
    return 0


def _make(llm: Any, plan: Any, config: Any, args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    from vllm_jetspecpp.evaluation import planned_serving
    from vllm_jetspecpp.evaluation.provenance import provenance
    from vllm_jetspecpp.planning.plan import best

    made_by = provenance()
    if args.save is not None:
        planned_serving.save_profile(plan.costs, args.save, made_by)
    batches, held = [], []
    for index, batch in enumerate(config.batches):
        rows = plan.explain(batch)
        chosen = best(rows)
        listed = [planned_serving.as_dict(row) for row in planned_serving.shortlist(rows)]
        batches.append({"batch": batch, "chosen": planned_serving.as_dict(chosen), "rows": listed})
        if index < args.validate:
            drafting = best(rows[1:]).choice
            choices = dict.fromkeys((chosen.choice, None, drafting, planned_serving.REFERENCE))
            usable = [c for c in choices if c is None or c.num_draft_tokens <= max(plan.options.gammas)]
            held += planned_serving.hold_to(llm, plan, batch, usable, config)
    costs = asdict(plan.costs)
    return {"plan": batches, "validation": held, "costs": costs, "made_by": made_by}


def _print(console: Any, result: dict[str, Any]) -> None:
    from rich.table import Table

    for batch in result["plan"]:
        table = Table(title=f"batch {batch['batch']}")
        for column in ("choice", "T_verify", "T_draft", "hidden", "T_fallback", "step, ms", "p_hit", "τ", "tok/s"):
            table.add_column(column, justify="left" if column == "choice" else "right")
        for row in batch["rows"]:
            name = row["choice"] + (" ←" if row["choice"] == batch["chosen"]["choice"] else "")
            times = [f"{row[key]:.1f}" for key in ("verify_ms", "draft_ms", "fallback_ms", "step_ms")]
            hidden = "yes" if row["hidden"] else "no"
            rates = [f"{row['hit_rate']:.2f}", f"{row['tau']:.2f}", f"{row['tok_s']:.1f}"]
            table.add_row(name, *times[:2], hidden, *times[2:], *rates)
        console.print(table)
    if not result["validation"]:
        return
    table = Table(title="predicted and measured, tok/s")
    columns = (
        "batch",
        "choice",
        "predicted",
        "while serving",
        "measured",
        "error",
        "while serving",
        "of a step's time",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "choice" else "right")
    for row in result["validation"]:
        table.add_row(
            str(row["batch"]),
            row["choice"],
            f"{row['predicted_tok_s']:.1f}",
            f"{row['predicted_while_serving_tok_s']:.1f}",
            f"{row['measured_tok_s']:.1f}",
            f"{100 * row['error']:+.0f} %",
            f"{100 * row['error_while_serving']:+.0f} %",
            f"{100 * row['step_error']:+.0f} %",
        )
    console.print(table)
