"""Rounds recorded once, with all that replays under other decoders and other rules need.

Only the served decoder has a say in the blocks (anchor replacement); the others read the same predicted states of the
same blocks, as the paper's Table 10 has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_jetspecpp.evaluation.acceptance import Bench
from vllm_jetspecpp.evaluation.answers import Answer
from vllm_jetspecpp.evaluation.methods import EvalConfig
from vllm_jetspecpp.evaluation.replay_engine import ReplayEngine
from vllm_jetspecpp.evaluation.rounds import Rounds, make_rounds
from vllm_jetspecpp.foresight.calibrated_score import NUM_CANDIDATES
from vllm_jetspecpp.foresight.foresight import Prefix, per_layer
from vllm_jetspecpp.foresight.masks import BranchMasks
from vllm_jetspecpp.models.decoder import Decoder
from vllm_jetspecpp.runtime.draft_engine import UnderVerification
from vllm_jetspecpp.runtime.offline import follow
from vllm_jetspecpp.types import Outcome

SERVED = "training-free"
"""The target's own layers, untouched."""


class RecordingEngine(ReplayEngine):
    """A replay engine that also shows its predicted states and what the draft model thinks of the block."""

    true_deepest: Tensor | None = None  # [length, hidden], the deepest tap's true states of the whole answer
    predicted: Tensor | None = None  # [1, T, hidden], the same of the block under verification, predicted

    def _foresee_and_draft(
        self, under: list[UnderVerification], prefix: Prefix, block: Tensor, confidence: Tensor
    ) -> None:
        caught: list[Tensor] = []
        hook = self.nets.target.decoder.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        try:
            super()._foresee_and_draft(under, prefix, block, confidence)
        finally:
            hook.remove()
        self.predicted, self.block = caught[0], block

    def draft_candidates(self) -> Tensor:
        """The draft model's likeliest tokens at every draft position, [γ, 32] rows of the head.

        Of one more pass from the true states over the block as it stands: q_θ(· | h_x, y_≤i) of Eq. 8.
        """
        last, nets = self.last, self.nets
        assert last is not None
        masks = BranchMasks(1, self.block.shape[1], self.block.device)
        mask = torch.cat([masks.prefix(last.prefix.mask), masks.own(torch.zeros_like(self.block[:, :1]))], dim=-1)
        rope = nets.target.rotary(last.prefix.anchor.unsqueeze(-1) + masks.position)
        context = per_layer(last.prefix.context.draft_model)
        hidden = nets.draft_model(nets.target.embed(self.block), rope, context, mask)
        return nets.target.logits(hidden[0, 1:]).topk(NUM_CANDIDATES, dim=-1).indices

    def log_probs_of(self, decoder: Decoder) -> Tensor:
        """log p̂ of another decoder over the predictions of the latest round, [1, T, draft_vocab]."""
        assert self.last is not None and self.predicted is not None and self.true_deepest is not None
        n = self.last.under.anchor_position
        states = torch.cat([self.true_deepest[:n].to(self.predicted), self.predicted[0]])[None]
        length = states.shape[1]
        rope = self.nets.target.rotary(torch.arange(length, device=states.device)[None])
        causal = torch.ones(1, length, length, dtype=torch.bool, device=states.device).tril()
        hidden, _ = decoder(states, rope, [[] for _ in decoder.layers], causal)
        return self.nets.target.logits(hidden[:, n:]).float().log_softmax(-1)


@dataclass
class Recording:
    """Rounds by decoder, and what else was seen of them."""

    rounds: dict[str, list[Rounds]] = field(default_factory=dict)
    draft_candidates: list[Tensor] = field(default_factory=list)
    agreed: dict[str, int] = field(default_factory=dict)
    """Positions reached by accepted drafts at which a decoder's likeliest token is the target's."""
    kl: dict[str, float] = field(default_factory=dict)
    """Sum of KL(p ‖ p̂) over those positions, both over the shortened head."""
    positions: int = 0

    def joined(self, decoder: str = SERVED) -> Rounds:
        """All rounds as a decoder saw them."""
        return Rounds.join(self.rounds[decoder])

    def candidates(self) -> Tensor:
        """[N, γ, 32], see :meth:`RecordingEngine.draft_candidates`."""
        return torch.stack(self.draft_candidates)

    def see(self, name: str, rounds: Rounds, log_probs: Tensor, target: Tensor) -> None:
        """Keep a round of one decoder; ``log_probs`` and ``target`` (the target's) are [reached, draft_vocab]."""
        self.rounds.setdefault(name, []).append(rounds)
        same = int((log_probs.argmax(-1) == target.argmax(-1)).sum())
        self.agreed[name] = self.agreed.get(name, 0) + same
        self.kl[name] = self.kl.get(name, 0.0) + float((target.exp() * (target - log_probs)).sum())


@torch.inference_mode()
def record(bench: Bench, config: EvalConfig, answers: Sequence[Answer], decoders: dict[str, Decoder]) -> Recording:
    """Run the method along ``answers`` and keep its rounds, as every decoder sees them."""
    nets, info = bench.engines.networks(config)
    engine = bench.engines.jetspecpp(config, RecordingEngine)
    recording = Recording()
    for answer in answers:
        states, logits = bench.forward(answer, info.target_layer_ids)
        target = logits[:, nets.target.head_token_ids.to(logits.device)].float().log_softmax(-1)
        engine.true_deepest = nets.deepest(states)

        def keep(outcome: Outcome, anchor: int, target: Tensor = target) -> None:
            last = engine.last
            assert last is not None
            reached = outcome.num_accepted + 1
            row = int(nets.token_rows[outcome.bonus_token])
            ends = torch.tensor([outcome.num_accepted]), torch.tensor([row])
            views = {SERVED: last.foresight.log_probs} | {n: engine.log_probs_of(d) for n, d in decoders.items()}
            for name, log_probs in views.items():
                rounds = make_rounds(log_probs, last.drafts, last.confidence, *ends)
                recording.see(name, rounds, log_probs[0, :reached], target[anchor : anchor + reached])
            recording.draft_candidates.append(engine.draft_candidates())
            recording.positions += reached

        span = {"prompt_length": answer.prompt_length, "counted": answer.counted}
        follow(engine, answer.tokens, states, **span, on_round=keep)
        bench.say(f"{answer.id}: {len(recording.draft_candidates)} rounds recorded")
    return recording
