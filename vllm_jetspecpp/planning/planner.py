"""The choice at run time: asked before every step, told after it how it went.

It changes its mind only for a gain that is worth it, and now and then tries what it left: some plain steps where
drafting pays by little, some drafted ones where it does not, some drafted ahead where it drafts in line. What trials
cost is bounded: 8 in 256 steps at first, then, while they bring nothing, 8 in 512 and at last in 1,024 (.8 % of the
steps, at the slower one's speed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from vllm_jetspecpp.planning.acceptance import Acceptance
from vllm_jetspecpp.planning.costs import Costs
from vllm_jetspecpp.planning.plan import Options, Plan, Prediction, best
from vllm_jetspecpp.planning.running import Running, Step
from vllm_jetspecpp.types import NO_DRAFTING, RoundChoice

REPLAN_FIRST, REPLAN_EVERY = 8, 64
"""Steps of one batch size after which its choice is looked at again: few at first, when the recording speaks alone."""
CLOSE, ALL_EVERY = 0.9, 8
"""Looks are at the choices that promised this share of the best when all were looked at, in every eighth look: hundreds
take milliseconds."""
HYSTERESIS = 1.03
"""A new choice has to promise this many times the present one's throughput."""
PROMISE_EVERY = 16
TRIAL_STEPS = 8
DRAFTING_PAYS = 1.05
"""Drafting has to promise this many times plain decoding's throughput: what is promised is known less well."""
LARGE_BATCH, DRAFTING_PAYS_LARGE = 8, 1.2
"""From this batch size on it has to promise so much: on a CPU every verified token costs there, copied ones too."""
TRIAL_EVERY, TRIAL_AT_MOST_EVERY = 256, 1024
PLAIN_IS_CLOSE = 1.5
"""Plain decoding is tried where drafting promises less than this many times its throughput."""
OTHER_IS_CLOSE = 0.8
"""Drafting in line is tried where one drafts ahead, or the other way round, if it promises at least this share."""
TRIAL_PAYS = 1.05
"""A trial goes on while it brings this many times what is promised without it."""
TRIAL_FAILS, LEAST_TRIAL = 0.6, 3
"""It ends early, after so many steps, where it brings less than this share."""


@dataclass
class _Current:
    """What is in force for a batch size."""

    chosen: Prediction = field(init=False)
    until_look: int = REPLAN_FIRST
    """Steps before it is looked at again."""
    interval: int = REPLAN_FIRST
    min_accept_prob: float = 0.0
    looks: int = 0
    close: tuple[RoundChoice, ...] | None = None
    """Choices to look at; None: all."""

    def explain(self, plan: Plan, batch: int, drafted: int) -> list[Prediction]:
        """The table of the next look."""
        among = self.close if self.looks % ALL_EVERY else None
        rows = plan.explain(batch, drafted, among)
        if among is None:
            least = CLOSE * best(rows[1:]).throughput
            self.close = tuple(row.choice for row in rows if row.choice is not None and row.throughput >= least)
        self.looks += 1
        return rows


