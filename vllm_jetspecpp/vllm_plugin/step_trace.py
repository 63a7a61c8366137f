"""What the recorder times in vLLM's worker: the target's step, and what goes to the draft process and comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_jetspecpp.config import EngineConfig
from vllm_jetspecpp.draft_process.client import DraftClient
from vllm_jetspecpp.tracing.recorder import Details, Recorder, open_recorder
from vllm_jetspecpp.transport.messages import DraftBatch, VerifiedBatch
from vllm_jetspecpp.vllm_plugin import compat


def recording_name(directory: str | None, engine: int) -> str | None:
    """Where the files of one engine begin: worker's and draft process's names extend it; None: nothing is recorded."""
    if directory is None:
        return None
    # The draft process has a folder of its own to stand in.
    return os.path.abspath(f"{directory}/engine-{engine}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def trace_worker(runner: Any, client: DraftClient, engine: EngineConfig) -> Recorder | None:
    """Record a worker from now on, if ``engine`` says so.

    Args:
        runner: vLLM's model runner, V1 or V2, with our drafter; methods of this one object are wrapped.
    """
    if engine.trace is None:
        return None
    shape = engine.round
    header = {
        "process": "worker",
        "device": str(runner.device),
        "target": Path(engine.target).name,
        "checkpoint": Path(engine.checkpoint).name,
        "dtype": engine.dtype,
        "num_draft_tokens": shape.num_draft_tokens,
        "num_outcomes": shape.num_outcomes,
        "jacobi_passes": shape.jacobi_passes,
        "context_refreshes": shape.context_refreshes,
    }
    recorder = open_recorder(f"{engine.trace}.worker.jsonl", header, runner.device.type)
    if recorder is not None:
        _wrap_steps(recorder, runner)
        recorder.wrap(runner.drafter, "propose", "message")
        recorder.wrap(client, "send", describe=_sent)
        recorder.wrap(client, "receive", describe=_received)
    return recorder


def _wrap_steps(recorder: Recorder, runner: Any) -> None:
    """The worker's three calls of a step, what lies between them, and the target's work inside."""
    v1 = not hasattr(runner, "speculator")
    compat.require("trace" if v1 else "trace_v2")
    recorder.wrap(*(runner, "_model_forward") if v1 else (runner.model, "forward"), name="forward")
    recorder.wrap(runner.model, "compute_logits", "logits")
    recorder.wrap(runner, "_sample" if v1 else "sample", "sample")
    outside = _Outside(recorder)
    recorder.wrap(runner, "execute_model", describe=_scheduled)
    recorder.wrap(runner, "sample_tokens")
    recorder.wrap(runner, "take_draft_token_ids", "take_drafts")
    for name in ("execute_model", "sample_tokens", "take_draft_token_ids"):
        setattr(runner, name, outside.entered(getattr(runner, name)))


class _Outside:
    """Records the time between the worker's calls: vLLM's scheduler, executor and front end."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._left = 0

    def entered(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def method_and_before(*args: Any, **options: Any) -> Any:
            if self._left:
                self._recorder.add("engine", self._left, time.perf_counter_ns())
            try:
                return method(*args, **options)
            finally:
                self._left = time.perf_counter_ns()

        return method_and_before


def _scheduled(result: Any, scheduler_output: Any, *unused: Any) -> Details:
    return {
        "requests": len(scheduler_output.num_scheduled_tokens),
        "tokens": scheduler_output.total_num_scheduled_tokens,
    }


def _sent(sent: bool, batch: VerifiedBatch) -> Details:
    """Every request whose block was verified: slot, draft tokens verified, accepted; and what all states weigh."""
    rounds = [[r.slot, r.num_verified, r.num_accepted] for r in batch.requests if r.num_accepted >= 0]
    size = sum(r.states.numel() * r.states.element_size() for r in batch.requests)
    return {"step": batch.step, "wants_reply": batch.wants_reply, "verified": rounds, "state_bytes": size}


def _received(reply: DraftBatch | None) -> Details:
    """Every block: slot, where it came from, its length."""
    if reply is None:
        return {}
    return {"step": reply.step, "drafts": [[d.slot, d.origin.name.lower(), len(d.tokens)] for d in reply.drafts]}
