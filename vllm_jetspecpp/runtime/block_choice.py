"""Which block is handed out, and how much of it: by how far the target will probably go along.

A drafted token is as likely to be accepted as the draft model is sure of it, a copied one as copies after such a match
have been. Both are running averages, so that a model that is too sure, or text that repeats itself, is
known after some rounds. Only which tokens are verified depends on them, and nothing of the verification itself: output
stays the target's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from vllm_jetspecpp.runtime.copied_drafts import LONGEST_MATCH, copy_drafts
from vllm_jetspecpp.types import DraftBlock, Origin

CONFIDENCE_BINS = 10
AGREEMENT = (0.7, 1.0)
"""Copied tokens are of three kinds by :attr:`Copied.agreement`: below the first, below the second, and undisputed."""
COPIES_ACCEPTED = (
    (0.15, 0.27, 0.20, 0.25, 0.25, 0.30, 0.30, 0.40),
    (0.55, 0.55, 0.50, 0.50, 0.50, 0.50, 0.50, 0.50),
    (0.42, 0.66, 0.74, 0.75, 0.82, 0.90, 0.90, 0.91),
)
"""By agreement, shares of copied tokens that SmolLM2-135M-Instruct accepts after matches of 1 to 8 tokens on the
calibration prompts (docs/LOG.md): where the running averages begin."""
PRIOR_WEIGHT = 20.0
"""Tokens that the beginning counts as."""
MEMORY = 1000.0
"""Tokens after which an old one counts 1/e."""


class RunningRates:
    """Probability that a token is accepted if those before it are, for each of some kinds of tokens."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._accepted = [PRIOR_WEIGHT * p for p in prior]
        self._seen = [PRIOR_WEIGHT] * len(prior)

    def __getitem__(self, kind: int) -> float:
        return self._accepted[kind] / self._seen[kind]

    def see(self, kind: int, accepted: bool) -> None:
        """Count one token that the verification reached."""
        keep = 1 - 1 / MEMORY
        self._accepted[kind] = keep * self._accepted[kind] + accepted
        self._seen[kind] = keep * self._seen[kind] + 1


@dataclass(frozen=True)
class Offer:
    """A block that can be handed out."""

    block: DraftBlock
    origin: Origin
    kinds: tuple[int, ...]
    """Of each token, as the running averages know them."""
    reached: tuple[float, ...]
    """Probability that the target accepts each token and all before it."""

    def num_worth(self, least: float, limit: int) -> int:
        """Tokens to hand out: at most ``limit``, and but for the first none less probable than ``least``."""
        worth = sum(p >= least for p in self.reached)  # they only fall
        return min(max(worth, 1), len(self.reached), limit)

    def expected(self, count: int) -> float:
        """Tokens that the target will probably accept of the first ``count``."""
        return sum(self.reached[:count])


class BlockChoice:
    """Offers of all requests, judged by one set of running averages."""

    def __init__(self) -> None:
        self._drafted = RunningRates([(i + 0.5) / CONFIDENCE_BINS for i in range(CONFIDENCE_BINS)])
        self._copied = RunningRates([p for row in COPIES_ACCEPTED for p in row])

    def _rates(self, origin: Origin) -> RunningRates:
        return self._copied if origin is Origin.COPIED else self._drafted

    def _offer(self, block: DraftBlock, origin: Origin, kinds: tuple[int, ...]) -> Offer:
        rates = self._rates(origin)
        return Offer(block, origin, kinds, tuple(accumulate((rates[kind] for kind in kinds), mul)))

    def drafted(self, block: DraftBlock, origin: Origin) -> Offer:
        """A block of the draft model's."""
        kinds = tuple(min(int(CONFIDENCE_BINS * math.exp(c)), CONFIDENCE_BINS - 1) for c in block.confidence)
        return self._offer(block, origin, kinds)

    def copied(self, tokens: np.ndarray, count: int) -> Offer | None:
        """At most ``count`` copied drafts after ``tokens`` [num_tokens] int32; None where there is nothing to copy."""
        copied = copy_drafts(tokens, count)
        if not copied:
            return None
        kinds = tuple(bisect_right(AGREEMENT, c.agreement) * LONGEST_MATCH + c.num_matching - 1 for c in copied)
        confidence = tuple(math.log(self._copied[kind]) for kind in kinds)
        return self._offer(DraftBlock(tuple(c.token for c in copied), confidence), Origin.COPIED, kinds)

    def settle(self, offer: Offer, num_accepted: int, num_verified: int) -> None:
        """Learn how the verification of the first ``num_verified`` tokens ended."""
        rates = self._rates(offer.origin)
        for index, kind in enumerate(offer.kinds[: min(num_accepted + 1, num_verified)]):
            rates.see(kind, index < num_accepted)
