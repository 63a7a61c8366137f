"""A draft engine that drafts only for the outcome that came true: what a full round would answer, at 1/B of its cost.

Branches never see each other, so the block of the realised outcome does not depend on the others; offline, where
nothing is hidden behind verification, they need not be drafted. Also the place that shows what a round saw.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_jetspecpp.evaluation.rounds import Rounds, make_rounds
from vllm_jetspecpp.foresight.foresight import (
    Blocks,
    Context,
    Foresight,
    Prefix,
    draft_outcomes,
    draft_verified,
    foresee,
)
from vllm_jetspecpp.foresight.outcome_selection import SelectedOutcomes
from vllm_jetspecpp.runtime.draft_engine import DraftEngine, UnderVerification, to_blocks
from vllm_jetspecpp.runtime.request_states import Parts
from vllm_jetspecpp.transport.messages import NO_BLOCK, Verified
from vllm_jetspecpp.types import DraftBlock, Outcome

UNPIPELINED = "unpipelined"
STATES = ("predicted", "true", "copied", UNPIPELINED)


@dataclass(frozen=True)
class LastRound:
    """What the latest round worked with; one request a round."""

    under: UnderVerification
    prefix: Prefix
    foresight: Foresight
    drafts: Tensor  # [1, γ] int64, draft tokens as rows of the shortened head
    confidence: Tensor  # [1, γ]


class ReplayEngine(DraftEngine):
    """One request at a time."""

    drafts_from = "predicted"
    """One of :data:`STATES`: what the blocks of hits are drafted from."""
    target_layer_ids: tuple[int, ...] = ()
    has_cache = True
    last: LastRound | None = None
    _last_state: Tensor | None = None  # [1, num_taps * hidden], of the last verified position

    def _foresee_and_draft(
        self, under: list[UnderVerification], prefix: Prefix, block: Tensor, confidence: Tensor
    ) -> None:
        if len(under) != 1:
            raise ValueError(f"a replay engine takes one request at a time, got {len(under)}")
        if self.drafts_from == UNPIPELINED:
            return
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
        return to_blocks(self._drafts(last, request, chosen, same.int().argmax(dim=1, keepdim=True)))[0][0]

    def _drafts(self, last: LastRound, request: Verified, chosen: SelectedOutcomes, index: Tensor) -> Blocks:
        """The block of the realised outcome, ``chosen`` at ``index`` [1, 1]: [1, 1, γ]."""
        options = self.config.round
        if self.drafts_from == "true":
            self._commit()
            prefix = self.states.prefix([request.slot], [request.anchor_position])
            return self._verified(prefix, options.jacobi_passes, options.context_refreshes)
        foresight = last.foresight
        if self.drafts_from == "copied":
            foresight = replace(foresight, context=self._copied_context(last))
        picked = SelectedOutcomes(*(values.gather(1, index) for values in chosen))
        return draft_outcomes(self.nets, options, last.prefix, foresight, picked)

    def _verified(self, prefix: Prefix, passes: int, refreshes: int) -> Blocks:
        options = self.config.round
        return draft_verified(
            self.nets, prefix, options.num_draft_tokens, passes, refreshes, options.anchor_replacement
        )

    def _copied_context(self, last: LastRound) -> Context:
        """Context of the block under verification when every state in it is the last verified one."""
        assert self._last_state is not None
        nets, size = self.nets, self.config.round.block_size
        states = self._last_state.to(nets.target.embedding).expand(1, size, -1)
        rope = nets.target.rotary(last.prefix.anchor.unsqueeze(-1) + torch.arange(size, device=states.device))
        causal = torch.ones(1, size, size, dtype=torch.bool, device=states.device).tril()
        _, decoder = nets.target.decoder(nets.deepest(states), rope, [[] for _ in nets.target.decoder.layers], causal)
        return Context(
            [nets.draft_model.context_keys_values(states, rope)],
            [nets.adapter.context_keys_values(states, rope)],
            [decoder],
        )

    def _commit(self, parts: Parts = Parts.ALL) -> None:
        for request in self._uncommitted:
            if len(request.states):
                self._last_state = request.states[-1:]
        super()._commit(parts)

    def _fallback(self, missed: list[Verified]) -> dict[int, DraftBlock]:
        if self.drafts_from != UNPIPELINED:
            return super()._fallback(missed)
        (request,) = missed
        self._commit()  # refreshes read all of it
        prefix = self.states.prefix([request.slot], [request.anchor_position])
        drafts = self._verified(prefix, self.config.round.jacobi_passes, self.config.round.context_refreshes)
        return {request.slot: to_blocks(drafts)[0][0]}

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
