"""The planner's arithmetic: the best shape of a round on made-up costs, and what running averages make of it."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest

from vllm_jetspecpp.planning.acceptance import Acceptance, Rounds, unmeasured
from vllm_jetspecpp.planning.costs import Costs, Grid, Line, MeasuredRound, fit_line, fit_rounds, load_costs
from vllm_jetspecpp.planning.plan import Copied, Corrections, Options, Plan
from vllm_jetspecpp.planning.planner import LEAST_TRIAL, TRIAL_EVERY, Planner
from vllm_jetspecpp.planning.running import Step, Verification
from vllm_jetspecpp.types import Origin, RoundChoice

SIZES, BATCHES = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
COPIES = RoundChoice(0, 0, 0, 0)


def random_costs(rng: random.Random) -> Costs:
    base, per_token = rng.uniform(1, 30), rng.uniform(0.01, 3)
    seconds = tuple(tuple(1e-3 * (base + per_token * batch * size) for size in SIZES) for batch in BATCHES)

    def line(most: float) -> Line:
        return Line(1e-3 * rng.uniform(0, most), 1e-3 * rng.uniform(0, most / 20))

    return Costs(
        Grid(BATCHES, SIZES, seconds),
        line(10),
        line(20),
        line(10),
        line(20),
        line(20),
        comm=rng.uniform(0, 1e-3),
        target_slowdown=rng.choice((1.0, rng.uniform(1, 2))),
        draft_slowdown=rng.choice((1.0, rng.uniform(1, 3))),
        concurrent=rng.random() < 0.8,
    )


def random_acceptance(rng: random.Random, gamma: int = 15) -> Acceptance:
    def rounds(ranks: int) -> Rounds:
        lengths = [rng.random() * 0.7**k for k in range(gamma + 1)]
        shares = [rng.random() / (r + 1) for r in range(ranks)]
        scale = sum(lengths) * rng.uniform(0.2, 1) / max(sum(shares), 1e-9)
        return Rounds(tuple(lengths), tuple(share * scale for share in shares))

    passes = [(0, 0), (0, 1), (1, 1), (1, 2), (3, 3)]
    return Acceptance(gamma, {p: rounds(16) for p in passes}, {p: rounds(16) for p in passes}, rounds(0))


def eq4(costs: Costs, acceptance: Acceptance, batch: int, choice: RoundChoice) -> float:
    """Tokens a second by Eq. 4, written down anew: expectations over accepted lengths, hits by iterating the chain."""
    gamma, b, j, r, m = choice

    def tau(rounds: Rounds) -> float:
        return sum(n * (min(k, gamma) + 1) for k, n in enumerate(rounds.accepted)) / sum(rounds.accepted)

    size = gamma + 1
    verify = costs.verify(batch, size)
    if b:
        m = min(m, b)
        anchors = int(r > j)  # refreshed before the initial draft, a row each
        kinds = [acceptance.after_hit[j, r], acceptance.after_hit[0, anchors], acceptance.after_miss[j, r]]
        shares = [1.0, 0.0, 0.0]  # of blocks refined, drafted ahead but not refined, and drafted after a miss
        for _ in range(800):
            refined, plain = (
                sum(s * sum(k.ranks[a:z]) / sum(k.accepted) for s, k in zip(shares, kinds, strict=True))
                for a, z in ((0, m), (m, b))
            )
            shares = [refined, plain, 1 - refined - plain]
        p = shares[0] + shares[1]
        rows, refined_rows = batch * b * (size - anchors), batch * m * (size - anchors)
        draft = costs.foresight(batch * size) + anchors * costs.refresh(batch * b)
        if size - anchors > 1:  # else the decoder's tokens are the whole draft
            draft += costs.draft_pass(rows)
            draft += j * costs.draft_pass(refined_rows) + (r - anchors) * costs.refresh(refined_rows)
        mean = sum(share * tau(kind) for share, kind in zip(shares, kinds, strict=True))
    else:
        p, draft, mean = 0.0, 0.0, tau(acceptance.in_line)

    def together(draft: float) -> float:
        """A step of the two together, from one end to the next, the gap between their ends normally distributed."""
        if not costs.concurrent:
            return verify + draft
        left, time = [verify, draft], 0.0
        rates = (1 / costs.target_slowdown, 1 / costs.draft_slowdown)
        while min(left) > 1e-12:
            both = min(left[0] / rates[0], left[1] / rates[1])
            left, time = [left[0] - both * rates[0], left[1] - both * rates[1]], time + both
        target, drafting = time + left[0] * (left[0] > 1e-12), time + left[1] * (left[1] > 1e-12)
        grid = np.linspace(-8, 8, 4001)
        weights = np.exp(-(grid**2) / 2)
        late = np.maximum(drafting - target + 0.1 * target * grid, 0)
        return float(target + (late * weights).sum() / weights.sum())

    all_hit = p**batch
    both = (1 - all_hit) * together(draft) + (all_hit and all_hit * together(draft + costs.commit(batch * size)))
    # Fallbacks of 0..batch requests, weighed by how likely so many miss.
    from math import comb

    fallback = sum(
        comb(batch, m) * (1 - p) ** m * p ** (batch - m) * costs.fallback(m * size) for m in range(1, batch + 1)
    )
    return batch * mean / (both + costs.comm + fallback)


@pytest.mark.parametrize("seed", range(12))
def test_choice_is_the_brute_force_optimum(seed: int) -> None:
    rng = random.Random(seed)
    costs, acceptance, batch = random_costs(rng), random_acceptance(rng), rng.choice((1, 2, 3, 8, 16))
    options = Options.within(acceptance, rng.choice((3, 7, 15)), num_refined=rng.choice((None, 3, 64)))
    plan = Plan(costs, acceptance, options)
    plain = batch / costs.verify(batch, 1)
    speeds = {choice: eq4(costs, acceptance, batch, choice) for choice in options.choices}
    for row in plan.explain(batch)[1:]:
        assert row.choice is not None and row.throughput == pytest.approx(speeds[row.choice], rel=1e-6)
    chosen = plan.choose(batch)
    assert chosen.throughput == pytest.approx(max(plain, *speeds.values()), rel=1e-6)
    assert (chosen.choice is None) == (plain >= max(speeds.values()))


def test_plain_decoding_wins_ties_and_slow_drafting() -> None:
    acceptance = unmeasured(7)
    slow = Costs(Grid((1,), (1, 8), ((0.01, 0.1),)), *[Line(1, 0)] * 5, 0.0)
    plan = Plan(slow, acceptance, Options.within(acceptance, 7))
    assert all(plan.choose(batch).choice is None for batch in (1, 2, 16))
    nothing = Rounds((1.0,) + (0.0,) * 7, (0.0,) * 16)  # no draft is ever accepted, and drafting is free
    useless = Acceptance(7, {(0, 0): nothing}, {(0, 0): nothing}, nothing)
    free = Costs(Grid((1,), (1, 8), ((0.01, 0.01),)), *[Line(0, 0)] * 5, comm=0.0)
    assert Plan(free, useless, Options.within(useless, 7)).choose(1).choice is None


def test_dearer_drafting_never_promises_more() -> None:
    rng = random.Random(1)
    costs, acceptance = random_costs(rng), random_acceptance(rng)
    options = Options.within(acceptance, 15)
    dearer = dataclasses.replace(costs, draft_pass=Line(costs.draft_pass.base * 2, costs.draft_pass.slope * 2))
    pairs = zip(*(Plan(c, acceptance, options).explain(4) for c in (costs, dearer)), strict=True)
    assert all(second.throughput <= first.throughput for first, second in pairs)
    rates = [Plan(costs, acceptance, options).rates(RoundChoice(7, b, 1, 1))[0] for b in (1, 2, 4, 8, 16)]
    assert rates == sorted(rates)
    taus = [Plan(costs, acceptance, options).rates(RoundChoice(g, 4, 1, 1))[1] for g in options.gammas]
    assert taus == sorted(taus)


def test_a_number_given_is_the_only_one() -> None:
    acceptance = unmeasured(7)
    options = Options.within(acceptance, 5, num_outcomes=3)
    assert {choice.num_outcomes for choice in options.choices} == {3}
    assert max(choice.num_draft_tokens for choice in options.choices) == 5
    with pytest.raises(ValueError, match="jacobi_passes 5"):
        Options.within(acceptance, 7, jacobi_passes=5)


def test_fit_finds_the_lines() -> None:
    lines = Line(2e-3, 1e-5), Line(4e-3, 2e-5), Line(8e-3, 0.0)
    costs = Costs(Grid((1,), (1,), ((1.0,),)), Line(0, 0), *lines, Line(0, 0), comm=0.0)
    shapes = [
        (1, 7, 1, 0, 0),
        (1, 7, 4, 0, 0),
        (1, 3, 4, 1, 1),
        (4, 7, 2, 3, 3),
        (2, 15, 1, 1, 0),
        (4, 3, 1, 0, 0),
        (1, 3, 4, 0, 1),
    ]
    rounds = [MeasuredRound(n, RoundChoice(*shape), costs.draft(n, RoundChoice(*shape))) for n, *shape in shapes]
    for found, line in zip(fit_rounds(rounds), lines, strict=True):
        assert found(100) == pytest.approx(line(100), rel=0.02)
    assert fit_line([(8, 0.01), (16, 0.012), (32, 0.016)]) == pytest.approx(Line(0.008, 0.00025))


def test_profile_file(tmp_path: Path) -> None:
    costs = random_costs(random.Random(2))
    path = tmp_path / "profile.json"
    costs.save(path)
    assert load_costs(path) == costs
    for change, message in (
        ({"comm": -1}, "between 0 and"),
        ({"comm": "x"}, "between 0 and"),
        ({"foresight": [1]}, "list of 2 numbers"),
        ({"verify": {}}, "batches, sizes and seconds"),
        ({"verify": {"batches": [2, 1], "sizes": [1], "seconds": [[1], [1]]}}, "that rise"),
        ({"verify": {"batches": [1], "sizes": [1], "seconds": [[0]]}}, "more than 0 seconds"),
        ({"draft_slowdown": 0.5}, "from 1 on"),
        ({"comn": 1}, "did you mean 'comm'"),
        ({"concurrent": 1}, "true or false"),
    ):
        path.write_text(json.dumps(json.loads(json.dumps(dataclasses.asdict(costs))) | change))
        with pytest.raises(ValueError, match=message):
            load_costs(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_costs(path)
    with pytest.raises(ValueError, match="is not a file"):
        load_costs(tmp_path / "none.json")


def test_acceptance_file() -> None:
    acceptance = random_acceptance(random.Random(3), 3)
    values = json.loads(json.dumps(acceptance.as_dict()))
    assert Acceptance.from_dict(values, "here") == acceptance
    for path, value, message in (
        (("num_draft_tokens",), 4, "expected 5 accepted"),
        (("settings",), [], "1 to"),
        (("in_line", "accepted"), [0, 0, 0, 0], "count rounds"),
        (("in_line", "ranks"), [-1], "from 0 on"),
        (("in_line", "rank"), [], "did you mean 'ranks'"),
    ):
        broken = json.loads(json.dumps(values))
        place = broken
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(ValueError, match=message):
            Acceptance.from_dict(broken, "here")


class World:
    """Serves a planner's choices: what really happens, by costs and rates of its own."""

    def __init__(self, costs: Costs, acceptance: Acceptance, seed: int = 0, beside: float = 1.0) -> None:
        self.costs, self.acceptance, self.rng = costs, acceptance, random.Random(seed)
        self.beside = beside
        """Factor on the target's steps while blocks are drafted ahead, which nobody has measured."""
        self.choices: list[RoundChoice | None] = []
        self.tokens, self.seconds = 0, 0.0

    def serve(self, planner: Planner, steps: int, batch: int = 1) -> None:
        ahead, hit = None, False
        for _ in range(steps):
            choice = planner.choose(batch, batch)
            self.choices.append(choice)
            step = self._step(choice, ahead, hit, batch)
            hit = Origin.HIT in step.answers
            planner.see(step)
            assert step.seconds is not None
            self.tokens, self.seconds, ahead = self.tokens + step.tokens, self.seconds + step.seconds, choice

    def _step(self, choice: RoundChoice | None, ahead: RoundChoice | None, hit: bool, batch: int) -> Step:
        if choice is None:
            return Step(None, ahead, batch, 0, self.costs.verify(batch, 1), 0.0, (), ())
        blocks, answers = [], []
        for _ in range(batch):
            origin, rounds = Origin.FALLBACK, self.acceptance.in_line
            if ahead is not None and ahead.num_outcomes:
                passes = ahead[2:4]
                before = (self.acceptance.after_hit if hit else self.acceptance.after_miss)[passes]
                origin = Origin.FALLBACK if self.rng.random() < before.miss_rate(ahead[1]) else Origin.HIT
                rounds = (self.acceptance.after_hit if origin is Origin.HIT else self.acceptance.after_miss)[passes]
            k = self.rng.choices(range(len(rounds.accepted)), rounds.accepted)[0]
            blocks.append(Verification(origin, choice[0], min(k, choice[0])))
            answers.append(origin)
        alone = self.costs.verify(batch, choice[0] + 1) * (self.beside if choice.num_outcomes else 1.0)
        verify, draft = self.costs.overlap(alone, self.costs.draft(batch, ahead) if ahead else 0.0)
        missed = sum(origin is not Origin.HIT for origin in answers)
        exposed = max(draft - verify, 0) + (self.costs.fallback(missed * (choice[0] + 1)) if missed else 0)
        return Step(choice, ahead, batch, batch, verify + exposed, exposed, tuple(blocks), tuple(answers))


