"""Recorder, rounds, figures and files, on spans made by hand."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from tests.traces import check_trace_file
from vllm_jetspecpp import cli
from vllm_jetspecpp.tracing import recorder as recorder_module
from vllm_jetspecpp.tracing.chrome import write_trace
from vllm_jetspecpp.tracing.phases import Piece, draft_pieces
from vllm_jetspecpp.tracing.recorder import FLUSH, Recorder, check_directory, open_recorder
from vllm_jetspecpp.tracing.recording import Recording, Span, ordered, read_recording
from vllm_jetspecpp.tracing.report import render
from vllm_jetspecpp.tracing.rounds import Timeline
from vllm_jetspecpp.tracing.summary import summarise

MS = 1_000_000
HEADER = {
    "process": "worker",
    "boot": "b",
    "target": "t",
    "checkpoint": "c",
    "dtype": "float32",
    "num_draft_tokens": 7,
    "num_outcomes": 4,
    "jacobi_passes": 1,
    "context_refreshes": 1,
}


def span(name: str, start: float, end: float, **details: Any) -> Span:
    return Span(name, int(start * MS), int(end * MS), details)


def step(number: int, start: float, wait_end: float, k: int | None, origin: str) -> list[Span]:
    """A step of the worker, in ms: .5 outside, 1 of inputs, 10 of verification, 1.5 of results, then the wait."""
    t = start + 0.5
    verified = [] if k is None else [[0, 7, k]]
    return [
        span("engine", start, t),
        span("execute_model", t, t + 10, requests=1, tokens=8),
        span("forward", t + 1, t + 9),
        span("logits", t + 9, t + 10),
        span("sample_tokens", t + 10, t + 12.5),
        span("sample", t + 10, t + 11),
        span("message", t + 11.5, t + 12.5),
        span("send", t + 12, t + 12.5, step=number, wants_reply=True, verified=verified, state_bytes=8),
        span("take_drafts", t + 12.5, wait_end + 0.25),
        span("receive", t + 12.5, wait_end, step=number, drafts=[[0, origin, 7]]),
    ]


def answer(number: int, asked: float, received: float, replying: float, busy_until: float) -> list[Span]:
    """A round of the draft process: all that it does after its reply is the first foresight."""
    return [
        span("receive", asked, received, step=number),
        span("answer", received, replying, step=number),
        span("send", replying, replying + 0.1, step=number),
        span("work", replying + 0.1, busy_until),
        span("foresee", replying + 0.1, busy_until),
        span("simulate_verification", replying + 0.1, busy_until),
    ]


def recording(aligned: bool = True) -> Recording:
    """A first step without a block; a hit whose drafting took 2 ms too long; a miss that took 5 ms to answer."""
    worker = [
        *step(1, 0, 14, None, "first"),  # receive ends at 14
        *step(2, 14.25, 30, 3, "hit"),  # sends at 26.75, waits from 27.25
        *step(3, 30.25, 50, 0, "fallback"),  # sends at 42.75, waits from 43.25
    ]
    draft = [
        *answer(1, 0, 12.6, 13.8, 29.25),
        *answer(2, 29.25, 29.35, 29.85, 40),
        *answer(3, 40, 43, 49.5, 60),
        span("receive", 60, 61, step=4),
    ]
    return Recording(HEADER, ordered(worker), ordered(draft), aligned)


def test_innermost_call_counts() -> None:
    spans = [
        span("work", 0, 10),
        span("foresee", 1, 4),
        span("simulate_verification", 2, 3),
        span("draft_outcomes", 4, 9),
        span("simulate_verification", 5, 6),
        span("draft_pass", 6, 7),
        span("fallback", 12, 15),
        span("draft_pass", 13, 14),
    ]
    found = [(p.phase, p.start // MS, p.end // MS) for p in draft_pieces(spans)]
    assert found == [
        ("work", 0, 1),
        ("selection", 1, 2),
        ("foresight", 2, 3),
        ("selection", 3, 4),
        ("branches", 4, 5),
        ("refresh", 5, 6),
        ("pass", 6, 7),
        ("branches", 7, 9),
        ("work", 9, 10),
        ("fallback", 12, 13),
        ("fallback", 13, 14),
        ("fallback", 14, 15),
    ]


def test_rounds_of_both_processes() -> None:
    timeline = Timeline.of(recording())
    hit, miss = timeline.rounds
    assert (hit.is_hit, hit.num_committed, hit.duration, hit.exposed) == (True, 4, 16 * MS, 2.75 * MS)
    assert (miss.is_hit, miss.num_committed, miss.duration, miss.exposed) == (False, 1, 20 * MS, 6.75 * MS)
    for r in timeline.rounds:
        assert sum(r.phases.values()) == r.duration and r.phases["other"] == 0
        assert sum((r.causes() or {}).values()) == r.exposed
    assert list((hit.causes() or {}).values()) == [2 * MS, 0.1 * MS, 0.5 * MS, 0.15 * MS]
    assert list((miss.causes() or {}).values()) == [0, 0, 6.25 * MS, 0.5 * MS], "the message came before the wait"
    assert hit.communication() == 0.25 * MS and miss.communication() == 0.75 * MS
    assert hit.phases["forward"] == 8 * MS and hit.phases["engine"] == 0.5 * MS and hit.phases["message"] == 0.5 * MS
    after_hit, after_miss = timeline.draft_rounds()
    assert after_hit.phases == {
        "answer": 0.5 * MS,
        "reply": 0.1 * MS,
        "foresight": 10.05 * MS,
        "idle": 3 * MS,
        "other": 0,
    }
    assert after_miss.was_hit is False and sum(after_miss.phases.values()) == after_miss.duration == 18 * MS


def test_summary() -> None:
    summary = summarise(Timeline.of(recording()), skip=0)
    assert (summary["rounds"], summary["hits"], summary["misses"], summary["tau"]) == (2, 1, 1, 2.5)
    assert summary["tok_s"] == round(5 / 0.036, 2) and summary["limit_tok_s"] == round(5 / 0.020, 2)
    assert summary["share_of_limit"] == round(20 / 36, 4)
    assert summary["worker"]["groups"]["T_verify"] == {"median_ms": 10, "p90_ms": 10, "mean_ms": 10, "share": 0.5556}
    assert sum(entry["share"] for entry in summary["worker"]["groups"].values()) == pytest.approx(1, abs=1e-3)
    assert summary["exposed"]["hits"]["exposed"]["median_ms"] == 2.75
    assert summary["exposed"]["hits"]["share_of_T_verify"] == 0.275
    assert summary["exposed"]["misses"]["waited_for"]["answer"]["median_ms"] == 6.25
    assert summary["draft_round"]["median_ms"] == pytest.approx((10.65 + 17) / 2)
    with pytest.raises(ValueError, match="too few rounds"):
        summarise(Timeline.of(recording()), skip=2)


def test_clocks_that_differ_are_not_compared() -> None:
    summary = summarise(Timeline.of(recording(aligned=False)), skip=0)
    assert summary["T_comm"] is None and summary["draft"] is None and summary["aligned"] is False
    assert summary["exposed"]["hits"]["exposed"]["median_ms"] == 2.75


def test_a_message_without_reply_ends_the_chain_of_rounds() -> None:
    given = recording()
    lost = [s for s in given.worker if not (s.name == "receive" and s.details["step"] == 2)]
    assert Timeline.of(Recording(HEADER, lost, given.draft, True)).rounds == []


@pytest.mark.parametrize("aligned", [True, False])
def test_trace_file(tmp_path: Path, aligned: bool) -> None:
    write_trace(tmp_path / "trace.json", Timeline.of(recording(aligned)), {"command": "tests"})
    events = check_trace_file(tmp_path / "trace.json")
    assert {e["name"] for e in events if e["ph"] == "s"} == ({"outcome", "reply"} if aligned else set())
    assert [e["name"] for e in events if e["ph"] == "X" and e["pid"] == e["tid"] == 1] == ["hit", "miss"]
    with pytest.raises(AssertionError):
        check_trace_file(broken(tmp_path, {"ph": "X", "pid": 1, "tid": 2, "ts": 5e3, "dur": 9e6, "name": "a"}))


def broken(folder: Path, event: dict[str, Any]) -> Path:
    """A file with one event more: the checks can fail."""
    content = json.loads((folder / "trace.json").read_text())
    content["traceEvents"].append(event)
    (folder / "broken.json").write_text(json.dumps(content))
    return folder / "broken.json"


def write_recording(folder: Path, given: Recording, draft_boot: str = "b") -> None:
    files = {
        "e.worker.jsonl": (HEADER, given.worker),
        "e.draft-1.jsonl": ({"process": "draft", "boot": draft_boot}, given.draft),
    }
    for name, (header, spans) in files.items():
        lines = [header, *([s.name, s.start, s.end, s.details] for s in spans)]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_render(tmp_path: Path) -> None:
    write_recording(tmp_path, recording())
    summary = render(tmp_path, tmp_path / "out", {"command": "tests"}, skip=0)
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary
    assert (tmp_path / "out/timeline.png").read_bytes().startswith(b"\x89PNG") and summary["aligned"]
    check_trace_file(tmp_path / "out/trace.json")


def test_render_with_another_hosts_draft_process(tmp_path: Path) -> None:
    write_recording(tmp_path, recording(), draft_boot="another")
    assert render(tmp_path, tmp_path / "out", {}, skip=0)["aligned"] is False
    assert not (tmp_path / "out/timeline.png").exists()


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    write_recording(tmp_path, recording())
    file = tmp_path / "e.draft-1.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-9])
    assert len(read_recording(tmp_path).draft) == len(recording().draft) - 1
    file.write_text(whole.replace('["answer"', '["answer', 1))
    with pytest.raises(ValueError, match=r"e\.draft-1\.jsonl:3 is no span"):
        read_recording(tmp_path)


def test_recorder_writes_what_it_timed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.worker.jsonl", {"process": "worker"})
    double = recorder.timed("double", lambda x: 2 * x, lambda result, x: {"result": result})
    fail = recorder.timed("fail", lambda: 1 / 0)
    silent = recorder.timed("silent", lambda: None, lambda result: None)
    assert double(3) == 6
    silent()
    with pytest.raises(ZeroDivisionError):
        fail()
    recorder.close()
    assert double(4) == 8, "after the end calls go on"
    found = read_recording(tmp_path).worker
    assert [(s.name, s.details) for s in found] == [("double", {"result": 6}), ("fail", {})]
    assert 0 < found[0].start <= found[0].end <= found[1].start


def test_recorder_keeps_little_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_BUFFERED", 8)
    recorder = Recorder(tmp_path / "a.worker.jsonl", {"process": "worker"})
    call = recorder.timed("call", lambda: None)
    for _ in range(100):
        call()
        assert len(recorder._buffer) <= 8
    recorder.close()
    names = [s.name for s in read_recording(tmp_path).worker]
    assert names.count("call") == 100 and names.count(FLUSH) > 5


def test_an_idle_recorder_writes(tmp_path: Path) -> None:
    """A draft process is killed when its server stops."""
    recorder = Recorder(tmp_path / "a.worker.jsonl", {"process": "worker"})
    recorder.timed("call", lambda: None)()
    deadline = time.monotonic() + 60
    while not read_recording(tmp_path).worker and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [s.name for s in read_recording(tmp_path).worker] == ["call"]
    recorder.close()


def test_recorder_stops_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_BYTES", 2000)
    recorder = Recorder(tmp_path / "a.worker.jsonl", {"process": "worker"})
    call = recorder.timed("call", lambda: 5)
    monkeypatch.setattr(recorder_module, "logger", logging.getLogger("tests"))  # vLLM, once loaded, silences its own
    for _ in range(3):
        assert [call() for _ in range(100)] == [5] * 100
        recorder.flush()
    assert caplog.text.count("the step recorder stopped") == 1
    recorder.close()
    assert (tmp_path / "a.worker.jsonl").stat().st_size <= 2000


def test_a_recorder_that_cannot_write_is_none(tmp_path: Path) -> None:
    assert open_recorder(str(tmp_path / "missing/a.worker.jsonl"), {}, "cpu") is None


def test_bad_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, message in (("missing", "existing folder"), ("file", "existing folder")):
        with pytest.raises(ValueError, match=f"trace_directory must be an {message}, got .*{folder}"):
            check_directory(str(tmp_path / folder))
    with pytest.raises(ValueError, match="trace_directory must be a folder that can be written to, got '/proc'"):
        check_directory("/proc")
    check_directory(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "."], "no recording in"),
        (["--rounds", "0"], "--rounds must be an integer from 10"),
        (["--bench", "gsm9k"], "did you mean 'gsm8k'"),
    ],
)
def test_wrong_usage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trace", "--out", str(tmp_path / "out"), *arguments]) == cli.USER_ERROR
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_pieces_are_asked_for_by_time() -> None:
    timeline = Timeline.of(recording())
    assert list(timeline.worker.between(15 * MS, 16 * MS)) == [
        Piece("prepare", int(14.75 * MS), int(15.75 * MS)),
        Piece("forward", int(15.75 * MS), int(23.75 * MS)),
    ]
