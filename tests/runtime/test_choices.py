"""An engine whose round gets another shape at every step: γ, B, J and R, drafting in line, and none at all."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest

from tests.tiny_round import Tiny, random_tokens
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.runtime.base import Engine
from vllm_jetspecpp.runtime.draft_engine import DraftEngine
from vllm_jetspecpp.runtime.offline import generate
from vllm_jetspecpp.transport.messages import Draft, DraftBatch, VerifiedBatch
from vllm_jetspecpp.types import Origin, RoundChoice

LIMITS = RoundConfig(7, 32, 3, 3)
CHOICES: tuple[RoundChoice | None, ...] = (
    RoundChoice(7, 32, 1, 1),
    RoundChoice(3, 2, 0, 0),
    RoundChoice(5, 16, 3, 2),
    None,
    RoundChoice(7, 32, 2, 2),
    RoundChoice(4, 0, 0, 0),
    RoundChoice(1, 1, 1, 0),
    None,
    None,
    RoundChoice(6, 32, 0, 0),
    RoundChoice(7, 32, 2, 2, 3),
    RoundChoice(5, 16, 0, 1),
    RoundChoice(1, 8, 0, 1),
    RoundChoice(6, 16, 1, 2),
)


class Choosing:
    """Stands for the worker: chooses for each step, and asks for nothing where it chose no drafting."""

    def __init__(self, engine: DraftEngine, choices: tuple[RoundChoice | None, ...]) -> None:
        self.engine, self._choices = engine, itertools.cycle(choices)
        self.lengths: list[tuple[RoundChoice | None, int]] = []

    def answer(self, batch: VerifiedBatch) -> DraftBatch:
        choice = next(self._choices)
        (request,) = batch.requests
        limit = 0 if choice is None else choice.num_draft_tokens
        news = dataclasses.replace(request, wants_draft=choice is not None, max_draft_tokens=limit)
        answer = self.engine.answer(dataclasses.replace(batch, requests=(news,), choice=choice))
        drafts = answer.drafts or (Draft(request.slot, (), Origin.NONE),)
        self.lengths.append((choice, len(drafts[0].tokens)))
        return DraftBatch(answer.step, drafts)

    def work(self) -> None:
        self.engine.work()


def run(tiny: Tiny, engine: Engine, prompt: list[int], count: int) -> tuple[list[int], Counter[Origin]]:
    result = generate(tiny.offline(), engine, prompt, max_tokens=count)
    return result.tokens, Counter(origin for origin, _ in result.rounds)


@pytest.mark.parametrize("order", [1, -1])
def test_greedy_output_while_choices_change(tiny: Tiny, order: int) -> None:
    prompt = random_tokens(12, seed=1)
    choosing = Choosing(tiny.engine(LIMITS), CHOICES[::order])
    tokens, origins = run(tiny, choosing, prompt, 80)
    assert tokens == tiny.greedy(prompt, 80)
    assert origins[Origin.HIT] and origins[Origin.FALLBACK] and origins[Origin.NONE] > 3
    assert {choice for choice, _ in choosing.lengths} == set(CHOICES)
    assert all(length <= choice.num_draft_tokens if choice else not length for choice, length in choosing.lengths)


@pytest.mark.parametrize("choice", [RoundChoice(4, 3, 1, 1), RoundChoice(4, 3, 0, 1)], ids=str)
def test_a_choice_is_the_engine_of_that_shape(tiny: Tiny, choice: RoundChoice) -> None:
    """Every block: γ = 4, B = 3 chosen of larger limits, against an engine that knows nothing else."""
    prompt = random_tokens(12, seed=3)
    alone, chosen = tiny.engine(RoundConfig(**choice._asdict())), Choosing(tiny.engine(LIMITS), (choice,))
    results = [generate(tiny.offline(), engine, prompt, max_tokens=50) for engine in (alone, chosen)]
    assert results[0].rounds == results[1].rounds
    assert len(chosen.engine.cache._slots[0].blocks) <= 3


def test_refined_outcomes_are_those_of_a_full_round(tiny: Tiny) -> None:
    """Of eight outcomes three are refined: their blocks are those of a round that refines all, the others J_0's."""
    prompt = random_tokens(12, seed=3)
    shapes = (RoundChoice(4, 8, 2, 1), RoundChoice(4, 8, 0, 0), RoundChoice(4, 8, 2, 1, 3))
    made = []
    for shape in shapes:
        engine = tiny.engine(RoundConfig(**shape._asdict()))
        generate(tiny.offline(), engine, prompt, max_tokens=2)  # one round after the prompt
        made.append(list(engine.cache._slots[0].blocks.items()))
    refined, plain, some = ([(outcome, block.tokens) for outcome, block in blocks] for blocks in made)
    assert some == [*refined[:3], *plain[3:]] and len(some) == 8
    assert refined[:3] != plain[:3] and refined[3:] != plain[3:]
    for (_, block), (_, expected) in zip(made[2], [*made[0][:3], *made[1][3:]], strict=True):
        assert block.confidence == pytest.approx(expected.confidence, rel=1e-4)


def test_in_line_drafts_nothing_ahead(tiny: Tiny) -> None:
    engine = Choosing(tiny.engine(LIMITS), (RoundChoice(4, 0, 0, 0),))
    _, origins = run(tiny, engine, random_tokens(12, seed=4), 30)
    assert engine.engine.cache._slots == {} and origins[Origin.FALLBACK] > 5
    assert not origins[Origin.HIT]


def test_larger_rounds_than_at_start_are_refused(tiny: Tiny) -> None:
    engine = tiny.engine(RoundConfig(4, 2, 1, 1))
    for choice in (RoundChoice(5, 2, 1, 1), RoundChoice(4, 3, 1, 1)):
        with pytest.raises(ValueError, match="larger than the one of the start"):
            engine.answer(VerifiedBatch(0, (), choice=choice))
