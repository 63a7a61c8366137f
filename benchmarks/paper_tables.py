"""Our versions of the paper's Tables 1, 4 to 6, 9 to 12 and 14 to 16, with the paper's figure where its text has one.

::

    python benchmarks/paper_tables.py --quick                    # 10 minutes, few prompts, short answers
    python benchmarks/paper_tables.py                            # hours; stopped, it goes on where it was
    python benchmarks/paper_tables.py --shard 1/2                # as a second process, at the same time

Cells land in ``<out>/cells-*.jsonl``; ``<out>/README.md``, ``tables.json`` and the plots are written from all cells
that are there, at the end and with ``--report``. Rivals come from ``benchmarks/train_rivals.py``; one that was not
trained is left out and named.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paper_cells import MATH, Places, Results, settings, table_cells
from paper_report import report

from vllm_jetspecpp.commands.training import shard

CACHE_SIZES = tuple(range(1, 17))


def answers_for(bench: Any, name: str, temperature: float, args: argparse.Namespace) -> list[Any]:
    """The target's answers to a benchmark, made once."""
    from vllm_jetspecpp.evaluation.answers import AnswerConfig, stored_answers
    from vllm_jetspecpp.evaluation.datasets import CALIBRATION, benchmark, read_prompts

    config = AnswerConfig(args.max_new_tokens, temperature)
    limit = args.calibration_prompts if name == "calibration" else args.limit
    prompts = read_prompts(CALIBRATION)[:: max(1, 56 // limit)] if name == "calibration" else benchmark(name, limit)
    path = args.work / f"{name}-T{temperature:g}-{limit}x{args.max_new_tokens}.json"
    return stored_answers(path, lambda: bench.answerer(prompts, config))


def run_cells(bench: Any, places: Places, results: Results, args: argparse.Namespace, deadline: float) -> None:
    """Every cell of this shard that is not there yet; in the quick form, until the time is up."""
    from vllm_jetspecpp.evaluation.acceptance import describe
    from vllm_jetspecpp.evaluation.provenance import provenance

    index, count = args.shard
    mine = table_cells(args.quick)[index::count]
    finished, missing = set(results.read()), set[str]()
    began, done = time.monotonic(), 0
    for number, cell in enumerate(mine, 1):
        if cell.key in finished:
            continue
        config = settings(cell.label, places, cell.budget)
        if config is None:
            missing.add(cell.label.partition(":")[0])
            continue
        if time.monotonic() > deadline:
            print(f"out of time at cell {number} of {len(mine)}", flush=True)
            break
        config = replace(config, max_new_tokens=args.max_new_tokens, temperature=cell.temperature)
        answers = answers_for(bench, cell.bench, cell.temperature, args)
        figures = bench.follow(config, answers)
        figures.pop("identical_prompts")
        results.write(cell.key, {**asdict(cell), **describe(config), **figures, "made_by": provenance()})
        done += 1
        left = (time.monotonic() - began) / done * (len(mine) - number) / 60
        print(f"{number}/{len(mine)} {cell.key}: tau {figures['tau']:.3f}; at most {left:.0f} min left", flush=True)
    if missing:
        where = " or ".join(map(str, places.rivals))
        print(f"left out, no model in {where}: {', '.join(sorted(missing))}", flush=True)


def run_replays(bench: Any, places: Places, results: Results, args: argparse.Namespace) -> None:
    """Tables 9 to 11: rounds recorded once, replayed under other decoders and rules."""
    from vllm_jetspecpp.calibration.fit import fit
    from vllm_jetspecpp.evaluation import selection_rules as rules
    from vllm_jetspecpp.evaluation.provenance import provenance
    from vllm_jetspecpp.evaluation.recording import SERVED, record

    if {f"replay|{name}" for name in MATH} <= results.read().keys():
        return
    config = settings("J1-R1", places, 16)
    assert config is not None
    nets, _ = bench.engines.networks(config)
    decoders = load_decoders(nets, places)
    calibration = record(bench, config, answers_for(bench, "calibration", 0.0, args), decoders)
    fits = {name: fit(calibration.joined(name), 0.9) for name in calibration.rounds}
    known = calibration.joined()
    laws = {
        rules.GEOMETRIC_DECODER: rules.fit_law(known),
        rules.GEOMETRIC_DRAFT: rules.fit_law(rules.with_draft_anchors(known, calibration.candidates())),
    }
    for name in MATH:
        recording = record(bench, config, answers_for(bench, name, 0.0, args), decoders)
        served = recording.joined()
        by_decoder = {
            decoder: rules.rule_hit_rates(
                recording.joined(decoder), recording.candidates(), fits[decoder], laws, CACHE_SIZES
            )
            for decoder in recording.rounds
        }
        figures = {
            "bench": name,
            "rounds": len(served),
            "decoder_top1": {d: n / recording.positions for d, n in recording.agreed.items()},
            "decoder_kl": {d: kl / recording.positions for d, kl in recording.kl.items()},
            "rules": by_decoder[SERVED],
            "decoders": {d: rates[rules.SERVED] for d, rates in by_decoder.items()},
            "laws": {rule: law._asdict() for rule, law in laws.items()},
            "posterior_mass": {b: rules.posterior_masses(served, b) for b in (1, 2, 4, 8, 16)},
        }
        results.write(f"replay|{name}", {**figures, "made_by": provenance()})


def load_decoders(nets: Any, places: Places) -> dict[str, Any]:
    """The fine-tuned decoder, where one was trained."""
    from copy import deepcopy

    from safetensors.torch import load_file

    path = places.find("decoder.safetensors")
    if path is None:
        print("left out, no decoder.safetensors beside the rivals: the fine-tuned decoder", flush=True)
        return {}
    decoder = deepcopy(nets.target.decoder)
    decoder.load_state_dict(load_file(path))
    return {"fine-tuned": decoder.to(nets.target.embedding.dtype).eval()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Our versions of the paper's tables.")
    parser.add_argument("--quick", action="store_true", help="few prompts and short answers: 10 minutes")
    parser.add_argument("--report", action="store_true", help="only write tables and plots from what is there")
    parser.add_argument(
        "--target", default=None, help="default: $JETSPECPP_DEMO_TARGET or the demo's, made on first use"
    )
    parser.add_argument("--checkpoint", default="checkpoints/smollm2-135m-instruct")
    parser.add_argument("--rivals", type=Path, nargs="*", default=[Path("checkpoints/rivals"), Path(".cache/rivals")])
    parser.add_argument(
        "--out", type=Path, default=None, help="default: benchmarks/results/paper, or .cache/paper-quick"
    )
    parser.add_argument("--work", type=Path, default=Path(".cache/paper"), help="the target's answers are kept here")
    parser.add_argument("--limit", type=int, default=None, help="prompts a benchmark (default: all; 2 with --quick)")
    parser.add_argument("--max-new-tokens", type=int, default=None, help="default: the paper's 2048; 40 with --quick")
    parser.add_argument("--calibration-prompts", type=int, default=None, help="default: 56; 8 with --quick")
    parser.add_argument("--no-replays", action="store_true", help="leave Tables 9 to 11 to another process")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="i/n", help="every n-th cell from the i-th on")
    args = parser.parse_args()
    quick = {"limit": 2, "max_new_tokens": 40, "calibration_prompts": 8, "out": Path(".cache/paper-quick")}
    full = {"limit": None, "max_new_tokens": 2048, "calibration_prompts": 56, "out": Path("benchmarks/results/paper")}
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.report:
        report(args.out)
        return

    import torch

    from vllm_jetspecpp.commands.evaluation import eval_target
    from vllm_jetspecpp.evaluation.acceptance import Bench

    deadline = time.monotonic() + 480 if args.quick else float("inf")
    torch.set_num_threads(1)
    places = Places(eval_target(args), args.checkpoint, tuple(args.rivals))
    results = Results(args.out, args.shard[0])
    config = settings("J1-R1", places, 16)
    assert config is not None
    bench = Bench(config, say=lambda line: None)
    if args.shard[0] == 0 and not args.no_replays:
        run_replays(bench, places, results, args)
    run_cells(bench, places, results, args, deadline)
    report(args.out)


if __name__ == "__main__":
    sys.exit(main())
