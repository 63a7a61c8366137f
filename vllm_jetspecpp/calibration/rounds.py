"""Calibration rounds: what the draft process knew of each verification, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from vllm_jetspecpp.evaluation.acceptance import Bench, EvalConfig
from vllm_jetspecpp.evaluation.datasets import Prompt
from vllm_jetspecpp.foresight.calibrated_score import Candidates, features, top_candidates
from vllm_jetspecpp.runtime.offline import generate
from vllm_jetspecpp.types import Outcome


@dataclass(frozen=True)
class Rounds:
    """N recorded rounds; tokens are rows of the decoder's shortened head."""

    phi: Tensor  # [N, γ, 6] float32, features of every draft position
    drafts: Tensor  # [N, γ] int64
    draft_log_probs: Tensor  # [N, γ] float32, log p̂(d_i | i - 1)
    candidate_log_probs: Tensor  # [N, γ + 1, 32] float32
    candidate_tokens: Tensor  # [N, γ + 1, 32] int64
    num_accepted: Tensor  # [N] int64, realised k
    bonus: Tensor  # [N] int64, realised a; -1 outside the head

    def __len__(self) -> int:
        return len(self.num_accepted)

    @property
    def candidates(self) -> Candidates:
        """The decoder's likeliest bonus tokens."""
        return Candidates(self.candidate_log_probs, self.candidate_tokens)

    def select(self, index: Tensor) -> Rounds:
        """The rounds at ``index``."""
        return Rounds(*(getattr(self, f.name)[index] for f in fields(self)))

    @classmethod
    def join(cls, parts: Sequence[Rounds]) -> Rounds:
        """All rounds of ``parts``."""
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))


def make_rounds(log_probs: Tensor, drafts: Tensor, confidence: Tensor, num_accepted: Tensor, bonus: Tensor) -> Rounds:
    """Rounds from what their foresight saw; the first three arguments as in ``calibrated_score.features``."""
    candidates = top_candidates(log_probs)
    known = drafts >= 0
    of_draft = log_probs[:, :-1].gather(-1, drafts.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return Rounds(
        phi=features(log_probs, drafts, confidence, candidates),
        drafts=drafts,
        draft_log_probs=of_draft.float().masked_fill(~known, float("-inf")),
        candidate_log_probs=candidates.log_probs.float(),
        candidate_tokens=candidates.tokens,
        num_accepted=num_accepted,
        bonus=bonus,
    )


def record(bench: Bench, config: EvalConfig, prompts: Sequence[Prompt], say_every: int = 8) -> Rounds:
    """Run ``prompts`` greedily and keep every round."""
    engine, parts = bench.engine(config), list[Rounds]()

    def keep(outcome: Outcome, logits: Tensor) -> None:
        last = engine.last
        assert last is not None
        row = int(bench.nets.token_rows[outcome.bonus_token])
        ends = torch.tensor([outcome.num_accepted]), torch.tensor([row])
        parts.append(make_rounds(last.foresight.log_probs, last.drafts, last.confidence, *ends))

    room = config.max_new_tokens + 2 * config.round.block_size
    for number, prompt in enumerate(prompts, 1):
        generate(
            bench.target,
            engine,
            bench.encode(prompt, room),
            max_tokens=config.max_new_tokens,
            eos_token_id=bench.eos,
            on_round=keep,
        )
        if number % say_every == 0 or number == len(prompts):
            bench._say(f"recorded {number}/{len(prompts)} prompts, {len(parts)} rounds")
    return Rounds.join(parts)
