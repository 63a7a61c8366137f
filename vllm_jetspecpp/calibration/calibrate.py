"""``jetspecpp calibrate``: record rounds on held-out prompts, fit, and put the result into the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from vllm_jetspecpp.calibration.fit import fit
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.evaluation.acceptance import Bench
from vllm_jetspecpp.evaluation.answers import AnswerConfig
from vllm_jetspecpp.evaluation.datasets import Prompt
from vllm_jetspecpp.evaluation.methods import EvalConfig
from vllm_jetspecpp.evaluation.provenance import provenance
from vllm_jetspecpp.evaluation.rounds import Rounds, hit_rates, log_scores, uncalibrated_scores
from vllm_jetspecpp.evaluation.tally import CACHE_SIZES
from vllm_jetspecpp.models.calibration import load_calibrations, save_calibration

FOLDS = 4


def held_out_hit_rates(rounds: Rounds, coverage: float) -> dict[str, dict[int, float]]:
    """Hit rate by cache size of both rules, the calibrated one always on rounds it was not fitted on.

    Folds are contiguous, so that rounds of one answer stay together.
    """
    fold = torch.arange(len(rounds)) * FOLDS // len(rounds)
    sums: dict[int, float] = dict.fromkeys(CACHE_SIZES, 0.0)
    for index in range(FOLDS):
        fitted = fit(rounds.select((fold != index).nonzero().flatten()), coverage)
        aside = rounds.select((fold == index).nonzero().flatten())
        scores = log_scores(aside, torch.tensor(fitted.weights), fitted.beta)
        for size, rate in hit_rates(aside, scores, CACHE_SIZES).items():
            sums[size] += rate * len(aside) / len(rounds)
    return {"calibrated": sums, "uncalibrated": hit_rates(rounds, uncalibrated_scores(rounds), CACHE_SIZES)}


def calibrate(
    config: EvalConfig, prompts: Sequence[Prompt], num_draft_tokens: Sequence[int], coverage: float
) -> dict[str, Any]:
    """Fit for each γ and write ``calibration/thresholds.json``; what was found, for people and machines.

    Fits for other γ that are there stay.

    Args:
        config: B, J, R and target of the recorded rounds; its γ is replaced.
        coverage: of the conformal threshold.
    """
    # Recorded under Eq. 6, so that an earlier calibration has no say in the new one.
    base = replace(config, round=replace(config.round, selection="uncalibrated"))
    bench = Bench(base)
    answers = bench.answerer(prompts, AnswerConfig(config.max_new_tokens))
    folder, found = Path(config.checkpoint), list[dict[str, Any]]()
    fits = [fit for fit in load_calibrations(folder) if fit.num_draft_tokens not in num_draft_tokens]
    for count in num_draft_tokens:
        options: RoundConfig = replace(base.round, num_draft_tokens=count)
        rounds = bench.record(replace(base, round=options), answers)
        fits.append(fit(rounds, coverage))
        found.append({**asdict(fits[-1]), "rounds": len(rounds), "hit_rate": held_out_hit_rates(rounds, coverage)})
    run = {"prompts": len(prompts), "made_by": provenance(), "found": found}
    save_calibration(folder, fits, run)
    return run
