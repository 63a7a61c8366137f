"""γ, B, J and R that maximise Eq. 4 for a batch, or no drafting where plain decoding is faster.

Eq. 3 is not a wall: drafting that verification does not hide is exposed, and Eq. 4 counts it; where both take about as
long, some rounds end late though the average one does not. A step of a batch waits for its slowest answer: for the
fallback if any request missed, and for the rows of all that did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from vllm_jetspecpp.planning.acceptance import Acceptance, Passes, Rounds, mixed
from vllm_jetspecpp.planning.costs import Costs
from vllm_jetspecpp.types import ALL_OUTCOMES, RoundChoice

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 19, 23, 31, 47, 63)
"""Block lengths that are considered, and the longest allowed one."""
OUTCOMES = (0, 1, 2, 4, 6, 8, 12, 16)
"""Cache sizes that are considered."""
MIXING_ROUNDS = 50
"""After which shares of a chain of three kinds of blocks have long settled."""
SPREAD = 0.1
"""Standard deviation of how much later a round ends than its step, as a share of T_verify: lengths and machine vary."""
MARGIN_TOKENS = 7
"""Draft tokens over which the price of one more is taken."""
MOST_MIN_ACCEPT_PROB = 0.5
REFINED = (1, 2, ALL_OUTCOMES)
"""Outcomes of which the drafts are refined, as considered."""
COPIES_CELL = -1
COPIES_ALONE = RoundChoice(0, 0, 0, 0)
"""Nothing is drafted."""


class Copied(NamedTuple):
    """Blocks copied from the requests themselves; none by default."""

    share: float = 0.0
    """Of all blocks."""
    tau: float = 1.0
    """Tokens that a round with one commits, bonus token included."""
    length: float = 0.0
    """Tokens of one that are verified."""
    wait: float = 0.0
    """Seconds for each request of a batch that a step waits for its copies where nothing is drafted, beyond T_comm."""


NO_COPIES = Copied()


@dataclass(frozen=True)
class Corrections:
    """What running averages say of the recorded rates; 1 everywhere is the recording itself."""

    misses: float = 1.0
    """Factor on the probability that an outcome was not foreseen."""
    rejections_after_hit: float = 1.0
    """Factor on the probability that a draft token is rejected, in blocks drafted ahead."""
    rejections_after_miss: float = 1.0
    """The same in blocks drafted after a miss or in line."""
    copied: Copied = NO_COPIES
    """Beside drafting."""
    copied_alone: Copied = NO_COPIES
    """Where nothing is drafted."""


@dataclass(frozen=True)
class Pace:
    """What running averages say of the measured times."""

    target: float = 1.0
    """Factor on every step of the target."""
    drafting: float = 1.0
    """Factor on rounds of the draft process."""
    fallback: float = 1.0
    """Factor on drafting after a miss."""
    beside: float = 1.0
    """Further factor on the target's steps beside drafting ahead: the two share caches and memory."""
    cells: dict[tuple[int, int], float] = field(default_factory=dict)
    """Further factor on steps of (batch, γ); γ = 0 is plain decoding, :data:`COPIES_CELL` copied drafts alone."""