def some_costs(scale: float = 1.0) -> Costs:
    """20 ms a step, and drafting of J1-R1, B = 4 in about 25 ms times ``scale``."""
    seconds = tuple(tuple(1e-3 * (18 + 0.6 * batch * size) for size in SIZES) for batch in BATCHES)
    lines = [
        Line(1e-3 * base * scale, 1e-6 * slope * scale)
        for base, slope in ((2, 10), (8, 20), (3, 40), (4, 40), (8, 100))
    ]
    return Costs(Grid(BATCHES, SIZES, seconds), *lines, comm=1e-4)


def test_planner_settles_on_the_best() -> None:
    acceptance = unmeasured(7)
    planner = Planner(some_costs(), acceptance, Options.within(acceptance, 7))
    world = World(some_costs(), acceptance)
    world.serve(planner, 1500)
    best = Plan(some_costs(), acceptance, Options.within(acceptance, 7)).choose(1)
    assert best.choice is not None
    assert world.tokens / world.seconds > 0.93 * best.throughput
    assert planner.state()["factors"]["1"]["drafting"] == pytest.approx(1, abs=0.15)


def test_planner_learns_what_drafting_ahead_does_to_the_target() -> None:
    """Steps beside drafting ahead take 1.5 times as long, as on cores that share their memory: in line is better."""
    acceptance, costs = unmeasured(7), dataclasses.replace(some_costs(), fallback=Line(5e-3, 1e-5))
    planner = Planner(costs, acceptance, Options.within(acceptance, 7, jacobi_passes=0, context_refreshes=0))
    assert (planner.choose(1, 1) or COPIES).num_outcomes > 0
    world = World(costs, acceptance, beside=1.5)
    world.serve(planner, 1500)
    assert sum(choice is not None and not choice.num_outcomes for choice in world.choices[-400:]) > 350
    assert planner.state()["factors"]["1"]["beside"] > 1.2


