"""``jetspecpp acceptance``: what a checkpoint's drafts are worth, recorded on calibration prompts for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vllm_jetspecpp.evaluation.acceptance import Bench
from vllm_jetspecpp.evaluation.answers import Answer, AnswerConfig
from vllm_jetspecpp.evaluation.datasets import Prompt
from vllm_jetspecpp.evaluation.methods import EvalConfig
from vllm_jetspecpp.evaluation.provenance import provenance
from vllm_jetspecpp.evaluation.replay_engine import UNPIPELINED
from vllm_jetspecpp.evaluation.rounds import Rounds as RecordedRounds
from vllm_jetspecpp.evaluation.rounds import log_scores, realised_ranks, uncalibrated_scores
from vllm_jetspecpp.models.acceptance import load_acceptance, save_acceptance
from vllm_jetspecpp.models.calibration import load_calibration
from vllm_jetspecpp.planning.acceptance import Acceptance, Passes, Rounds
from vllm_jetspecpp.types import Origin

MAX_RANK = 16
"""Largest B that is looked at."""


def histogram(values: Sequence[int], size: int) -> tuple[float, ...]:
    """How often each of 0..size - 1 stands in ``values``; others are left out."""
    return tuple(float(values.count(value)) for value in range(size))


def measure_acceptance(config: EvalConfig, prompts: Sequence[Prompt], settings: Sequence[Passes]) -> Acceptance:
    """Record rounds along the target's own answers and put ``calibration/acceptance.json`` into the checkpoint.

    Other settings that are there for the same γ stay.

    Args:
        config: target, checkpoint, γ and the length of answers; B, J and R are replaced.
        settings: every J and R to record.
    """
    bench = Bench(config)
    answers = bench.answerer(prompts, AnswerConfig(config.max_new_tokens))
    gamma = config.round.num_draft_tokens
    known = load_acceptance(Path(config.checkpoint))
    if known is not None and known.num_draft_tokens != gamma:
        known = None
    hit: dict[Passes, Rounds] = {} if known is None else dict(known.after_hit)
    miss: dict[Passes, Rounds] = {} if known is None else dict(known.after_miss)
    for passes in settings:
        hit[passes], miss[passes] = _by_origin(bench, config, answers, passes)
    in_line = replace(config, states=UNPIPELINED, round=replace(config.round, jacobi_passes=0, context_refreshes=0))
    lengths = [outcome.num_accepted for g in bench.tally(in_line, answers).generations for _, outcome in g.rounds]
    made_by = {**provenance(), "prompts": len(prompts), "max_new_tokens": config.max_new_tokens}
    acceptance = Acceptance(gamma, hit, miss, Rounds(histogram(lengths, gamma + 1), ()), made_by)
    save_acceptance(Path(config.checkpoint), acceptance)
    return acceptance


def _by_origin(bench: Bench, config: EvalConfig, answers: Sequence[Answer], passes: Passes) -> tuple[Rounds, Rounds]:
    """Rounds of blocks that were hits, and of all other blocks."""
    shape = replace(
        config.round, num_outcomes=MAX_RANK, jacobi_passes=passes[0], context_refreshes=passes[1], selection="auto"
    )
    tally = bench.tally(replace(config, round=shape), answers)
    ends = [r for generation in tally.generations for r in generation.rounds]
    ranks = _ranks(RecordedRounds.join(tally.rounds), config)
    found = []
    for was_hit in (True, False):
        members = [i for i, (origin, _) in enumerate(ends) if (origin is Origin.HIT) == was_hit]
        if not members:
            raise ValueError(f"no round of J{passes[0]}-R{passes[1]} {'hit' if was_hit else 'missed'}: more prompts")
        lengths = [ends[i][1].num_accepted for i in members]
        size = config.round.num_draft_tokens + 1
        found.append(Rounds(histogram(lengths, size), histogram([ranks[i] for i in members], MAX_RANK)))
    return found[0], found[1]


def _ranks(rounds: RecordedRounds, config: EvalConfig) -> list[int]:
    calibration = load_calibration(Path(config.checkpoint), config.round.num_draft_tokens)
    if calibration is None:
        scores = uncalibrated_scores(rounds)
    else:
        scores = log_scores(rounds, torch.tensor(calibration.weights), calibration.beta)
    return realised_ranks(rounds, scores, MAX_RANK).tolist()