class Planner:
    """Chooses (γ, B, J, R) or no drafting, by batch size.

    Args:
        options: what may be chosen from.
    """

    def __init__(self, costs: Costs, acceptance: Acceptance, options: Options) -> None:
        self._recorded = Plan(costs, acceptance, options)
        self._running: dict[int, Running] = {}
        self._current: dict[tuple[int, int], _Current] = {}
        self._trial: _Trial | None = None
        self._other_next = False
        self._pin: tuple[RoundChoice | None] | None = None
        self._served: dict[int, Served] = {}
        self._promised: dict[tuple[int, RoundChoice | None], tuple[float, float]] = {}
        self._until_promise = 0
        self._until_trial = self._interval = TRIAL_EVERY

    def running(self, batch: int) -> Running:
        """What was learnt at about this batch size; at others drafting takes and brings other than in proportion."""
        size = batch.bit_length()
        if size not in self._running:
            options = self._recorded.options
            self._running[size] = Running(self._recorded.costs, copies=0 in options.gammas)
        return self._running[size]

    def plan(self, batch: int) -> Plan:
        """Eq. 4 for this batch size as it stands now, running averages included."""
        running = self.running(batch)
        return self._recorded.corrected(running.corrections, running.pace)

    def choose(self, batch: int, drafted: int) -> RoundChoice | None:
        """What the next step of ``batch`` requests is drafted with, ``drafted`` of them at most; None: no drafting."""
        if not batch or not drafted:
            return None
        current = self._look(batch, drafted)
        if self._pin is not None:
            return self._pin[0]
        if self._trial is not None:
            return self._trial.choice
        self._until_trial -= 1
        if self._until_trial <= 0:
            self._trial = self._begin_trial(current.chosen, batch, drafted)
            self._until_trial = self._interval
            if self._trial is not None:
                return self._trial.choice
        return current.chosen.choice

    def min_accept_prob(self, batch: int, drafted: int) -> float:
        """Least probability of acceptance of a draft token that is worth verifying, in the step just chosen for."""
        current = self._current.get((batch, drafted))
        return 0.0 if current is None else current.min_accept_prob

    def _look(self, batch: int, drafted: int) -> _Current:
        """The choice in force, looked at again when it is due."""
        current = self._current.get((batch, drafted))
        if current is None:
            plan = self.plan(batch)
            current = self._current[batch, drafted] = _Current()
            current.chosen = _decide(current.explain(plan, batch, drafted), batch)
            current.min_accept_prob = plan.min_accept_prob(current.chosen, batch)
        current.until_look -= 1
        if current.until_look < 0:
            current.interval = min(2 * current.interval, REPLAN_EVERY)
            current.until_look = current.interval
            plan, choice = self.plan(batch), current.chosen.choice
            now = plan.plain(batch) if choice is None else plan.predict(choice, batch, drafted)
            new = _decide(current.explain(plan, batch, drafted), batch)
            drafting_fails = choice is not None and now.throughput < plan.plain(batch).throughput
            current.chosen = new if drafting_fails or new.throughput > HYSTERESIS * now.throughput else now
            current.min_accept_prob = plan.min_accept_prob(current.chosen, batch)
        return current

    def _begin_trial(self, chosen: Prediction, batch: int, drafted: int) -> _Trial | None:
        """Try the other thing, where there is a chance that it is better."""
        plan = self.plan(batch)
        plain = plan.plain(batch)
        if chosen.choice is not None:
            self._other_next = not self._other_next
            if self._other_next:
                # In line nothing is learnt of what drafting ahead takes, and the other way round.
                ahead = chosen.choice.num_outcomes > 0
                rows = [
                    r for r in plan.explain(batch, drafted)[1:] if r.choice and (r.choice.num_outcomes > 0) != ahead
                ]
                if rows and best(rows).throughput > OTHER_IS_CLOSE * chosen.throughput:
                    return _Trial(best(rows).choice, chosen.throughput, best(rows).tokens)
            close = chosen.throughput < PLAIN_IS_CLOSE * plain.throughput
            return _Trial(None, chosen.throughput) if close else None
        drafting = best(plan.explain(batch, drafted)[1:])
        assert drafting.choice is not None
        perfect = drafted * (drafting.choice.num_draft_tokens + 1) + batch - drafted
        if perfect / drafting.seconds < plain.throughput:
            return None  # even if every draft were accepted
        return _Trial(drafting.choice, plain.throughput)

    def see(self, step: Step) -> None:
        """Learn from a step that is over."""
        self.running(step.batch).see(step, self._recorded)
        if step.seconds is not None and step.drafted in (0, step.batch):
            self._served.setdefault(step.batch, Served()).add(step, *self._promises(step))
        trial = self._trial
        if trial is not None and step.choice == trial.choice:
            trial.see(step)
            if trial.over:
                self._end_trial(trial)

    def _promises(self, step: Step) -> tuple[float, float]:
        """Throughput of such a step with what was learnt and without; asked anew every few steps."""
        self._until_promise -= 1
        if self._until_promise <= 0:
            self._until_promise = PROMISE_EVERY
            self._promised.clear()
        choice = step.choice if step.drafted else None
        key = (step.batch, choice)
        if key not in self._promised:
            plans = (self.plan(step.batch), self._recorded)
            rows = [p.plain(step.batch) if choice is None else p.predict(choice, step.batch) for p in plans]
            self._promised[key] = rows[0].throughput, rows[1].throughput
        return self._promised[key]

    def _end_trial(self, trial: _Trial) -> None:
        self._trial = None
        self._interval = TRIAL_EVERY if trial.pays else min(2 * self._interval, TRIAL_AT_MOST_EVERY)
        self._until_trial = self._interval
        for current in self._current.values():
            current.until_look = current.looks = 0  # what was learnt counts from the next step on, for all choices

    def pin(self, choice: RoundChoice | None) -> None:
        """Take this choice from now on, for measurements; None: no drafting."""
        self._pin = (choice,)

    def unpin(self) -> None:
        """Choose again."""
        self._pin = None

    def summary(self, max_batch: int) -> str:
        """One line for the log: the choice for each batch size, as known now."""
        batches = [batch for batch in (1, 2, 4, 8, 16) if batch <= max(max_batch, 1)]
        chosen = {batch: _decide(self.plan(batch).explain(batch), batch).choice for batch in batches}
        return ", ".join(f"{batch}: {choice or NO_DRAFTING}" for batch, choice in chosen.items())

    def describe(self) -> dict[str, Any]:
        """All that it works with, as plain values."""
        recorded = self._recorded
        return {
            "costs": asdict(recorded.costs),
            "acceptance": recorded.acceptance.as_dict(),
            "options": {f.name: list(getattr(recorded.options, f.name)) for f in fields(recorded.options)},
            "state": self.state(),
        }

    def state(self) -> dict[str, Any]:
        """For people: the choice in force for each batch size, and the factors learnt, by the least such size."""
        choices = {
            f"{batch}/{drafted}": {
                "choice": str(current.chosen.choice or NO_DRAFTING),
                "promised_tok_s": round(current.chosen.throughput, 2),
                "min_accept_prob": round(current.min_accept_prob, 4),
            }
            for (batch, drafted), current in sorted(self._current.items())
        }
        served = {str(batch): vars(served).copy() for batch, served in sorted(self._served.items())}
        return {
            "choices": choices,
            "served": served,
            "factors": {str(1 << size >> 1): running.factors() for size, running in sorted(self._running.items())},
        }


