"""At temperature > 0, tokens through vLLM's sampler follow the target's distribution (chi-square, fixed seed)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines import UniformEngine
from tests.tiny_models import make_tiny_llama
from tests.vllm_plugin.conftest import generate, running_engine

VOCAB = 8
PROMPT = [1, 5, 2, 7]
NUM_SAMPLES = 3000
NUM_TOKENS = 3
FALSE_ALARM_RATE = 1e-4


def next_probabilities(logits: torch.Tensor, temperature: float, top_k: int) -> torch.Tensor:
    logits = logits.double() / temperature
    if top_k:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    return logits.softmax(-1)


@torch.inference_mode()
def exact_distribution(model: Any, temperature: float, top_k: int) -> torch.Tensor:
    """Probability of every continuation, [vocab] * NUM_TOKENS."""
    prefixes, joint = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.double)
    for _ in range(NUM_TOKENS):
        p = next_probabilities(model(prefixes).logits[:, -1], temperature, top_k)
        joint = (joint[:, None] * p).flatten()
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(p))[:, None]], 1)
    return joint


def chi_square_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of the counts under ``probabilities``; cells of fewer than 5 expected are merged into one."""
    expected = probabilities * counts.sum()
    small = expected < 5
    assert counts[probabilities == 0].sum() == 0, "a continuation of probability 0 was sampled"
    pool = lambda values: torch.cat([values[~small], values[small].sum()[None]])  # noqa: E731
    counts, expected = pool(counts.double()), pool(expected)
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-12))[expected > 0].sum()
    degrees = (expected > 0).sum() - 1
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 3)])
def test_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, top_k: int) -> None:
    monkeypatch.setattr(UniformEngine, "vocab_size", VOCAB)
    model = make_tiny_llama(tmp_path, vocab_size=VOCAB, num_hidden_layers=4, initializer_range=0.1)
    options = {
        "method": "jetspecpp",
        "draft_engine": "tests.engines.UniformEngine",
        "transport": "local",
        "num_speculative_tokens": 2,
        "draft_slots": 64,
    }
    with running_engine(model, max_num_seqs=64, speculative_config=options) as llm:
        samples = generate(llm, [PROMPT] * NUM_SAMPLES, temperature=temperature, top_k=top_k, max_tokens=NUM_TOKENS)
        stats = llm.collective_rpc("jetspecpp_stats")[0]
    assert stats["rounds"] > NUM_SAMPLES / 2 and 0 < stats["accepted"] < stats["drafted"]
    found = Counter(sum(token * VOCAB ** (NUM_TOKENS - 1 - i) for i, token in enumerate(s)) for s in samples)
    counts = torch.tensor([found[cell] for cell in range(VOCAB**NUM_TOKENS)])
    exact = exact_distribution(AutoModelForCausalLM.from_pretrained(model), temperature, top_k)
    assert chi_square_p_value(counts, exact) > FALSE_ALARM_RATE
