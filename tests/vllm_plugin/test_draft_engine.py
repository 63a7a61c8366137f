"""vLLM with the real draft engine, in this process: a checkpoint with random weights changes nothing of the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.vllm_plugin.conftest import MAX_TOKENS, generate, running_engine


def test_greedy_output(tiny_model: Path, plain: dict[str, Any], prompts: list[list[int]], tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tiny_model, tmp_path, copy_adapter=True)
    options = {"method": "jetspecpp", "model": str(checkpoint.folder), "transport": "local", "num_outcomes": 2}
    with running_engine(tiny_model, max_num_batched_tokens=64, speculative_config=options) as llm:
        assert generate(llm, prompts) == plain["outputs"]
        stats = llm.collective_rpc("jetspecpp_stats")[0]
    assert sum(stats["committed"].values()) == sum(len(output) for output in plain["outputs"])
    assert stats["rounds"] > MAX_TOKENS and stats["invalid_blocks"] == 0
    assert stats["blocks_by_origin"]["first"] == len(prompts)
