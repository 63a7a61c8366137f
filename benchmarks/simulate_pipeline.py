"""What drafting beside verification brings on machines that are not here, by discrete-event simulation.

::

    python benchmarks/simulate_pipeline.py --paper-table3                    # the paper's serving figures
    python benchmarks/simulate_pipeline.py --model qwen3-8b --targets 8 --draft-devices 2
    python benchmarks/simulate_pipeline.py --verify-ms 6.2 --pass-ms 0.9 --pred-ms 1.9 --hit-rate 0.93 --tau-hit 7.9
    python benchmarks/simulate_pipeline.py --profile costs.json --targets 8 --draft-devices 1-8 --plot devices.png
    python benchmarks/simulate_pipeline.py --study                           # benchmarks/results/simulation

Nothing here is measured: times and acceptance go in, waiting comes out. ``docs/scaling.md`` explains model and limits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline_paper import ROWS, Check, PaperRow, deployment, exposed_by_fallback, given, ratio_range, table_3
from pipeline_plots import draw_devices, draw_sharing, draw_timeline
from pipeline_study import Study, compare, count_records, markdown, pipelined_setup
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_jetspecpp.config import RoundConfig, check_choice
from vllm_jetspecpp.evaluation.pipeline_simulator import Acceptance, PipelineCosts, Profile, simulate
from vllm_jetspecpp.evaluation.provenance import provenance

RESULTS = Path(__file__).parent / "results/simulation"
MODELS: dict[str, PaperRow] = {
    f"{name}{suffix}": row
    for name, rows in (("qwen3-8b", ROWS[:2]), ("qwen3.8-27b", ROWS[2:]))
    for suffix, row in zip(("", "-math"), rows, strict=True)
}
COSTS = {
    "verify_ms": ("verify", "T_verify"),
    "pred_ms": ("predict", "T_pred"),
    "pass_ms": ("draft_pass", "T_pass"),
    "fallback_ms": ("fallback", "T_fallback"),
    "inline_ms": ("inline_draft", "drafting of a method that drafts in line"),
    "plain_ms": ("plain", "a step of plain decoding"),
    "comm_ms": ("comm_ms", "T_comm"),
    "host_ms": ("host_ms", "T_host of a draft round"),
    "commit_ms": ("commit_ms", "writing true states"),
    "step_ms": ("step_ms", "the target's own work between rounds"),
}
ROUND = {
    "num_outcomes": "B, outcomes pre-drafted",
    "jacobi_passes": "J, refinement passes",
    "context_refreshes": "R, context refreshes",
    "num_draft_tokens": "γ, draft tokens a block",
}


def device_counts(text: str) -> list[int]:
    """``3`` → [3]; ``1-8`` → [1, …, 8]."""
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a number or a range like 1-8, got {text!r}")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"expected at least 1 draft device and a range that rises, got {text!r}")
    return list(range(low, high + 1))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Discrete-event simulation of drafting beside verification.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--paper-table3", action="store_true", help="the paper's serving figures; fails beyond 10 %%")
    what.add_argument("--study", action="store_true", help=f"all questions of docs/scaling.md, into {RESULTS.name}/")
    source = parser.add_argument_group("deployment (options override the model's or the profile's)")
    source.add_argument("--model", help=f"times and acceptance of the paper's text: {', '.join(MODELS)}")
    source.add_argument("--profile", type=Path, metavar="FILE", help="a JSON profile: costs, round, acceptance")
    for option, (_, said) in COSTS.items():
        source.add_argument(f"--{option.replace('_', '-')}", type=float, metavar="MS", help=said)
    for option, said in ROUND.items():
        source.add_argument(f"--{option.replace('_', '-')}", type=int, metavar="N", help=said)
    source.add_argument("--hit-rate", type=float, help="p_hit, whatever the accepted length")
    source.add_argument("--tau-hit", type=float, help="tokens a verification commits after a hit")
    source.add_argument("--tau-miss", type=float, help="the same after a miss (default: as after a hit)")
    source.add_argument("--tau-inline", type=float, help="the same of the method that drafts in line")
    machines = parser.add_argument_group("machines")
    machines.add_argument("--targets", type=int, default=1, metavar="N")
    machines.add_argument("--draft-devices", type=device_counts, default=[1], metavar="M", help="a number, or 1-8")
    machines.add_argument("--batch", type=int, default=1, metavar="N", help="requests that a target verifies together")
    machines.add_argument("--merge", action="store_true", help="a device drafts for all that wait at once")
    machines.add_argument("--fallbacks-first", action="store_true", help="fallbacks overtake draft rounds")
    machines.add_argument("--drop-queued", action="store_true", help="draft rounds that begin too late are given up")
    parser.add_argument("--rounds", type=int, help="rounds a target (default 20000; a study 2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write JSON; - is standard output")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="speed over the number of draft devices")
    parser.add_argument("--timeline", type=Path, metavar="PNG", help="the first rounds, device by device")
    parser.add_argument("--write-profile", type=Path, metavar="FILE", help="the deployment as JSON, to edit")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where a study goes")
    args = parser.parse_args(argv)
    if args.rounds is None:
        args.rounds = 2000 if args.study else 20_000
    return args


def profile_of(args: argparse.Namespace) -> Profile:
    """The deployment the command line describes.

    Raises:
        ValueError: nothing to start from, or a value that makes no sense.
    """
    if args.model is not None and args.profile is not None:
        raise ValueError("--model and --profile both name a deployment: give one of them")
    if args.profile is not None:
        base = Profile.from_json(args.profile)
    elif args.model is not None:
        check_choice("--model", args.model, MODELS)
        base = deployment(MODELS[args.model])
    else:
        missing = [name for name in ("verify_ms", "hit_rate", "tau_hit") if getattr(args, name) is None]
        if missing:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise ValueError(f"without --model or --profile, {options} must be given too")
        base = None
    changed = {name: getattr(args, option) for option, (name, _) in COSTS.items() if getattr(args, option) is not None}
    costs = PipelineCosts.from_dict({**(base.costs.to_dict() if base else {}), **changed}, "command line")
    chosen = {name: getattr(args, name) for name in ROUND if getattr(args, name) is not None}
    options = replace(base.round, **chosen) if base else RoundConfig(**{"num_draft_tokens": 15, **chosen})
    tau_inline = args.tau_inline if args.tau_inline is not None else base.tau_inline if base else None
    name = base.name if base else "command line"
    return Profile(costs, options, acceptance_of(args, base, options), tau_inline, name)


def acceptance_of(args: argparse.Namespace, base: Profile | None, options: RoundConfig) -> Acceptance:
    """Acceptance of the command line over that of the deployment."""
    known = base.acceptance if base else None
    if args.hit_rate is None and args.tau_hit is None and args.tau_miss is None and known is not None:
        return known
    hit_rate = args.hit_rate if args.hit_rate is not None else known.hit_rate if known else None
    tau_hit = args.tau_hit if args.tau_hit is not None else known.after_hit.mean if known else None
    tau_miss = args.tau_miss if args.tau_miss is not None else known.after_miss.mean if known else tau_hit
    assert hit_rate is not None and tau_hit is not None and tau_miss is not None
    return Acceptance.of(hit_rate, tau_hit, tau_miss, options.num_draft_tokens)


def rounded(value: Any) -> Any:
    """Numbers to six digits, far within the statistical error; everything else as it is."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_study(result: dict[str, Any], path: Path) -> None:
    """A line for every record: files of results are read in differences, too."""
    parts = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(r, ensure_ascii=False) for r in part) + "\n]"
        if isinstance(part, list)
        else f"{json.dumps(name)}: {json.dumps(part)}"
        for name, part in rounded(result).items()
    ]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def write_json(result: Any, where: str | None) -> None:
    """To a file or, for ``-``, to standard output."""
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
    if where == "-":
        print(text)
    elif where:
        Path(where).write_text(text + "\n")


