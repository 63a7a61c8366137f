"""Where a figure comes from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vllm_jetspecpp import __version__


def provenance() -> dict[str, Any]:
    """Command, commit, versions, machine and date: what every figure carries."""
    import transformers

    root = Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": git.stdout.strip() or None,
        "versions": {
            "vllm_jetspecpp": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
    }
