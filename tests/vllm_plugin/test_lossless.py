"""Whatever an engine drafts, greedy output in float32 equals plain vLLM's, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import SwitchableEngine
from tests.vllm_plugin.conftest import generate, running_engine, worker_of

MODES = ("echo", "wrong", "mixed", "garbage")


@pytest.fixture(scope="module")
def llm(tiny_model: Path, sequences_file: Path) -> Iterator[Any]:
    """Chunked prefill (64 tokens a step), prefix caching, and room for about half of the prompts at once."""
    with running_engine(
        tiny_model,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        block_size=32,
        num_gpu_blocks_override=20,
        speculative_config={
            "method": "jetspecpp",
            "model": str(sequences_file),
            "draft_engine": "tests.engines.SwitchableEngine",
            "transport": "local",
            "num_speculative_tokens": 7,
        },
    ) as llm:
        yield llm


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(SwitchableEngine, "mode", request.param)
    return request.param


def take_stats(llm: Any) -> dict[str, Any]:
    return llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})[0]


def test_plain_vllm_runs_its_own_classes(plain: dict[str, Any]) -> None:
    assert plain["classes"] == ["vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner"]
    assert all(len(set(output)) > 5 for output in plain["outputs"]), "too easy to continue"


def test_one_request_at_a_time(llm: Any, plain: dict[str, Any], prompts: list[list[int]], mode: str) -> None:
    take_stats(llm)
    outputs = [generate(llm, [prompt])[0] for prompt in prompts]
    assert outputs == plain["outputs"]
    check_counts(take_stats(llm), mode, sum(map(len, outputs)))


def test_batch_with_preemption(llm: Any, plain: dict[str, Any], prompts: list[list[int]], mode: str) -> None:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preemptions = []
    original = scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **kwargs: preemptions.append(args) or original(*args, **kwargs)
    try:
        assert generate(llm, prompts) == plain["outputs"]
    finally:
        scheduler._preempt_request = original
    assert preemptions
    check_counts(take_stats(llm), mode, sum(map(len, plain["outputs"])))


def check_counts(stats: dict[str, Any], mode: str, num_tokens: int) -> None:
    assert sum(stats["committed"].values()) == num_tokens
    assert sum(stats["accepted_lengths"]) == stats["rounds"] == sum(stats["verified_by_origin"].values())
    assert stats["client"]["replies"] >= stats["verify_steps"] > 0
    if mode == "echo":
        assert stats["accepted"] == stats["drafted"] > 0
    if mode == "wrong":
        assert stats["accepted"] == 0 and stats["acceptance_length"] == 1
    if mode == "mixed":
        assert stats["accepted_by_origin"]["fallback"] == stats["accepted"] > 0 and stats["hits"] == 0
    assert (stats["invalid_blocks"] > 0) == (mode == "garbage")


def test_greedy_rows_beside_sampled_ones(
    llm: Any, plain: dict[str, Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    monkeypatch.setattr(SwitchableEngine, "mode", "echo")
    params = [
        SamplingParams(temperature=i % 2, top_k=5 if i % 2 else 0, max_tokens=30, ignore_eos=True, detokenize=False)
        for i in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for output, expected in list(zip(outputs, plain["outputs"], strict=True))[::2]:
        assert list(output.outputs[0].token_ids) == expected[:30]


def test_states_are_those_of_the_tapped_layers(
    llm: Any, tiny_model: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative error against Hugging Face's hidden states below 1e-4 in float32, at every position but the anchor's."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(SwitchableEngine, "mode", "mixed")
    llm.reset_prefix_cache()
    generate(llm, [prompts[3]])
    engine = SwitchableEngine.last
    slot = engine.messages[-1].requests[-1].slot
    history, states = engine.history[slot], engine.states[slot]
    assert sorted(states) == list(range(len(history) - 1))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.inference_mode():
        hidden = model(torch.tensor([history]), output_hidden_states=True).hidden_states
    taps = worker_of(llm).vllm_config.speculative_config.target_layer_ids
    expected = torch.cat([hidden[tap + 1][0] for tap in taps], dim=-1)[: len(states)]
    actual = torch.stack([states[position] for position in sorted(states)])
    assert torch.linalg.norm(actual - expected) < 1e-4 * torch.linalg.norm(expected)


def test_cached_prefix_brings_tokens_but_no_states(
    llm: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SwitchableEngine, "mode", "echo")
    generate(llm, [prompts[5]], max_tokens=4)
    num_messages = len(SwitchableEngine.last.messages)
    generate(llm, [prompts[5]], max_tokens=4)
    first = SwitchableEngine.last.messages[num_messages].requests[0]
    assert first.reset and first.token_start == 0
    assert first.state_start == 96 and first.states.shape[0] == first.tokens.shape[0] - 1 - 96
