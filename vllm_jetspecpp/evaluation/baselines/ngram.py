"""Prompt lookup: what followed the last few tokens when they stood in the context before. A floor for every drafter."""

from __future__ import annotations

import torch

from vllm_jetspecpp.evaluation.baselines.base import SequenceEngine

LONGEST_MATCH = 3


class NgramEngine(SequenceEngine):
    """The library's own prompt lookup (``transformers``): the longest n-gram of at most three tokens, first match."""

    def __init__(self, num_draft_tokens: int) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        super().__init__(num_draft_tokens)
        self._lookup = PromptLookupCandidateGenerator(
            num_output_tokens=num_draft_tokens, max_matching_ngram_size=LONGEST_MATCH, max_length=1 << 30
        )

    def draft(self) -> tuple[int, ...]:
        """What followed, or nothing."""
        candidates, _ = self._lookup.get_candidates(torch.tensor([self.tokens]))
        return tuple(candidates[0, len(self.tokens) :].tolist())
