"""``jetspecpp eval`` as a user types it, for every method, on what comes with the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RIVALS = ("dflash", "jetspec", "dspark", "domino", "ssd")
SHORT = ("--bench", "gsm8k", "--limit", "1", "--max-new-tokens", "32", "--json", "-")


def run(script: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the repository in its root."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, cwd=ROOT)


def evaluate(*arguments: str) -> dict[str, Any]:
    """What ``jetspecpp eval`` prints: one JSON object and nothing else."""
    done = run(("-m", "vllm_jetspecpp.cli", "eval"), *SHORT, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("method", [*RIVALS, "ngram"])
def test_rivals_are_evaluated_and_lossless(method: str) -> None:
    """One answer verified by the target in float32: the output is its own, and a trained rival is accepted."""
    found = evaluate("--method", method)
    assert found["method"] == method and found["verified_by"] == "target"
    assert found["identical_to_target"] is True and found["tokens"] == 32
    assert (found["hit_rate"] is None) == (method != "ssd")
    assert found["tau"] > (1.0 if method == "ngram" else 1.3)
    assert found["rounds"] < 31


def test_the_method_live_and_along_its_answer() -> None:
    """The same τ, hits and rounds whether the target verifies or its recorded answer is followed."""
    options = ("--method", "jetspecpp", "--jacobi", "1", "--refresh", "1")
    live, followed = evaluate(*options), evaluate(*options, "--follow")
    assert live["identical_to_target"] is True and live["tau"] > 1.5
    assert {"tau", "hit_rate", "rounds", "tokens", "identical_to_target", "made_by"} <= live.keys()
    assert all(live[name] == followed[name] for name in ("tau", "hit_rate", "rounds", "tokens", "tau_hit"))
    assert followed["verified_by"] == "recorded answers" and followed["identical_to_target"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "dflahs"), "method must be one of .* (did you mean 'dflash'?)"),
        (("--method", "dspark", "--checkpoint", "nowhere"), "`python benchmarks/train_rivals.py dspark`"),
        (
            ("--method", "jetspec", "--checkpoint", "checkpoints/rivals/dflash"),
            "a draft model of 'dflash', not of 'jetspec'",
        ),
    ],
)
def test_what_cannot_be_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = run(("-m", "vllm_jetspecpp.cli", "eval"), *SHORT, *arguments)
    assert done.returncode == 2
    assert message.partition(" .* ")[0] in done.stderr and message.rpartition(" .* ")[2] in done.stderr
    assert "Traceback" not in done.stderr


def test_tables_of_the_paper(tmp_path: Path) -> None:
    """The short form with answers of a few tokens: every table is written, and a second run has nothing left to do."""
    options = ("--quick", "--limit", "1", "--max-new-tokens", "6", "--calibration-prompts", "2")
    places = ("--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"))
    done = run(("benchmarks/paper_tables.py",), *options, *places)
    assert done.returncode == 0, done.stderr[-3000:]
    tables = json.loads((tmp_path / "out/tables.json").read_text())
    assert {table["number"] for table in tables["tables"]} >= {1, 5, 6, 9, 10, 11, 12, 16}
    table_1 = next(table for table in tables["tables"] if table["number"] == 1)
    names = [row[0] for row in table_1["rows"]]
    assert names == ["ngram", *RIVALS[:4], "ssd, 4 draft tokens", "ssd", "J1-R1", "J3-R3"]
    assert all(isinstance(value, float) for row in table_1["rows"] for value in row[1:])
    assert {"commits", "versions", "machine", "dates", "command"} <= tables["made_by"].keys()
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {
        "tau_by_method.png",
        "tau_over_passes.png",
        "hit_rate_over_cache_size.png",
        "acceptance_by_position.png",
    }
    cells = (tmp_path / "out/cells-0.jsonl").read_text()
    assert run(("benchmarks/paper_tables.py",), *options, *places).returncode == 0
    assert (tmp_path / "out/cells-0.jsonl").read_text() == cells
