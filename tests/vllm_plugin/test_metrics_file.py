"""From the worker's counts to Prometheus's text, without an engine."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.scraping import Samples, parse
from vllm_jetspecpp.vllm_plugin import compat, metrics, metrics_file
from vllm_jetspecpp.vllm_plugin.statistics import Statistics

GAMMA = 7
MODEL = "tiny"


def key(name: str, engine: str = "0") -> tuple[str, frozenset[tuple[str, str]]]:
    return f"vllm:jetspecpp_{name}", frozenset({"model_name": MODEL, "engine": engine}.items())


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Counts:
    """What :meth:`Proposer.totals` gives, without an engine."""

    def __init__(self) -> None:
        self.statistics = Statistics(GAMMA)

    def totals(self) -> dict[str, Any]:
        client = {"exposed_seconds": 0.5, "replies": 3, "timeouts": 0, "restarts": 0}
        return self.statistics.totals() | {"client": client, "alive": True}


def shown_by(collector: metrics.StatisticsCollector) -> Samples:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    return parse(generate_latest(registry).decode())


def test_context_without_states_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "INTERVAL", 0.01)
    collector, counts = metrics.StatisticsCollector(), Counts()
    collector.add(str(tmp_path))
    writer = metrics_file.MetricsWriter(str(tmp_path), MODEL, 0, counts.totals)
    counts.statistics.context(100, 30)
    counts.statistics.context(50, 0)
    shown = shown_by(collector)
    assert shown[key("context_positions_total")] == 150
    assert shown[key("missing_context_positions_total")] == 30
    assert counts.statistics.as_dict()["missing_share"] == 0.2
    counts.statistics.reset()
    counts.statistics.context(10, 5)
    assert counts.statistics.as_dict()["missing_share"] == 0.5
    assert shown_by(collector)[key("missing_context_positions_total")] == 35
    writer.close()


def test_the_writer_follows_by_itself_and_keeps_no_engine_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "INTERVAL", 0.01)
    counts = Counts()
    writer = metrics_file.MetricsWriter(str(tmp_path), MODEL, 3, counts.totals)
    (path,) = tmp_path.iterdir()
    assert path.name == "engine-3.json" and json.loads(path.read_text())["counts"]["plain_tokens"] == 0
    counts.statistics.plain_tokens = 5
    wait_for(lambda: json.loads(path.read_text())["counts"]["plain_tokens"] == 5)
    del counts
    gc.collect()
    wait_for(lambda: not writer._thread.is_alive())
    writer.close()
    assert not tmp_path.exists(), "its owner may have been killed"


def test_engines_beside_each_other(tmp_path: Path) -> None:
    """Data-parallel ranks have labels of their own; of two engines with the same labels the later one counts."""
    collector, values = metrics.StatisticsCollector(), {"a/0": 1, "a/1": 2, "b/0": 4}
    kept, writers = [], []
    for name, value in values.items():
        directory, engine = tmp_path / name.partition("/")[0], int(name.partition("/")[2])
        if not directory.exists():
            directory.mkdir()
            collector.add(str(directory))
        counts = Counts()
        counts.statistics.plain_tokens = value
        kept.append(counts)
        writers.append(metrics_file.MetricsWriter(str(directory), MODEL, engine, counts.totals))
    shown = shown_by(collector)
    assert shown[key("plain_tokens_total")] == 4
    assert shown[key("plain_tokens_total", engine="1")] == 2
    for writer in writers:
        writer.close()
    assert shown_by(collector) == {} and list(tmp_path.iterdir()) == []


BAD = {
    "empty": "",
    "cut": '{"model_name": "tiny", "engine": "0", "counts": {"rou',
    "list": "[1, 2]",
    "no counts": '{"model_name": "tiny", "engine": "0"}',
    "not numbers": "NOT_NUMBERS",
    "negative": "NEGATIVE",
    "binary": "BINARY",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_breaks_nothing(tmp_path: Path, kind: str) -> None:
    good, bad = Counts(), Counts()
    content = {"model_name": "other", "engine": "0", "counts": bad.totals()}
    if kind == "not numbers":
        content["counts"]["rounds"], content["counts"]["verified_by_origin"] = "many", {"hit": None}
    if kind == "negative":
        content["counts"]["drafted"] = -1
    path = tmp_path / "engine-0.json"
    path.write_text(json.dumps(content) if BAD[kind].isupper() else BAD[kind])
    if kind == "binary":
        path.write_bytes(b"\x80\x04\x95" + bytes(range(256)))  # as a pickle begins; nothing is ever unpickled
    collector = metrics.StatisticsCollector()
    collector.add(str(tmp_path / "gone"))
    collector.add(str(tmp_path))
    assert shown_by(collector) == {}
    writer = metrics_file.MetricsWriter(str(tmp_path), MODEL, 1, good.totals)
    assert {dict(labels)["model_name"] for _, labels in shown_by(collector)} == {MODEL}
    writer.close()


def test_off_where_vllms_are_off_or_not_as_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = SimpleNamespace(disable_log_stats=True, _api_process_count=1, _api_process_rank=0)
    assert metrics.prepare(arguments) is None
    arguments.disable_log_stats = False
    caplog.set_level(logging.WARNING, "vllm.jetspecpp")
    logging.getLogger("vllm.jetspecpp").addHandler(caplog.handler)
    monkeypatch.setattr(compat, "check", lambda scopes: ["something is missing"])
    try:
        assert metrics.prepare(arguments) is None
    finally:
        logging.getLogger("vllm.jetspecpp").removeHandler(caplog.handler)
    assert "/metrics goes without those of jetspecpp: RuntimeError: something is missing" in caplog.text
