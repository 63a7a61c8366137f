"""Rules of selection on recorded rounds: none beats the exact optimum, and each does what its formula says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from vllm_jetspecpp.evaluation import selection_rules as rules
from vllm_jetspecpp.evaluation.fan_out import (
    GeometricLaw,
    accepted_length_law,
    fit_acceptance_rate,
    fit_exponent,
    integer_fan_out,
)
from vllm_jetspecpp.evaluation.rounds import Rounds, make_rounds, uncalibrated_scores
from vllm_jetspecpp.foresight.outcome_distribution import outcome_log_probs
from vllm_jetspecpp.foresight.outcome_selection import select_outcomes
from vllm_jetspecpp.foresight.speculative_sampling import verify
from vllm_jetspecpp.models.calibration import Calibration

GAMMA, VOCAB, COUNT = 4, 12, 3000
SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def truth() -> torch.Tensor:
    """The target's distributions of ``COUNT`` rounds, [N, γ + 1, vocab]."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(COUNT, GAMMA + 1, VOCAB, generator=generator) * 2).softmax(-1)


@pytest.fixture(scope="module")
def rounds(truth: torch.Tensor) -> Rounds:
    """Rounds with a perfect decoder, verified by the reference sampler; drafts are often the likeliest token."""
    generator = torch.Generator().manual_seed(1)
    best, random = truth[:, :-1].argmax(-1), torch.randint(0, VOCAB, (COUNT, GAMMA), generator=generator)
    drafts = torch.where(torch.rand(COUNT, GAMMA, generator=generator) < 0.8, best, random)
    ends = [verify(p, d, generator) for p, d in zip(truth, drafts.tolist(), strict=True)]
    confidence = torch.rand(COUNT, GAMMA, generator=generator).log()
    k, a = torch.tensor(ends).T
    return make_rounds(truth.log(), drafts, confidence, k, a)


def draft_candidates(rounds: Rounds) -> torch.Tensor:
    """A draft model that has no idea: random orders of the vocabulary."""
    generator = torch.Generator().manual_seed(2)
    return torch.rand(len(rounds), GAMMA, VOCAB, generator=generator).argsort(-1)


def all_rates(rounds: Rounds, sizes: tuple[int, ...] = SIZES) -> dict[str, dict[int, float]]:
    calibration = Calibration(GAMMA, (0.0, 1.0, 0.0, 0.0, 0.0, 0.0), 1.0, -9.0, 0.9)
    laws = {rules.GEOMETRIC_DECODER: rules.fit_law(rounds)}
    laws[rules.GEOMETRIC_DRAFT] = rules.fit_law(rules.with_draft_anchors(rounds, draft_candidates(rounds)))
    return rules.rule_hit_rates(rounds, draft_candidates(rounds), calibration, laws, sizes)


def test_no_rule_beats_the_exact_optimum(truth: torch.Tensor, rounds: Rounds) -> None:
    """Over 3,000 rounds the hit rate of each rule is at most the mass of the B best outcomes, four standard errors
    allowed (false alarm below 1e-4 a comparison); the rule of Eq. 6 with this decoder reaches it.
    """
    exact = outcome_log_probs(truth.log(), rounds.drafts)
    found = all_rates(rounds)
    assert set(found) == set(rules.RULES)
    for size in SIZES:
        optimum = float(select_outcomes(exact, size).log_prob.exp().sum(-1).mean())
        error = math.sqrt(optimum * (1 - optimum) / COUNT)
        assert found[rules.UNCALIBRATED][size] == pytest.approx(optimum, abs=4 * error)
        for rule in rules.RULES:
            assert found[rule][size] <= optimum + 4 * error, (rule, size)
    assert found[rules.GEOMETRIC_DECODER][4] > found[rules.GEOMETRIC_DRAFT][4]
    assert found[rules.UNCALIBRATED][4] > found[rules.DRAFT_MODEL][4]