def test_a_slow_fallback_says_nothing_of_rounds() -> None:
    """Misses take twice as long as measured, the rounds themselves do not: hidden as they are, nobody sees them."""
    acceptance, costs = unmeasured(7), some_costs()
    slow = dataclasses.replace(costs, fallback=Line(2 * costs.fallback.base, 2 * costs.fallback.slope))
    planner = Planner(costs, acceptance, Options.within(acceptance, 7, 4, 0, 0))
    World(slow, acceptance).serve(planner, 600)
    factors = planner.state()["factors"]["1"]
    assert factors["fallback"] == pytest.approx(2, rel=0.1)
    assert factors["drafting"] == pytest.approx(1, abs=0.05)


def test_what_large_batches_teach_holds_for_them() -> None:
    """Drafting for sixteen is six times as slow as measured, for one as measured: neither misleads the other."""
    acceptance, costs = unmeasured(7), some_costs()
    planner = Planner(costs, acceptance, Options.within(acceptance, 7))
    alone, together = World(costs, acceptance), World(some_costs(6), acceptance)
    alone.serve(planner, 200)
    planner.pin(RoundChoice(7, 4, 1, 1))
    together.serve(planner, 60, batch=16)
    planner.unpin()
    alone.serve(planner, 100)
    factors = planner.state()["factors"]
    assert factors["16"]["drafting"] > 2 and factors["1"]["drafting"] == pytest.approx(1, abs=0.15)
    assert all(choice and choice.num_outcomes for choice in alone.choices[-100:])


