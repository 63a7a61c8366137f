"""What is counted over the rounds of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_jetspecpp.evaluation.replay_engine import ReplayEngine
from vllm_jetspecpp.evaluation.rounds import Rounds, hit_rates, log_scores, uncalibrated_scores
from vllm_jetspecpp.models.calibration import Calibration
from vllm_jetspecpp.runtime.offline import Generation
from vllm_jetspecpp.types import Origin, Outcome

CACHE_SIZES = (1, 2, 4, 8, 16)


@dataclass
class Tally:
    """Sums over rounds, and the rounds themselves."""

    generations: list[Generation] = field(default_factory=list)
    agreed: int = 0
    positions: int = 0
    agreed_reached: int = 0
    positions_reached: int = 0
    identical: int | None = None
    """Prompts whose answer is the target's own; None when that was not checked."""
    rounds: list[Rounds] = field(default_factory=list)

    def see(self, choices: Tensor, outcome: Outcome, target: Tensor) -> None:
        """Compare the decoder's choices [γ + 1] with the target's, of the same shape."""
        self.agreed += int((choices == target).sum())
        self.positions += len(choices)
        reached = outcome.num_accepted + 1
        self.see_reached(choices[:reached], target[:reached])

    def see_reached(self, choices: Tensor, target: Tensor) -> None:
        """The same over positions whose drafts were all accepted."""
        self.agreed_reached += int((choices == target).sum())
        self.positions_reached += len(choices)

    def figures(self, has_cache: bool = True) -> dict[str, Any]:
        """Everything that is measured, by name; what a method has not is None."""
        rounds = [r for g in self.generations for r in g.rounds]
        whole = Generation(rounds=rounds)
        committed = {origin: [o.num_accepted + 1 for kind, o in rounds if kind is origin] for origin in Origin}
        longest = max((o.num_accepted for _, o in rounds), default=0)
        return {
            "tau": round(whole.acceptance_length, 4),
            "tau_error": _ratio_error([[o.num_accepted + 1 for _, o in g.rounds] for g in self.generations]),
            "hit_rate": round(whole.hit_rate, 4) if has_cache else None,
            "decoder_top1": _share(self.agreed, self.positions),
            "decoder_top1_reached": _share(self.agreed_reached, self.positions_reached),
            "tau_hit": _mean(committed[Origin.HIT]),
            "tau_miss": _mean(committed[Origin.FALLBACK]) if has_cache else None,
            "accepted_by_position": [_mean([o.num_accepted >= i for _, o in rounds]) for i in range(1, longest + 1)],
            "rounds": len(rounds),
            "tokens": sum(len(g.tokens) for g in self.generations),
            "prompts": len(self.generations),
            "identical_prompts": self.identical,
            "identical_to_target": None if self.identical is None else self.identical == len(self.generations),
        }

    def replayed_hit_rates(self, calibration: Calibration | None) -> dict[str, dict[int, float]]:
        """Hit rate by cache size, had the recorded rounds been served by each rule."""
        if not self.rounds:
            return {}
        rounds = Rounds.join(self.rounds)
        rules = {"uncalibrated": uncalibrated_scores(rounds)}
        if calibration:
            rules["calibrated"] = log_scores(rounds, torch.tensor(calibration.weights), calibration.beta)
        rates = {name: hit_rates(rounds, scores, CACHE_SIZES) for name, scores in rules.items()}
        return {name: {size: round(rate, 4) for size, rate in by_size.items()} for name, by_size in rates.items()}


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _share(count: int, total: int) -> float | None:
    return round(count / total, 4) if total else None


def _ratio_error(groups: Sequence[Sequence[int]]) -> float | None:
    """Standard error of the mean over all rounds, rounds of one answer taken together (jackknife over answers)."""
    groups = [g for g in groups if g]
    if len(groups) < 2:
        return None
    total, count = sum(map(sum, groups)), sum(map(len, groups))
    left_out = torch.tensor([(total - sum(g)) / (count - len(g)) for g in groups], dtype=torch.float64)
    n = len(groups)
    return round(float(((n - 1) / n * (left_out - left_out.mean()).square().sum()).sqrt()), 4)


@dataclass
class RoundObserver:
    """Keeps what a round of the method saw, verified by the target."""

    engine: ReplayEngine
    tally: Tally

    def __call__(self, outcome: Outcome, logits: Tensor) -> None:
        """After a verification; ``logits`` [γ + 1, vocab] are the target's."""
        if self.engine.last is not None:
            self.tally.see(self.engine.decoder_choices(), outcome, logits.argmax(-1))
            self.tally.rounds.append(self.engine.recorded(outcome))


@dataclass
class AnswerObserver:
    """The same along an answer, where the target's choices are known up to the first mistake."""

    engine: ReplayEngine
    tally: Tally
    choices: Tensor  # [length], the target's choice after every token

    def __call__(self, outcome: Outcome, anchor: int) -> None:
        """After a round with its anchor at position ``anchor``."""
        if self.engine.last is not None:
            reached = outcome.num_accepted + 1
            self.tally.see_reached(self.engine.decoder_choices()[:reached], self.choices[anchor : anchor + reached])
            self.tally.rounds.append(self.engine.recorded(outcome))
