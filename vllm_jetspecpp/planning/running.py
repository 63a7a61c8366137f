"""Running averages: what serving teaches about rates and times, on top of what was recorded and measured.

Few numbers, each a factor with a prior of 1: one on misses, one on rejections after hits and one after misses, one on
the target's time, one on drafting's and one on that after a miss, and one on each batch and block size that was served.
A factor holds for choices that are not in force too, which is what makes leaving a choice possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_jetspecpp.planning.costs import Costs
from vllm_jetspecpp.planning.plan import Copied, Corrections, Pace, Plan, Prediction, cell_of
from vllm_jetspecpp.types import Origin, RoundChoice

LEAST, MOST = 0.05, 20.0
"""A factor stays within; a time twenty times the measured one is a machine that stood still."""
LATE = 2.0
"""An answer that takes this many times as long as expected, and a millisecond, had to wait for its round."""
COPIED = {True: Copied(0.2, 1.8, 4.0), False: Copied(0.3, 1.7, 3.0, 1e-4)}
"""By whether it is drafted as well: where averages begin."""


class Verification(NamedTuple):
    """How one verified block ended."""

    origin: Origin
    """Where the block came from."""
    num_verified: int
    """Draft tokens of it that the target saw."""
    num_accepted: int


@dataclass(frozen=True)
class Step:
    """One decoding step, from one hand-over of outcomes to the next."""

    choice: RoundChoice | None
    """In force in it; None: no drafting."""
    ahead: RoundChoice | None
    """In force in the step before, in which blocks for this one were drafted ahead."""
    batch: int
    drafted: int
    """Requests whose drafts were verified in it."""
    seconds: float | None
    """How long it took; None where that says nothing (a prefill beside it, a pause before it)."""
    exposed: float
    """Of it, waiting for the draft process."""
    verifications: tuple[Verification, ...]
    answers: tuple[Origin, ...]
    """Where the blocks came from that were handed out for it."""

    @property
    def tokens(self) -> int:
        """Tokens that the step committed."""
        return self.batch + sum(v.num_accepted for v in self.verifications)


class Ratio:
    """Observed to predicted, exponentially averaged, with a prior of 1.

    Args:
        weight: of the prior, in units of what is predicted.
        memory: observations after which an old one counts 1/e.
    """

    def __init__(self, weight: float, memory: float) -> None:
        self._weight, self._keep = weight, 1 - 1 / memory
        self._observed = self._predicted = 0.0

    def add(self, observed: float, predicted: float) -> None:
        """Count one observation; ``predicted`` without this factor."""
        self._observed = self._keep * self._observed + observed
        self._predicted = self._keep * self._predicted + predicted

    @property
    def value(self) -> float:
        """The factor."""
        return min(max((self._weight + self._observed) / (self._weight + self._predicted), LEAST), MOST)


class Mean:
    """An exponentially averaged value.

    Args:
        prior: where it begins.
        weight: of the prior, in observations.
        memory: observations after which an old one counts 1/e.
    """

    def __init__(self, prior: float, weight: float, memory: float) -> None:
        self._sum, self._count, self._keep = prior * weight, weight, 1 - 1 / memory

    def add(self, value: float) -> None:
        """Count one observation."""
        self._sum = self._keep * self._sum + value
        self._count = self._keep * self._count + 1

    @property
    def value(self) -> float:
        """The average."""
        return self._sum / self._count


class Running:
    """All factors, fed step by step."""

    def __init__(self, costs: Costs, copies: bool = False) -> None:
        self._costs, self._copies = costs, copies
        self._misses = Ratio(5, 400)  # five misses, after which serving weighs as much as the recording
        self._rejections = {True: Ratio(8, 400), False: Ratio(8, 400)}
        self._copied = {
            drafting: (Mean(c.share, 20, 200), Mean(c.tau, 5, 100), Mean(c.length, 5, 100), Mean(c.wait, 10, 100))
            for drafting, c in COPIED.items()
        }
        self._target = Ratio(3, 40)
        self._beside = Ratio(3, 60)
        self._drafting, self._fallback = Ratio(3, 60), Ratio(3, 60)
        self._cells: dict[tuple[int, int], Ratio] = {}

    @property
    def corrections(self) -> Corrections:
        """Factors on rates."""
        known = Corrections(self._misses.value, self._rejections[True].value, self._rejections[False].value)
        if not self._copies:
            return known
        copied, alone = (Copied(*(mean.value for mean in self._copied[drafting])) for drafting in (True, False))
        return replace(known, copied=copied, copied_alone=alone)

    @property
    def pace(self) -> Pace:
        """Factors on times."""
        cells = {cell: ratio.value for cell, ratio in self._cells.items()}
        return Pace(self._target.value, self._drafting.value, self._fallback.value, self._beside.value, cells)

    def factors(self) -> dict[str, float]:
        """All that was learnt, for people."""
        pace, corrections = self.pace, self.corrections
        found = {
            "misses": corrections.misses,
            "rejections_after_hit": corrections.rejections_after_hit,
            "rejections_after_miss": corrections.rejections_after_miss,
            "target": pace.target,
            "beside": pace.beside,
            "drafting": pace.drafting,
            "fallback": pace.fallback,
            "copied_share": corrections.copied.share,
            "copied_tau": corrections.copied.tau,
            "copied_alone_share": corrections.copied_alone.share,
            "copied_alone_tau": corrections.copied_alone.tau,
            "copied_alone_wait_ms": 1e3 * corrections.copied_alone.wait,
        }
        return {name: round(value, 4) for name, value in found.items()}

    def see(self, step: Step, recorded: Plan) -> None:
        """Learn from one step; ``recorded`` is the plan without any factor."""
        for verification in step.verifications:
            self._see_block(verification, step, recorded)
        if step.ahead is not None and step.ahead.num_outcomes:
            self._see_answers(step.answers, step.ahead, recorded)
        if step.choice is not None:
            self._see_copies(step, step.choice)
        if step.seconds is not None:
            self._see_times(step, recorded)

    def _see_block(self, verification: Verification, step: Step, recorded: Plan) -> None:
        was_hit = verification.origin is Origin.HIT
        source = step.ahead if was_hit else step.choice
        if source is None or step.choice is None or verification.origin is Origin.COPIED:
            return
        rounds, last = recorded.rounds(source, was_hit), recorded.acceptance.num_draft_tokens
        # What is left off as too improbable counts as rejected: no tokens come of it.
        whole = max(min(source.num_draft_tokens, step.choice.num_draft_tokens), verification.num_verified)
        reached = min(verification.num_accepted + 1, whole)
        predicted = sum(rounds.rejection(min(i, last)) for i in range(1, reached + 1))
        self._rejections[was_hit].add(float(verification.num_accepted < whole), predicted)

    def _see_copies(self, step: Step, choice: RoundChoice) -> None:
        share, tau, length, wait = self._copied[choice.num_draft_tokens > 0]
        if not choice.num_draft_tokens and choice == step.ahead and step.seconds is not None:
            wait.add(max(step.exposed - self._costs.comm, 0.0) / step.batch)
        # Where nothing is drafted, a request that has no copy has no answer.
        blocks = len(step.answers) if choice.num_draft_tokens else step.batch
        if blocks:
            share.add(sum(origin is Origin.COPIED for origin in step.answers) / blocks)
        for origin, num_verified, num_accepted in step.verifications:
            if origin is Origin.COPIED:
                tau.add(num_accepted + 1)
                length.add(num_verified)

    def _see_answers(self, answers: Sequence[Origin], choice: RoundChoice, recorded: Plan) -> None:
        """Whether outcomes had been foreseen; a first block says nothing of it."""
        hit_rate = recorded.rates(choice)[0]
        after_hit, after_miss = (recorded.miss_rate(choice, was_hit) for was_hit in (True, False))
        expected = hit_rate * after_hit + (1 - hit_rate) * after_miss
        for origin in answers:
            if origin in (Origin.HIT, Origin.FALLBACK):
                self._misses.add(float(origin is Origin.FALLBACK), expected)

    def _see_times(self, step: Step, recorded: Plan) -> None:
        assert step.seconds is not None
        choice = step.choice if step.drafted else None
        said = recorded.plain(step.batch) if choice is None else recorded.predict(choice, step.batch, step.drafted)
        measured = max(step.seconds - step.exposed, 1e-6)
        cell = self._cells.setdefault((step.batch, cell_of(choice)), Ratio(3, 100))
        verify = said.verify
        if choice is not None and not choice.num_draft_tokens:
            verified = sum(v.num_verified for v in step.verifications) / step.drafted
            verify = recorded.verify_seconds(step.batch, step.drafted, verified, cell_of(choice))
        ratio, target, own = _ratio(measured, verify), self._target.value, cell.value
        ahead = choice is not None and choice.num_outcomes > 0
        beside = self._beside.value if ahead else 1.0
        self._target.add(ratio / own / beside, 1.0)
        cell.add(ratio / target / beside, 1.0)
        if ahead:
            self._beside.add(ratio / target / own, 1.0)
        if choice is not None and choice.num_draft_tokens and choice == step.ahead and step.answers:
            self._see_drafting(step, choice, measured, said)

    def _see_drafting(self, step: Step, choice: RoundChoice, verify: float, said: Prediction) -> None:
        """The wait for answers tells how long drafting takes, unless it was hidden as expected."""
        missed = sum(origin in (Origin.FIRST, Origin.FALLBACK) for origin in step.answers)
        fallback = self._costs.fallback(missed * (choice.num_draft_tokens + 1)) if missed else 0.0
        comm, wait = self._costs.comm, step.exposed
        answer = self._fallback.value * fallback + comm
        if not self._costs.concurrent:
            ratio = _ratio(wait, said.draft - said.verify + fallback + comm)
            self._drafting.add(ratio, 1.0)
            self._fallback.add(ratio, 1.0)
        elif said.draft and (self._drafting.value * said.draft > verify or wait > LATE * answer + 1e-3):
            self._drafting.add(_ratio(max(verify + wait - answer, 0.0), said.draft), 1.0)
        elif missed:
            # Apart from the rounds: other products, and on what the target has left in the caches.
            self._fallback.add(_ratio(max(wait - comm, 0.0), fallback), 1.0)


def _ratio(measured: float, predicted: float) -> float:
    """Of two times, within reason; nothing is said of what was predicted to take no time at all."""
    return min(measured / predicted, MOST) if predicted > 1e-6 else 1.0