def print_table(title: str, columns: list[str], rows: list[list[str]], console: Console) -> None:
    """A rich table."""
    made = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        made.add_row(*row)
    console.print(made)


def paper_table(args: argparse.Namespace, console: Console) -> int:
    """The paper's Table 3; 1 when a figure is off by more than 10 %."""
    checks = table_3(args.rounds, args.seed)
    failed = [c for c in checks if c.is_within is False]
    if args.json != "-":
        print_inputs(console)
        rows = [
            [c.row, c.figure, f"{c.simulated:.3f}", "–" if c.paper is None else f"{c.paper:g}"]
            + ["–" if c.error is None else f"{100 * c.error:+.1f} %", c.mark]
            for c in checks
        ]
        columns = ["row", "figure", "simulated", "the paper's", "error", "mark"]
        print_table("Table 3, simulated (– : the text gives no figure)", columns, rows, console)
        for mark in ("predicted", "fitted", "input"):
            compared = [c.is_within for c in checks if c.mark == mark and c.is_within is not None]
            console.print(f"{mark}: {sum(compared)} of {len(compared)} figures within 10 % of the paper's")
    ranges = {row.name: ratio_range(row, args.rounds, args.seed) for row in ROWS}
    result = {"made_by": provenance(), "inputs": given(), "checks": [c.to_dict() for c in checks]}
    write_json(result | {"speed_over_dspark_at_both_ends_of_verify_ms": ranges, "failed": len(failed)}, args.json)
    return 1 if failed else 0


