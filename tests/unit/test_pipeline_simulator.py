"""The pipeline simulator against closed forms, a second simulation by time steps, and the paper's serving figures."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.evaluation.pipeline_simulator import (
    Acceptance,
    CommittedTokens,
    CostCurve,
    Method,
    PipelineCosts,
    Profile,
    Setup,
    inline_acceptance,
    simulate,
)
from vllm_jetspecpp.evaluation.pipeline_simulator.bounds import (
    expected_fallback_ms,
    saturated_round_ms,
    targets_per_device,
    throughput_eq4,
)

Z_ALLOWED = 5.0
"""Of a mean over 50 batches: beyond it by chance in fewer than 1 of 100,000 seeds (Student's t, 49 degrees)."""
TAU = 5
ALWAYS_FIVE = [float(n == TAU) for n in range(1, 9)]
SHORT_ROUND = RoundConfig(num_draft_tokens=7, num_outcomes=4, jacobi_passes=1, context_refreshes=1)


def costs(**changed: Any) -> PipelineCosts:
    """T_draft of SHORT_ROUND is 2·1.5 + 2·1 + .5 + .25 = 5.75 ms."""
    given = {"verify": 6.0, "predict": 1.5, "draft_pass": 1.0, "fallback": 3.0, "comm_ms": 0.4}
    return PipelineCosts.from_dict({**given, "host_ms": 0.5, "commit_ms": 0.25, "step_ms": 0.2, **changed})


def steady(hit_rate: float, **changed: Any) -> Setup:
    """Five tokens whatever happens."""
    return Setup(costs(**changed), SHORT_ROUND, Acceptance.of(hit_rate, ALWAYS_FIVE, ALWAYS_FIVE, 7))


def test_draft_round_is_equation_3() -> None:
    curves = costs(predict={"1": 1.5, "4": 2.1}, draft_pass={"1": 1.0, "4": 1.6, "8": 2.0})
    assert costs().draft_round_ms(SHORT_ROUND, 1) == pytest.approx(5.75)
    # T_pred(1) + 2 T_pass(4) + T_pred(4) + T_host + commit
    assert curves.draft_round_ms(SHORT_ROUND, 1) == pytest.approx(1.5 + 2 * 1.6 + 2.1 + 0.75)
    # Two requests: T_pred(2) lies on the line, T_pred(8) on the one that goes on.
    assert curves.draft_round_ms(SHORT_ROUND, 2) == pytest.approx(1.7 + 2 * 2.0 + 2.9 + 0.75)


@pytest.mark.parametrize("verify", [2.0, 5.75, 6.0, 9.5])
def test_without_misses_a_round_is_the_longer_of_the_two_and_the_answer(verify: float) -> None:
    setup = steady(1.0, verify=verify)
    figures = simulate(setup, rounds=50, warm_up=5).figures
    round_ms = max(verify, 5.75) + 0.4 + 0.2
    assert figures.round_ms == pytest.approx(round_ms) and figures.hit_rate == 1.0
    assert figures.exposed_ms == pytest.approx(max(5.75 - verify, 0) + 0.4)
    assert figures.tok_s == pytest.approx(1000 * TAU / round_ms)
    assert throughput_eq4(setup) == pytest.approx(figures.tok_s)
    assert figures.utilisation == pytest.approx(5.75 / round_ms, rel=0.03)


def test_a_miss_adds_the_fallback() -> None:
    setup = steady(0.0)
    figures = simulate(setup, rounds=50, warm_up=5).figures
    assert figures.round_ms == pytest.approx(6.0 + 0.4 + 3.0 + 0.2) and figures.hit_rate == 0.0
    assert figures.exposed_ms == figures.exposed_miss_ms == pytest.approx(3.4) and figures.exposed_hit_ms is None
    assert figures.tok_s == pytest.approx(throughput_eq4(setup))


def test_hidden_up_to_equation_3_and_exposed_beyond() -> None:
    """T_draft crosses T_verify between J = 1 and J = 2; from there every pass is exposed in full."""
    for jacobi in range(5):
        setup = replace(steady(1.0), round=RoundConfig(7, 4, jacobi, 1 if jacobi else 0))
        draft = setup.draft_round_ms(1)
        assert (draft <= 6.0) == (jacobi <= 1)
        assert simulate(setup, 20, 5).figures.exposed_ms == pytest.approx(0.4 + max(0.0, draft - 6.0))


@pytest.mark.parametrize("hit_rate", [0.3, 0.7, 0.93])
@pytest.mark.parametrize("batch", [1, 3])
def test_equation_4_within_the_statistical_error(hit_rate: float, batch: int) -> None:
    slow = costs(verify=CostCurve.line(6.0, 0.5), fallback=CostCurve.line(3.0, 1.0), draft_pass=CostCurve.line(1, 0.2))
    setup = Setup(slow, SHORT_ROUND, Acceptance.of(hit_rate, 5.5, 2.5, 7), batch_size=batch)
    figures = simulate(setup, rounds=6000, seed=7).figures
    assert figures.tok_s_error is not None and figures.tok_s_error < 0.02 * figures.tok_s
    assert abs(figures.tok_s - throughput_eq4(setup)) < Z_ALLOWED * figures.tok_s_error
    assert figures.exposed_hit_ms == pytest.approx(0.4 + max(0, setup.draft_round_ms(batch) - slow.verify(batch)))


def test_hit_rate_and_tau_of_a_decoder_whose_errors_compound() -> None:
    acceptance = Acceptance.compounding(0.02, 6.0, 3.0, 7)
    figures = simulate(Setup(costs(), SHORT_ROUND, acceptance), rounds=20_000, seed=3).figures
    # At most 1 in 100,000 seeds: |z| < 4.5 with the deviation of independent rounds, doubled for their dependence.
    assert figures.hit_rate == pytest.approx(acceptance.hit_rate, abs=4.5 * 2 * 0.5 / 20_000**0.5)
    assert figures.tau == pytest.approx(acceptance.tau, abs=4.5 * 2 * 3 / 20_000**0.5)
    assert acceptance.hit_rate < (1 - 0.02) ** 3.0, "long blocks are foreseen less often than short ones"
    assert Acceptance.of(0.9, 6.0, 3.0, 7).hit_rate == pytest.approx(0.9)


@pytest.mark.parametrize("targets", range(1, 6))
def test_a_shared_device_serves_until_it_is_full(targets: int) -> None:
    """N equal targets without misses: max(T_verify, T_draft) + T_comm, until N·T_draft is longer."""
    setup = replace(steady(1.0, verify=12.0), num_targets=targets)
    figures = simulate(setup, rounds=200, warm_up=50).figures
    alone = 12.0 + 0.4 + 0.2
    assert figures.round_ms == pytest.approx(max(alone, targets * 5.75), rel=1e-6)
    assert saturated_round_ms(setup) == pytest.approx(targets * 5.75)
    assert targets_per_device(setup) == pytest.approx(alone / 5.75)
    if targets > alone / 5.75:
        assert figures.utilisation == pytest.approx(1.0)
        assert figures.total_tok_s == pytest.approx(1000 * TAU / 5.75, rel=1e-6)


def test_a_full_device_works_off_draft_rounds_and_fallbacks() -> None:
    setup = replace(steady(0.8, verify=8.0), num_targets=6, num_draft_devices=2)
    figures = simulate(setup, rounds=3000).figures
    assert figures.hit_rate is not None and figures.utilisation == pytest.approx(1.0, abs=1e-3)
    of_these_rounds = 3 * (5.75 + (1 - figures.hit_rate) * 3.0)
    assert figures.round_ms == pytest.approx(of_these_rounds, rel=2e-3)
    assert saturated_round_ms(setup) == pytest.approx(of_these_rounds, rel=0.05)
    assert simulate(replace(setup, num_draft_devices=6), 500).figures.exposed_ms < figures.exposed_ms


def by_time_steps(targets: int, verify: int, draft: int, fallback: int, comm: int, rounds: int) -> float:
    """Mean round of ``targets`` that always miss and share a device: clock ticks of 1 ms, no event queue."""
    queue: deque[tuple[str, int]] = deque()
    state = {i: "idle" for i in range(targets)}
    left, drafted, ends = dict.fromkeys(range(targets), 0), set[int](), [list[int]() for _ in range(targets)]
    running: tuple[str, int] | None = None
    running_left = tick = 0
    while min(map(len, ends)) < rounds:
        changed = True
        while changed:
            changed = False
            if running is not None and running_left == 0:
                kind, who = running
                running, changed = None, True
                if kind == "draft":
                    drafted.add(who)
                else:
                    ends[who].append(tick)
                    state[who] = "idle"
            for i in range(targets):
                if state[i] == "idle" and tick >= verify * i // targets:
                    state[i], left[i], changed = "verify", verify, True
                    queue.append(("draft", i))
                elif state[i] == "verify" and left[i] == 0 and i in drafted:
                    drafted.remove(i)
                    state[i], left[i], changed = "answer", comm, True
                elif state[i] == "answer" and left[i] == 0:
                    state[i], changed = "fallback", True
                    queue.append(("fallback", i))
            if running is None and queue:
                running = queue.popleft()
                running_left, changed = draft if running[0] == "draft" else fallback, True
        tick += 1
        running_left = max(0, running_left - 1)
        left = {i: max(0, n - 1) for i, n in left.items()}
    first = rounds // 5
    return sum((e[rounds - 1] - e[first]) / (rounds - 1 - first) for e in ends) / targets


@pytest.mark.parametrize("times", [(2, 40, 10, 7, 3), (3, 60, 19, 5, 1), (4, 44, 9, 11, 2), (5, 35, 13, 6, 4)])
def test_sharing_with_misses_agrees_with_time_steps(times: tuple[int, int, int, int, int]) -> None:
    targets, verify, draft, fallback, comm = times
    own = PipelineCosts.from_dict({"verify": verify, "predict": draft, "fallback": fallback, "comm_ms": comm})
    law = Acceptance.of(0.0, ALWAYS_FIVE, ALWAYS_FIVE, 7)
    setup = Setup(own, RoundConfig(7, 1, 0, 0), law, num_targets=targets)
    expected = by_time_steps(targets, verify, draft, fallback, comm, rounds=300)
    assert simulate(setup, rounds=300, warm_up=60).figures.round_ms == pytest.approx(expected, rel=0.01)


def test_what_a_device_may_do_about_its_queue() -> None:
    crowded = replace(steady(0.9, verify=8.0), num_targets=6)
    plain = simulate(crowded, 1000).figures
    merged = simulate(replace(crowded, merge=True), 1000).figures
    dropped = simulate(replace(crowded, drop_queued=True), 1000).figures
    assert plain.hit_rate is not None and dropped.hit_rate is not None and plain.wait_ms is not None
    assert merged.tok_s > 2 * plain.tok_s, "a batch costs as much as one here"
    assert dropped.hit_rate < 0.7 * plain.hit_rate and dropped.tok_s > plain.tok_s
    first = simulate(replace(crowded, fallbacks_first=True), 1000).figures
    assert first.exposed_miss_ms is not None and plain.exposed_miss_ms is not None
    assert first.exposed_miss_ms < plain.exposed_miss_ms


def test_other_methods_are_sums() -> None:
    own = costs(inline_draft=2.0, plain=4.0)
    inline = Setup(own, SHORT_ROUND, inline_acceptance(4.0, 7), Method.INLINE, num_targets=2)
    figures = simulate(inline, 4000).figures
    assert figures.exposed_ms == pytest.approx(2.0) and figures.round_ms == pytest.approx(6.0 + 2.0 + 0.2)
    assert figures.hit_rate is None and figures.utilisation is None and figures.tok_s_error is not None
    assert abs(figures.tok_s - throughput_eq4(inline)) < Z_ALLOWED * figures.tok_s_error
    plain = replace(inline, method=Method.PLAIN)
    assert simulate(plain, 20).figures.tok_s == pytest.approx(1000 / 4.2)
    assert throughput_eq4(plain) == pytest.approx(1000 / 4.2)
    ssd = replace(steady(1.0), method=Method.AUTOREGRESSIVE)
    assert simulate(ssd, 20).figures.exposed_ms == pytest.approx(7 * 1.0 + 0.75 - 6.0 + 0.4)


def test_the_answer_waits_for_the_last_request_of_a_batch() -> None:
    """A round of n requests pays for a fallback as soon as one of them missed: 1 - p^n of the rounds."""
    setup = replace(steady(0.9), batch_size=8)
    figures = simulate(setup, rounds=10_000, seed=1).figures
    share = (figures.exposed_ms - 0.4) / 3.0
    assert share == pytest.approx(1 - 0.9**8, abs=4.5 * 0.5 / 10_000**0.5)
    assert expected_fallback_ms(setup) == pytest.approx(3.0 * (1 - 0.9**8))


def test_the_same_seed_gives_the_same_rounds() -> None:
    setup = Setup(costs(), SHORT_ROUND, Acceptance.of(0.8, 5.0, 3.0, 7), num_targets=2)
    one, same, other = (simulate(setup, 300, seed=seed, timeline_ms=50) for seed in (5, 5, 6))
    assert one == same and one.figures != other.figures
    assert {s.row for s in one.segments} == {"target 0", "target 1", "draft device 0"}
    bars = sorted((s.start, s.end) for s in one.segments if s.row == "draft device 0")
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(bars)), "one job at a time"


