"""Counts on ``/metrics`` and in ``LLM.get_metrics()``, vLLM's and ours, are those of the outputs."""

from __future__ import annotations

import logging
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY, generate_latest

from tests.engines import SwitchableEngine
from tests.scraping import Samples, parse
from tests.vllm_plugin.conftest import MAX_TOKENS, generate, running_engine, worker_of
from vllm_jetspecpp.vllm_plugin import metrics, metrics_file

GAMMA = 7
BLOCK_SIZE = 32
MODEL = "tiny"
LABELS = {"model_name": MODEL, "engine": "0"}
DRAFTED_AHEAD = ("first", "hit", "fallback", "copied")

pytestmark = pytest.mark.parametrize("family", ["llama"], indirect=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path, sequences_file: Path) -> Iterator[Any]:
    with running_engine(
        tiny_model,
        served_model_name=MODEL,
        disable_log_stats=False,
        enable_prefix_caching=True,
        block_size=BLOCK_SIZE,
        speculative_config={
            "method": "jetspecpp",
            "model": str(sequences_file),
            "draft_engine": "tests.engines.SwitchableEngine",
            "transport": "local",
            "num_speculative_tokens": GAMMA,
        },
    ) as llm:
        directory = worker_of(llm).vllm_config.speculative_config.metrics_directory
        yield llm
    assert not os.path.exists(directory)
    assert ours(scrape()) == {}


def scrape() -> Samples:
    return parse(generate_latest(REGISTRY).decode())


def ours(samples: Samples) -> Samples:
    return {key: value for key, value in samples.items() if "jetspecpp" in key[0]}


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"vllm:{name}", frozenset((LABELS | labels).items())


def grown(before: Samples, after: Samples, name: str, **labels: str) -> float:
    return after[key(name, **labels)] - before[key(name, **labels)]


def by_origin(before: Samples, after: Samples, name: str) -> dict[str, float]:
    return {origin: grown(before, after, f"jetspecpp_{name}_total", origin=origin) for origin in DRAFTED_AHEAD}


def accepted_lengths(before: Samples, after: Samples) -> list[float]:
    """Rounds by the number of draft tokens they accepted, from the cumulative buckets."""
    name = "jetspecpp_accepted_tokens_per_round_bucket"
    totals = [grown(before, after, name, le=f"{k}.0") for k in range(GAMMA + 1)]
    assert grown(before, after, name, le="+Inf") == totals[-1]
    return [total - former for total, former in zip(totals, [0.0, *totals], strict=False)]


@pytest.mark.parametrize("mode", ["echo", "wrong", "mixed", "garbage"])
def test_counts_are_those_of_the_outputs(
    llm: Any, plain: dict[str, Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Every generated token is plain, bonus or an accepted draft; vLLM's own counters say the same."""
    monkeypatch.setattr(SwitchableEngine, "mode", mode)
    llm.reset_prefix_cache()
    llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})
    before = scrape()
    assert generate(llm, prompts) == plain["outputs"]
    after = scrape()
    rounds, accepted = by_origin(before, after, "rounds"), by_origin(before, after, "accepted_tokens")
    lengths = accepted_lengths(before, after)
    num_rounds, num_accepted = sum(rounds.values()), sum(accepted.values())
    num_plain = grown(before, after, "jetspecpp_plain_tokens_total")

    assert num_plain + num_rounds + num_accepted == sum(map(len, plain["outputs"]))
    assert grown(before, after, "generation_tokens_total") == sum(map(len, plain["outputs"]))
    assert sum(lengths) == num_rounds == grown(before, after, "jetspecpp_accepted_tokens_per_round_count")
    assert sum(k * n for k, n in enumerate(lengths)) == num_accepted
    assert num_accepted == grown(before, after, "jetspecpp_accepted_tokens_per_round_sum")
    if mode == "wrong":
        assert num_accepted == 0 < num_rounds == lengths[0]
    if mode == "mixed":
        assert rounds["fallback"] == num_rounds and accepted["fallback"] == num_accepted > 0
    assert (grown(before, after, "jetspecpp_invalid_blocks_total") > 0) == (mode == "garbage")

    assert grown(before, after, "spec_decode_num_drafts_total") == num_rounds
    assert grown(before, after, "spec_decode_num_accepted_tokens_total") == num_accepted
    drafted = grown(before, after, "jetspecpp_draft_tokens_total")
    assert grown(before, after, "spec_decode_num_draft_tokens_total") == drafted > 0
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    for position in range(GAMMA):
        assert grown(before, after, per_position, position=str(position)) == sum(lengths[position + 1 :])

    stats = llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})[0]
    assert stats["verified_by_origin"] == rounds and stats["accepted_by_origin"] == accepted
    assert stats["accepted_lengths"] == lengths and stats["plain_tokens"] == num_plain
    assert stats["blocks_by_origin"] == by_origin(before, after, "drafts")
    assert stats["hits"] == grown(before, after, "jetspecpp_hits_total")
    assert stats["misses"] == grown(before, after, "jetspecpp_misses_total")
    assert stats["verify_steps"] == grown(before, after, "jetspecpp_verify_steps_total")
    assert stats["client"]["replies"] == grown(before, after, "jetspecpp_replies_total")
    for seconds, name in (
        (stats["verify_seconds"], "verify"),
        (stats["client"]["exposed_seconds"], "exposed_drafting"),
    ):
        assert math.isclose(grown(before, after, f"jetspecpp_{name}_seconds_total"), seconds, rel_tol=1e-6)
        assert seconds > 0
    assert ours(scrape()) == ours(after), "a reset lowers nothing"


