"""vLLM's model runner V2: whatever is drafted, greedy output in float32 equals plain vLLM's, token for token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.vllm_plugin.conftest import ENGINE_OPTIONS, MAX_TOKENS, ROOT

SECONDS = 600
SHORT = 20
"""Tokens where nothing is gained by more: the interpreter takes 20 ms a step."""
MODES = {"echo": MAX_TOKENS, "wrong": SHORT, "mixed": SHORT, "garbage": SHORT}
ALONE = (1, 6, 7)
"""A short prompt, and two that leave little and no room before ``max_model_len``."""
pytestmark = pytest.mark.parametrize("family", ["llama"], indirect=True)


@pytest.fixture(scope="module")
def stop_token(plain: dict[str, Any]) -> int:
    """A token that comes up in the midst of the fourth output."""
    return plain["outputs"][3][MAX_TOKENS // 2]


@pytest.fixture(scope="module")
def report(
    tiny_model: Path,
    sequences_file: Path,
    prompts: list[list[int]],
    stop_token: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What happened in one process with two engines: chunked prefill (64 tokens a step) and prefix caching in both."""
    checkpoint = make_tiny_checkpoint(tiny_model, tmp_path_factory.mktemp("checkpoint"), copy_adapter=True)
    common = {"method": "jetspecpp", "transport": "local", "num_speculative_tokens": 7}
    request = {
        "model": str(tiny_model),
        "prompts": prompts,
        "modes": MODES,
        "alone": ALONE,
        "stop_token": stop_token,
        "max_tokens": SHORT,
        "engine": {
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": True,
            "block_size": 32,
            "num_gpu_blocks_override": 20,
        },
        "switchable": common | {"model": str(sequences_file), "draft_engine": "tests.engines.SwitchableEngine"},
        "checkpoint": common
        | {
            "model": str(checkpoint.folder),
            "num_outcomes": 4,
            "num_speculative_tokens_per_batch_size": [[1, 3, 7], [4, 8, 2]],
        },
    }
    return run("tests.vllm_plugin.run_model_runner_v2", request, {"PYTHONPATH": str(ROOT)})


