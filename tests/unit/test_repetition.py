"""The onset of a repetition loop, on sequences made by hand."""

from __future__ import annotations

import random

import pytest

from vllm_jetspecpp.evaluation.answers import count_tokens
from vllm_jetspecpp.evaluation.repetition import MIN_REPEATED, RepetitionLoop, repetition_onset

START = list(range(100, 117))


@pytest.mark.parametrize(
    ("tokens", "onset"),
    [
        ([], None),
        (list(range(500)), None),
        (START + [7] * 25, 18),  # one 7 is an answer's, those behind it are repeats
        (START + [7] * 24, None),  # 23 repeats are too few
        (START + [1, 2, 3] * 9, 20),
        (START + [1, 2, 3] * 8, None),
        (START + list(range(20)) * 4, 37),
        (START + list(range(20)) * 3, None),  # a refrain sung three times is none yet
        (START + list(range(64)) * 4, 81),
        (START + list(range(65)) * 8, None),  # longer than any period that is looked for
        (START + [7] * 10 + [8] + [7] * 10, None),
        ([1, 2] * 20 + START, 2),  # at its first loop, whatever follows
    ],
)
def test_onset(tokens: list[int], onset: int | None) -> None:
    assert repetition_onset(tokens) == onset


def test_a_growing_answer_is_judged_as_a_whole_one() -> None:
    """In pieces of any size the first onset found is the same, and it is found as soon as it can be."""
    rng = random.Random(0)
    for _ in range(50):
        period = rng.randint(1, 12)
        tokens = [rng.randint(0, 9) for _ in range(rng.randint(0, 30))] + [
            rng.randint(0, 9) for _ in range(period)
        ] * 40
        loop, seen, found = RepetitionLoop(), 0, None
        while found is None:
            seen = min(seen + rng.randint(1, 7), len(tokens))
            found = loop(tokens[:seen])
        assert found == repetition_onset(tokens)
        assert seen <= found + max(4 * period, MIN_REPEATED + period) + 7


def test_what_counts_of_an_answer() -> None:
    """Up to the limit, the end of the answer, or a loop, whichever is first."""
    assert count_tokens(range(50), 20, None) == 20
    assert count_tokens([5, 6, 2, 9, 9], 20, 2) == 3
    assert count_tokens([*START, *[7] * 40, 2], 200, 2) == 18
