"""Benchmark and calibration prompts that come with the package; ``data/bench/README.md`` has sources and licences."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vllm_jetspecpp.config import check_choice

DATA = Path(__file__).parent.parent / "data"
CALIBRATION = DATA / "calib/calib.jsonl"
BENCHMARKS = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mtbench")


@dataclass(frozen=True)
class Prompt:
    """The user messages of an item: one, or two for MT-Bench."""

    id: str
    turns: tuple[str, ...]


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of a file in the format of ``data/bench``.

    Raises:
        FileNotFoundError: there is no such file.
    """
    with path.open(encoding="utf8") as lines:
        rows = [json.loads(line) for line in lines]
    return [Prompt(row["id"], tuple(row["turns"])) for row in rows[:limit]]


def benchmark(name: str, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of a benchmark.

    Raises:
        ValueError: an unknown name.
    """
    check_choice("bench", name, BENCHMARKS)
    return read_prompts(DATA / f"bench/{name}.jsonl", limit)