def test_whole_fan_out_hits_always(rounds: Rounds) -> None:
    """With room for every anchor each round is a hit; with none at some length no round that ends there is."""
    assert rules.fan_out_hit_rate(rounds, (VOCAB,) * (GAMMA + 1)) == 1
    without = rules.fan_out_hit_rate(rounds, (VOCAB, 0, VOCAB, VOCAB, VOCAB))
    assert without == pytest.approx(1 - float((rounds.num_accepted == 1).float().mean()))


def test_ranks_leave_the_draft_token_out(rounds: Rounds) -> None:
    """Rank by a plain loop over the decoder's order."""
    ranks = rules.realised_rank(rounds).tolist()
    for n in range(50):
        k, bonus = int(rounds.num_accepted[n]), int(rounds.bonus[n])
        order = [t for t in rounds.candidate_tokens[n, k].tolist() if k == GAMMA or t != int(rounds.drafts[n, k])]
        assert ranks[n] == order.index(bonus) + 1
    outside = replace(rounds, bonus=torch.full_like(rounds.bonus, -1))
    assert int(rules.realised_rank(outside).min()) > VOCAB


def test_proposition_2b(rounds: Rounds) -> None:
    """Selection by each round's posterior is at least as good as the best fixed allocation, which beats all others."""
    for size in SIZES:
        selected, fixed = rules.posterior_masses(rounds, size)
        assert selected >= fixed > 0
        masses = uncalibrated_scores(rounds).double().exp().sort(-1, descending=True).values
        for law in (GeometricLaw(0.6, 1.0), GeometricLaw(0.9, 0.3)):
            fan_out = integer_fan_out(law, GAMMA, size)
            mass = sum(float(masses[:, k, :f].sum(-1).mean()) for k, f in enumerate(fan_out))
            assert mass <= fixed + 1e-9


@pytest.mark.parametrize("noise", [0.1, 1.0, 3.0])
def test_remark_3_bounds_what_an_imperfect_decoder_loses(truth: torch.Tensor, rounds: Rounds, noise: float) -> None:
    """In every round, at every cache size: best possible mass minus the mass of what the decoder selects."""
    generator = torch.Generator().manual_seed(3)
    decoder = (truth.log() + noise * torch.randn(truth.shape, generator=generator)).softmax(-1)
    exact = outcome_log_probs(truth.log(), rounds.drafts).exp()
    assumed = outcome_log_probs(decoder.log(), rounds.drafts)
    accepted = truth[:, :-1].gather(-1, rounds.drafts.unsqueeze(-1)).squeeze(-1)
    reach = torch.cat([torch.ones(COUNT, 1), accepted.cumprod(-1)], dim=1)
    bound = rules.decoder_loss_bound(reach, (truth - decoder).abs().sum(-1) / 2)
    for size in SIZES:
        best = exact.flatten(1).topk(size).values.sum(-1)
        chosen = select_outcomes(assumed, size)
        got = exact.flatten(1).gather(1, chosen.num_accepted * VOCAB + chosen.bonus).sum(-1)
        assert bool((best - got <= bound + 1e-5).all())
        assert float((best - got).max()) > 0


def test_laws_are_recovered() -> None:
    """α and ρ from samples of SSD's own assumptions, to about three standard errors."""
    generator = torch.Generator().manual_seed(4)
    law = torch.tensor(accepted_length_law(0.7, 6))
    lengths = torch.multinomial(law, 20_000, replacement=True, generator=generator).tolist()
    assert fit_acceptance_rate(lengths, 6) == pytest.approx(0.7, abs=0.01)
    # P(rank > F) = F^-ρ from F = 2 on.
    uniform = torch.rand(20_000, generator=generator)
    ranks = (uniform ** (-1 / 0.8)).ceil().clamp(max=1e6).long().tolist()
    assert fit_exponent(ranks) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("budget", [1, 4, 10, 16])
def test_integer_fan_out_keeps_the_budget(budget: int) -> None:
    fan_out = integer_fan_out(GeometricLaw(0.6, 1.0), 4, budget)
    assert sum(fan_out) == budget and list(fan_out[:4]) == sorted(fan_out[:4], reverse=True)
    assert integer_fan_out(GeometricLaw(0.6, 1.0), 4, 10) == (3, 2, 2, 1, 2)
