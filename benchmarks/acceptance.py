"""Acceptance length over refinement, hit rate over cache size: a checkpoint on several benchmarks, as files and a plot.

::

    python benchmarks/acceptance.py run --bench gsm8k --out benchmarks/results/acceptance    # one process a core
    python benchmarks/acceptance.py report benchmarks/results/acceptance

Every file holds what ``jetspecpp eval --json`` prints for one setting; settings that have a file are not run again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

SETTINGS = {
    "J0": {"jacobi_passes": 0, "context_refreshes": 0},
    "J1-R1": {},
    "J3-R3": {"jacobi_passes": 3, "context_refreshes": 3},
    "J1-R1 true states": {"states": "true"},
    "J1": {"context_refreshes": 0},
    "J3": {"jacobi_passes": 3, "context_refreshes": 0},
}


def run(args: argparse.Namespace) -> None:
    import torch

    from vllm_jetspecpp.config import RoundConfig
    from vllm_jetspecpp.evaluation.acceptance import Bench, EvalConfig, describe, provenance
    from vllm_jetspecpp.evaluation.datasets import benchmark

    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    shape = RoundConfig(args.num_draft_tokens, args.num_outcomes)
    base = EvalConfig(
        args.target,
        args.checkpoint,
        shape,
        max_new_tokens=args.max_new_tokens,
        dtype="bfloat16",
        check_output=False,
    )
    bench = Bench(base)
    for setting in args.setting or SETTINGS:
        options: dict[str, Any] = dict(SETTINGS[setting])
        states = options.pop("states", "predicted")
        for name in args.bench:
            path = args.out / f"{name}-{setting.replace(' ', '-')}.json"
            if path.is_file():
                continue
            config = replace(base, round=replace(shape, **options), states=states)
            figures = bench.run(config, benchmark(name, args.limit))
            result = {"setting": setting, "bench": name, **describe(config), **figures, "made_by": provenance()}
            path.write_text(json.dumps(result, indent=2) + "\n")
            print(f"{name} {setting}: tau {figures['tau']}, hit rate {figures['hit_rate']}", flush=True)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def report(args: argparse.Namespace) -> None:
    """Markdown on standard output, and ``acceptance.png`` beside the files."""
    results = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.json"))]
    by = {(r["setting"], r["bench"]): r for r in results}
    benches = sorted({r["bench"] for r in results})
    print("| setting | " + " | ".join(benches) + " | mean τ | mean hit rate | decoder top-1 (reached) |")
    print("| --- |" + " --- |" * (len(benches) + 3))
    for setting in SETTINGS:
        rows = [by[setting, bench] for bench in benches if (setting, bench) in by]
        if len(rows) < len(benches):
            continue
        taus = " | ".join(f"{r['tau']:.2f}" for r in rows)
        top1 = f"{mean([r['decoder_top1'] for r in rows]):.3f} ({mean([r['decoder_top1_reached'] for r in rows]):.3f})"
        hits = mean([r["hit_rate"] for r in rows])
        print(f"| {setting} | {taus} | {mean([r['tau'] for r in rows]):.2f} | {hits:.3f} | {top1} |")
    served = [by["J1-R1", bench]["hit_rate_by_cache_size"] for bench in benches if ("J1-R1", bench) in by]
    if served:
        sizes = list(served[0]["uncalibrated"])
        print("\n| rule, hit rate replayed on J1-R1's rounds | " + " | ".join(f"B = {size}" for size in sizes) + " |")
        print("| --- |" + " --- |" * len(sizes))
        for rule in served[0]:
            rates = " | ".join(f"{mean([s[rule][size] for s in served]):.3f}" for size in sizes)
            print(f"| {rule} | {rates} |")
        draw(args.folder / "acceptance.png", by, benches)


def draw(path: Path, by: dict[tuple[str, str], dict[str, Any]], benches: list[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    settings = [s for s in ("J0", "J1", "J3", "J1-R1", "J3-R3") if all((s, b) in by for b in benches)]
    for bench in benches:
        left.plot(settings, [by[s, bench]["tau"] for s in settings], "o-", label=bench)
    left.set(title="acceptance length τ", ylim=(1, None))
    left.legend()
    for bench in (b for b in benches if ("J1-R1", b) in by):
        rates = by["J1-R1", bench]["hit_rate_by_cache_size"]
        for rule, style in (("calibrated", "-"), ("uncalibrated", ":")):
            if rule in rates:
                right.plot(list(rates[rule]), list(rates[rule].values()), style, marker="o", label=f"{bench}, {rule}")
    right.set(title="hit rate over B, J1-R1's rounds", ylim=(0, 1))
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance on several benchmarks and settings.")
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--bench", nargs="+", required=True)
    runner.add_argument("--setting", nargs="+", choices=SETTINGS, help="default: all")
    runner.add_argument("--out", type=Path, required=True)
    runner.add_argument("--target", default=".cache/smollm2-135m-instruct")
    runner.add_argument("--checkpoint", default="checkpoints/smollm2-135m-instruct")
    runner.add_argument("--num-draft-tokens", type=int, default=15)
    runner.add_argument("--num-outcomes", type=int, default=16)
    runner.add_argument("--limit", type=int, default=32)
    runner.add_argument("--max-new-tokens", type=int, default=96)
    runner.set_defaults(run=run)
    reporter = commands.add_parser("report")
    reporter.add_argument("folder", type=Path)
    reporter.set_defaults(run=report)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