def test_a_mean_becomes_a_distribution_with_that_mean() -> None:
    for mean in (1.0, 3.3, 7.9, 8.0):
        law = CommittedTokens.of(mean, 7)
        assert law.mean == pytest.approx(mean) and sum(law.law) == pytest.approx(1.0) and len(law.law) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"costs": {"predict": 1.0}}, "'verify' is missing"),
        ({"costs": {"verify": 6.0, "verifi": 1}}, "did you mean 'verify'"),
        ({"costs": {"verify": -1}}, "0 ms or more"),
        ({"costs": {"verify": "six"}}, "milliseconds"),
        ({"costs": {"verify": 6.0, "comm_ms": {"1": 1, "2": 2}}}, "one number"),
        ({"acceptance": {"hit_rate": 1.2, "tau_hit": 3, "tau_miss": 2}}, "from 0 to 1"),
        ({"acceptance": {"hit_rate": 0.9, "tau_hit": 30, "tau_miss": 2}}, "tau_hit must be from 1"),
        ({"acceptance": {"hit_rate": 0.9, "tau_hit": 3}}, "needs tau_hit, tau_miss"),
        ({"round": {"num_draft_tokens": 7, "jacobi": 1}}, "did you mean 'jacobi_passes'"),
        ({"rounds": {}}, "did you mean 'round'"),
    ],
)
def test_a_wrong_profile_is_named(change: dict[str, Any], message: str) -> None:
    good = {
        "costs": {"verify": 6.0},
        "round": {"num_draft_tokens": 7},
        "acceptance": {"hit_rate": 0.9, "tau_hit": 4.0, "tau_miss": 3.0},
    }
    made = Profile.from_dict(good)
    again = Profile.from_dict(json.loads(json.dumps(made.to_dict())))
    assert (again.costs, again.round, again.acceptance) == (made.costs, made.round, made.acceptance)
    with pytest.raises(ValueError, match=message):
        Profile.from_dict({**good, **change})


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield


