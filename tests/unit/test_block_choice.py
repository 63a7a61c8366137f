"""Copied drafts against a slow search, and what is handed out of a block."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from vllm_jetspecpp.runtime.block_choice import CONFIDENCE_BINS, BlockChoice
from vllm_jetspecpp.runtime.copied_drafts import LONGEST_MATCH, Copied, copy_drafts
from vllm_jetspecpp.types import DraftBlock, Origin


def slow_copies(tokens: list[int], count: int) -> list[Copied]:
    """Token by token: of the places where as many as possible of the latest tokens stand, the likeliest next one."""

    def matching(end: int) -> int:
        n = 0
        while n < LONGEST_MATCH and end - n >= 0 and tokens[end - n] == tokens[len(tokens) - 1 - n]:
            n += 1
        return n

    found = {end: matching(end) for end in range(len(tokens) - 1)}
    longest = max(found.values(), default=0)
    places = [end for end, n in found.items() if n == longest]
    if not longest:
        return []
    text, copied = list(tokens), []
    for i in range(count):
        follows = [text[end + 1 + i] for end in places]
        token = max(
            dict.fromkeys(follows), key=lambda t: (follows.count(t), max(p for p, f in enumerate(follows) if f == t))
        )
        copied.append(Copied(token, min(longest + i, LONGEST_MATCH), follows.count(token) / len(follows)))
        places = [end for end, f in zip(places, follows, strict=True) if f == token]
        text.append(token)
    return copied


@pytest.mark.parametrize("vocab", [1, 2, 3, 20, 60])
def test_copies_equal_a_slow_search(vocab: int) -> None:
    rng = random.Random(vocab)
    copied = 0
    for length in (1, 2, 3, 10, 60, 200):
        for _ in range(10):
            tokens = [rng.randrange(vocab) for _ in range(length)]
            found = copy_drafts(np.array(tokens, np.int32), 7)
            assert found == slow_copies(tokens, 7)
            copied += bool(found)
    assert copied >= 10


def test_a_copy_that_reaches_the_end_goes_round() -> None:
    found = copy_drafts(np.array([9, 1, 2, 3, 1, 2, 3, 1], np.int32), 8)
    assert [c.token for c in found] == [2, 3, 1, 2, 3, 1, 2, 3]
    assert copy_drafts(np.array([1, 2, 3], np.int32), 8) == []


def block(*probabilities: float) -> DraftBlock:
    return DraftBlock(tuple(range(len(probabilities))), tuple(math.log(p) for p in probabilities))


def test_what_is_worth_handing_out() -> None:
    offer = BlockChoice().drafted(block(0.95, 0.55, 0.35, 0.95), Origin.HIT)
    assert offer.reached == pytest.approx((0.95, 0.95 * 0.55, 0.95 * 0.55 * 0.35, 0.95 * 0.55 * 0.35 * 0.95))
    assert offer.expected(2) == pytest.approx(0.95 + 0.95 * 0.55)
    assert [offer.num_worth(least, 4) for least in (0, 0.18, 0.19, 0.6, 0.99)] == [4, 3, 2, 1, 1]
    assert offer.num_worth(0, 2) == 2 and offer.num_worth(0.99, 0) == 0


def test_running_averages_learn_what_the_target_accepts() -> None:
    """A draft model that is always too sure, and copies after matches of two tokens that are never right."""
    rng, choice = random.Random(0), BlockChoice()
    tokens = np.array([5, 1, 2, 7, 8, 3, 1, 2], np.int32)
    first = choice.copied(tokens, 3)
    assert first is not None and first.block.tokens == (7, 8, 3)
    for _ in range(400):
        sure = choice.drafted(block(0.95, 0.95, 0.95), Origin.HIT)
        accepted = next((i for i in range(3) if rng.random() > 0.4), 3)
        choice.settle(sure, accepted, 3)
        copied = choice.copied(tokens, 3)
        assert copied is not None
        choice.settle(copied, 0, 3)
    assert choice.drafted(block(0.95), Origin.HIT).reached[0] == pytest.approx(0.4, abs=0.08)
    assert choice.drafted(block(0.15), Origin.HIT).reached[0] == 1.5 / CONFIDENCE_BINS  # not seen, as at the start
    last = choice.copied(tokens, 3)
    assert last is not None and last.reached[0] < 0.05 < first.reached[0]
    # Only the first token was reached: of a third one after two matching ones nothing was learnt.
    assert last.reached[1] / last.reached[0] == pytest.approx(first.reached[1] / first.reached[0])
