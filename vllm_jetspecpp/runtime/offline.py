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

        self._model, self.target_layer_ids = model, list(target_layer_ids)
        self._new_cache = DynamicCache
        self.reset()

    def reset(self) -> None:
        """Start a new sequence."""
        self._cache, self.length = self._new_cache(), 0

    @torch.inference_mode()
    def forward(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Append ``tokens``: logits [count, vocab] and tapped states [count, num_taps * hidden]."""
        ids = torch.tensor([tokens], device=self._model.device)
        out = self._model(ids, past_key_values=self._cache, output_hidden_states=True)
        self.length += len(tokens)
        states = [out.hidden_states[tap + 1][0] for tap in self.target_layer_ids]
        return out.logits[0], torch.cat(states, dim=-1) if states else out.logits.new_empty(len(tokens), 0)

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


def committed_tokens(outcome: Outcome, drafts: Sequence[int], eos_token_id: int | None) -> list[int]:
    """What a round commits: accepted drafts and the bonus token, up to the end of the answer."""
    tokens = [*drafts[: outcome.num_accepted], outcome.bonus_token]
    return tokens[: tokens.index(eos_token_id) + 1] if eos_token_id in tokens else tokens


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
    stop: Callable[[list[int]], int | None] | None = None,
) -> Generation:
    """Speculative decoding of one prompt; the loop a vLLM worker and a draft process run together.

    Args:
        on_round: called after each verification with its outcome and the target's logits [γ + 1, vocab].
        stop: called with the answer after each round; says how many of its tokens to keep when it should end there.
            Rounds that began behind them are not counted.
    """
    target.reset()
    result, sequence, step, keep = Generation(), list(prompt), 0, None
    logits, states = target.forward(sequence)
    anchor = verify(distributions(logits[-1:], temperature), [], generator).bonus_token
    sequence.append(anchor)
    starts: list[int] = []
    news = Verified(slot, 0, torch.tensor(sequence, dtype=torch.int32), 0, states, wants_draft=True, reset=True)
    while True:
        result.tokens = sequence[len(prompt) : len(prompt) + max_tokens]
        keep = stop(result.tokens) if stop else None
        if len(result.tokens) >= max_tokens or result.tokens[-1] == eos_token_id or keep is not None:
            break
        draft = engine.answer(VerifiedBatch(step, (news,))).drafts[0]
        engine.work()
        start = len(sequence) - 1
        logits, states = target.forward([sequence[-1], *draft.tokens])
        outcome = verify(distributions(logits, temperature), list(draft.tokens), generator)
        committed = committed_tokens(outcome, draft.tokens, eos_token_id)
        sequence += committed
        target.rollback(start + len(committed))
        starts.append(start - len(prompt))
        result.rounds.append((draft.origin, Outcome(len(committed) - 1, committed[-1])))
        if on_round is not None:
            on_round(outcome, logits)
        step += 1
        news = next_message(slot, start, committed, states, draft.tokens)
    if keep is not None:
        result.tokens = result.tokens[:keep]
        result.rounds = [r for r, at in zip(result.rounds, starts, strict=True) if at < keep - 1]
    return result


def next_message(slot: int, start: int, committed: list[int], states: Tensor, drafts: Sequence[int]) -> Verified:
    """What a verification of ``drafts`` behind the anchor at ``start`` made known; ``states`` are the block's."""
    return Verified(
        slot,
        token_start=start + 1,
        tokens=torch.tensor(committed, dtype=torch.int32),
        state_start=start,
        states=states[: len(committed)],
        num_accepted=len(committed) - 1 if drafts else NO_BLOCK,
        num_verified=len(drafts),
        wants_draft=True,
    )


def follow(
    engine: Engine,
    tokens: list[int],
    states: Tensor,
    *,
    prompt_length: int,
    counted: int,
    slot: int = 0,
    on_round: Callable[[Outcome, int], None] | None = None,
) -> Generation:
    """The rounds of :func:`generate` along an answer that the target has given already: no forward of the target.

    With point-mass proposals a draft is accepted exactly when it is the target's own draw (Eq. 11), so the answer does
    not depend on what is drafted, and which drafts are accepted can be read off it, at every temperature.

    Args:
        tokens: prompt and answer; tokens beyond the counted ones only end the last round.
        states: [len(tokens), num_taps * hidden], true states.
        counted: tokens of the answer; rounds begin within them.
        on_round: called after each round with its outcome and its anchor's position.
    """
    result, step, start = Generation(tokens=tokens[prompt_length : prompt_length + counted]), 0, prompt_length
    first = torch.tensor(tokens[: start + 1], dtype=torch.int32)
    news = Verified(slot, 0, first, 0, states[:start], wants_draft=True, reset=True)
    while start < min(prompt_length + counted, len(tokens)) - 1:
        draft = engine.answer(VerifiedBatch(step, (news,))).drafts[0]
        engine.work()
        left = tokens[start + 1 :]
        same = [mine == theirs for mine, theirs in zip(draft.tokens, left[:-1], strict=False)]
        accepted = same.index(False) if False in same else len(same)
        outcome = Outcome(accepted, left[accepted])
        result.rounds.append((draft.origin, outcome))
        if on_round is not None:
            on_round(outcome, start)
        step += 1
        news = next_message(slot, start, left[: accepted + 1], states[start:], draft.tokens)
        start += accepted + 1
    return result


def generate_plainly(
    target: OfflineTarget,
    prompt: list[int],
    *,
    max_tokens: int,
    eos_token_id: int | None = None,
    stop: Callable[[list[int]], int | None] | None = None,
) -> list[int]:
    """The target's own greedy answer, token by token; ``stop`` as in :func:`generate`."""
    target.reset()
    tokens: list[int] = []
    logits, _ = target.forward(prompt)
    while True:
        tokens.append(int(logits[-1].argmax()))
        if stop and (keep := stop(tokens)) is not None:
            return tokens[:keep]
        if len(tokens) >= max_tokens or tokens[-1] == eos_token_id:
            return tokens
        logits, _ = target.forward(tokens[-1:])