def test_the_papers_serving_figures_within_ten_percent(benchmarks: None) -> None:
    from pipeline_paper import table_3

    checks = table_3(rounds=6000)
    compared = [c for c in checks if c.paper is not None]
    assert [c for c in compared if not c.is_within] == []
    said = {(c.row, c.figure) for c in compared if c.mark == "predicted"}
    assert {("Qwen3-8B MATH-500", f) for f in ("hit rate", "exposed ms, JetSpec++", "speed over DSpark")} <= said
    assert {("Qwen3.8-27B GSM8K", f) for f in ("exposed ms, JetSpec++", "speed over DSpark")} <= said


def test_predictions_do_not_read_what_they_are_compared_with(benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other outcomes in the paper's rows behind the first one, every simulated figure stays what it was."""
    import pipeline_paper as paper

    before = [c.simulated for c in paper.table_3(rounds=200)]
    first, *others = paper.ROWS
    wrong = [
        replace(r, exposed_ms=9.0, ratio=9.0, hit_rate=r.hit_rate and 0.1, ssd=r.ssd and (r.ssd[0], 9, 9))
        for r in others
    ]
    monkeypatch.setattr(paper, "ROWS", (first, *wrong))
    after = paper.table_3(rounds=200)
    assert [c.simulated for c in after] == before
    assert any(c.is_within is False for c in after)


def test_the_command(benchmarks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from simulate_pipeline import main

    files = {name: tmp_path / name for name in ("out.json", "plot.png", "timeline.png", "profile.json")}
    wanted = ["--model", "qwen3-8b", "--targets", "4", "--draft-devices", "1-3", "--rounds", "200"]
    wanted += ["--plot", str(files["plot.png"]), "--timeline", str(files["timeline.png"])]
    wanted += ["--json", str(files["out.json"]), "--write-profile", str(files["profile.json"])]
    assert main(wanted) == 0
    assert all(file.stat().st_size > 1000 for file in files.values())
    records = json.loads(files["out.json"].read_text())["records"]
    assert [r["draft_devices"] for r in records] == [1, 2, 3]
    assert records[0]["jetspecpp"]["tok_s"] < records[2]["jetspecpp"]["tok_s"]
    capsys.readouterr()
    assert main(["--profile", str(files["profile.json"]), "--rounds", "100", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["records"][0]["deployment"] == "Qwen3-8B GSM8K"
    assert main(["--model", "qwen3-9b"]) == 2 and "did you mean 'qwen3-8b'" in capsys.readouterr().err
    assert main(["--verify-ms", "6"]) == 2 and "--hit-rate, --tau-hit" in capsys.readouterr().err
