"""vLLM with a draft process that things happen to, as the fault tests watch it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.draft_process_tools import cluster_processes, ended, wait_for
from tests.faulty_engine import order, orders_file
from tests.vllm_plugin.conftest import MAX_TOKENS, running_engine, worker_of
from vllm_jetspecpp.draft_process import supervisor

REPLY_TIMEOUT = 2.0
LONGEST_STEP = 2 * REPLY_TIMEOUT + 3.0
"""Seconds: a step may wait for room and for the answer, and other programs use the machine too."""
RESTART_TIMEOUT = 120.0
FIRST_DELAY, MAX_DELAY = 0.1, 0.4
GCS_TIMEOUT = 8
"""Seconds after which Ray's processes give up on their GCS; Ray's own default is a minute."""
NO_ANSWER = "no answer to step"


class Warnings(logging.Handler):
    """What is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Served:
    """vLLM with a draft process, and what can be seen of it from outside."""

    def __init__(
        self, llm: Any, directory: str, sequences: Path, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        self.llm, self.directory, self.sequences = llm, directory, sequences
        self.prompts, self.expected = prompts, expected
        self.warnings = Warnings()
        self.longest_step = 0.0
        self._count = 0

    @property
    def client(self) -> Any:
        return worker_of(self.llm).draft_client

    def processes(self, mark: str) -> list[int]:
        return [pid for pid, line in cluster_processes(self.directory).items() if mark in line]

    def draft_pid(self) -> int:
        (pid,) = self.processes("ray::DraftActor")
        return pid

    def stats(self) -> dict[str, Any]:
        return self.llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})[0]

    def answer(self, at_step: int = -1, act: Callable[[], object] = lambda: None, abort: int = 0) -> None:
        """Answer all prompts at once, as plain vLLM does.

        ``act`` comes after a given number of steps, and then the last ``abort`` requests are broken off.
        """
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
        engine, first = self.llm.llm_engine, self._count
        for prompt in self.prompts:
            engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
            self._count += 1
        outputs: dict[int, list[int]] = {}
        steps = 0
        while engine.has_unfinished_requests():
            began = time.monotonic()
            for output in engine.step():
                if output.finished:
                    outputs[int(output.request_id) - first] = list(output.outputs[0].token_ids)
            self.longest_step = max(self.longest_step, time.monotonic() - began)
            steps += 1
            if steps == at_step:
                act()
                engine.abort_request([str(self._count - 1 - i) for i in range(abort)])
        kept = len(self.prompts) - abort
        assert [outputs[i] for i in range(kept)] == self.expected[:kept]

    def assert_drafts(self) -> None:
        """Every request has drafts, and all are right, as this engine's are as long as nothing happens."""
        self.stats()
        self.answer()
        stats = self.stats()
        assert stats["accepted"] == stats["drafted"] > 0 and not stats["client"]["restarts"]
        assert stats["blocks_by_origin"]["first"] >= len(self.prompts)

    def wait_replaced(self, pid: int) -> None:
        """Until another draft process is ready; the former one is gone."""
        generation = self.client.generation
        wait_for(lambda: self.client.ready() and self.client.generation > generation, RESTART_TIMEOUT, "the restart")
        assert ended(pid) and self.draft_pid() != pid


@contextlib.contextmanager
def served(
    model: Path, sequences: Path, prompts: list[list[int]], expected: list[list[int]], directory: str, **options: Any
) -> Iterator[Served]:
    """Chunked prefill (64 tokens a step) of eight requests; waits for little."""
    method = {
        "method": "jetspecpp",
        "model": str(sequences),
        "draft_engine": "tests.faulty_engine.FaultyEngine",
        "num_speculative_tokens": 3,  # many steps, so that faults have time to happen
        "reply_timeout": REPLY_TIMEOUT,
        "start_timeout": RESTART_TIMEOUT,
    }
    loggers = [logging.getLogger(name) for name in ("vllm_jetspecpp", "vllm.jetspecpp")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "FIRST_DELAY", FIRST_DELAY)
        patch.setattr(supervisor, "MAX_DELAY", MAX_DELAY)
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", str(GCS_TIMEOUT))
        with running_engine(model, max_num_batched_tokens=64, speculative_config=method | options) as llm:
            everything = Served(llm, directory, sequences, prompts, expected)
            for logger in loggers:
                logger.setLevel(logging.WARNING)
                logger.addHandler(everything.warnings)
            yield everything
            for logger in loggers:
                logger.removeHandler(everything.warnings)


@dataclass(frozen=True)
class Fault:
    """How it is brought about: by an order to the engine, or after some steps from outside."""

    name: str
    reason: str
    """What the warning says."""
    fault: str = ""
    when: str = "decode"
    seconds: float = 0.0
    outside: Callable[[Served, pytest.MonkeyPatch], None] | None = None
    at_step: int = 10


def suffer(served: Served, fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Everything a fault must not and must do."""
    pid = served.draft_pid()
    served.warnings.lines.clear()
    served.longest_step = 0.0
    served.stats()
    if fault.fault:
        order(served.sequences, fault.fault, fault.when, seconds=fault.seconds)
    elif fault.outside is not None and fault.at_step == 0:
        fault.outside(served, patch)
    outside = fault.outside
    served.answer(fault.at_step, lambda: outside and outside(served, patch))
    assert not orders_file(served.sequences).exists(), "the fault did not happen"
    assert served.longest_step < LONGEST_STEP
    timeouts = served.stats()["client"]["timeouts"]
    served.wait_replaced(pid)
    assert len(served.warnings.lines) == 1, served.warnings.lines
    assert fault.reason in served.warnings.lines[0] and timeouts == (fault.reason == NO_ANSWER)
    served.assert_drafts()
