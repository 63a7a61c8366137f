"""A draft engine that drafts only for the outcome that came true: what a full round would answer, at 1/B of its cost.

Branches never see each other, so the block of the realised outcome does not depend on the others; offline, where
nothing is hidden behind verification, they need not be drafted. Also the place that shows what a round saw.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_jetspecpp.evaluation.rounds import Rounds, make_rounds
from vllm_jetspecpp.foresight.foresight import Foresight, Prefix, draft_outcomes, draft_verified, foresee
from vllm_jetspecpp.foresight.outcome_selection import SelectedOutcomes
from vllm_jetspecpp.runtime.draft_engine import DraftEngine, UnderVerification, to_blocks
from vllm_jetspecpp.transport.messages import NO_BLOCK, Verified
from vllm_jetspecpp.types import DraftBlock, Outcome


@dataclass(frozen=True)
class LastRound:
    """What the latest round worked with; one request a round."""

    under: UnderVerification
    prefix: Prefix
    foresight: Foresight
    drafts: Tensor  # [1, γ] int64, draft tokens as rows of the shortened head
    confidence: Tensor  # [1, γ]


class ReplayEngine(DraftEngine):
    """One request at a time; ``true_states`` drafts hits from the target's states instead of the predicted ones."""

    true_states = False
    last: LastRound | None = None

    def _foresee_and_draft(
        self, under: list[UnderVerification], prefix: Prefix, block: Tensor, confidence: Tensor
    ) -> None:
        if len(under) != 1:
            raise ValueError(f"a replay engine takes one request at a time, got {len(under)}")
        foresight = foresee(self.nets, self.selector, prefix, block, confidence)
        drafts = self.nets.token_rows[block[:, 1:]]
        self.last = LastRound(under[0], prefix, foresight, drafts, confidence)

    def _lookup(self, request: Verified) -> DraftBlock | None:
        last = self.last
        if request.num_accepted == NO_BLOCK or last is None or last.under.slot != request.slot:
            return None
        if last.under.anchor_position != request.anchor_position - request.num_accepted - 1:
            return None
        chosen = last.foresight.outcomes
        same = (chosen.num_accepted == request.num_accepted) & chosen.log_prob.isfinite()
        same &= self.nets.target.head_token_ids[chosen.bonus] == int(request.tokens[-1])
        if not bool(same.any()):
            return None
        index = same.int().argmax(dim=1, keepdim=True)
        options = self.config.round
        if self.true_states:
            self._commit()
            prefix = self.states.prefix([request.slot], [request.anchor_position])
            passes, refreshes = options.jacobi_passes, options.context_refreshes
            drafts = draft_verified(self.nets, prefix, options.num_draft_tokens, passes, refreshes)
        else:
            picked = SelectedOutcomes(*(values.gather(1, index) for values in chosen))
            drafts = draft_outcomes(self.nets, options, last.prefix, last.foresight, picked)
        return to_blocks(drafts)[0][0]

    def _forget(self, slot: int) -> None:
        super()._forget(slot)
        self.last = None

    @torch.inference_mode()
    def decoder_choices(self) -> Tensor:
        """The decoder's likeliest token after every position of the block under verification, [γ + 1] int64.

        Raises:
            RuntimeError: no round has run.
        """
        if self.last is None:
            raise RuntimeError("no round has run yet")
        return self.nets.target.head_token_ids[self.last.foresight.log_probs[0].argmax(-1)]

    def recorded(self, outcome: Outcome) -> Rounds:
        """The latest round, which ended with ``outcome``.

        Raises:
            RuntimeError: no round has run.
        """
        last = self.last
        if last is None:
            raise RuntimeError("no round has run yet")
        row = int(self.nets.token_rows[outcome.bonus_token])
        ends = torch.tensor([outcome.num_accepted]), torch.tensor([row])
        return make_rounds(last.foresight.log_probs, last.drafts, last.confidence, *ends)
