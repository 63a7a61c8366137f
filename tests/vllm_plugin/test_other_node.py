"""The whole chain with the draft process on another node of a Ray cluster, reached through TCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ray_nodes import FAR, RayNodes
from tests.vllm_plugin.conftest import ENGINE_OPTIONS, MAX_TOKENS
from tests.vllm_plugin.test_processes import run_engine


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_draft_process_on_another_node(
    ray_nodes: RayNodes,
    tiny_model: Path,
    sequences_file: Path,
    plain: dict[str, Any],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ray_nodes.environment.items():
        monkeypatch.setenv(name, value)
    speculative_config = {
        "method": "jetspecpp",
        "model": str(sequences_file),
        "draft_engine": "tests.engines.EchoEngine",
        "num_speculative_tokens": 7,
        "transport": "tcp",
        "ray_address": ray_nodes.address,
        "draft_resources": {"num_cpus": 1, FAR: 1},
        "reply_timeout": 30.0,
        "start_timeout": 150.0,
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
    assert report["layout"]["draft_cores"] is None, "no core of this host is kept free"