def run(module: str, request: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(request)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_our_runner_is_a_v2_runner(report: dict[str, Any]) -> None:
    assert report["runner"][:4] == [
        "CPUHiddenStatesRunnerV2",
        "HiddenStatesRunnerV2",
        "CPUModelRunner",
        "GPUModelRunner",
    ]


def test_warm_up_is_not_drafted_for(report: dict[str, Any]) -> None:
    assert report["start"]["messages"] == report["start"]["rounds"] == report["start"]["plain_tokens"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_batch(report: dict[str, Any], plain: dict[str, Any], mode: str) -> None:
    batch, expected = report[f"batch {mode}"], [output[: MODES[mode]] for output in plain["outputs"]]
    assert batch["outputs"] == expected
    stats = batch["stats"]
    assert sum(stats["committed"].values()) == sum(map(len, expected))
    assert sum(stats["accepted_lengths"]) == stats["rounds"] == sum(stats["verified_by_origin"].values()) > 0
    assert (stats["invalid_blocks"] > 0) == (mode == "garbage")
    if mode == "echo":
        assert stats["accepted"] == stats["drafted"]
        assert stats["committed"]["target"] < sum(map(len, expected)) / 3
    if mode == "wrong":
        assert stats["accepted"] == 0
    if mode == "mixed":
        assert stats["accepted_by_origin"]["fallback"] == stats["accepted"] > 0


def test_some_requests_were_preempted(report: dict[str, Any]) -> None:
    assert sum(report[f"batch {mode}"]["preemptions"] for mode in MODES) > 1


def test_one_request_at_a_time(report: dict[str, Any], plain: dict[str, Any]) -> None:
    assert [alone["outputs"][0] for alone in report["alone"]] == [plain["outputs"][i] for i in ALONE]
    for alone in report["alone"]:
        stats = alone["stats"]
        assert stats["accepted"] == stats["drafted"]
        assert sum(stats["committed"].values()) == len(alone["outputs"][0])


def test_stop_token(report: dict[str, Any], plain: dict[str, Any], stop_token: int) -> None:
    expected = [o[: o.index(stop_token) + 1] if stop_token in o else o for o in plain["outputs"]]
    assert report["stop"]["outputs"] == expected
    assert sum(len(output) < MAX_TOKENS for output in expected[:4]) > 0


def test_cached_prefix_brings_tokens_but_no_states(
    report: dict[str, Any], plain: dict[str, Any], prompts: list[list[int]]
) -> None:
    cached = report["cached"]
    assert cached["output"] == plain["outputs"][5][:4]
    assert cached["reset"] and cached["token_start"] == 0 and cached["num_tokens"] == len(prompts[5]) + 1
    assert cached["state_start"] == 96 and cached["num_states"] == len(prompts[5]) - 96


def test_abort(report: dict[str, Any], plain: dict[str, Any]) -> None:
    abort = report["abort"]
    assert abort["outputs"] == [output[:30] for output in plain["outputs"][::2]]
    assert abort["next"] == plain["outputs"][:1]
    # Of the last request the worker hears with the next step only.
    assert abort["num_known"] == 1 and abort["num_free_slots"] == 7


def test_states_are_those_of_the_tapped_layers(report: dict[str, Any]) -> None:
    states = report["states"]
    assert states["complete"] and states["num_tokens"] > 100
    assert states["error"] < 1e-4


def test_draft_engine(report: dict[str, Any], plain: dict[str, Any], prompts: list[list[int]]) -> None:
    """The real one, on a checkpoint with random weights."""
    expected, stats = [output[:SHORT] for output in plain["outputs"]], report["draft engine"]["stats"]
    assert report["draft engine"]["outputs"] == expected
    assert sum(stats["committed"].values()) == sum(map(len, expected))
    assert stats["rounds"] > SHORT and stats["invalid_blocks"] == 0
    assert stats["blocks_by_origin"]["first"] == len(prompts)


def test_schedule_by_batch_size(report: dict[str, Any]) -> None:
    """vLLM's own schedule: 7 draft tokens up to three requests, 2 beyond."""
    together, alone = report["draft engine"]["stats"], report["draft engine"]["cold"]["stats"]
    assert together["drafted"] < 3 * together["rounds"]
    assert alone["drafted"] > 3 * alone["rounds"]


def test_states_of_a_cached_prefix_come_from_the_prefix_store(report: dict[str, Any], plain: dict[str, Any]) -> None:
    cold, warm = report["draft engine"]["cold"], report["draft engine"]["warm"]
    assert cold["outputs"] == warm["outputs"] == [plain["outputs"][5][:8]]
    assert warm["stats"]["missing_positions"] == 0 < warm["stats"]["context_positions"]
    assert warm["stats"]["accepted_lengths"] == cold["stats"]["accepted_lengths"]


def test_tensor_parallel(
    tiny_model: Path, sequences_file: Path, plain: dict[str, Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    """Two ranks verify the drafts that only the first of them has."""
    cores = sorted(os.sched_getaffinity(0))
    # Workers are processes of their own: each is shown the CPU backend as it starts.
    customize = "from tests.vllm_plugin.triton_on_cpu import pretend_cpu_backend\n\npretend_cpu_backend()\n"
    (tmp_path / "sitecustomize.py").write_text(customize)
    speculative_config = {
        "method": "jetspecpp",
        "model": str(sequences_file),
        "draft_engine": "tests.engines.EchoEngine",
        "transport": "local",
        "num_speculative_tokens": 7,
    }
    request = {
        "engine": ENGINE_OPTIONS
        | {"model": str(tiny_model), "tensor_parallel_size": 2, "speculative_config": speculative_config},
        "prompts": prompts[:4],
        "max_tokens": SHORT,
    }
    environment = {
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc of a function
    }
    report = run("tests.vllm_plugin.run_engine", request, environment)
    assert report["outputs"] == [output[:SHORT] for output in plain["outputs"][:4]]
    stats = report["stats"]
    assert stats["accepted"] == stats["drafted"] > stats["rounds"]