@dataclass
class Served:
    """What was promised and what came of it, over the steps of a batch size; rates are these divided by seconds."""

    steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    """Committed."""
    promised_tokens: float = 0.0
    """As Eq. 4 says at each step, with what had been learnt by then."""
    recorded_tokens: float = 0.0
    """As it says from measured times and recorded acceptance alone."""

    def add(self, step: Step, promised: float, recorded: float) -> None:
        """Count a step, and the throughput that was promised for it."""
        assert step.seconds is not None
        self.steps += 1
        self.seconds += step.seconds
        self.tokens += step.tokens
        self.promised_tokens += step.seconds * promised
        self.recorded_tokens += step.seconds * recorded


class FixedChoice:
    """Stands for a planner where nothing could be measured: always the same."""

    def __init__(self, choice: RoundChoice | None) -> None:
        self.choice = choice

    def choose(self, batch: int, drafted: int) -> RoundChoice | None:
        """See :class:`Planner`."""
        return self.choice if batch and drafted else None

    def min_accept_prob(self, batch: int, drafted: int) -> float:
        """Nothing is known of what a token costs."""
        return 0.0

    def see(self, step: Step) -> None:
        """Nothing to learn."""

    def state(self) -> dict[str, Any]:
        """See :class:`Planner`."""
        return {"choices": {"all": {"choice": str(self.choice or NO_DRAFTING)}}}

    def describe(self) -> dict[str, Any]:
        """Nothing was measured."""
        return {}


def _decide(rows: Sequence[Prediction], batch: int) -> Prediction:
    """The best row, in doubt plain decoding, which is the first."""
    chosen, plain = best(rows), rows[0]
    pays = DRAFTING_PAYS if batch < LARGE_BATCH else DRAFTING_PAYS_LARGE
    return chosen if chosen.throughput > pays * plain.throughput else plain


class _Trial:
    """Some steps under a choice that is not the best known one.

    Args:
        to_beat: throughput without it.
        tokens: expected of a step, where these are known well and only times are to be learnt: in a few steps chance
            decides about tokens. None: those that come.
    """

    def __init__(self, choice: RoundChoice | None, to_beat: float, tokens: float | None = None) -> None:
        self.choice, self._to_beat, self._expected = choice, to_beat, tokens
        self._steps, self._tokens, self._seconds = 0, 0.0, 0.0
        self._seen = 0

    def see(self, step: Step) -> None:
        """Count a step of it."""
        self._seen += 1
        if step.seconds is not None:
            self._steps += 1
            self._tokens += step.tokens if self._expected is None else self._expected
            self._seconds += step.seconds

    @property
    def pays(self) -> bool:
        """Whether it brings more than what it interrupts."""
        return self._tokens > TRIAL_PAYS * self._to_beat * self._seconds

    @property
    def over(self) -> bool:
        """After :data:`TRIAL_STEPS`; as long as it pays, eight times as many; sooner where it plainly fails."""
        if self._steps >= LEAST_TRIAL and self._tokens < TRIAL_FAILS * self._to_beat * self._seconds:
            return True
        return self._seen >= (8 * TRIAL_STEPS if self._steps and self.pays else TRIAL_STEPS)
