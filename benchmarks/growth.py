"""What a round of the draft engine costs as context, batch, outcomes and block grow.

::

    python benchmarks/growth.py --quick --json -                     # two minutes on one core
    python benchmarks/growth.py --out benchmarks/results/growth      # every size, more repeats

Each size is an engine of its own over the checkpoint's networks, fed with random tokens and states: what is timed,
from outside, is the answer to an outcome that was foreseen, the answer to one that was not, and the work behind an
answer (commit, foresee, draft). Rounds of all sizes take turns. Quality plays no part: blocks longer than the
checkpoint was trained for are drafted with the same weights. FLOPs of matrix products and bytes of new tensors are
counted beside the seconds. glibc keeps its memory as in the demo's server (``--default-malloc``: as it likes). The exit
status is 1 where something grows with the square of the context.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from growth_fit import Exponent, fit
from growth_report import write
from growth_rounds import Point, Rounds
from rich.console import Console
from rich.progress import track

from vllm_jetspecpp.commands.evaluation import eval_target, write_json
from vllm_jetspecpp.config import EngineConfig, RoundConfig
from vllm_jetspecpp.demo.run import SERVE_ENV
from vllm_jetspecpp.evaluation.provenance import provenance
from vllm_jetspecpp.models.calibration import load_calibration
from vllm_jetspecpp.models.networks import load_networks

WINDOW = 512
AXES: dict[str, tuple[str, Point, tuple[int, ...], tuple[int, ...]]] = {
    "context": ("context", Point(), (128, 256, 512, 1024, 2048, 4096, 8192), (128, 512, 2048, 4096, 8192)),
    "context, window": (
        "context",
        Point(window=WINDOW),
        (512, 1024, 2048, 4096, 8192),
        (512, 2048, 8192),
    ),
    "batch": ("batch", Point(), (1, 2, 4, 8, 16), (1, 4, 16)),
    "outcomes": ("num_outcomes", Point(), (1, 2, 4, 8, 16), (1, 4, 16)),
    "block": ("num_draft_tokens", Point(), (7, 11, 15, 23, 31), (7, 15, 31)),
}
"""What grows: its field, the other sizes, its sizes, and those of ``--quick``."""
PARTS = ("answer_hit", "answer_miss", "work")
COUNTS = ("flops", "bytes")
SQUARE = 1.3
"""A fitted exponent whose interval lies above this counts as more than linear: caches that a longer context leaves make
linear work a little dearer, a square is far above."""
LONGEST_BLOCK, LONGEST_CONTEXT = 31, 8192


def sizes_of(axis: str, quick: bool, longest: int) -> list[int]:
    """Sizes to measure."""
    field, _, full, few = AXES[axis]
    return [size for size in (few if quick else full) if field != "context" or size <= longest]


def points_of(axis: str, sizes: Sequence[int]) -> list[Point]:
    """The rounds of one axis."""
    field, base, _, _ = AXES[axis]
    return [replace(base, **{field: size}) for size in sizes]


def measure(rounds: dict[Point, Rounds], repeats: int, console: Console) -> dict[Point, dict[str, list[float]]]:
    """Seconds of every part, ``repeats`` of each point, points in a new order every time."""
    seconds: dict[Point, dict[str, list[float]]] = {point: {part: [] for part in PARTS} for point in rounds}
    order, turn = list(rounds), random.Random(0)
    for repeat in track(range(repeats + 1), "rounds", console=console):
        turn.shuffle(order)
        for point in order:
            for hit in (True, False):
                answer, work = rounds[point].round(hit)
                if repeat:  # the first is a warm-up
                    seconds[point]["answer_hit" if hit else "answer_miss"].append(answer)
                    seconds[point]["work"].append(work)
    return seconds


def summarise(seconds: dict[str, list[float]], counts: dict[str, int]) -> dict[str, Any]:
    """Medians and quartiles in milliseconds, and counts."""
    figures: dict[str, Any] = {}
    for part, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4)
        figures[part] = {"ms": 1e3 * middle, "low": 1e3 * low, "high": 1e3 * high}
    return figures | counts


def exponents(
    points: Sequence[Point], sizes: Sequence[int], seconds: dict[Point, Any], counts: dict[Point, Any]
) -> dict[str, Exponent]:
    """By part and by count."""
    fits = {part: fit(sizes, [seconds[point][part] for point in points]) for part in PARTS}
    return fits | {name: fit(sizes, [[counts[point][name]] for point in points]) for name in COUNTS}


def squares(fitted: dict[str, dict[str, Exponent]]) -> list[str]:
    """What grows faster than linearly with the context: by its interval where timed, at all where counted."""
    return [
        f"{part} ({axis}): {exponent}"
        for axis in fitted
        if AXES[axis][0] == "context"
        for part, exponent in fitted[axis].items()
        if exponent.low > (SQUARE if part in PARTS else 1.001) and exponent.tail > 1.001
    ]


def dearer(fitted: dict[str, dict[str, Exponent]]) -> list[str]:
    """Times that grow faster than linearly between the two largest contexts, whether or not the whole fit shows it."""
    return [
        f"{part} ({axis}), {exponent.tail:.2f}"
        for axis in fitted
        if AXES[axis][0] == "context"
        for part, exponent in fitted[axis].items()
        if part in PARTS and exponent.low > 0 and exponent.tail > SQUARE
    ]


def run_as_served() -> None:
    """Start this script again with the memory settings of the demo's server, which glibc reads at start alone."""
    settings = {name: value for name, value in SERVE_ENV.items() if name.startswith("MALLOC_")}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=None, help="folder of the target (default: the demo's, made on first use)")
    parser.add_argument("--checkpoint", default="checkpoints/smollm2-135m-instruct")
    parser.add_argument("--axis", action="append", choices=list(AXES), help="only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--repeats", type=int, default=None, help="rounds of every size (default: 15; --quick: 7)")
    parser.add_argument("--longest-context", type=int, default=LONGEST_CONTEXT, help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1, help="processor cores (default: %(default)s)")
    parser.add_argument("--default-malloc", action="store_true", help="without the server's memory settings")
    parser.add_argument("--out", type=Path, default=None, help="folder for README.md, growth.json and growth.png")
    parser.add_argument(
        "--json", default=None, metavar="PATH", help="figures as one JSON object; - for standard output"
    )
    args = parser.parse_args()
    repeats = args.repeats or (7 if args.quick else 15)
    if repeats < 2:
        parser.error(f"--repeats must be at least 2, got {repeats}")
    if not args.default_malloc:
        run_as_served()
    torch.set_num_threads(args.threads)
    console = Console(stderr=True)

    longest = RoundConfig(LONGEST_BLOCK)
    config = EngineConfig(eval_target(args), args.checkpoint, longest, 1, args.longest_context, dtype=args.dtype)
    nets, info = load_networks(config)
    found: dict[str, Any] = {}
    fitted: dict[str, dict[str, Exponent]] = {}
    for axis in args.axis or AXES:
        sizes = sizes_of(axis, args.quick, args.longest_context)
        points = points_of(axis, sizes)
        console.print(f"{axis}: {', '.join(map(str, sizes))}")
        rounds = {
            point: Rounds(
                nets, point, load_calibration(info.folder, point.num_draft_tokens), getattr(torch, args.dtype)
            )
            for point in track(points, "contexts", console=console)
        }
        counts = {point: rounds[point].counts() for point in points}
        seconds = measure(rounds, repeats, console)
        fitted[axis] = exponents(points, sizes, seconds, counts)
        found[axis] = {
            "field": AXES[axis][0],
            "points": [asdict(point) | summarise(seconds[point], counts[point]) for point in points],
            "exponents": {part: asdict(exponent) for part, exponent in fitted[axis].items()},
        }
    faults = squares(fitted)
    result = {
        "axes": found,
        "square_in_context": faults,
        "dearer_at_the_end": dearer(fitted),
        "repeats": repeats,
        "threads": args.threads,
        "dtype": args.dtype,
        "default_malloc": args.default_malloc,
        "trained_block": info.block_size - 1,
        "max_position_embeddings": info.max_position_embeddings,
        "made_by": provenance(),
    }
    if args.out is not None:
        write(args.out, result, fitted)
        console.print(f"{args.out} written")
    write_json(result, args.json)
    for fault in faults:
        console.print(f"grows faster than linearly with the context: {fault}", style="red")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
