"""What the soak test calls flat, right and passed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield


def series(growth_per_hour: float, minutes: int = 60) -> Any:
    from soak_memory import Series

    made = Series("worker", 1)
    for second in range(0, minutes * 60, 10):
        made.seconds.append(float(second))
        warm_up = min(second / 300, 1.0) * 200
        made.own.append(800 + warm_up + growth_per_hour * second / 3600 + 5 * (second % 3))
        made.pss.append(made.own[-1] + 100)
        made.rss.append(made.own[-1] + 200)
    return made


def test_growth_after_the_warm_up_is_no_flat_memory() -> None:
    assert series(0.0).summary()["flat"] is True
    leaking = series(100.0).summary()
    assert leaking["flat"] is False and leaking["slope_mib_per_hour"] == pytest.approx(100, rel=0.1)
    assert leaking["growth_mib"] > leaking["limit_mib"]
    assert series(1000.0, minutes=5).summary()["flat"] is None


def test_roles() -> None:
    from soak_memory import role_of

    assert role_of("vllm serve", True) == "server"
    assert role_of("VLLM::Worker_TP0", False) == "worker"
    assert role_of("ray::DraftActor.serve", False) == "draft process"
    assert role_of("ray::IDLE", False) == "Ray's own"
    assert role_of("python -c from multiprocessing.resource_tracker", False) is None


def references() -> list[Any]:
    from soak_load import Reference

    return [Reference(kind, kind, (1,), tuple(range(20))) for kind in ("greedy", "chat")]


def test_the_mix_repeats_and_holds_everything() -> None:
    from soak_load import WEIGHTS, Mix

    one, other = (Mix("demo", references(), 3) for _ in range(2))
    jobs = [one.draw() for _ in range(300)]
    assert jobs == [other.draw() for _ in range(300)]
    assert {job.kind for job in jobs} == set(WEIGHTS)
    assert any(job.abort_after is not None for job in jobs)
    assert {job.body["stream"] for job in jobs} == {True, False}


def test_an_answer_of_another_form_is_wrong() -> None:
    from soak_load import Answer, Job, wrong_form

    answer = Answer(text={0: "abc-12"})
    assert wrong_form(Job("structured", {}), answer) is None
    assert "match" in str(wrong_form(Job("structured", {}), Answer(text={0: "abc-12", 1: "xyz"})))
    assert "stop string" in str(wrong_form(Job("stop", {}), Answer(text={0: "apple"})))
    assert wrong_form(Job("sampled", {}), Answer(text={0: "apple"})) is None


def test_a_wrong_greedy_answer_is_counted() -> None:
    from soak_load import Tally
    from soak_report import judge_differences

    tally = Tally(compared=5, differences=[(0, (0, 1, 9)), (0, (0, 1, 9))])
    judged = judge_differences(Path("nowhere"), references(), tally, exact=True)
    assert judged["equal"] == 3 and judged["wrong"] == 1 and len(judged["wrong_answers"]) == 1


def result() -> dict[str, Any]:
    return {
        "settings": {"kills": 1},
        "requests": {"sent": 9, "failed": 0},
        "greedy": {"compared": 4, "wrong": 0},
        "kills": [{"resumed_at": 30.0}],
        "draft_process": {"restarts": 2, "timeouts": 1, "warnings": 2},
        "memory": [{"flat": True}, {"flat": None}],
        "exit": {"clean": True},
    }


@pytest.mark.parametrize(
    ("part", "wrong", "check"),
    [
        ("requests", {"sent": 9, "failed": 1}, "requests_answered"),
        ("greedy", {"compared": 4, "wrong": 1}, "greedy_answers_equal"),
        ("greedy", {"compared": 0, "wrong": 0}, "greedy_answers_equal"),
        ("kills", [], "killed_as_often_as_asked"),
        ("kills", [{"resumed_at": None}], "drafting_resumed"),
        ("draft_process", {"restarts": 2, "timeouts": 0, "warnings": 2}, "no_unexplained_restart"),
        ("draft_process", {"restarts": 2, "timeouts": 1, "warnings": 3}, "one_warning_per_restart"),
        ("memory", [{"flat": True}, {"flat": False}], "memory_flat"),
        ("exit", {"clean": False}, "clean_exit"),
    ],
)
def test_every_check_can_fail(part: str, wrong: Any, check: str) -> None:
    from soak_report import checks_of

    assert all(checks_of(result()).values())
    assert not checks_of(result() | {part: wrong})[check]