@dataclass(frozen=True)
class Options:
    """What may be chosen from."""

    gammas: tuple[int, ...]
    """With 0, for copied drafts alone, where drafts can be copied."""
    outcomes: tuple[int, ...]
    passes: tuple[Passes, ...]
    refined: tuple[int, ...] = (ALL_OUTCOMES,)
    """Outcomes whose drafts are refined, fewest first."""

    @classmethod
    def within(
        cls,
        acceptance: Acceptance,
        num_draft_tokens: int,
        num_outcomes: int | None = None,
        jacobi_passes: int | None = None,
        context_refreshes: int | None = None,
        num_refined: int | None = ALL_OUTCOMES,
        copies: bool = False,
    ) -> Options:
        """All that the statistics speak of, γ at most ``num_draft_tokens``; a number given is the only one.

        Raises:
            ValueError: there are no statistics of the J or R that is given.
        """
        gammas = [gamma for gamma in GAMMAS if gamma < num_draft_tokens] + [num_draft_tokens]
        gammas = [0, *gammas] if copies else gammas
        known = sorted(acceptance.after_hit)
        passes = [(j, r) for j, r in known if jacobi_passes in (None, j) and context_refreshes in (None, r)]
        if not passes:
            said = ", ".join(f"J{j}-R{r}" for j, r in known)
            raise ValueError(
                f"the checkpoint's acceptance statistics know {said}, and none with jacobi_passes {jacobi_passes} and "
                f"context_refreshes {context_refreshes}: `jetspecpp acceptance --settings` records others"
            )
        if num_outcomes is None:
            outcomes = tuple(b for b in OUTCOMES if b <= acceptance.max_outcomes)
        else:
            outcomes = (num_outcomes,)
        refined = REFINED if num_refined is None else (num_refined,)
        return cls(tuple(gammas), outcomes, tuple(passes), refined)

    @cached_property
    def choices(self) -> tuple[RoundChoice, ...]:
        """Every shape a round may get, in the order in which ties are decided: cheapest first."""
        found = []
        for gamma in self.gammas:
            if not gamma:
                found.append(COPIES_ALONE)
                continue
            for outcomes in self.outcomes:
                # Drafted in line there is nothing to refine ahead.
                passes = self.passes if outcomes else ((0, 0),)
                for j, r in passes:
                    counts = dict.fromkeys(m if j and m < outcomes else ALL_OUTCOMES for m in self.refined)
                    found += [RoundChoice(gamma, outcomes, j, r, m) for m in counts]
        return tuple(found)


@dataclass(frozen=True)
class Prediction:
    """One row of the table behind a choice; times in seconds, of one step of the whole batch."""

    choice: RoundChoice | None
    """None: no drafting."""
    tokens: float
    """Committed a step, by all requests."""
    seconds: float
    verify: float
    """T_verify, beside the drafting."""
    draft: float
    """Left side of Eq. 3, beside the target."""
    fallback: float
    """Expected wait for fallback blocks."""
    hit_rate: float
    tau: float
    """Tokens a round of one request, bonus token included."""

    @property
    def throughput(self) -> float:
        """Tokens a second, all requests together."""
        return self.tokens / self.seconds

    @property
    def hidden(self) -> bool:
        """Whether Eq. 3 holds."""
        return self.draft <= self.verify


