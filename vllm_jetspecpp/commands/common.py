"""What several subcommands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subcommands = object

DEMO_TARGET = Path(".cache/smollm2-135m-instruct")
DEMO_CHECKPOINT = Path("checkpoints/smollm2-135m-instruct")


def counts(text: str) -> tuple[int, ...]:
    """``2,3,1`` → (2, 3, 1), for argparse."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers above 0 with commas between them, got {text!r}")
    return tuple(map(int, parts))