def print_inputs(console: Console) -> None:
    """What goes in, with marks."""
    rows = [[g["what"], f"{g['value']:.4g}", g["mark"], g["source"]] for g in given()]
    print_table("What goes in", ["what", "value", "mark", "source"], rows, console)


def run_study(args: argparse.Namespace, console: Console) -> int:
    """Every question; JSON, Markdown and plots."""
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {}
    study, total = Study(args.rounds, args.seed), count_records()
    for question, record in track(study.run(), "simulating", total, console=console):
        results.setdefault(question, []).append(record)
    checks: list[Check] = table_3(20_000, args.seed)
    as_dicts, made_by = [c.to_dict() for c in checks], provenance()
    (args.out / "README.md").write_text(markdown(results, as_dicts, given(), made_by).rstrip() + "\n")
    whole = {"made_by": made_by, "inputs": given(), "table_3": as_dicts, "exposed_by_fallback": exposed_by_fallback()}
    whole |= results
    write_study(whole, args.out / "results.json")
    draw_sharing(args.out / "sharing.png", results["sharing"])
    shared = pipelined_setup(deployment(ROWS[0], 0.5), num_targets=3)
    segments = simulate(shared, 100, 1, args.seed, timeline_ms=60).segments
    draw_timeline(args.out / "timeline.png", segments, "Qwen3-8B: three targets on one draft device")
    console.print(f"wrote README.md, results.json, sharing.png and timeline.png into {args.out.name}/")
    return 0


def run_deployment(args: argparse.Namespace, console: Console) -> int:
    """One deployment, at every number of draft devices asked for."""
    profile = profile_of(args)
    if args.write_profile:
        write_json(profile.to_dict(), str(args.write_profile))
    policy = {name: getattr(args, name) for name in ("merge", "fallbacks_first", "drop_queued")}
    shared = {"num_targets": args.targets, "batch_size": args.batch, **policy}
    records = [
        compare(profile, args.rounds, args.seed, num_draft_devices=devices, **shared) for devices in args.draft_devices
    ]
    if args.json != "-":
        print_records(profile, records, console)
    write_json({"made_by": provenance(), "profile": profile.to_dict(), "records": records}, args.json)
    if args.plot:
        draw_devices(args.plot, records, profile.name)
    if args.timeline:
        setup = pipelined_setup(profile, num_draft_devices=args.draft_devices[0], **shared)
        until = 10 * profile.costs.verify(args.batch)
        segments = simulate(setup, 20, 1, args.seed, timeline_ms=until).segments
        draw_timeline(args.timeline, segments, profile.name)
    return 0


def print_records(profile: Profile, records: list[dict[str, Any]], console: Console) -> None:
    """A line for every number of draft devices."""

    def shown(value: float | None, digits: int = 2) -> str:
        return "–" if value is None else f"{value:,.{digits}f}"

    columns = ["draft devices", "tok/s a target", "in all", "τ", "hits", "exposed ms", "wait ms", "busy", "Eq. 4"]
    columns += ["/ in line", "per GPU", "/ plain"]
    rows = []
    for record in records:
        f = record["jetspecpp"]
        cells = [str(record["draft_devices"]), f"{f['tok_s']:,.0f}±{shown(f['tok_s_error'], 0)}"]
        cells += [shown(f["total_tok_s"], 0), shown(f["tau"]), shown(f["hit_rate"], 3), shown(f["exposed_ms"])]
        cells += [shown(f["wait_ms"]), shown(f["utilisation"]), shown(record["eq4_tok_s"], 0)]
        rows.append(cells + [shown(record.get(k)) for k in ("over_inline", "over_inline_per_gpu", "over_plain")])
    first = records[0]
    title = f"{profile.name}: {first['targets']} targets, {first['batch']} requests each (simulated)"
    print_table(title, columns, rows, console)
    bound = f"{first['targets_per_device']:.2f}"
    console.print(
        f"One draft device is full at {bound} such targets. Eq. 4 is for a device of one's own: it has no queue."
    )
    console.print("'per GPU' counts targets and draft devices, over drafting in line on the targets alone.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; 2 on input that makes no sense."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        if args.paper_table3:
            return paper_table(args, console)
        return run_study(args, console) if args.study else run_deployment(args, console)
    except ValueError as error:
        print(f"simulate_pipeline.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
