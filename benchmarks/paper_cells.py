"""What the paper's tables are made of here: one cell is one method in one setting on one benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.evaluation.datasets import BENCHMARKS
from vllm_jetspecpp.evaluation.methods import EvalConfig

MATH = ("gsm8k", "math500")
"""The two benchmarks of the paper's smaller tables."""
PASSES = {"J0": (0, 0), "J1": (1, 0), "J2": (2, 0), "J3": (3, 0), "J1-R1": (1, 1), "J2-R2": (2, 2), "J3-R3": (3, 3)}
SSD_LOOKAHEAD = 4
"""The paper's SSD commits at most five tokens a round: drafting token by token, more cannot be hidden."""
SSD = f"ssd, {SSD_LOOKAHEAD} draft tokens"
RIVALS = ("ngram", "dflash", "jetspec", "dspark", "domino", SSD, "ssd")
"""``ssd`` drafts the whole budget, which takes as many passes as tokens."""
OURS = ("J1-R1", "J3-R3")
ABLATIONS = ("ours", "noise-noised", "mask-prefix", "mask-noised", "reverse-kl", "cross-entropy", "bidirectional")
NO_REPLACEMENT = " without replacement"


@dataclass(frozen=True)
class Cell:
    """One evaluation; its fields are its name."""

    label: str
    """Method or, for JetSpec++, J and R; with what else differs from serving."""
    bench: str
    temperature: float = 0.0
    budget: int = 16
    """Block size at verification, anchor included."""

    @property
    def key(self) -> str:
        """Name of the cell."""
        return f"{self.label}|{self.bench}|T{self.temperature:g}|{self.budget}"


@dataclass(frozen=True)
class Places:
    """Where models are."""

    target: str
    checkpoint: str
    rivals: tuple[Path, ...]
    """Folders of rivals and ablations."""

    def find(self, name: str) -> Path | None:
        """Folder or file of a rival's name, the first there is."""
        return next((path for folder in self.rivals if (path := folder / name).exists()), None)


def settings(label: str, places: Places, budget: int) -> EvalConfig | None:
    """The evaluation a label stands for; None where its model is not there."""
    shape = RoundConfig(budget - 1, num_outcomes=16)
    ours = EvalConfig(places.target, places.checkpoint, shape, dtype="bfloat16", check_output=False)
    name, _, states = label.partition(", ")
    passes = PASSES.get(name.removesuffix(NO_REPLACEMENT).rpartition(": ")[2])
    if passes is None:
        folder = places.find(name)
        if folder is None and label != "ngram":
            return None
        if label == SSD:
            shape = replace(shape, num_draft_tokens=SSD_LOOKAHEAD)
        return replace(
            ours, method=name, checkpoint=str(folder), round=replace(shape, jacobi_passes=0, context_refreshes=0)
        )
    shape = replace(
        shape,
        jacobi_passes=passes[0],
        context_refreshes=passes[1],
        anchor_replacement=not name.endswith(NO_REPLACEMENT),
    )
    model, colon, _ = name.rpartition(": ")
    if not colon:
        return replace(ours, round=shape, states=states or "predicted")
    folder = Path(places.checkpoint) if model == "jetspecpp" else places.find(model)
    return replace(ours, round=shape, method="draft-only", checkpoint=str(folder)) if folder else None


def table_cells(quick: bool) -> list[Cell]:
    """Every cell, those that the headline needs first."""
    cells: list[Cell] = []

    def add(labels: Iterator[str] | list[str], benches: tuple[str, ...], **more: Any) -> None:
        cells.extend(Cell(label, bench, **more) for bench in benches for label in labels)

    methods = [*RIVALS, *OURS]
    add(methods, BENCHMARKS)  # Table 1
    add(["J0", "J1", "J3", *(f"{name}{NO_REPLACEMENT}" for name in OURS)], MATH)  # Table 5
    add([f"{name}, {states}" for name in ("J0", "J1", "J3") for states in ("true", "copied")], MATH)  # Table 6
    final = ("jetspec", "jetspecpp", "every-prefix")
    add([f"{model}: {name}" for model in final for name in ("J0", "J1", "J3")], MATH)  # Table 12
    add([f"{model}: {name}" for model in ABLATIONS for name in ("J0", "J1", "J3")], MATH)  # Tables 4, 14, 15
    add([f"{name}, unpipelined" for name in ("J0", "J1", "J3", *OURS)], MATH)  # Table 16
    if not quick:
        add(methods, BENCHMARKS, budget=32)
        add(methods, BENCHMARKS, temperature=1.0)
        add(methods, BENCHMARKS, temperature=1.0, budget=32)
        add(["J2", "J2-R2"], MATH)
    return cells


class Results:
    """Cells on disk, one JSON object a line; every process writes its own file and reads all."""

    def __init__(self, folder: Path, shard: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._own = folder, folder / f"cells-{shard}.jsonl"

    def read(self) -> dict[str, dict[str, Any]]:
        """Every finished cell by key."""
        lines = [line for path in sorted(self.folder.glob("cells-*.jsonl")) for line in path.read_text().splitlines()]
        return {row["key"]: row for row in map(json.loads, lines)}

    def write(self, key: str, figures: dict[str, Any]) -> None:
        """Append a cell."""
        with self._own.open("a") as file:
            file.write(json.dumps({"key": key, **figures}) + "\n")
