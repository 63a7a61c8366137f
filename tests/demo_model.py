"""The real small model of the demo, for tests of behaviour: its target and the checkpoint of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "checkpoints/smollm2-135m-instruct"
TARGET = Path(os.environ.get("JETSPECPP_DEMO_TARGET", ROOT / ".cache/smollm2-135m-instruct"))


def require_demo_model() -> None:
    """Fail, or skip where JETSPECPP_ALLOW_MISSING=1, unless both folders are there."""
    for folder in (TARGET, CHECKPOINT):
        if (folder / "config.json").is_file():
            continue
        reason = f"{folder} is missing; `make test` prepares the target, the checkpoint is part of the repository"
        if os.environ.get("JETSPECPP_ALLOW_MISSING") == "1":
            pytest.skip(reason)
        pytest.fail(f"{reason} (JETSPECPP_ALLOW_MISSING=1 skips)")
