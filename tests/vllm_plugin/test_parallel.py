"""Several workers, several engines, and engines that hand over to each other: greedy output is that of one worker.

On the CPU. Every engine has one draft process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.engines import EchoEngine
from tests.tiny_models import make_tiny_llama
from tests.vllm_plugin.conftest import ENGINE_OPTIONS, MAX_TOKENS, generate, running_engine
from tests.vllm_plugin.test_processes import run_engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key-value head for each of two workers."""
    return make_tiny_llama(tmp_path_factory.mktemp("target"), num_key_value_heads=2)


@pytest.fixture(scope="module")
def expected(target: Path, prompts: list[list[int]]) -> list[list[int]]:
    with running_engine(target) as llm:
        return generate(llm, prompts)


@pytest.fixture(scope="module")
def known(prompts: list[list[int]], expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("known") / "sequences.json"
    path.write_text(json.dumps([p + o for p, o in zip(prompts, expected, strict=True)]))
    return path


def echo_options(known: Path) -> dict[str, Any]:
    return {
        "method": "jetspecpp",
        "model": str(known),
        "draft_engine": "tests.engines.EchoEngine",
        "num_speculative_tokens": 7,
        "reply_timeout": 120.0,
        "start_timeout": 500.0,
    }


def run(target: Path, known: Path, prompts: list[list[int]], **parallel: int) -> dict[str, Any]:
    engine = ENGINE_OPTIONS | parallel | {"model": str(target), "speculative_config": echo_options(known)}
    return run_engine({"engine": engine, "prompts": prompts, "max_tokens": MAX_TOKENS}, "run_parallel.py", seconds=900)


def test_disaggregated_prefill(
    target: Path, known: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    """A plain engine prefills and hands over keys and values; the one that decodes drafts without those states."""

    def connector(role: str) -> dict[str, Any]:
        extra = {"shared_storage_path": str(tmp_path)}
        config = {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": extra}
        return {"kv_transfer_config": config, "block_size": 32, "enable_prefix_caching": False}

    with running_engine(target, **connector("kv_producer")) as llm:
        generate(llm, prompts, max_tokens=1)
    options = {**echo_options(known), "transport": "local"}
    with running_engine(target, **connector("kv_consumer"), speculative_config=options) as llm:
        assert generate(llm, prompts) == expected
        stats = llm.collective_rpc("jetspecpp_stats")[0]
    assert stats["accepted"] == stats["drafted"] > 0
    engine = EchoEngine.last
    assert engine is not None
    first = [request for batch in engine.messages for request in batch.requests if request.reset]
    # Whole blocks of 32 came from the other engine, and of them tokens alone go to the draft process.
    assert all(request.token_start == 0 for request in first)
    assert max(request.state_start for request in first) == 224


def test_tensor_parallel(target: Path, known: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    report = run(target, known, prompts, tensor_parallel_size=2)
    assert report["outputs"] == expected
    first, second = sorted(report["workers"], key=lambda worker: worker["rank"])
    assert first["drafts"] and not second["drafts"] and second["stats"] == {}
    stats = first["stats"]
    assert stats["accepted"] == stats["drafted"] > 0
    assert stats["client"]["timeouts"] == stats["client"]["restarts"] == 0


def test_data_parallel(target: Path, known: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Each engine is given every second request, and has a draft process that drafts for those alone."""
    report = run(target, known, prompts, data_parallel_size=2)
    assert report["outputs"] == expected
    workers = sorted(report["workers"], key=lambda worker: worker["engine"])
    assert [worker["engine"] for worker in workers] == [0, 1] and all(worker["drafts"] for worker in workers)
    for worker, outputs in zip(workers, (expected[::2], expected[1::2]), strict=True):
        stats = worker["stats"]
        assert stats["accepted"] == stats["drafted"] > 0 and stats["client"]["restarts"] == 0
        assert sum(stats["committed"].values()) == sum(map(len, outputs))
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(workers[0]["draft_cores"]) & set(workers[1]["draft_cores"])
