"""Options of the engine that change what requests get: prompt embeddings and processed log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams

from tests.engines import SwitchableEngine
from tests.tiny_models import make_tiny_llama
from tests.vllm_plugin.conftest import local_drafts, running_engine

OPTIONS: dict[str, Any] = {
    "enable_prompt_embeds": True,
    "logprobs_mode": "processed_logprobs",
    "max_num_batched_tokens": 64,
}
MAX_TOKENS = 40
ASKED: dict[str, dict[str, Any]] = {
    "unprocessed": {},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "allowed": {"allowed_token_ids": list(range(0, 128, 3)), "presence_penalty": -0.5},
    # Sampled from one token at last, but at another temperature.
    "temperature_and_top_k": {"temperature": 0.5, "top_k": 1},
}
"""With log-probabilities after these have been applied."""
EMBEDDED = [2, 3]
"""Prompts that are given as embeddings; the second one is prefilled in two steps."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def asked_prompts(model: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Four prompts, two of them as embeddings that belong to no tokens."""
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(2)
    asked: list[dict[str, Any]] = []
    for index, tokens in enumerate(prompts[:4]):
        if index in EMBEDDED:
            noise = torch.randn(len(tokens), embedding.shape[1], generator=generator)
            asked.append({"prompt_embeds": embedding[tokens] + 0.1 * noise})
        else:
            asked.append({"prompt_token_ids": tokens})
    return asked


def ask(llm: Any, asked_prompts: list[dict[str, Any]], options: dict[str, Any]) -> list[Any]:
    params = SamplingParams(
        **(
            {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "detokenize": False, "logprobs": 3}
            | options
        )
    )
    return [output.outputs[0] for output in llm.generate(asked_prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain(model: Path, asked_prompts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    with running_engine(model, **OPTIONS) as llm:
        return {name: ask(llm, asked_prompts, options) for name, options in ASKED.items()}


@pytest.fixture(scope="module", params=["known", "real"])
def drafts(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(
    drafts: str, model: Path, plain: dict[str, list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    engine = None if drafts == "real" else "ContinuingEngine"
    options = local_drafts(model, tmp_path_factory.mktemp(drafts), engine)
    with running_engine(model, speculative_config=options, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("name", ASKED)
def test_greedy_with_logprobs(
    name: str,
    drafts: str,
    llm: Any,
    plain: dict[str, list[Any]],
    asked_prompts: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens as in plain vLLM, their log-probabilities to 1e-4, whether the prompt has tokens or embeddings."""
    if drafts == "known":
        monkeypatch.setattr(SwitchableEngine, "mode", "mixed")
        monkeypatch.setattr(SwitchableEngine.last, "sequences", [list(answer.token_ids) for answer in plain[name]])
    llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})
    answers = ask(llm, asked_prompts, ASKED[name])
    stats = llm.collective_rpc("jetspecpp_stats")[0]
    assert stats["drafted"] > MAX_TOKENS and stats["invalid_blocks"] == 0
    if drafts == "known":
        assert 0 < stats["accepted"] < stats["drafted"]
    for answer, expected in zip(answers, plain[name], strict=True):
        assert answer.token_ids == expected.token_ids
        for here, there in zip(answer.logprobs, expected.logprobs, strict=True):
            assert here.keys() == there.keys()
            values = {token: entry.logprob for token, entry in there.items()}
            assert {token: entry.logprob for token, entry in here.items()} == pytest.approx(values, abs=1e-4)


def test_processing_changes_logprobs(plain: dict[str, list[Any]]) -> None:
    first = {name: answers[0].logprobs[1] for name, answers in plain.items()}
    values = [sorted(entry.logprob for entry in logprobs.values()) for logprobs in first.values()]
    assert all(one != other for i, one in enumerate(values) for other in values[:i])
