"""The replay engine answers what the whole engine would, and says what a round saw."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tiny_round import Tiny, random_tokens
from vllm_jetspecpp.calibration.fit import fit
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.evaluation.replay_engine import ReplayEngine
from vllm_jetspecpp.evaluation.rounds import Rounds
from vllm_jetspecpp.models.calibration import Calibration
from vllm_jetspecpp.runtime.draft_engine import DraftEngine
from vllm_jetspecpp.runtime.offline import Generation, generate, generate_plainly
from vllm_jetspecpp.types import Origin, Outcome

CALIBRATION = Calibration(7, (0.2, 0.5, 0.5, -0.2, -0.1, 0.0), 1.2, -7.0, 0.9)
RULES = ("uncalibrated", "calibrated", "conformal")


def run(tiny: Tiny, engine: DraftEngine, seed: int, count: int = 40) -> Generation:
    return generate(tiny.offline(), engine, random_tokens(12, seed), max_tokens=count)


@pytest.mark.parametrize("rule", RULES)
def test_replay_equals_the_whole_round(tiny: Tiny, rule: str) -> None:
    """The same tokens, origins and outcomes under every rule; hits and misses both occur, and the output is exact."""
    config = tiny.config(RoundConfig(7, 6, 2, 1, rule))
    nets = tiny.networks(config.round)
    origins = set()
    for seed in (1, 2, 3):
        whole = run(tiny, DraftEngine.from_networks(config, nets, CALIBRATION), seed)
        replayed = run(tiny, ReplayEngine.from_networks(config, nets, CALIBRATION), seed)
        assert replayed == whole
        assert whole.tokens == tiny.greedy(random_tokens(12, seed), 40)
        origins |= {origin for origin, _ in whole.rounds}
    assert origins == {Origin.FIRST, Origin.HIT, Origin.FALLBACK}


def test_plain_decoding_is_the_targets(tiny: Tiny) -> None:
    prompt = random_tokens(12, 5)
    tokens = generate_plainly(tiny.offline(), prompt, max_tokens=20)
    assert tokens == tiny.greedy(prompt, 20)
    stopped = generate_plainly(tiny.offline(), prompt, max_tokens=20, eos_token_id=tokens[4])
    assert stopped == tokens[: tokens.index(tokens[4]) + 1]


def test_true_states_change_hits_only(tiny: Tiny) -> None:
    """Up to the first hit nothing differs, and the output is exact either way."""
    config = tiny.config(RoundConfig(7, 6, 1, 1))
    nets = tiny.networks(config.round)
    engine = ReplayEngine.from_networks(config, nets)
    engine.drafts_from = "true"
    bound, served = run(tiny, engine, 1), run(tiny, ReplayEngine.from_networks(config, nets), 1)
    assert bound.tokens == served.tokens
    first_hit = next(i for i, (origin, _) in enumerate(served.rounds) if origin is Origin.HIT)
    assert bound.rounds[:first_hit] == served.rounds[:first_hit]


def test_rounds_are_recorded_and_fitted(tiny: Tiny) -> None:
    """What a calibration needs, from real rounds: choices of the decoder, realised outcomes, a fit that is finite."""
    config = tiny.config(RoundConfig(7, 6, 1, 1))
    engine = ReplayEngine.from_networks(config, tiny.networks(config.round))
    parts, choices = list[Rounds](), list[int]()

    def keep(outcome: Outcome, logits: torch.Tensor) -> None:
        parts.append(engine.recorded(outcome))
        choices.append(int(engine.decoder_choices()[outcome.num_accepted]))

    result = generate(tiny.offline(), engine, random_tokens(12, 1), max_tokens=60, on_round=keep)
    rounds = Rounds.join(parts)
    assert len(rounds) == len(result.rounds)
    assert rounds.num_accepted.tolist() == [outcome.num_accepted for _, outcome in result.rounds]
    best = rounds.candidate_tokens[torch.arange(len(rounds)), rounds.num_accepted, 0]
    assert choices == engine.nets.target.head_token_ids[best].tolist()
    found = fit(rounds, 0.9)
    assert found.num_draft_tokens == 7 and all(map(math.isfinite, (*found.weights, found.beta, found.threshold)))
