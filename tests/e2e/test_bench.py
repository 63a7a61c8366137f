"""`jetspecpp bench serve` as a user runs it, on a tiny target: two methods, one JSON, equal answers in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.tiny_chat import make_tiny_chat

ARGUMENTS = ("--quick", "--methods", "plain,jetspecpp", "--prompts", "1", "--repeats", "2", "--max-tokens", "12")
FIGURES = ("tok_s", "tau", "hit_rate", "exposed_ms", "exposed_ms_hits", "verify_ms", "host_ms", "ttft_ms")
LATENCIES = ("itl_p50_ms", "itl_p99_ms")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    target, checkpoint = make_tiny_chat(folder)
    paths = ["--target", str(target), "--checkpoint", str(checkpoint), "--work", str(folder / "work")]
    command = [sys.executable, "-m", "vllm_jetspecpp.cli", "bench", "serve", *ARGUMENTS, "--dtype", "float32", *paths]
    options = ["--num-speculative-tokens", "3", "--concurrency", "1,2", "--json", "-"]
    run = subprocess.run([*command, *options], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    assert (folder / "work/plain.log").is_file()
    return json.loads(run.stdout)


def test_one_object_with_all_figures(result: dict[str, Any]) -> None:
    assert list(result["methods"]) == ["plain", "jetspecpp"] and result["skipped"] == {}
    for method in result["methods"].values():
        assert set(method["concurrency"]) == {"1", "2"}
        assert all(key in method for key in (*FIGURES, *LATENCIES))
        assert method["tok_s"] > 0 and method["verify_ms"] > 0 and method["host_ms"] > 0
        assert len(method["spread"]["tok_s"]["values"]) == 2
    assert result["methods"]["plain"]["tau"] == 1.0
    ours = result["methods"]["jetspecpp"]
    assert ours["hit_rate"] is not None or ours["copied_share"], "the planner may copy alone, but drafts something"
    assert "wanted" in result["ratios"]["jetspecpp_over_plain"]
    assert result["settings"]["repeats"] == 2 and result["provenance"]["versions"]["vllm"]


def test_answers_equal_plain_ones(result: dict[str, Any]) -> None:
    answers = result["methods"]["jetspecpp"]["answers"]
    assert answers["compared"] == answers["equal"] == 3