def test_planner_leaves_drafting_that_does_not_pay() -> None:
    """Text on which nothing is accepted, and drafting four times as slow as measured: near plain decoding's speed."""
    acceptance = unmeasured(7)
    planner = Planner(some_costs(), acceptance, Options.within(acceptance, 7))
    useless = Rounds((0.9, 0.1) + (0.0,) * 6, (0.02,) * 16)
    hard = Acceptance(
        7, dict.fromkeys(acceptance.after_hit, useless), dict.fromkeys(acceptance.after_miss, useless), useless
    )
    world = World(some_costs(4), hard)
    world.serve(planner, 200)
    world.tokens, world.seconds = 0, 0.0
    world.serve(planner, 3000)
    plain = Plan(some_costs(), acceptance, Options.within(acceptance, 7)).plain(1)
    assert world.tokens / world.seconds > 0.97 * plain.throughput
    drafted = sum(choice is not None for choice in world.choices[200:])
    assert 0 < drafted <= 3000 / TRIAL_EVERY * (LEAST_TRIAL + 2)  # trials that plainly fail end early


def test_planner_comes_back_when_text_gets_easy() -> None:
    acceptance = unmeasured(7)
    planner = Planner(some_costs(), acceptance, Options.within(acceptance, 7))
    useless = Rounds((1.0,) + (0.0,) * 7, (0.01,) * 16)
    hard = Acceptance(
        7, dict.fromkeys(acceptance.after_hit, useless), dict.fromkeys(acceptance.after_miss, useless), useless
    )
    World(some_costs(), hard).serve(planner, 800)
    world = World(some_costs(), acceptance)
    world.serve(planner, 3000)
    drafted = sum(choice is not None for choice in world.choices[-500:])
    assert world.choices[0] is None and drafted > 400