def test_numbers_of_one_request(llm: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """60 tokens, all drafts right: the first comes from the prefill, then seven rounds of 7 + 1 and one of 2 + 1."""
    monkeypatch.setattr(SwitchableEngine, "mode", "echo")
    before = scrape()
    generate(llm, [prompts[1]])
    after = scrape()
    assert MAX_TOKENS == 60
    assert by_origin(before, after, "rounds") == {"first": 1, "hit": 7, "fallback": 0, "copied": 0}
    assert by_origin(before, after, "accepted_tokens") == {"first": 7, "hit": 44, "fallback": 0, "copied": 0}
    assert accepted_lengths(before, after) == [0, 0, 1, 0, 0, 0, 0, 7]
    assert grown(before, after, "jetspecpp_hits_total") == 7 and grown(before, after, "jetspecpp_misses_total") == 0
    assert grown(before, after, "jetspecpp_plain_tokens_total") == 1
    assert after[key("jetspecpp_draft_process_alive")] == 1
    for name in ("timeouts", "draft_process_restarts", "invalid_blocks"):
        assert grown(before, after, f"jetspecpp_{name}_total") == 0


def test_placeholders_of_vllm_are_its_own(
    llm: Any, plain: dict[str, Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM verifies γ placeholders with the one token that a cached prompt leaves, and counts them as a draft."""
    monkeypatch.setattr(SwitchableEngine, "mode", "wrong")
    sequence = prompts[1] + plain["outputs"][1]
    prompt = sequence[: 2 * BLOCK_SIZE + 1]
    generate(llm, [prompt], max_tokens=2)
    before = scrape()
    # The placeholders' token, two rounds of two and one wrong draft tokens, and a last token with no room for a draft.
    assert generate(llm, [prompt], max_tokens=4) == [sequence[len(prompt) : len(prompt) + 4]]
    after = scrape()
    assert sum(by_origin(before, after, "rounds").values()) == 2
    assert grown(before, after, "spec_decode_num_drafts_total") == 3
    assert grown(before, after, "jetspecpp_draft_tokens_total") == 3
    assert grown(before, after, "spec_decode_num_draft_tokens_total") == 3 + GAMMA
    assert grown(before, after, "jetspecpp_plain_tokens_total") == 2


def test_llm_get_metrics_has_them(llm: Any) -> None:
    expected = scrape()
    found = {m.name: m for m in llm.get_metrics() if m.name.startswith("vllm:jetspecpp_")}
    assert set(found) == {metrics.PREFIX + name for name, *_ in metrics.COUNTERS} | {
        metrics.PREFIX + metrics.ACCEPTED,
        metrics.PREFIX + metrics.ALIVE,
    }
    assert found["vllm:jetspecpp_replies"].value == expected[key("jetspecpp_replies_total")] > 0
    assert found["vllm:jetspecpp_accepted_tokens_per_round"].count == sum(
        expected[key("jetspecpp_rounds_total", origin=origin)] for origin in DRAFTED_AHEAD
    )


@pytest.mark.parametrize("num_servers", [1, 2])
def test_route_of_the_server(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_servers: int) -> None:
    """vLLM's own route, as one API server mounts it, and as one of several does."""
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router

    if num_servers > 1:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    app = FastAPI()
    attach_router(app)
    with TestClient(app) as client:
        for path in ("/metrics", "/metrics/"):
            response = client.get(path)
            assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
            assert ours(parse(response.text)) == ours(scrape()) != {}


def test_directory_is_private_and_found_by_the_other_servers(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = worker_of(llm).vllm_config.speculative_config.metrics_directory
    assert stat.S_IMODE(os.stat(own).st_mode) == 0o700
    monkeypatch.delenv(metrics.DIRECTORY_VARIABLE, raising=False)
    assert metrics._find_directory(2, 0) is None
    alone, shared = metrics._find_directory(1, 0), metrics._find_directory(2, -1)
    assert alone and shared and len({own, alone, shared}) == 3
    assert metrics._find_directory(2, 0) == metrics._find_directory(2, 1) == shared
    for directory in (alone, shared):
        metrics_file.remove_directory(directory)
        assert not os.path.exists(directory)


def test_what_fails_is_said_once_and_stops_nothing(
    llm: Any, plain: dict[str, Any], prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The directory goes while the engine runs, as a cleaner of /tmp might do."""
    writer = worker_of(llm).metrics_writer
    directory = writer._path.parent
    caplog.set_level(logging.WARNING, "vllm.jetspecpp")
    logging.getLogger("vllm.jetspecpp").addHandler(caplog.handler)
    away = directory.rename(directory.with_name(directory.name + "-away"))
    try:
        assert generate(llm, prompts[:2]) == plain["outputs"][:2]
        writer.flush()
        assert generate(llm, prompts[:2]) == plain["outputs"][:2]
        writer.flush()
        assert ours(scrape()) == {}
    finally:
        away.rename(directory)
        logging.getLogger("vllm.jetspecpp").removeHandler(caplog.handler)
    assert len({id(r) for r in caplog.records if "not up to date" in r.message}) == 1
    assert key("jetspecpp_replies_total") in scrape(), "back with the directory"
