"""``auto`` through vLLM: measured at start, chosen step by step, the same output; and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.vllm_plugin.conftest import generate, local_drafts, running_engine, worker_of
from vllm_jetspecpp.planning.costs import Costs, Grid, Line
from vllm_jetspecpp.planning.planner import FixedChoice
from vllm_jetspecpp.types import NO_DRAFTING, RoundChoice
from vllm_jetspecpp.vllm_plugin import worker

AUTO = {"num_outcomes": "auto", "jacobi_passes": "auto", "context_refreshes": "auto"}
CHOICES: list[list[int] | None] = [
    [7, 4, 1, 1],
    None,
    [0, 0, 0, 0],
    [3, 8, 0, 0],
    [5, 0, 0, 0],
    [7, 16, 3, 3],
    [4, 8, 1, 1, 2],
    [6, 4, 0, 1],
    [],
    None,
]


@pytest.fixture(scope="module")
def llm(tiny_model: Path, plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = local_drafts(tiny_model, tmp_path_factory.mktemp("auto"), None) | AUTO | {"copy_drafts": True}
    with running_engine(tiny_model, max_num_batched_tokens=64, speculative_config=options) as llm:
        yield llm


def take_stats(llm: Any) -> dict[str, Any]:
    return llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})[0]


def test_measured_at_start(llm: Any) -> None:
    """Before the first request; neither the target's KV cache nor the draft process nor counters remember it."""
    plan = llm.collective_rpc("jetspecpp_plan")[0]
    costs = Costs.from_dict(json.loads(json.dumps(plan["costs"])), "costs")
    assert costs.verify.sizes == (1, 2, 4, 8) and costs.verify.batches == (1, 2, 4, 8)
    assert costs.draft(1, RoundChoice(7, 4, 1, 1)) > 0 and costs.fallback(8) > 0 and not costs.concurrent
    assert worker_of(llm).model_runner.requests == {}
    stats = take_stats(llm)
    assert stats["plain_tokens"] == stats["rounds"] == stats["client"]["replies"] == 0
    assert stats["client"]["exposed_seconds"] == 0


def test_same_output(llm: Any, plain: dict[str, Any], prompts: list[list[int]]) -> None:
    assert generate(llm, prompts) == plain["outputs"]
    assert generate(llm, prompts[3:4]) == plain["outputs"][3:4]
    stats = take_stats(llm)
    assert sum(stats["steps_by_choice"].values()) > 60 and stats["plan"]["choices"]
    assert stats["invalid_blocks"] == 0 and {"target", "drafting", "misses"} <= stats["plan"]["factors"]["1"].keys()


def test_same_output_while_choices_change(llm: Any, plain: dict[str, Any], prompts: list[list[int]]) -> None:
    """Another choice every few steps, drafting left and taken up again."""
    drafter = worker_of(llm).model_runner.drafter
    planner, choose = drafter.planning.planner, drafter.planning.planner.choose
    asked = [0]

    def pinned(batch: int, drafted: int) -> RoundChoice | None:
        asked[0] += 1
        llm.collective_rpc("jetspecpp_pin", args=(CHOICES[asked[0] // 3 % len(CHOICES)],))
        return choose(batch, drafted)

    planner.choose = pinned
    try:
        assert generate(llm, prompts) == plain["outputs"]
    finally:
        planner.choose = choose
        llm.collective_rpc("jetspecpp_pin", args=([],))
    steps = take_stats(llm)["steps_by_choice"]
    named = {NO_DRAFTING if choice is None else str(RoundChoice(*choice)) for choice in CHOICES if choice != []}
    assert named <= steps.keys()


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_a_profile_decides(tiny_model: Path, plain: dict[str, Any], prompts: list[list[int]], tmp_path: Path) -> None:
    """With a profile nothing is measured: drafting that costs a second is never chosen, free drafting always."""
    options = local_drafts(tiny_model, tmp_path, None) | {"num_outcomes": "auto", "plan_profile": str(tmp_path / "p")}
    free = Costs(Grid((1,), (1, 8), ((0.01, 0.01),)), *[Line(0.0, 0.0)] * 5, comm=0.0)
    for costs, drafts in ((free, True), (dataclasses.replace(free, fallback=Line(1, 0)), False)):
        costs.save(tmp_path / "p")
        with running_engine(tiny_model, speculative_config=options) as llm:
            assert generate(llm, prompts[:1], max_tokens=6) == [plain["outputs"][0][:6]]
            steps = take_stats(llm)["steps_by_choice"]
            said = llm.collective_rpc("jetspecpp_plan")[0]
        assert (NO_DRAFTING not in steps) == drafts and len(steps) == 1
        assert said["options"]["passes"] == [(1, 1)] and said["costs"]["verify"]["sizes"] == (1, 8)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_a_machine_that_cannot_be_measured(
    tiny_model: Path,
    plain: dict[str, Any],
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr("vllm_jetspecpp.vllm_plugin.worker.measure", fail)
    warnings: list[str] = []
    monkeypatch.setattr(worker.logger, "warning", lambda text, *values: warnings.append(text % values))
    options = local_drafts(tiny_model, tmp_path, None) | AUTO | {"num_outcomes": 2}
    with running_engine(tiny_model, speculative_config=options) as llm:
        assert generate(llm, prompts[:1]) == plain["outputs"][:1]
        assert isinstance(worker_of(llm).model_runner.drafter.planning.planner, FixedChoice)
        assert set(take_stats(llm)["steps_by_choice"]) == {"γ7 B2 J1-R1"}
    assert "times could not be measured (RuntimeError: no clock): every round is of γ7 B2 J1-R1" in warnings


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_a_planner_that_fails(
    tiny_model: Path, plain: dict[str, Any], prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go on, without drafts."""
    options = local_drafts(tiny_model, tmp_path, None) | AUTO | {"plan_profile": str(tmp_path / "p")}
    Costs(Grid((1,), (1, 8), ((0.01, 0.01),)), *[Line(0.0, 0.0)] * 5, comm=0.0).save(tmp_path / "p")
    with running_engine(tiny_model, speculative_config=options) as llm:
        monkeypatch.setattr(worker_of(llm).model_runner.drafter.planning.planner, "choose", None)
        assert generate(llm, prompts[:2]) == plain["outputs"][:2]
        stats = take_stats(llm)
    assert stats["steps_by_choice"].keys() == {NO_DRAFTING} and stats["plan"]["choices"]["all"]


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_with_a_draft_process_of_its_own(
    tiny_model: Path, plain: dict[str, Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    checkpoint = make_tiny_checkpoint(tiny_model, tmp_path, copy_adapter=True)
    options = {"method": "jetspecpp", "model": str(checkpoint.folder), "reply_timeout": 60.0, **AUTO}
    with running_engine(tiny_model, speculative_config=options) as llm:
        assert generate(llm, prompts) == plain["outputs"]
        said = llm.collective_rpc("jetspecpp_plan")[0]
        stats = take_stats(llm)
    assert said["costs"]["concurrent"] and said["costs"]["target_slowdown"] >= 1
    assert stats["client"]["timeouts"] == stats["client"]["restarts"] == 0 and stats["steps_by_choice"]
