"""Target and draft engine in one process, without vLLM: the plainest way to run, test and measure the method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_jetspecpp.foresight.speculative_sampling import verify
from vllm_jetspecpp.runtime.base import Engine
from vllm_jetspecpp.transport.messages import NO_BLOCK, Verified, VerifiedBatch
from vllm_jetspecpp.types import Origin, Outcome


class OfflineTarget:
    """A Hugging Face causal LM that verifies blocks for one sequence at a time.

    Args:
        model: any ``AutoModelForCausalLM`` whose cache can be cropped.
        target_layer_ids: tapped layers, 0-based.
    """

    def __init__(self, model: Any, target_layer_ids: Sequence[int]) -> None:
        from transformers import DynamicCache

        self._model, self._taps = model, list(target_layer_ids)
        self._new_cache = DynamicCache
        self.reset()

    def reset(self) -> None:
        """Start a new sequence."""
        self._cache, self.length = self._new_cache(), 0

    @torch.inference_mode()
    def forward(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Append ``tokens``: logits [count, vocab] and tapped states [count, num_taps * hidden]."""
        out = self._model(torch.tensor([tokens]), past_key_values=self._cache, output_hidden_states=True)
        self.length += len(tokens)
        return out.logits[0], torch.cat([out.hidden_states[tap + 1][0] for tap in self._taps], dim=-1)

    def rollback(self, length: int) -> None:
        """Forget all positions from ``length`` on."""
        if length < self.length:
            self._cache.crop(length - self.length)
            self.length = length


@dataclass
class Generation:
    """What one prompt gave."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[tuple[Origin, Outcome]] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """τ: mean tokens committed per verification round, bonus token included."""
        return sum(o.num_accepted + 1 for _, o in self.rounds) / max(len(self.rounds), 1)

    @property
    def hit_rate(self) -> float:
        """Share of rounds, after a request's first, that found their outcome in the cache."""
        count = Counter(origin for origin, _ in self.rounds)
        return count[Origin.HIT] / max(count[Origin.HIT] + count[Origin.FALLBACK], 1)


def distributions(logits: Tensor, temperature: float) -> Tensor:
    """Rows of probabilities [count, vocab]; one-hot at temperature 0."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits.float() / temperature).softmax(-1)


def generate(
    target: OfflineTarget,
    engine: Engine,
    prompt: list[int],
    *,
    max_tokens: int,
    eos_token_id: int | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    slot: int = 0,
    on_round: Callable[[Outcome, Tensor], None] | None = None,
) -> Generation:
    """Speculative decoding of one prompt; the loop a vLLM worker and a draft process run together.

    Args:
        on_round: called after each verification with its outcome and the target's logits [γ + 1, vocab].
    """
    target.reset()
    result, sequence, step = Generation(), list(prompt), 0
    logits, states = target.forward(sequence)
    anchor = verify(distributions(logits[-1:], temperature), [], generator).bonus_token
    sequence.append(anchor)
    news = Verified(slot, 0, torch.tensor(sequence, dtype=torch.int32), 0, states, wants_draft=True, reset=True)
    while True:
        result.tokens = sequence[len(prompt) : len(prompt) + max_tokens]
        if eos_token_id in result.tokens:
            result.tokens = result.tokens[: result.tokens.index(eos_token_id) + 1]
        if len(result.tokens) >= max_tokens or eos_token_id in result.tokens:
            return result
        draft = engine.answer(VerifiedBatch(step, (news,))).drafts[0]
        engine.work()
        start = len(sequence) - 1
        logits, states = target.forward([sequence[-1], *draft.tokens])
        outcome = verify(distributions(logits, temperature), list(draft.tokens), generator)
        committed = [*draft.tokens[: outcome.num_accepted], outcome.bonus_token]
        sequence += committed
        target.rollback(start + outcome.num_accepted + 1)
        result.rounds.append((draft.origin, outcome))
        if on_round is not None:
            on_round(outcome, logits)
        step += 1
        news = Verified(
            slot,
            token_start=start + 1,
            tokens=torch.tensor(committed, dtype=torch.int32),
            state_start=start,
            states=states[: outcome.num_accepted + 1],
            num_accepted=outcome.num_accepted if draft.tokens else NO_BLOCK,
            num_verified=len(draft.tokens),
            wants_draft=True,
        )


def generate_plainly(
    target: OfflineTarget, prompt: list[int], *, max_tokens: int, eos_token_id: int | None = None
) -> list[int]:
    """The target's own greedy answer, token by token."""
    target.reset()
    tokens: list[int] = []
    logits, _ = target.forward(prompt)
    while True:
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) >= max_tokens or tokens[-1] == eos_token_id:
            return tokens
        logits, _ = target.forward(tokens[-1:])
