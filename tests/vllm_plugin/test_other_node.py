"""The whole chain with the draft process on another node of a Ray cluster, reached through TCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ray_nodes import FAR, RayNodes
from tests.vllm_plugin.test_processes import run_echo


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
    report = run_echo(
        tiny_model,
        sequences_file,
        plain,
        prompts,
        transport="tcp",
        ray_address=ray_nodes.address,
        draft_resources={"num_cpus": 1, FAR: 1},
        start_timeout=150.0,
    )
    assert report["layout"]["draft_cores"] is None, "no core of this host is kept free"