def test_copies_are_a_mixture() -> None:
    """τ with copied blocks is the mixture of theirs and of drafted ones; alone they cost the target's time only."""
    acceptance, costs = unmeasured(7), some_costs()
    options = Options.within(acceptance, 7, copies=True)
    learnt = Corrections(copied=Copied(0.25, 3.0), copied_alone=Copied(0.5, 2.0, length=4.0, wait=2e-3))
    without, plan = Plan(costs, acceptance, options), Plan(costs, acceptance, options, learnt)
    choice = RoundChoice(7, 4, 1, 1)
    drafted, mixed = without.predict(choice, 1), plan.predict(choice, 1)
    assert mixed.tau == pytest.approx(0.75 * drafted.tau + 0.25 * 3)
    assert mixed.fallback == pytest.approx(0.75 * drafted.fallback) and mixed.draft == drafted.draft
    alone = plan.predict(COPIES, 1)
    assert alone.tau == pytest.approx(1.5) and alone.draft == alone.fallback == 0
    assert alone.seconds == pytest.approx(costs.verify(1, 3) + costs.comm + 2e-3)
    assert COPIES in options.choices and COPIES not in Options.within(acceptance, 7).choices


def test_least_probability_is_the_price_of_a_token() -> None:
    """Draft tokens at .6 ms each where 100 tokens a second are committed: below 6 % they cost more than they bring."""
    acceptance = unmeasured(7)
    plan = Plan(some_costs(), acceptance, Options.within(acceptance, 7))
    now = dataclasses.replace(plan.plain(1), tokens=2.0, seconds=0.02)
    assert plan.min_accept_prob(now, 1) == pytest.approx(0.06)
    flat = dataclasses.replace(some_costs(), verify=Grid((1,), (1, 8), ((0.02, 0.02),)))
    assert Plan(flat, acceptance, plan.options).min_accept_prob(now, 1) == 0


@pytest.mark.parametrize(("share", "tau"), [(0.8, 4.0), (0.5, 1.0)])
def test_planner_learns_what_copies_are_worth(share: float, tau: float) -> None:
    """Dear drafting beside good copies leaves copies alone; worthless ones are left as well."""
    acceptance, rng = unmeasured(7), random.Random(1)
    costs = some_costs(8)
    planner = Planner(costs, acceptance, Options.within(acceptance, 7, copies=True))
    chosen = []
    for _ in range(600):
        choice = planner.choose(1, 1)
        chosen.append(choice)
        origin = Origin.NONE
        if choice is not None and rng.random() < share:
            origin = Origin.COPIED
        elif choice is not None and choice.num_draft_tokens:
            origin = Origin.FALLBACK
        accepted = int(tau) - 1 if origin is Origin.COPIED else 0
        blocks = (Verification(origin, 7, accepted),) if origin is not Origin.NONE else ()
        exposed = 0.2 if choice is not None and choice.num_draft_tokens else 0.0
        answers = (origin,) if blocks else ()
        seconds = costs.verify(1, 8 if blocks else 1) + exposed
        planner.see(Step(choice, choice, 1, len(blocks), seconds, exposed, blocks, answers))
    assert set(chosen[-100:]) <= ({COPIES} if tau > 1 else {None, COPIES})
    assert chosen[-100:].count(COPIES if tau > 1 else None) > 80
    corrections = planner.running(1).corrections
    assert corrections.copied_alone.tau == pytest.approx(tau, abs=0.3)
