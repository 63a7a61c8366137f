"""A checkpoint's acceptance statistics, ``calibration/acceptance.json``: what the planner starts from. Optional."""

from __future__ import annotations

from pathlib import Path

from vllm_jetspecpp.models.checkpoint import ACCEPTANCE_FILE, read_json, write_json, write_manifest
from vllm_jetspecpp.planning.acceptance import Acceptance


def save_acceptance(folder: Path, acceptance: Acceptance) -> None:
    """Write the file into a checkpoint, and its manifest anew."""
    path = folder / ACCEPTANCE_FILE
    path.parent.mkdir(exist_ok=True)
    write_json(path, acceptance.as_dict())
    write_manifest(folder, read_json(folder / "manifest.json")["target"])


def load_acceptance(folder: Path) -> Acceptance | None:
    """The checkpoint's statistics; None where it has none.

    Raises:
        ValueError: the file is not what :func:`save_acceptance` writes.
    """
    path = folder / ACCEPTANCE_FILE
    return Acceptance.from_dict(read_json(path), str(path)) if path.is_file() else None
