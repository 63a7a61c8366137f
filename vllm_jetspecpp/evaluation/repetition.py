"""Where an answer begins to repeat itself: small models fall into loops, which any drafter foresees.

The paper stops "at the onset of a repetition loop" and leaves the rule to an appendix that we do not have. Ours: the
last tokens are at least four copies of a piece of at most 64 tokens, and the repeats span at least 24 tokens; the onset
is where the second copy begins.
"""

from __future__ import annotations

MAX_PERIOD = 64
MIN_COPIES = 4
MIN_REPEATED = 24


class RepetitionLoop:
    """Watches one growing answer."""

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._run = [0] * (
            MAX_PERIOD + 1
        )  # for every period, how many of the last tokens equal the one a period before

    def __call__(self, tokens: list[int]) -> int | None:
        """Take in what is new in ``tokens``; the onset's index once there is a loop, else None."""
        for token in tokens[len(self._seen) :]:
            count = len(self._seen)
            for period in range(1, min(MAX_PERIOD, count) + 1):
                self._run[period] = self._run[period] + 1 if self._seen[-period] == token else 0
            self._seen.append(token)
            for period in range(1, min(MAX_PERIOD, count) + 1):
                if self._run[period] >= max((MIN_COPIES - 1) * period, MIN_REPEATED):
                    return count + 1 - self._run[period]
        return None


def repetition_onset(tokens: list[int]) -> int | None:
    """Index from which a finished answer only repeats itself, at its first loop; None where there is none."""
    return RepetitionLoop()(tokens)
