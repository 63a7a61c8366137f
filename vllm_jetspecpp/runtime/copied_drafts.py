"""Drafts copied from the request's own tokens: what followed where its latest tokens stood before.

Prompt lookup decoding (Saxena, 2023; vLLM's ``ngram``) that follows the most frequent of several continuations, as
suffix decoding does. On the host: a few comparisons of arrays, no device work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LONGEST_MATCH = 8
"""Tokens that are compared at most: with more of them a copy is no more likely to go on right."""


class Copied(NamedTuple):
    """One copied token, and what speaks for it."""

    token: int
    num_matching: int
    """Tokens before it that stand before its earlier occurrences too, 1..:data:`LONGEST_MATCH`."""
    agreement: float
    """Share of the places with the same tokens before, after which it follows."""


def copy_drafts(tokens: np.ndarray, count: int) -> list[Copied]:
    """Copy ``count`` tokens from after the longest match, nothing where the last token is new.

    Of several continuations the most frequent is followed, of equally frequent ones the latest; a copy that reaches the
    end goes on with what it has copied itself.

    Args:
        tokens: [num_tokens] int32, all of a request, the anchor last.
    """
    last = len(tokens) - 1
    num_matching, ends = _longest_match(tokens)
    if not num_matching:
        return []
    text = np.concatenate([tokens, np.empty(count, tokens.dtype)])
    copied: list[Copied] = []
    for i in range(count):
        follows = text[ends + 1 + i]
        token, share = _most_frequent(follows)
        copied.append(Copied(token, min(num_matching + i, LONGEST_MATCH), share))
        text[last + 1 + i] = token
        ends = ends[follows == token]
    return copied


def _longest_match(tokens: np.ndarray) -> tuple[int, np.ndarray]:
    """How many latest tokens stand together elsewhere too, and where their last one does, ascending."""
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    if not len(ends):
        return 0, ends
    for num_matching in range(1, LONGEST_MATCH):
        longer = ends[ends >= num_matching]
        longer = longer[tokens[longer - num_matching] == tokens[-1 - num_matching]]
        if not len(longer):
            return num_matching, ends
        ends = longer
    return LONGEST_MATCH, ends


def _most_frequent(values: np.ndarray) -> tuple[int, float]:
    """A value and its share; of equally frequent ones that which comes last."""
    if len(values) == 1 or (values == values[-1]).all():
        return int(values[-1]), 1.0
    backwards = values[::-1]
    found, first, counts = np.unique(backwards, return_index=True, return_counts=True)
    best = max(range(len(found)), key=lambda i: (counts[i], -first[i]))
    return int(found[best]), float(counts[best]) / len(values)
