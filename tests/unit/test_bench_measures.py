"""Figures, ratios and report of `jetspecpp bench` on records made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_jetspecpp.benchmarking.closed_loop import closed_loop
from vllm_jetspecpp.benchmarking.measures import by_repeat, measure, percentile, summary
from vllm_jetspecpp.benchmarking.methods import Choice, check_names, make_method
from vllm_jetspecpp.benchmarking.ratios import all_ratios
from vllm_jetspecpp.benchmarking.records import RequestRecord, Run, StepRecord
from vllm_jetspecpp.benchmarking.report import markdown, write_report
from vllm_jetspecpp.benchmarking.runner import by_engine, turns


def run_of(method: str, scale: float = 1.0, hits: bool = True, concurrency: int = 1, repeat: int = 0) -> Run:
    """One request: prefill of .1 s, then three bursts of 3, 1 and 2 tokens, .05 s apart; all of it times ``scale``."""
    times = [t * scale for t in (0.1, 0.15, 0.2, 0.25)]
    steps = [StepRecord(0.1 * scale, 0.09 * scale, 0.0, False, 0, 1)]
    for committed, exposed in ((3, 0.0), (1, 0.02), (2, 0.001)):
        hit = int(hits and exposed < 0.01)
        steps.append(StepRecord(0.05 * scale, 0.02 * scale, exposed * scale, True, 1, committed, hit, int(hits) - hit))
    return Run(
        method, concurrency, repeat, 0, 0.25 * scale, [RequestRecord(0, 0.0, times, [1, 3, 1, 2], [7] * 7)], steps
    )


def test_figures_of_one_run() -> None:
    figures = measure([run_of("jetspecpp")])
    assert figures == pytest.approx(
        {
            "tok_s": 6 / 0.15,
            "total_tok_s": 7 / 0.25,
            "ttft_ms": 100.0,
            "tpot_ms": 25.0,
            "itl_p50_ms": 50.0,
            "itl_p99_ms": 50.0,
            "tau": 2.0,
            "hit_rate": 2 / 3,
            "copied_share": 0.0,
            "step_ms": 50.0,
            "verify_ms": 20.0,
            "verify_mean_ms": 20.0,
            "exposed_ms": 7.0,
            "exposed_ms_hits": 0.5,
            "host_ms": 29.0,
        }
    )


def test_figures_of_nothing_are_none() -> None:
    assert set(measure([]).values()) == {None}


def test_percentile_is_numpys() -> None:
    values = [5.0, 1.0, 4.0, 9.0, 2.5]
    for share in (0.0, 0.25, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))


def runs() -> list[Run]:
    """Three repeats: ours twice as fast as plain in the first two, three times in the last."""
    found = []
    for repeat, speed in enumerate((2.0, 2.0, 3.0)):
        found += [run_of("plain", 1.0, hits=False, repeat=repeat), run_of("jetspecpp", 1 / speed, repeat=repeat)]
        found += [run_of("plain", 1.0, False, 16, repeat), run_of("jetspecpp", 1.25, True, 16, repeat)]
    return found


def test_ratios_are_taken_within_a_repeat_and_judged_by_their_median() -> None:
    ratios = all_ratios(by_repeat(runs()))
    ours = ratios["jetspecpp_over_plain"]
    assert (ours["value"], ours["min"], ours["max"]) == pytest.approx((2.0, 2.0, 3.0))
    assert (ours["repeats"], ours["wanted"], ours["met"]) == (3, ">= 2", True)
    assert "jetspecpp_over_dflash" not in ratios, "what was not measured is not judged"
    assert ratios["exposed_on_hits_over_verify"]["value"] == pytest.approx(0.5 / 20)
    assert ratios["host_and_comm_over_plain_ms"]["value"] == pytest.approx(29 / 2 - 29)
    limit = ratios["tok_s_over_tau_by_verify"]
    assert (limit["value"], limit["met"]) == (pytest.approx(40 / (2 / 0.02)), False)
    loaded = ratios["concurrency_16_over_plain"]
    assert (loaded["value"], loaded["met"]) == (pytest.approx(0.8), False)


def result() -> dict[str, Any]:
    table = by_repeat(runs())
    methods = {
        name: {
            **summary(table[name, 1]),
            "concurrency": {str(level): summary(table[name, level]) for level in (1, 16)},
        }
        for name in ("plain", "jetspecpp")
    }
    methods["jetspecpp"]["answers"] = {"compared": 2, "equal": 1, "near_ties": 1, "different": 0}
    return {
        "methods": methods,
        "ratios": all_ratios(table),
        "skipped": {"suffix": "not installed"},
        "settings": {
            **{"prompts": ["a", "b"], "max_tokens": 7, "repeats": 3, "dtype": "bfloat16", "compiled": False},
            "idle_cores": 0.01,
        },
        "provenance": {"command": "c", "commit": "d", "date": "e", "machine": "m", "versions": {"v": "1"}},
    }


def test_report_has_every_method_level_and_ratio(tmp_path: Path) -> None:
    said = result()
    text = markdown(said)
    assert "| jetspecpp | 80.0 (80.0–120.0) | 2.00 | 0.67 |" in text
    assert "## 1 at a time" in text and "## 16 at a time" in text
    assert "| jetspecpp_over_plain | 2.00 | 2.00–3.00 | >= 2 | yes |" in text
    assert "| jetspecpp | 2 | 1 | 1 | 0 |" in text and "`suffix`: not installed" in text
    write_report(said, tmp_path / "out")
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".md", ".png"}


def test_every_method_begins_and_ends_a_turn() -> None:
    orders = [turns(["a", "b", "c", "d"], index) for index in range(8)]
    assert all(sorted(order) == ["a", "b", "c", "d"] for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {"a", "b", "c", "d"}


class ScriptedEngine:
    """Answers every request with the first output at once and two tokens a step, four in all."""

    def __init__(self) -> None:
        self.at_work: dict[str, int] = {}
        self.most = 0

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        assert request_id not in self.at_work
        self.at_work[request_id] = 0
        self.most = max(self.most, len(self.at_work))

    def step(self) -> list[Any]:
        outputs = []
        for name, count in list(self.at_work.items()):
            new = 2 if count else 1
            self.at_work[name] += new
            finished = self.at_work[name] >= 5
            outputs.append(Output(name, [count] * new, finished))
            if finished:
                del self.at_work[name]
        return outputs


class Output:
    def __init__(self, request_id: str, token_ids: list[int], finished: bool) -> None:
        self.request_id, self.finished, self.outputs = request_id, finished, [self]
        self.token_ids = token_ids


class NoPhases:
    def take(self) -> tuple[float, float, tuple[int, ...]]:
        return 0.0, 0.0, (0, 0, 0)


def test_closed_loop_keeps_as_many_in_flight_as_asked() -> None:
    engine = ScriptedEngine()
    said = closed_loop(engine, NoPhases(), [(index, [1]) for index in range(5)], 2, lambda: None)
    run = Run.from_json("plain", 2, 0, 0, said)
    assert engine.most == 2 and not engine.at_work
    assert sorted(request.prompt for request in run.requests) == list(range(5))
    assert all(request.tokens == [0, 1, 1, 3, 3] and request.counts == [1, 2, 2] for request in run.requests)
    assert [step.decode for step in run.steps] == [False, True, True] * 3
    assert measure([run])["tau"] == 2.0


def test_methods_that_differ_in_cores_alone_share_an_engine() -> None:
    choice = Choice(changes={"dflash_2": {"num_speculative_tokens": 3}}, cores=(4, 5))
    made = {name: make_method(name, choice, Path("unpacked"))[0] for name in ("plain", "plain_2", "jetspecpp", "ngram")}
    methods = [method for method in made.values() if method is not None]
    assert [[method.name for method in group] for group in by_engine(methods)] == [
        ["plain", "plain_2"],
        ["jetspecpp"],
        ["ngram"],
    ]
    assert [(method.cores, method.threads) for method in methods] == [((4,), 1), ((4, 5), 2), (None, 1), ((4,), 1)]
    assert methods[2].speculative["draft_cores"] == [5]


def test_an_unknown_method_is_refused_with_the_nearest_name() -> None:
    check_names(Choice(("mine",), {"mine": {"method": "ngram"}}))
    with pytest.raises(ValueError, match=r"unknown method 'dflush' \(did you mean 'dflash'"):
        check_names(Choice(("plain", "dflush")))


def test_a_method_without_its_draft_model_says_so(tmp_path: Path) -> None:
    assert make_method("eagle3", Choice(rivals=tmp_path), tmp_path) == (None, f"no draft model in {tmp_path}/eagle3")
