"""Eq. 12: scores against a plain loop, the fit against known w and β, conformal coverage, the selection rules."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vllm_jetspecpp.calibration.fit import conformal_threshold, fit
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.evaluation.rounds import (
    Rounds,
    hit_rates,
    log_scores,
    make_rounds,
    realised_index,
    realised_scores,
    uncalibrated_scores,
)
from vllm_jetspecpp.foresight.calibrated_score import (
    bonus_log_probs,
    calibrated_log_scores,
    length_log_probs,
    top_candidates,
)
from vllm_jetspecpp.foresight.outcome_distribution import outcome_log_probs
from vllm_jetspecpp.foresight.outcome_selection import OutcomeSelector, select_outcomes
from vllm_jetspecpp.models.calibration import Calibration, load_calibration, load_calibrations, save_calibration
from vllm_jetspecpp.models.checkpoint import check_manifest, read_json, write_json

WEIGHTS = (0.3, 0.6, 0.5, -0.2, -0.4, 0.1)
W = torch.tensor(WEIGHTS)
GAMMA, VOCAB = 5, 50
CALIBRATION = Calibration(GAMMA, WEIGHTS, beta=1.4, threshold=-1.5, coverage=0.9)


def random_blocks(count: int, seed: int, sharpness: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """log p̂ [N, γ + 1, vocab], drafts that are often its best token, and confidences."""
    gen = torch.Generator().manual_seed(seed)
    log_probs = (torch.randn(count, GAMMA + 1, VOCAB, generator=gen) * sharpness).log_softmax(-1)
    best, other = log_probs[:, :-1].argmax(-1), torch.randint(0, VOCAB, (count, GAMMA), generator=gen)
    drafts = torch.where(torch.rand(count, GAMMA, generator=gen) < 0.7, best, other)
    return log_probs, drafts, torch.rand(count, GAMMA, generator=gen).log()


def plain_score(log_probs: Tensor, drafts: list[int], confidence: list[float], k: int, a: int) -> float:
    """Eq. 12 for one outcome, written from the text."""

    def logit(p: float) -> float:
        p = min(max(p, 1e-6), 1 - 1e-6)
        return math.log(p / (1 - p))

    def accept(i: int) -> float:  # of draft i, 1-based
        p = log_probs[i - 1].exp().tolist()
        d = drafts[i - 1]
        other = max(v for token, v in enumerate(p) if token != d)
        phi = (
            logit(math.exp(confidence[i - 1])),
            logit(p[d]),
            float(max(range(VOCAB), key=p.__getitem__) == d),
            logit(other / (1 - p[d])),
            i / 14,
            1.0,
        )
        return 1 / (1 + math.exp(-sum(w * f for w, f in zip(WEIGHTS, phi, strict=True))))

    length = math.prod(accept(i) for i in range(1, k + 1)) * (1 - accept(k + 1) if k < GAMMA else 1)
    top = log_probs[k].topk(32).indices.tolist()
    tempered = {t: math.exp(log_probs[k, t].item() / 1.4) for t in top if k == GAMMA or t != drafts[k]}
    return math.log(length * tempered[a] / sum(tempered.values()))


def test_scores_equal_the_text() -> None:
    log_probs, drafts, confidence = random_blocks(3, seed=0)
    scores, tokens = calibrated_log_scores(log_probs, drafts, confidence, W, 1.4)
    for row in range(3):
        for k in range(GAMMA + 1):
            for c in (0, 1, 7, 31):
                a = int(tokens[row, k, c])
                if k < GAMMA and a == drafts[row, k]:
                    assert scores[row, k, c] == float("-inf")
                    continue
                expected = plain_score(log_probs[row], drafts[row].tolist(), confidence[row].tolist(), k, a)
                assert scores[row, k, c].item() == pytest.approx(expected, abs=1e-4)


def test_scores_are_a_distribution_over_candidates() -> None:
    scores, _ = calibrated_log_scores(*random_blocks(8, seed=1), W, 1.4)
    torch.testing.assert_close(scores.exp().sum((1, 2)), torch.ones(8))


def test_saturated_and_unknown_drafts_stay_finite() -> None:
    """p̂ of 0 and 1, a draft outside the vocabulary, confidence 1: a score for every allowed candidate, no NaN."""
    log_probs = torch.full((1, 3, 40), -1000.0)
    log_probs[..., 3] = 0.0
    for drafts in ([3, 3], [5, -1]):
        scores, _ = calibrated_log_scores(log_probs, torch.tensor([drafts]), torch.zeros(1, 2), W, 1.4)
        assert not scores.isnan().any() and scores.isfinite().any()


def synthetic_rounds(count: int, seed: int, beta: float = 1.4) -> Rounds:
    """Rounds whose k and a are drawn from Eq. 12 itself."""
    log_probs, drafts, confidence = random_blocks(count, seed)
    gen = torch.Generator().manual_seed(seed + 1)
    rounds = make_rounds(log_probs, drafts, confidence, torch.zeros(count).long(), torch.zeros(count).long())
    k = torch.multinomial(length_log_probs(rounds.phi, torch.tensor(WEIGHTS)).exp(), 1, generator=gen).squeeze(1)
    of_k = bonus_log_probs(rounds.candidates, drafts, beta)[torch.arange(count), k]
    index = torch.multinomial(of_k.exp(), 1, generator=gen).squeeze(1)
    return replace(rounds, num_accepted=k, bonus=rounds.candidate_tokens[torch.arange(count), k, index])


@pytest.fixture(scope="module")
def fitted() -> Calibration:
    return fit(synthetic_rounds(20_000, seed=3), coverage=0.9)


def test_fit_recovers_w_and_beta(fitted: Calibration) -> None:
    """20,000 rounds, each figure within four standard errors or more. False alarm: .001."""
    assert fitted.beta == pytest.approx(1.4, rel=0.05)
    errors = (0.1, 0.1, 0.2, 0.1, 0.5, 0.2)
    for found, true, error in zip(fitted.weights, WEIGHTS, errors, strict=True):
        assert found == pytest.approx(true, abs=error)


def test_fit_is_no_worse_than_the_truth(fitted: Calibration) -> None:
    """Its likelihood of the realised outcomes is at least that of the true w and β, less rounding and the ridge."""
    rounds = synthetic_rounds(20_000, seed=3)
    own = realised_scores(rounds, log_scores(rounds, torch.tensor(fitted.weights), fitted.beta)).mean()
    true = realised_scores(rounds, log_scores(rounds, torch.tensor(WEIGHTS), 1.4)).mean()
    assert own >= true - 2e-3


@pytest.mark.parametrize("coverage", [0.5, 0.9, 0.99])
def test_conformal_coverage_holds_on_fresh_rounds(coverage: float) -> None:
    """λ from 1,000 rounds, coverage on 20,000 fresh ones. Coverage is Beta distributed around the level with a standard
    deviation of at most .016, plus .0035 of sampling: .065 below it is a false alarm of less than .0001."""
    weights = torch.tensor(WEIGHTS)
    scores = [
        realised_scores(rounds, log_scores(rounds, weights, 1.4))
        for rounds in (synthetic_rounds(1_000, seed=5), synthetic_rounds(20_000, seed=6))
    ]
    threshold = conformal_threshold(scores[0], coverage)
    covered = (scores[1] >= threshold).float().mean().item()
    assert coverage - 0.065 < covered < coverage + 0.065


def test_conformal_threshold_by_hand() -> None:
    """Nine scores: at 90 % the smallest is λ; at 95 % no finite λ is enough."""
    scores = torch.tensor([-3.0, -1, -2, -9, -4, -5, -6, -7, -8])
    assert conformal_threshold(scores, 0.9) == -9.0
    assert conformal_threshold(scores, 0.8) == -8.0
    assert conformal_threshold(scores, 0.95) == -math.inf


def test_realised_candidates_are_found() -> None:
    rounds = synthetic_rounds(200, seed=7)
    index = realised_index(rounds)
    assert (index >= 0).all()
    outside = replace(rounds, bonus=torch.full_like(rounds.bonus, -1))
    assert (realised_index(outside) == -1).all()
    assert (realised_scores(outside, log_scores(outside, torch.tensor(WEIGHTS), 1.0)) == -math.inf).all()


def test_hit_rates_equal_a_loop_and_rise_with_calibration() -> None:
    """By hand for both rules; and rounds drawn from Eq. 12 are foreseen better by it than by Eq. 6."""
    rounds, sizes = synthetic_rounds(4_000, seed=8), (1, 4, 16)
    rules = {"plain": uncalibrated_scores(rounds), "served": log_scores(rounds, torch.tensor(WEIGHTS), 1.4)}
    rates = {name: hit_rates(rounds, scores, sizes) for name, scores in rules.items()}
    for name, scores in rules.items():
        hits = 0
        for row in range(300):
            best = set(scores[row].flatten().topk(4).indices.tolist())
            own = [
                c for c in range(32) if rounds.candidate_tokens[row, rounds.num_accepted[row], c] == rounds.bonus[row]
            ]
            hits += any(int(rounds.num_accepted[row]) * 32 + c in best for c in own)
        part = rounds.select(torch.arange(300))
        assert hit_rates(part, scores[:300], (4,))[4] == pytest.approx(hits / 300)
        assert 0 < rates[name][1] < rates[name][4] < rates[name][16] <= 1
    assert all(rates["served"][size] >= rates["plain"][size] for size in sizes)


def test_uncalibrated_scores_are_equation_6() -> None:
    log_probs, drafts, confidence = random_blocks(4, seed=9)
    rounds = make_rounds(log_probs, drafts, confidence, torch.zeros(4).long(), torch.zeros(4).long())
    whole = outcome_log_probs(log_probs, drafts).gather(-1, rounds.candidate_tokens)
    torch.testing.assert_close(uncalibrated_scores(rounds), whole)


@pytest.mark.parametrize("count", [1, 4, 16])
def test_selectors(count: int) -> None:
    """Each rule against its definition; tokens come back as indices into the whole vocabulary."""
    log_probs, drafts, confidence = random_blocks(6, seed=10)
    shape = RoundConfig(GAMMA, count, 1, 1, "uncalibrated")
    plain = OutcomeSelector(shape, CALIBRATION)(log_probs, drafts, confidence)
    expected = select_outcomes(outcome_log_probs(log_probs, drafts), count)
    assert torch.equal(plain.bonus, expected.bonus) and torch.equal(plain.num_accepted, expected.num_accepted)

    served = OutcomeSelector(replace(shape, selection="auto"), CALIBRATION)(log_probs, drafts, confidence)
    tokens = top_candidates(log_probs).tokens
    for row in range(6):
        for k, a, value in zip(served.num_accepted[row], served.bonus[row], served.log_prob[row], strict=True):
            assert a in tokens[row, k]
            outcome = int(k), int(a)
            by_hand = plain_score(log_probs[row], drafts[row].tolist(), confidence[row].tolist(), *outcome)
            assert value.item() == pytest.approx(by_hand, abs=1e-4)

    conformal = OutcomeSelector(replace(shape, selection="conformal"), CALIBRATION)(log_probs, drafts, confidence)
    kept = conformal.log_prob.isfinite()
    assert torch.equal(kept, served.log_prob >= CALIBRATION.threshold)
    assert torch.equal(conformal.log_prob[kept], served.log_prob[kept])


def test_rules_that_need_a_calibration_say_so() -> None:
    assert OutcomeSelector(RoundConfig(GAMMA), None).rule == "uncalibrated"
    assert OutcomeSelector(RoundConfig(GAMMA), CALIBRATION).rule == "calibrated"
    with pytest.raises(ValueError, match=r"'conformal' needs calibration/thresholds.json .* `jetspecpp calibrate`"):
        OutcomeSelector(RoundConfig(GAMMA, selection="conformal"), None)
    with pytest.raises(ValueError, match=r"did you mean 'calibrated'"):
        RoundConfig(GAMMA, selection="calibratd")


def bare_checkpoint(folder: Path) -> Path:
    """Files a manifest lists, without content."""
    (folder / "adapter").mkdir(parents=True)
    names = ("config.json", "adapter/config.json", "model.safetensors")
    for name in (*names, "adapter/converter.safetensors", "adapter/head.safetensors"):
        (folder / name).write_text("{}")
    write_json(folder / "manifest.json", {"target": "tiny", "files": {}})
    return folder


def test_calibration_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    """Written, listed in the manifest, read for the nearest γ; a broken file names what is wrong."""
    folder = bare_checkpoint(tmp_path / "checkpoint")
    assert load_calibration(folder, 7) is None
    save_calibration(folder, [replace(CALIBRATION, num_draft_tokens=7), replace(CALIBRATION, num_draft_tokens=15)], {})
    assert "calibration/thresholds.json" in check_manifest(folder)["files"]
    found = [load_calibration(folder, gamma) for gamma in (3, 7, 10, 12, 31)]
    assert [c.num_draft_tokens for c in found if c] == [7, 7, 7, 15, 15]
    assert found[1] == replace(CALIBRATION, num_draft_tokens=7)
    path = folder / "calibration/thresholds.json"
    save_calibration(folder, [*load_calibrations(folder), replace(CALIBRATION, num_draft_tokens=31)], {"prompts": 3})
    assert [fit.num_draft_tokens for fit in load_calibrations(folder)] == [7, 15, 31]
    assert read_json(path)["runs"] == [{}, {"prompts": 3}]
    path.write_text(path.read_text().replace('"beta": 1.4', '"beta": 0.0'))
    with pytest.raises(ValueError, match="beta above 0"):
        load_calibration(folder, 7)
    with pytest.raises(ValueError, match=r"thresholds.json (has|differs)"):
        check_manifest(folder)
