"""A checkpoint's calibration: how the outcomes of a verification are scored (Eq. 12), fitted on held-out rounds."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_jetspecpp.config import CALIBRATED, CONFORMAL, MAX_DRAFT_TOKENS, check_keys
from vllm_jetspecpp.models.checkpoint import (
    CALIBRATION_FILE,
    read_json,
    require,
    require_int,
    write_json,
    write_manifest,
)

NUM_FEATURES = 6


@dataclass(frozen=True)
class Calibration:
    """What ``jetspecpp calibrate`` fits for one γ."""

    num_draft_tokens: int
    """γ of the rounds it was fitted on."""
    weights: tuple[float, ...]
    """w, one for each feature, in the order of ``calibrated_score.features``."""
    beta: float
    """Temperature of the bonus distribution."""
    threshold: float
    """λ on the log score, split-conformal."""
    coverage: float
    """Share of rounds whose realised outcome is meant to score at least λ."""


def check_selection(selection: str, calibration: Calibration | None) -> None:
    """Raise ValueError when the rule needs a calibration and the checkpoint has none."""
    if selection in (CALIBRATED, CONFORMAL) and calibration is None:
        raise ValueError(
            f"selection {selection!r} needs {CALIBRATION_FILE} in the checkpoint: run `jetspecpp calibrate`, "
            "or choose 'uncalibrated'"
        )


def save_calibration(folder: Path, fits: list[Calibration], run: dict[str, Any]) -> None:
    """Write ``calibration/thresholds.json`` into a checkpoint, and its manifest anew.

    Args:
        run: how the newest of ``fits`` came to be; kept beside those of earlier runs.
    """
    path = folder / CALIBRATION_FILE
    path.parent.mkdir(exist_ok=True)
    runs = read_json(path).get("runs", []) if path.is_file() else []
    ordered = sorted(fits, key=lambda fit: fit.num_draft_tokens)
    write_json(path, {"fits": [asdict(fit) for fit in ordered], "runs": [*runs, run]})
    write_manifest(folder, read_json(folder / "manifest.json")["target"])


def load_calibrations(folder: Path) -> list[Calibration]:
    """All of the checkpoint's fits, one for each γ; none where it has no calibration.

    Raises:
        ValueError: the file is not what :func:`save_calibration` writes.
    """
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        return []
    entries = require(read_json(path), "fits", path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path}: fits must be a list of objects")
    fits = []
    for entry in entries:
        check_keys(entry, [f.name for f in fields(Calibration)], str(path))
        values = {f.name: require(entry, f.name, path) for f in fields(Calibration)}
        require_int(entry, "num_draft_tokens", path, 1, MAX_DRAFT_TOKENS)
        weights = values["weights"] if isinstance(values["weights"], list) else []
        numbers = [*weights, values["beta"], values["threshold"], values["coverage"]]
        if not all(isinstance(n, int | float) for n in numbers):
            raise ValueError(f"{path}: weights, beta, threshold and coverage of a fit must be numbers, got {entry}")
        fit = Calibration(**values | {"weights": tuple(weights)})
        if len(fit.weights) != NUM_FEATURES or not all(map(math.isfinite, (*fit.weights, fit.beta))) or fit.beta <= 0:
            raise ValueError(f"{path}: a fit needs {NUM_FEATURES} finite weights and beta above 0, got {entry}")
        fits.append(fit)
    return fits


def load_calibration(folder: Path, num_draft_tokens: int) -> Calibration | None:
    """The checkpoint's calibration for γ, or for the nearest γ it was fitted for; None where it has none."""
    fits = load_calibrations(folder)
    return min(fits, key=lambda fit: abs(fit.num_draft_tokens - num_draft_tokens), default=None)
