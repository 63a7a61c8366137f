"""The step recorder in real vLLM with a draft process of its own, and the files that it leads to."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_round import make_tiny
from tests.tiny_text_model import make_tiny_text_model
from tests.traces import check_trace_file
from tests.vllm_plugin.conftest import generate, local_drafts, running_engine, worker_of
from vllm_jetspecpp import cli
from vllm_jetspecpp.config import EngineConfig, RoundConfig
from vllm_jetspecpp.foresight import foresight
from vllm_jetspecpp.tracing.draft_hooks import ENGINE_STEPS, ROUND_STEPS, trace_draft_process
from vllm_jetspecpp.tracing.phases import DRAFT_PHASES, PRED, VERIFY, WORKER_PHASES
from vllm_jetspecpp.tracing.recording import read_recording
from vllm_jetspecpp.tracing.report import render
from vllm_jetspecpp.tracing.rounds import Timeline
from vllm_jetspecpp.tracing.summary import group_time

LLAMA = pytest.mark.parametrize("family", ["llama"], indirect=True)
RUNNER_STEPS = ("execute_model", "sample_tokens", "take_draft_token_ids", "_model_forward", "_sample")


@dataclass
class Traced:
    folder: Path
    stats: dict[str, Any]
    timeline: Timeline


@pytest.fixture(scope="module")
def traced(
    tiny_model: Path, plain: dict[str, Any], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Traced:
    """Eight requests together and one alone, traced; the output is plain vLLM's."""
    folder = tmp_path_factory.mktemp("traced")
    checkpoint = make_tiny_checkpoint(tiny_model, tmp_path_factory.mktemp("checkpoint"), copy_adapter=True)
    options = {
        "method": "jetspecpp",
        "model": str(checkpoint.folder),
        "trace_directory": str(folder),
        "reply_timeout": 60.0,
        "start_timeout": 400.0,
    }
    with running_engine(tiny_model, speculative_config=options) as llm:
        wrapped = {name for name in RUNNER_STEPS if name in vars(worker_of(llm).model_runner)}
        assert generate(llm, prompts) == plain["outputs"]
        assert generate(llm, prompts[1:2]) == plain["outputs"][1:2]
        stats = llm.collective_rpc("jetspecpp_stats")[0]
    assert wrapped == set(RUNNER_STEPS) and stats["accepted"] > 0
    return Traced(folder, stats, Timeline.of(read_recording(folder)))


@LLAMA
def test_phases_add_up_to_the_round(traced: Traced) -> None:
    rounds = traced.timeline.rounds
    assert len(rounds) > 20
    for r in rounds:
        assert sum(r.phases.values()) == r.duration and r.phases["other"] >= 0
        assert r.exposed == r.phases["wait"] and group_time(r.phases, WORKER_PHASES, VERIFY) > 0
        assert sum((r.causes() or {"all": r.exposed}).values()) == r.exposed
    assert statistics.median(r.phases["other"] / r.duration for r in rounds) < 0.05
    known = {phase.name for phase in WORKER_PHASES} | {"other"}
    assert set().union(*(r.phases for r in rounds)) <= known


@LLAMA
def test_the_draft_processs_phases_add_up(traced: Traced) -> None:
    made = list(traced.timeline.draft_rounds())
    assert len(made) > 20
    for r in made:
        assert sum(r.phases.values()) == r.duration and r.phases["other"] >= 0
        assert group_time(r.phases, DRAFT_PHASES, PRED) > 0 and r.phases["pass"] > 0
        assert ("fallback" in r.phases) >= (not r.was_hit)
    assert statistics.median(r.phases["other"] / r.duration for r in made) < 0.05
    assert set().union(*(r.phases for r in made)) <= {phase.name for phase in DRAFT_PHASES} | {"other"}


@LLAMA
def test_the_recording_agrees_with_the_workers_own_counts(traced: Traced) -> None:
    spans = traced.timeline.recording.worker
    replies = [s for s in spans if s.name == "receive" and s.details]
    origins = Counter(origin for s in replies for _, origin, _ in s.details["drafts"])
    assert origins == Counter(traced.stats["blocks_by_origin"])
    assert len(replies) == traced.stats["client"]["replies"]
    waited, counted = sum(s.end - s.start for s in replies) / 1e9, traced.stats["client"]["exposed_seconds"]
    assert counted <= waited <= 1.2 * counted + 0.1


