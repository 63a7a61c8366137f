"""Eqs. 6 and 7 and Proposition 1 against brute force and the worked examples of the paper."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from vllm_jetspecpp.foresight.outcome_distribution import outcome_log_probs
from vllm_jetspecpp.foresight.outcome_selection import select_outcomes
from vllm_jetspecpp.foresight.speculative_sampling import verify
from vllm_jetspecpp.types import Outcome


def brute_force(p: torch.Tensor, drafts: list[int]) -> dict[Outcome, float]:
    """P(k, a) by walking through verification: accept or reject position by position, then draw the residual."""
    result = {}
    for k, a in itertools.product(range(len(drafts) + 1), range(p.shape[1])):
        reach = math.prod(float(p[j, drafts[j]]) for j in range(k))
        if k == len(drafts):
            result[Outcome(k, a)] = reach * float(p[k, a])
        elif a == drafts[k]:
            result[Outcome(k, a)] = 0.0
        else:
            rejected = 1 - float(p[k, drafts[k]])
            residual = float(p[k, a]) / rejected if rejected else 0.0
            result[Outcome(k, a)] = reach * rejected * residual
    return result


@pytest.mark.parametrize(("gamma", "vocab", "seed"), [(1, 2, 0), (2, 3, 1), (4, 7, 2), (7, 33, 3)])
def test_outcome_distribution_equals_brute_force(gamma: int, vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(3, gamma + 1, vocab, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    drafts = torch.randint(0, vocab, (3, gamma), generator=generator)
    scores = outcome_log_probs(p.log(), drafts).exp()
    torch.testing.assert_close(scores.sum((1, 2)), torch.ones(3, dtype=torch.float64))
    for row in range(3):
        for (k, a), expected in brute_force(p[row], drafts[row].tolist()).items():
            assert scores[row, k, a].item() == pytest.approx(expected, abs=1e-12)


def test_worked_example() -> None:
    """γ = 2, p(d_1) = .8, after d_1: p(d_2) = .5 and p(b) = .3. P(1, b) = .24."""
    p = torch.tensor([[[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]]])
    assert outcome_log_probs(p.log(), torch.tensor([[0, 1]])).exp()[0, 1, 2].item() == pytest.approx(0.24)


def test_draft_token_outside_the_vocabulary_is_impossible() -> None:
    """-1 marks a token the decoder cannot name: nothing behind it is possible, and its own place loses no token."""
    p = torch.full((1, 3, 4), 0.25)
    scores = outcome_log_probs(p.log(), torch.tensor([[-1, 2]])).exp()
    torch.testing.assert_close(scores[0, 0], torch.full((4,), 0.25))
    assert scores[0, 1:].sum() == 0


@pytest.mark.parametrize(
    ("rows", "gamma", "vocab", "count"), [(2, 3, 5, 4), (3, 7, 40, 16), (1, 1, 2, 3), (1, 4, 100, 1)]
)
def test_selection_is_the_best_subset(rows: int, gamma: int, vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(rows + gamma)
    scores = torch.randn(rows, gamma + 1, vocab, generator=generator)
    chosen = select_outcomes(scores, count)
    for row in range(rows):
        best = scores[row].flatten().sort(descending=True).values[:count]
        torch.testing.assert_close(chosen.log_prob[row], best)
        for k, a, value in zip(chosen.num_accepted[row], chosen.bonus[row], chosen.log_prob[row], strict=True):
            assert scores[row, k, a] == value
        assert len(set(zip(chosen.num_accepted[row].tolist(), chosen.bonus[row].tolist(), strict=True))) == count


def test_fewer_outcomes_than_places_are_filled_and_marked() -> None:
    """γ = 1 and 2 tokens leave 4 places, of which (0, d_1) is impossible: the rest of B = 6 is marked -inf."""
    p = torch.tensor([[[0.6, 0.4], [0.9, 0.1]]])
    chosen = select_outcomes(outcome_log_probs(p.log(), torch.tensor([[0]])), 6)
    assert chosen.num_accepted.shape == (1, 6)
    possible = chosen.log_prob.isfinite()[0]
    assert possible.tolist() == [True] * 3 + [False] * 3
    assert chosen.log_prob[0, :3].exp().sum().item() == pytest.approx(1.0)


def test_reference_sampler_follows_proposition_1() -> None:
    """Frequencies of outcomes through the reference sampler against Eq. 6, by chi-square. False alarm: .001."""
    from scipy.stats import chisquare

    generator = torch.Generator().manual_seed(7)
    p = torch.randn(4, 5, generator=generator).softmax(-1)
    drafts, count = [3, 1, 0], 20_000
    expected = {o: v for o, v in brute_force(p.double(), drafts).items() if v > 0}
    seen = dict.fromkeys(expected, 0)
    for _ in range(count):
        seen[verify(p, drafts, generator)] += 1
    observed, ideal = list(seen.values()), [v * count / sum(expected.values()) for v in expected.values()]
    assert chisquare(observed, ideal).pvalue > 0.001


def test_softmax_as_proposal_would_not_be_lossless() -> None:
    """The paper's counter-example: with q = .9 as proposal of an argmax token a target's .6 is committed with 2/3."""
    q, p = 0.9, 0.6
    wrong = min(1.0, p / q)  # the draft is always this token, accepted with p / q; the residual never gives it back
    assert wrong == pytest.approx(2 / 3)
    generator = torch.Generator().manual_seed(0)
    right = sum(verify(torch.tensor([[p, 1 - p], [1.0, 0.0]]), [0], generator).num_accepted for _ in range(4000)) / 4000
    assert abs(right - p) < 4 * (p * (1 - p) / 4000) ** 0.5  # four standard deviations: false alarm 6e-5
