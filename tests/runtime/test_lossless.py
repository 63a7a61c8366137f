"""Lossless whatever is drafted: the offline loop with an untrained checkpoint, greedy and at temperature 1."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.tiny_round import Tiny, random_tokens
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.runtime.offline import distributions, generate
from vllm_jetspecpp.types import Origin


@pytest.mark.parametrize("shape", [(7, 1, 0, 0), (7, 4, 1, 1), (3, 16, 3, 3)], ids=str)
def test_greedy_output_is_the_targets(tiny: Tiny, shape: tuple[int, int, int, int]) -> None:
    prompt = random_tokens(12, seed=1)
    result = generate(tiny.offline(), tiny.engine(RoundConfig(*shape)), prompt, max_tokens=40)
    assert result.tokens == tiny.greedy(prompt, 40)
    assert result.rounds[0][0] is Origin.FIRST


def test_more_outcomes_hit_more_often(tiny: Tiny) -> None:
    """A decoder that knows something finds outcomes, and a larger cache holds a superset of a smaller one's."""
    prompt = random_tokens(12, seed=1)
    rates = [
        generate(tiny.offline(), tiny.engine(RoundConfig(3, b, 0, 0)), prompt, max_tokens=60).hit_rate for b in (1, 16)
    ]
    assert rates[1] > rates[0] and rates[1] > 0.1


def test_temperature_one_follows_the_target(tiny: Tiny) -> None:
    """The token after the first round, over many seeds, against the target's own distribution. False alarm: .001."""
    from scipy.stats import chisquare

    prompt, count = random_tokens(6, seed=2), 400
    with torch.inference_mode():
        first = distributions(tiny.model(torch.tensor([prompt])).logits[0, -1:], 1.0)[0]
    engine, target = tiny.engine(RoundConfig(2, 2, 1, 1)), tiny.offline()
    seen, second = Counter[int](), torch.zeros(128, dtype=torch.float64)
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        tokens = generate(target, engine, prompt, max_tokens=2, temperature=1.0, generator=generator).tokens
        seen[tokens[1]] += 1
    with torch.inference_mode():  # Σ_t p(t) p(· | t)
        for token in range(128):
            logits = tiny.model(torch.tensor([[*prompt, token]])).logits[0, -1:]
            second += first[token] * distributions(logits, 1.0)[0]
    order = second.argsort(descending=True)
    groups = order.split([1] * 8 + [8] * 5 + [128 - 48])  # rare tokens together, or their expected counts are too small
    observed = [sum(seen[int(t)] for t in group) for group in groups]
    expected = torch.tensor([float(second[group].sum()) for group in groups], dtype=torch.float64)
    assert chisquare(observed, (expected / expected.sum() * count).numpy()).pvalue > 0.001
