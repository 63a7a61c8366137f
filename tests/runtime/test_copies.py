"""Copied drafts and cut blocks: the output stays the target's, and the round foresees the ends of copied blocks too."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from tests.tiny_round import Tiny, follows_the_target, random_tokens
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.foresight.foresight import predraft
from vllm_jetspecpp.runtime import draft_engine
from vllm_jetspecpp.runtime.draft_engine import DraftEngine
from vllm_jetspecpp.runtime.offline import Generation, generate
from vllm_jetspecpp.transport.messages import DraftBatch, VerifiedBatch
from vllm_jetspecpp.types import Origin, RoundChoice

LIMITS = RoundConfig(7, 32, 1, 1, copy_drafts=True)


class Asking:
    """Stands for the worker: asks for choices in turn, with a least probability, and notes what it was handed."""

    def __init__(self, engine: DraftEngine, choices: list[RoundChoice | None], least: float = 0.0) -> None:
        self.engine, self._choices, self._least = engine, itertools.cycle(choices), least
        self.handed: list[tuple[RoundChoice | None, Origin, int]] = []

    def answer(self, batch: VerifiedBatch) -> DraftBatch:
        choice = next(self._choices)
        answer = self.engine.answer(dataclasses.replace(batch, choice=choice, min_accept_prob=self._least))
        (draft,) = answer.drafts
        self.handed.append((choice, draft.origin, len(draft.tokens)))
        return answer

    def work(self) -> None:
        self.engine.work()


def run(tiny: Tiny, engine: Asking, prompt: list[int], count: int = 60) -> Generation:
    result = generate(tiny.offline(), engine, prompt, max_tokens=count)
    assert result.tokens == tiny.greedy(prompt, count)
    return result


def repeating(tiny: Tiny) -> list[int]:
    """A prompt whose answer stands in it already: greedy, it is copied to the end."""
    start = random_tokens(12, seed=1)
    return start + tiny.greedy(start, 40) + start


@pytest.mark.parametrize("least", [0.0, 0.2, 0.99])
@pytest.mark.parametrize("choice", [(7, 4, 1, 1), (3, 8, 0, 0), (2, 0, 0, 0), (0, 0, 0, 0)], ids=str)
def test_greedy_output_is_the_targets(tiny: Tiny, choice: tuple[int, int, int, int], least: float) -> None:
    asking = Asking(tiny.engine(LIMITS), [RoundChoice(*choice)], least)
    for prompt in (random_tokens(12, seed=1), repeating(tiny)):
        run(tiny, asking, prompt)
    origins = Counter(origin for _, origin, _ in asking.handed)
    assert origins[Origin.COPIED] > 3
    if not choice[0]:
        assert origins.keys() <= {Origin.COPIED, Origin.NONE}
        assert asking.engine.cache._slots == {}
    drafted = [length for _, origin, length in asking.handed if origin not in (Origin.COPIED, Origin.NONE)]
    assert all(length <= choice[0] for length in drafted)
    if least == 0.99:
        assert all(length <= 1 for _, origin, length in asking.handed if origin is not Origin.COPIED)


def test_greedy_output_while_choices_change(tiny: Tiny) -> None:
    choices = [
        RoundChoice(7, 4, 1, 1),
        RoundChoice(0, 0, 0, 0),
        RoundChoice(2, 32, 0, 0),
        None,
        RoundChoice(5, 0, 0, 0),
    ]
    run(tiny, Asking(tiny.engine(LIMITS), choices, 0.1), repeating(tiny), 80)


def test_without_the_option_nothing_is_copied(tiny: Tiny) -> None:
    asking = Asking(tiny.engine(dataclasses.replace(LIMITS, copy_drafts=False)), [RoundChoice(3, 4, 0, 0)])
    result = run(tiny, asking, repeating(tiny))
    assert not [origin for origin, _ in result.rounds if origin is Origin.COPIED]


def test_ends_of_a_long_copy_are_foreseen(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """While copies of seven tokens are verified, rounds of γ = 2 draft what rounds of γ = 7 begin with."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(draft_engine, "predraft", lambda *args: calls.append(args) or predraft(*args))
    engine = tiny.engine(LIMITS)
    asking = Asking(engine, [RoundChoice(2, 32, 0, 0)])
    run(tiny, asking, repeating(tiny))
    assert max(length for _, _, length in asking.handed) == 7
    assert all(len(block.tokens) == 2 for block in engine.cache._slots[0].blocks.values())
    nets, short, selector, *seen = next(args for args in calls if args[4].shape[1] == 8)
    assert short.num_draft_tokens == 2
    with torch.inference_mode():
        made = [predraft(nets, shape, selector, *seen) for shape in (short, RoundConfig(7, 32, 0, 0))]
    assert torch.equal(made[0].bonus_tokens, made[1].bonus_tokens)
    assert torch.equal(made[0].drafts.tokens, made[1].drafts.tokens[..., :2])


def test_temperature_one_follows_the_target(tiny: Tiny) -> None:
    """The third token, with copied blocks among those verified, cut by a least probability. False alarm: .001."""
    prompt = random_tokens(6, seed=2) * 2
    engine, target = Asking(tiny.engine(RoundConfig(2, 8, 0, 0, copy_drafts=True)), [None], 0.1), tiny.offline()
    seen, origins, count = Counter[int](), Counter[Origin](), 300
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        result = generate(target, engine, prompt, max_tokens=3, temperature=1.0, generator=generator)
        seen[result.tokens[2]] += 1
        origins.update(origin for origin, _ in result.rounds)
    assert origins[Origin.COPIED] > 10
    assert follows_the_target(tiny, prompt, seen, count)
