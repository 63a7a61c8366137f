"""At temperature > 0, tokens through vLLM's sampler follow the target's distribution (chi-square, fixed seed)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
"""Of each case, over seeds; the seed is fixed."""


@dataclass(frozen=True)
class Sampled:
    """What a request asks for, as vLLM names it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def probabilities(
        self,
        logits: torch.Tensor,  # [num_prefixes, vocab]
        prefixes: torch.Tensor,  # [num_prefixes, num_tokens], the prompt first
    ) -> torch.Tensor:
        """Of the next token after each prefix, [num_prefixes, vocab]."""
        said = torch.nn.functional.one_hot(prefixes[:, len(PROMPT) :], VOCAB).sum(1)
        seen = said + torch.nn.functional.one_hot(torch.tensor(PROMPT), VOCAB).sum(0) > 0
        logits = logits.double()
        repeated = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        logits = torch.where(seen, repeated, logits)
        logits = logits - self.frequency_penalty * said - self.presence_penalty * (said > 0)
        logits = logits / self.temperature
        if self.top_k:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        return self._nucleus(logits.softmax(-1))

    def _nucleus(self, p: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens that make up ``top_p``."""
        best = p.sort(-1, descending=True)
        before = best.values.cumsum(-1) - best.values
        kept = torch.zeros_like(p).scatter(-1, best.indices, best.values * (before < self.top_p))
        return kept / kept.sum(-1, keepdim=True)


@torch.inference_mode()
def exact_distribution(model: Any, sampled: Sampled) -> torch.Tensor:
    """Probability of every continuation, [vocab] * NUM_TOKENS."""
    prefixes, joint = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.double)
    for _ in range(NUM_TOKENS):
        p = sampled.probabilities(model(prefixes).logits[:, -1], prefixes)
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return make_tiny_llama(folder, vocab_size=VOCAB, num_hidden_layers=4, initializer_range=0.1)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Any]:
    options = {
        "method": "jetspecpp",
        "draft_engine": "tests.engines.UniformEngine",
        "transport": "local",
        "num_speculative_tokens": 2,
        "draft_slots": 64,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UniformEngine, "vocab_size", VOCAB)
        with running_engine(model, max_num_seqs=64, speculative_config=options) as llm:
            yield llm


@pytest.mark.parametrize(
    "sampled",
    [
        Sampled(),
        Sampled(temperature=0.7, top_k=3),
        Sampled(top_p=0.7),
        Sampled(temperature=1.3, top_k=6, top_p=0.9),
        Sampled(presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.5),
        Sampled(temperature=0.8, top_p=0.9, frequency_penalty=-0.7, repetition_penalty=0.7),
    ],
    ids=["plain", "top_k", "top_p", "top_k_top_p", "penalties", "top_p_penalties"],
)
def test_distribution(sampled: Sampled, llm: Any, model: Path) -> None:
    llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})
    samples = generate(llm, [PROMPT] * NUM_SAMPLES, **asdict(sampled), max_tokens=NUM_TOKENS)
    stats = llm.collective_rpc("jetspecpp_stats")[0]
    assert stats["rounds"] > NUM_SAMPLES / 2 and 0 < stats["accepted"] < stats["drafted"]
    found = Counter(sum(token * VOCAB ** (NUM_TOKENS - 1 - i) for i, token in enumerate(s)) for s in samples)
    counts = torch.tensor([found[cell] for cell in range(VOCAB**NUM_TOKENS)])
    exact = exact_distribution(AutoModelForCausalLM.from_pretrained(model), sampled)
    assert chi_square_p_value(counts, exact) > FALSE_ALARM_RATE
