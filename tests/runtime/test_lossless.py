"""Lossless whatever is drafted: the offline loop with an untrained checkpoint, greedy and at temperature 1."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.tiny_round import Tiny, follows_the_target, random_tokens
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.models.calibration import Calibration
from vllm_jetspecpp.runtime.draft_engine import DraftEngine
from vllm_jetspecpp.runtime.offline import generate
from vllm_jetspecpp.types import Origin


@pytest.mark.parametrize("shape", [(7, 1, 0, 0), (7, 4, 1, 1), (3, 16, 3, 3), (5, 8, 0, 1)], ids=str)
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


@pytest.mark.parametrize(("rule", "refreshes"), [("uncalibrated", 0), ("calibrated", 0), ("calibrated", 1)])
def test_temperature_one_follows_the_target(tiny: Tiny, rule: str, refreshes: int) -> None:
    """The third token, after one or two rounds with hits among them, over many seeds. False alarm: .001."""
    prompt, count = random_tokens(6, seed=2), 300
    config = tiny.config(RoundConfig(2, 8, 0, refreshes, rule))
    calibration = Calibration(2, (0.2, 0.5, 0.5, -0.2, -0.1, 0.0), 1.2, -7.0, 0.9)
    engine = DraftEngine.from_networks(config, tiny.networks(config.round), calibration)
    target, seen, origins = tiny.offline(), Counter[int](), Counter[Origin]()
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        result = generate(target, engine, prompt, max_tokens=3, temperature=1.0, generator=generator)
        seen[result.tokens[2]] += 1
        origins.update(origin for origin, _ in result.rounds)
    assert origins[Origin.HIT] > 10
    assert follows_the_target(tiny, prompt, seen, count)
