"""SSD: an autoregressive draft model without target states, drafting ahead for a fixed geometric fan-out of outcomes.

The draft of an outcome does not depend on when it is made, so the block after a hit is the one that would be drafted
now: τ is that of the draft model, and the fan-out decides how many rounds find their block ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_jetspecpp.evaluation.answers import Answer
from vllm_jetspecpp.evaluation.baselines.base import SequenceEngine
from vllm_jetspecpp.evaluation.fan_out import FanOut, GeometricLaw, fit_acceptance_rate, fit_exponent
from vllm_jetspecpp.models.checkpoint import read_json, require, write_json
from vllm_jetspecpp.transport.messages import Verified
from vllm_jetspecpp.types import Origin, Outcome

LAWS_FILE = "fan_out.json"
"""Beside the draft model: the laws of the fan-out, fitted on calibration prompts."""
UNFITTED = GeometricLaw(0.5, 1.0)


def read_laws(folder: Path) -> tuple[GeometricLaw, GeometricLaw]:
    """The laws after a hit and after a miss; α = .5 and ρ = 1 where none were fitted."""
    path = folder / LAWS_FILE
    if not path.is_file():
        return UNFITTED, UNFITTED
    laws = read_json(path)
    return GeometricLaw(*require(laws, "after_hit", path)), GeometricLaw(*require(laws, "after_miss", path))


def rank(logits: Tensor, token: int, impossible: int | None) -> int:
    """Place of ``token`` in ``logits`` [vocab], the likeliest first (1), not counting ``impossible``."""
    above = logits > logits[token]
    return 1 + int(above.sum()) - int(impossible is not None and bool(above[impossible]))


def cached(rows: Tensor, drafts: Sequence[int], outcome: Outcome, fan_out: FanOut) -> bool:
    """Whether the fan-out holds ``outcome``: its bonus token among the F_k likeliest of the draft model at k.

    Args:
        rows: [at least k + 1, vocab], the draft model's logits behind every position of the block.
        drafts: the block's tokens; d_{k+1} is no outcome at k.
    """
    k, bonus = outcome
    return rank(rows[k], bonus, drafts[k] if k < len(drafts) else None) <= fan_out[k]


class AutoregressiveEngine(SequenceEngine):
    """A small causal LM drafts token by token.

    Args:
        model: a Hugging Face causal LM over the target's vocabulary.
        num_draft_tokens: γ.
        after_hit, after_miss: SSD's two fixed allocations, for blocks that were found ready or were not.
    """

    has_cache = True

    def __init__(self, model: Any, num_draft_tokens: int, after_hit: FanOut, after_miss: FanOut) -> None:
        super().__init__(num_draft_tokens)
        self.model = model
        self.fan_outs = {Origin.HIT: after_hit, Origin.FALLBACK: after_miss, Origin.FIRST: after_miss}
        self._latest = Origin.FIRST

    def reset(self) -> None:
        """Forget the last request."""
        from transformers import DynamicCache

        self._cache, self._rows, self._drafts = DynamicCache(), list[Tensor](), tuple[int, ...]()
        self._latest = Origin.FIRST

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """Logits behind every token, [length, vocab], on the CPU."""
        return self.model(torch.tensor([tokens], device=self.model.device)).logits[0].cpu()

    def _forward(self, tokens: list[int]) -> Tensor:
        """Append ``tokens`` to the cache: logits behind the last one, [vocab]."""
        ids = torch.tensor([tokens], device=self.model.device)
        return self.model(ids, past_key_values=self._cache, logits_to_keep=1).logits[0, -1]

    def origin(self, request: Verified) -> Origin:
        """A hit where the fan-out held the realised outcome."""
        outcome = Outcome(request.num_accepted, int(request.tokens[-1]))
        held = cached(torch.stack(self._rows), self._drafts, outcome, self.fan_outs[self._latest])
        self._latest = Origin.HIT if held else Origin.FALLBACK
        return self._latest

    def draft(self) -> tuple[int, ...]:
        """γ greedy tokens; the distribution behind the last of them is kept too, for outcomes that accept all."""
        known = self._cache.get_seq_length()
        if known >= len(self.tokens):
            self._cache.crop(len(self.tokens) - 1 - known)
            known = len(self.tokens) - 1
        self._rows = [self._forward(self.tokens[known:])]
        drafts: list[int] = []
        while len(drafts) < self.num_draft_tokens:
            drafts.append(int(self._rows[-1].argmax()))
            self._rows.append(self._forward(drafts[-1:]))
        # What was drafted is unknown to the target yet: it leaves the cache again.
        self._cache.crop(-len(drafts))
        self._drafts = tuple(drafts)
        return self._drafts


@torch.inference_mode()
def follow_autoregressive(
    engine: AutoregressiveEngine, tokens: list[int], *, prompt_length: int, counted: int
) -> list[tuple[Origin, Outcome]]:
    """The rounds of :func:`~vllm_jetspecpp.runtime.offline.follow` from one forward of the draft model.

    As long as a greedy draft is right it has read exactly the answer's tokens, so one pass over the answer gives every
    draft up to its first mistake, and the distribution there.
    """
    logits = engine.logits(tokens)
    best = logits.argmax(-1).tolist()
    rounds: list[tuple[Origin, Outcome]] = []
    origin = Origin.FIRST
    for start, outcome, drafted in _outcomes(best, tokens, prompt_length, counted, engine.num_draft_tokens):
        rounds.append((origin, outcome))
        k = outcome.num_accepted
        # Of the draft only d_{k+1} matters to what is cached at k.
        drafts = [*tokens[start + 1 : start + 1 + k], *drafted]
        held = cached(logits[start : start + k + 1], drafts, outcome, engine.fan_outs[origin])
        origin = Origin.HIT if held else Origin.FALLBACK
    return rounds


def _outcomes(
    best: list[int], tokens: list[int], prompt_length: int, counted: int, num_draft_tokens: int
) -> Iterator[tuple[int, Outcome, list[int]]]:
    """Anchor position, outcome, and d_{k+1} where there is one, of every round."""
    start = prompt_length
    while start < min(prompt_length + counted, len(tokens)) - 1:
        most = min(num_draft_tokens, len(tokens) - start - 2)
        k = next((i for i in range(most) if best[start + i] != tokens[start + 1 + i]), most)
        yield start, Outcome(k, tokens[start + 1 + k]), [best[start + k]] if k < num_draft_tokens else []
        start += k + 1


def fit_laws(engine: AutoregressiveEngine, answers: Sequence[Answer], folder: Path, provenance: dict[str, Any]) -> None:
    """Fit α and ρ on answers to calibration prompts, and write them beside the draft model.

    SSD keeps an allocation for blocks that were found ready and one for those that were not, since its fallback is
    another drafter. Here both come from the same draft model, so one fit serves both.
    """
    lengths, ranks = list[int](), list[int]()
    for answer in answers:
        logits = engine.logits(answer.tokens)
        best = logits.argmax(-1).tolist()
        count = engine.num_draft_tokens
        for start, (k, bonus), drafted in _outcomes(best, answer.tokens, answer.prompt_length, answer.counted, count):
            lengths.append(k)
            ranks.append(rank(logits[start + k], bonus, drafted[0] if drafted else None))
    law = GeometricLaw(fit_acceptance_rate(lengths, engine.num_draft_tokens), fit_exponent(ranks))
    fitted = {"after_hit": law, "after_miss": law, "rounds": len(lengths), "made_by": provenance}
    write_json(folder / LAWS_FILE, fitted)
