"""The replay engine answers what the whole engine would, and says what a round saw."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.naive_round import NaiveRound, true_context
from tests.tiny_round import Tiny, random_tokens
from vllm_jetspecpp.calibration.fit import fit
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.evaluation.recording import RecordingEngine
from vllm_jetspecpp.evaluation.replay_engine import ReplayEngine
from vllm_jetspecpp.evaluation.rounds import Rounds, hit_rates, log_scores
from vllm_jetspecpp.models.calibration import Calibration
from vllm_jetspecpp.runtime.draft_engine import DraftEngine
from vllm_jetspecpp.runtime.offline import Generation, follow, generate, generate_plainly
from vllm_jetspecpp.transport.messages import NO_BLOCK, DraftBatch, Verified, VerifiedBatch
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


def recorded(tiny: Tiny, kind: type[ReplayEngine], seed: int, size: int = 6) -> tuple[ReplayEngine, Generation, Rounds]:
    """Rounds of one answer, and the engine after it."""
    config = tiny.config(RoundConfig(7, size, 1, 1, "calibrated"))
    engine = kind.from_networks(config, tiny.networks(config.round), CALIBRATION)
    prompt = random_tokens(12, seed)
    tokens = [*prompt, *tiny.greedy(prompt, 60)]
    states, parts = tiny.states(tokens), list[Rounds]()
    if isinstance(engine, RecordingEngine):
        engine.true_deepest = engine.nets.deepest(states)
    result = follow(
        engine,
        tokens,
        states,
        prompt_length=12,
        counted=50,
        on_round=lambda outcome, _: parts.append(engine.recorded(outcome)),
    )
    return engine, result, Rounds.join(parts)


@pytest.mark.parametrize("size", [1, 6])
def test_replays_reproduce_the_recorded_rounds(tiny: Tiny, size: int) -> None:
    """Under the rule and cache size they were recorded with, every round's hit or miss comes out again."""
    for seed in (1, 2, 3):
        _, result, rounds = recorded(tiny, ReplayEngine, seed, size)
        hits = [origin is Origin.HIT for origin, _ in result.rounds[1:]]
        scores = log_scores(rounds, torch.tensor(CALIBRATION.weights), CALIBRATION.beta)
        replayed = [
            hit_rates(rounds.select(torch.tensor([n])), scores[n : n + 1], (size,))[size] == 1 for n in range(len(hits))
        ]
        assert replayed == hits


def test_another_decoder_sees_the_same_predictions(tiny: Tiny) -> None:
    """The served decoder itself, run as another one would be, says what the round's foresight said."""
    engine, _, _ = recorded(tiny, RecordingEngine, 1)
    assert isinstance(engine, RecordingEngine) and engine.last is not None
    with torch.inference_mode():
        again = engine.log_probs_of(engine.nets.target.decoder)
        torch.testing.assert_close(again, engine.last.foresight.log_probs, atol=1e-4, rtol=1e-4)
        best = engine.draft_candidates()
    assert best.shape == (7, 32)


def test_unpipelined_blocks_are_drafted_from_true_states(tiny: Tiny) -> None:
    """No round foresees anything, and every block is the plain reference's from the verified context."""
    options = RoundConfig(5, 4, 2, 2)
    nets = tiny.networks(options)
    engine = ReplayEngine.from_networks(tiny.config(options), nets)
    engine.drafts_from = "unpipelined"
    tokens = random_tokens(20, 4)
    states, ids = tiny.states(tokens[:-1]), torch.tensor(tokens, dtype=torch.int32)
    message = Verified(0, 0, ids, 0, states, NO_BLOCK, wants_draft=True, reset=True)
    reply = engine.answer(VerifiedBatch(0, (message,)))
    plain = NaiveRound(nets, replace(options, fallback_passes=2, fallback_refreshes=2), tokens, states)
    with torch.inference_mode():
        assert list(reply.drafts[0].tokens) == plain.fallback()
    prompt = random_tokens(12, 1)
    result = generate(tiny.offline(), engine, prompt, max_tokens=30)
    assert result.tokens == tiny.greedy(prompt, 30)
    assert {origin for origin, _ in result.rounds} == {Origin.FIRST, Origin.FALLBACK}


def test_copied_states_are_the_last_verified_one(tiny: Tiny) -> None:
    """A hit's block is the plain reference's over a context whose last k + 1 states are copies."""
    options = RoundConfig(5, 24, 1, 0)
    nets = tiny.networks(options)
    engine = ReplayEngine.from_networks(tiny.config(options), nets)
    engine.drafts_from = "copied"
    prompt = random_tokens(12, 1)
    tokens = [*prompt, *tiny.greedy(prompt, 40)]
    states, seen = tiny.states(tokens), list[tuple[int, Outcome]]()
    drafts: dict[int, tuple[int, ...]] = {}
    answer = engine.answer

    def spy(batch: VerifiedBatch) -> DraftBatch:
        reply = answer(batch)
        drafts[batch.requests[0].anchor_position] = reply.drafts[0].tokens
        return reply

    engine.answer = spy  # type: ignore[method-assign]
    result = follow(
        engine, tokens, states, prompt_length=12, counted=30, on_round=lambda outcome, at: seen.append((at, outcome))
    )
    checked = 0
    for (at, (k, a)), (origin, _) in zip(seen, result.rounds[1:], strict=False):
        if origin is Origin.HIT:
            plain = NaiveRound(nets, options, tokens[: at + 1], states[:at])
            copies = states[at - 1].expand(k + 1, -1)
            positions = list(range(at, at + k + 1))
            with torch.inference_mode():
                context = plain.context().plus(true_context(nets, copies, positions), k + 1)
                expected = plain.branch(list(tokens[at + 1 : at + 1 + k]), k, a, context)
            assert list(drafts[at + k + 1]) == expected
            checked += 1
    assert checked > 2
