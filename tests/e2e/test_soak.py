"""The soak test in its shortest form: `vllm serve` with a draft process of its own, mixed load, aborts and a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 900


def test_soak(tmp_path: Path) -> None:
    options = ["--minutes", "0.25", "--kills", "1", "--interval", "1", "--tiny", "--out", str(tmp_path)]
    command = [sys.executable, "benchmarks/soak.py", *options, "--json", "-"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert all(result["checks"].values()), result
    assert done.returncode == 0 and result["passed"]
    assert set(result["requests"]["by_kind"]) == {"greedy", "chat", "sampled", "several", "structured", "stop"}
    assert result["requests"]["aborted"] > 0
    (kill,) = result["kills"]
    assert kill["new_pid"] != kill["pid"] and kill["resumed_at"] > kill["at"]
    assert {process["role"] for process in result["memory"]} == {"server", "engine core", "worker", "draft process"}
    assert (tmp_path / "soak.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "soak.json").read_text())["samples"]
