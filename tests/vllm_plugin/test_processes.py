"""The whole chain: front end, engine core, worker, and a draft process of its own, placed by Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_plugin.conftest import ENGINE_OPTIONS, MAX_TOKENS, ROOT

SECONDS = 600


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_draft_process_of_its_own(
    tiny_model: Path, sequences_file: Path, plain: dict[str, Any], prompts: list[list[int]]
) -> None:
    report = run_echo(tiny_model, sequences_file, plain, prompts, start_timeout=400.0)
    layout, cores = report["layout"], sorted(os.sched_getaffinity(0))
    assert layout["class"] == "CPUSpecDecodeWorker" and layout["pid"] != report["pid"]
    assert layout["draft_cores"] == cores[-1:]
    assert layout["threads"] == str(max(len(cores) - 1, 1))


def run_echo(
    tiny_model: Path, sequences_file: Path, plain: dict[str, Any], prompts: list[list[int]], **options: Any
) -> dict[str, Any]:
    """An engine whose drafts are right: its output is plain vLLM's, all drafts are accepted, no answer is late."""
    speculative_config = {
        "method": "jetspecpp",
        "model": str(sequences_file),
        "draft_engine": "tests.engines.EchoEngine",
        "num_speculative_tokens": 7,
        "reply_timeout": 30.0,
        **options,
    }
    report = run_engine(
        {
            "engine": ENGINE_OPTIONS | {"model": str(tiny_model), "speculative_config": speculative_config},
            "prompts": prompts,
            "max_tokens": MAX_TOKENS,
        }
    )
    assert report["outputs"] == plain["outputs"]
    stats = report["stats"]
    assert stats["accepted"] == stats["drafted"] > 0 and stats["client"]["timeouts"] == 0
    assert stats["client"]["replies"] == stats["verify_steps"] > 0
    return report


def run_engine(request: dict[str, Any], program: str = "run_engine.py", seconds: int = SECONDS) -> dict[str, Any]:
    """What ``program`` of this folder reports on its last line."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc of a function
        "PYTHONPATH": str(ROOT),
    }
    del environment["OMP_NUM_THREADS"]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), json.dumps(request)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
