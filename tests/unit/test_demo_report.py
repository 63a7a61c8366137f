import io
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_jetspecpp.demo.near_ties import Difference
from vllm_jetspecpp.demo.report import Answer, Counters, Row, Setting, Summary, print_report
from vllm_jetspecpp.demo.run import read_prompts, split_cores
from vllm_jetspecpp.draft_process.client import ClientStats
from vllm_jetspecpp.types import Origin
from vllm_jetspecpp.vllm_plugin.statistics import Statistics


def stats(scale: int = 1) -> dict[str, Any]:
    """What a worker reports after 10 rounds, times ``scale``."""
    statistics = Statistics(num_draft_tokens=7)
    statistics.verified_by_origin = {"first": 1 * scale, "hit": 6 * scale, "fallback": 3 * scale, "copied": 0}
    statistics.accepted_by_origin = {"first": 2 * scale, "hit": 15 * scale, "fallback": 3 * scale, "copied": 0}
    statistics.blocks_by_origin = {"first": 1 * scale, "hit": 6 * scale, "fallback": 2 * scale}
    statistics.plain_tokens = scale
    statistics.verify_seconds = 0.4 * scale
    statistics.verify_steps = 10 * scale
    return statistics.as_dict() | {"client": asdict(ClientStats(exposed_seconds=0.01 * scale))}


def test_counters_between_two_readings() -> None:
    counters = Counters.from_stats(stats(3)) - Counters.from_stats(stats(2))
    assert counters.num_rounds == 10
    assert counters.num_committed == 31
    assert counters.tau == 3.0
    assert counters.hit_rate == 0.75
    assert counters.verify_ms == pytest.approx(40.0)
    assert counters.exposed_ms == pytest.approx(1.0)
    assert counters.accepted[Origin.HIT] == 15


def test_no_round_is_no_error() -> None:
    empty = Counters()
    assert (empty.tau, empty.hit_rate, empty.exposed_ms) == (0.0, 0.0, 0.0)


def rows() -> list[Row]:
    counters = Counters.from_stats(stats())
    ours, plain = Answer([1], list(range(30)), 0.5, counters), Answer([1], list(range(30)), 1.0)
    return [
        Row("same", ours, plain, None),
        Row("tied", ours, plain, Difference(7, 1.5)),
        Row("wrong", ours, plain, Difference(9, 12.0)),
        Row("ended", ours, plain, Difference(9, math.inf)),
    ]


def test_a_real_difference_is_neither_identical_nor_a_near_tie() -> None:
    summary = Summary.of(rows())
    assert (summary.prompts, summary.identical, summary.near_ties) == (4, 1, 1)
    assert summary.as_dict() == {
        "prompts": 4,
        "identical": 1,
        "near_ties": 1,
        "tau": 3.0,
        "hit_rate": 0.75,
        "jetspecpp_tok_s": 60.0,
        "vllm_tok_s": 30.0,
        "speedup": 2.0,
        "exposed_ms": 1.0,
        "verify_ms": 40.0,
    }
    json.loads(json.dumps(summary.as_dict(), allow_nan=False))


def test_the_report_says_what_a_reader_must_know() -> None:
    output = io.StringIO()
    print_report(Console(file=output, width=140), rows(), Setting((0,), (1,)))
    text = output.getvalue()
    for part in ("identical", "near tie at 7 (1.5 steps)", "DIFFERENT at 9 (12.0 steps)", "60.0", "2.00", "3.00"):
        assert part in text
    assert "target on core 0 in both runs; the draft process of JetSpec++ on core 1" in " ".join(text.split())


@pytest.mark.parametrize(
    ("available", "target", "draft"),
    [({0, 1}, (0,), (1,)), ({3}, (3,), ()), ({0, 1, 2, 3}, (0, 1, 2), (3,))],
)
def test_the_draft_process_gets_the_last_core(
    available: set[int], target: tuple[int, ...], draft: tuple[int, ...]
) -> None:
    assert split_cores(available, first_of=lambda core: core) == Setting(target, draft)


def test_siblings_count_as_one_core() -> None:
    assert split_cores({0, 1, 2, 3}, first_of=lambda core: core // 2) == Setting((1,), (3,))


def test_prompts_are_the_first_turns(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "turns": ["one", "two"]}\n{"id": "b", "turns": ["three"]}\n')
    assert [(p.id, p.text) for p in read_prompts(file, None)] == [("a", "one"), ("b", "three")]
    assert len(read_prompts(file, 1)) == 1


@pytest.mark.parametrize("content", ["", "{}\n", "no json\n", '{"id": "a", "turns": []}\n', "[]\n"])
def test_unreadable_prompts_are_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"prompts\.jsonl"):
        read_prompts(file, None)


def test_the_shipped_prompts_can_be_read() -> None:
    shipped = Path(__file__).parents[2] / "examples/prompts.jsonl"
    assert len(read_prompts(shipped, None)) == 9