@LLAMA
def test_files(traced: Traced, tmp_path: Path) -> None:
    summary = render(traced.folder, tmp_path, {"command": "tests"})
    events = check_trace_file(tmp_path / "trace.json")
    assert sum(e["ph"] == "s" for e in events) > 20
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert summary["exposed"]["hits"]["rounds"] + summary["exposed"]["misses"]["rounds"] <= summary["rounds"]
    assert 0 < summary["share_of_limit"] <= 1 and summary["setting"]["num_outcomes"] == 4


@LLAMA
def test_off_wraps_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with running_engine(tiny_model, speculative_config=local_drafts(tiny_model, tmp_path, None)) as llm:
        worker = worker_of(llm)
        runner, client = worker.model_runner, worker.draft_client
        assert worker.recorder is None
        assert not {*RUNNER_STEPS, "propose_draft_token_ids"} & set(vars(runner))
        assert not {"propose", "collect"} & set(vars(runner.drafter))
        assert not {"send", "receive"} & set(vars(client))
        assert not {"forward", "compute_logits"} & set(vars(runner.model))


@pytest.mark.parametrize("on", [False, True])
def test_the_draft_process_is_wrapped_only_when_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    functions = {name: getattr(foresight, name) for name in ROUND_STEPS}
    for name, function in functions.items():
        monkeypatch.setattr(foresight, name, function)  # so that they are themselves again after the test
    tiny = make_tiny("llama", tmp_path)
    engine = tiny.engine(RoundConfig(7))
    config = EngineConfig("t", "c", RoundConfig(7), 1, 256, trace=str(tmp_path / "e") if on else None)
    recorder = trace_draft_process(engine, End(), config, 1)
    assert [getattr(foresight, name) is not function for name, function in functions.items()] == [on] * len(functions)
    assert {*ENGINE_STEPS, "answer", "work"} & set(vars(engine)) == ({*ENGINE_STEPS, "answer", "work"} if on else set())
    if recorder is not None:
        recorder.close()


class End:
    """Of a transport, and never used."""

    def receive(self, timeout: float) -> None:
        """No message comes."""

    def send(self, batch: Any) -> None:
        """Nobody reads."""


@LLAMA
def test_bad_options_are_refused_at_start(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    options = local_drafts(tiny_model, tmp_path / "local", None)
    for given, message in (
        ({"trace_directory": str(tmp_path / "missing"), "transport": "shared_memory"}, "must be an existing folder"),
        ({"trace_directory": str(tmp_path)}, "a draft process of its own, which transport 'local' has not"),
        ({"trace_directry": str(tmp_path)}, "did you mean 'trace_directory'"),
    ):
        args = EngineArgs(model=str(tiny_model), skip_tokenizer_init=True, speculative_config=options | given)
        with pytest.raises(ValueError, match=message) as raised:
            args.create_engine_config()
        assert "\n" not in str(raised.value)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``jetspecpp trace`` from the prompt to the files."""
    model = make_tiny_text_model(tmp_path / "model", max_position_embeddings=2048)
    checkpoint = make_tiny_checkpoint(model, tmp_path / "checkpoint", taps=(0, 1), draft_vocab_size=512)
    out = tmp_path / "out"
    arguments = ["--target", str(model), "--checkpoint", str(checkpoint.folder), "--out", str(out), "--json", "-"]
    shape = ["--num-outcomes", "2", "--jacobi", "1", "--refresh", "0", "--options", '{"start_timeout": 400}']
    assert cli.main(["trace", *arguments, *shape, "--rounds", "20", "--prompt", "Say it.", "--max-tokens", "40"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["rounds"] >= 8 and summary["setting"]["context_refreshes"] == 0
    assert summary["made_by"]["commit"] and "T_comm" in summary
    assert {"trace.json", "timeline.png", "summary.json"} <= {path.name for path in out.iterdir()}
