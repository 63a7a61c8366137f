"""vLLM with the real draft engine, in this process: a checkpoint with random weights changes nothing of the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_models import make_tiny_llama
from tests.vllm_plugin.conftest import MAX_TOKENS, generate, running_engine
from vllm_jetspecpp.models.target_parts import load_target_parts

ROUNDS = [(1, 0, 0), (4, 1, 1), (16, 3, 3), (2, 2, 0), (7, 3, 1)]
"""B, J and R."""


@pytest.mark.parametrize(("outcomes", "passes", "refreshes"), ROUNDS)
def test_greedy_output(
    outcomes: int,
    passes: int,
    refreshes: int,
    tiny_model: Path,
    plain: dict[str, Any],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """Eight requests of different lengths together, and one alone, with prefills in chunks."""
    checkpoint = make_tiny_checkpoint(tiny_model, tmp_path, copy_adapter=True)
    options = {
        "method": "jetspecpp",
        "model": str(checkpoint.folder),
        "transport": "local",
        "num_outcomes": outcomes,
        "jacobi_passes": passes,
        "context_refreshes": refreshes,
    }
    with running_engine(tiny_model, max_num_batched_tokens=64, speculative_config=options) as llm:
        assert generate(llm, prompts) == plain["outputs"]
        stats = llm.collective_rpc("jetspecpp_stats")[0]
        assert generate(llm, prompts[3:4]) == plain["outputs"][3:4]
    assert sum(stats["committed"].values()) == sum(len(output) for output in plain["outputs"])
    assert stats["rounds"] > MAX_TOKENS and stats["invalid_blocks"] == 0
    assert stats["blocks_by_origin"]["first"] == len(prompts)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_a_checkpoint_of_a_shorter_length(
    tiny_model: Path, plain: dict[str, Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    """The target goes up to 256 positions, the draft networks read the last 48 of them: same output."""
    checkpoint = make_tiny_checkpoint(tiny_model, tmp_path, copy_adapter=True, max_position_embeddings=48)
    options = {"method": "jetspecpp", "model": str(checkpoint.folder), "transport": "local"}
    with running_engine(tiny_model, max_num_batched_tokens=64, speculative_config=options) as llm:
        assert generate(llm, prompts) == plain["outputs"]
        stats = llm.collective_rpc("jetspecpp_stats")[0]
    assert stats["rounds"] > MAX_TOKENS and stats["accepted"] > 0


def test_tied_embeddings(prompts: list[list[int]], tmp_path: Path) -> None:
    """The LM head of such a target is its embedding, whatever its files hold under the head's name."""
    target = make_tiny_llama(tmp_path / "target", tie_word_embeddings=True)
    weights = load_file(target / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = torch.zeros_like(weights["model.embed_tokens.weight"])
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    checkpoint = make_tiny_checkpoint(target, tmp_path / "checkpoint", copy_adapter=True)
    parts = load_target_parts(target, checkpoint.deepest_tap, None, 64, torch.float32)
    assert torch.equal(parts.head, parts.embedding)
    with running_engine(target) as llm:
        expected = generate(llm, prompts[:4])
    options = {"method": "jetspecpp", "model": str(checkpoint.folder), "transport": "local"}
    with running_engine(target, speculative_config=options) as llm:
        assert generate(llm, prompts[:4]) == expected
        stats = llm.collective_rpc("jetspecpp_stats")[0]
    assert stats["rounds"] > 0 and stats["invalid_blocks"] == 0