class Plan:
    """The maths of Eq. 4 over given costs and rates; cheap enough to be asked while serving."""

    def __init__(
        self,
        costs: Costs,
        acceptance: Acceptance,
        options: Options,
        corrections: Corrections | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.costs, self.acceptance, self.options = costs, acceptance, options
        self.corrections, self.pace = corrections or Corrections(), pace or Pace()
        self._mixtures: dict[tuple[int, ...], Rounds] = {}
        """Of the recording alone, so that plans with other corrections share them."""
        self._lengths: dict[tuple[tuple[int, ...], bool], list[float]] = {}
        self._hit_rates: dict[tuple[int, ...], float] = {}

    def corrected(self, corrections: Corrections, pace: Pace) -> Plan:
        """The same with other running averages."""
        plan = Plan(self.costs, self.acceptance, self.options, corrections, pace)
        plan._mixtures = self._mixtures
        return plan

    def plain(self, batch: int) -> Prediction:
        """Decoding without drafts."""
        seconds = self.verify_seconds(batch, batch, 0, cell_of(None))
        return Prediction(None, batch, seconds, seconds, 0.0, 0.0, 0.0, 1.0)

    def predict(self, choice: RoundChoice, batch: int, drafted: int | None = None) -> Prediction:
        """Eq. 4 for a step of ``batch`` requests, ``drafted`` of which get drafts (all by default)."""
        drafted = batch if drafted is None else drafted
        size, pace = choice.num_draft_tokens + 1, self.pace.drafting
        hit_rate, tau = self.rates(choice)
        copied = self.copied(choice)
        tau += copied.share * (copied.tau - tau)
        verified = choice.num_draft_tokens or copied.share * copied.length
        alone = self.verify_seconds(batch, drafted, verified, cell_of(choice))
        alone *= self.pace.beside if choice.num_outcomes else 1.0
        draft, commit = self.costs.draft(drafted, choice), self.costs.commit(drafted * size)
        after_miss = self.costs.overlap(alone, pace * draft)
        after_hit = self.costs.overlap(alone, pace * (draft + commit)) if choice.num_outcomes else after_miss
        all_hit = hit_rate**drafted
        verify, draft = (all_hit * hit + (1 - all_hit) * miss for hit, miss in zip(after_hit, after_miss, strict=True))
        drafting = (1 - copied.share) * (choice.num_draft_tokens > 0)
        missing = drafted * (1 - hit_rate) * size
        fallback = self.costs.fallback.base * (1 - all_hit) + self.costs.fallback.slope * missing
        fallback *= self.pace.fallback * drafting
        later = expected_later if self.costs.concurrent else max
        both = all_hit * later(*after_hit) + (1 - all_hit) * later(*after_miss)
        seconds = both + self.costs.comm + fallback
        seconds += 0.0 if choice.num_draft_tokens else copied.wait * batch
        return Prediction(choice, drafted * tau + batch - drafted, seconds, verify, draft, fallback, hit_rate, tau)

    def copied(self, choice: RoundChoice) -> Copied:
        """What copied blocks do for rounds of such a shape."""
        return self.corrections.copied if choice.num_draft_tokens else self.corrections.copied_alone

    def min_accept_prob(self, now: Prediction, batch: int) -> float:
        """Probability of acceptance below which a draft token costs more time than it brings tokens.

        It takes dT_verify / dtoken, in which ``now.throughput`` tokens are committed otherwise.
        """
        size = min(max(self.options.gammas), MARGIN_TOKENS)
        slope = (self.costs.verify(batch, 1 + size) - self.costs.verify(batch, 1)) / size / batch
        slowdown = self.costs.target_slowdown if now.draft else 1.0
        return min(max(slope * slowdown * self.pace.target * now.throughput, 0.0), MOST_MIN_ACCEPT_PROB)

    def verify_seconds(self, batch: int, drafted: int, num_draft_tokens: float, cell: int) -> float:
        """T_verify alone, of a step in which ``drafted`` of ``batch`` requests verify so many draft tokens each."""
        seconds = self.costs.verify(batch, 1 + num_draft_tokens * drafted / batch)
        return seconds * self.pace.target * self.pace.cells.get((batch, cell), 1.0)

    def rates(self, choice: RoundChoice) -> tuple[float, float]:
        """p_hit, in the long run, and τ.

        Hits follow hits more often than misses do, since a block drafted ahead is better known to those who drafted it;
        in the long run the share of hits p satisfies p = p · p(hit | hit) + (1 - p) · p(hit | miss).
        """
        if not choice.num_outcomes:
            return 0.0, self._tau(choice, False)
        hit_rate = self._hit_rate(choice)
        return hit_rate, hit_rate * self._tau(choice, True) + (1 - hit_rate) * self._tau(choice, False)

    def rounds(self, choice: RoundChoice, was_hit: bool) -> Rounds:
        """The recorded rounds that speak of the blocks of such a shape; in line where nothing is drafted ahead."""
        if not choice.num_outcomes:
            return self.acceptance.in_line
        passes = (choice.jacobi_passes, choice.context_refreshes)
        if not was_hit:
            return self.acceptance.after_miss[passes]
        if choice.num_refined >= choice.num_outcomes or _unrefined(passes) not in self.acceptance.after_hit:
            return self.acceptance.after_hit[passes]
        key = choice[1:]
        if key not in self._mixtures:
            self._mixtures[key] = self._mixture(choice)
        return self._mixtures[key]

    def _mixture(self, choice: RoundChoice) -> Rounds:
        """Of hits some are refined and some are not, by the rank of the outcome that came true: in the long run."""
        passes, edges = (choice.jacobi_passes, choice.context_refreshes), (0, choice.num_refined, choice.num_outcomes)
        after_hit = self.acceptance.after_hit
        kinds = (after_hit[passes], after_hit[_unrefined(passes)], self.acceptance.after_miss[passes])
        # From a block of each kind to one of the first or second kind, else a miss.
        to = [[sum(kind.ranks[a:b]) / kind.count for a, b in pairwise(edges)] for kind in kinds]
        shares = [0.5, 0.3, 0.2]
        for _ in range(MIXING_ROUNDS):
            hits = [sum(share * row[k] for share, row in zip(shares, to, strict=True)) for k in (0, 1)]
            shares = [*hits, 1 - sum(hits)]
        return mixed(kinds[:2], shares[:2])

    def miss_rate(self, choice: RoundChoice, was_hit: bool) -> float:
        """Probability that the end of such a block was not foreseen."""
        return min(self.corrections.misses * self.rounds(choice, was_hit).miss_rate(choice.num_outcomes), 1.0)

    def _hit_rate(self, choice: RoundChoice) -> float:
        key = choice[1:]
        if key not in self._hit_rates:
            after_miss = 1 - self.miss_rate(choice, False)
            leaving = self.miss_rate(choice, True)
            self._hit_rates[key] = after_miss / (leaving + after_miss) if after_miss else 0.0
        return self._hit_rates[key]

    def _tau(self, choice: RoundChoice, was_hit: bool) -> float:
        """Σ P(k ≥ i) over the block, plus the bonus token."""
        key = (choice[1:], was_hit)
        if key not in self._lengths:
            rounds = self.rounds(choice, was_hit)
            factor = self.corrections.rejections_after_hit if was_hit else self.corrections.rejections_after_miss
            reached, lengths = 1.0, [1.0]
            for position in range(1, max(self.options.gammas) + 1):
                known = min(position, self.acceptance.num_draft_tokens)
                reached *= 1 - min(factor * rounds.rejection(known), 1.0)
                lengths.append(lengths[-1] + reached)
            self._lengths[key] = lengths
        return self._lengths[key][choice.num_draft_tokens]

    def explain(
        self, batch: int, drafted: int | None = None, among: Sequence[RoundChoice] | None = None
    ) -> list[Prediction]:
        """The table behind the choice: no drafting first, then every candidate, or those of ``among``."""
        choices = self.options.choices if among is None else among
        return [self.plain(batch), *(self.predict(choice, batch, drafted) for choice in choices)]

    def choose(self, batch: int, drafted: int | None = None) -> Prediction:
        """The row of highest throughput; of equal ones the first, so never drafting that is no gain."""
        return best(self.explain(batch, drafted))


def _unrefined(passes: Passes) -> Passes:
    """What the drafts get that no pass refines: with R = J + 1 their anchors are refreshed all the same."""
    return 0, int(passes[1] > passes[0])


def expected_later(verify: float, draft: float) -> float:
    """Of two normal ends with these means: Clark's E[max], which is Eq. 4's maximum where they lie far apart."""
    spread, gap = SPREAD * verify, draft - verify
    z = gap / spread
    below = (1 + math.erf(z / math.sqrt(2))) / 2
    return verify + gap * below + spread * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def cell_of(choice: RoundChoice | None) -> int:
    """Of :attr:`Pace.cells`, beside the batch size."""
    return 0 if choice is None else choice.num_draft_tokens or COPIES_CELL


def best(rows: Sequence[Prediction]) -> Prediction:
    """The first row of highest throughput."""
    return max(rows, key=lambda row: row.throughput)
