"""What the recorder times in the draft process: its loop, the engine's steps, and the networks' calls in a round."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_jetspecpp.config import EngineConfig
from vllm_jetspecpp.tracing.recorder import Details, Recorder, open_recorder
from vllm_jetspecpp.transport.messages import DraftBatch, VerifiedBatch

ENGINE_STEPS = ("_lookup", "_commit", "_fallback", "_foresee_and_draft", "_store")
ROUND_STEPS = ("foresee", "draft_outcomes", "simulate_verification", "draft_pass")


def trace_draft_process(engine: Any, end: Any, config: EngineConfig, pid: int) -> Recorder | None:
    """Record a draft process from now on, if its config says so.

    Args:
        engine: what answers; of engines other than ours only ``answer`` and ``work`` are known.
        end: its end of the transport.
        pid: of this process; several may follow each other.
    """
    if config.trace is None:
        return None
    header = {"process": "draft", "device": config.device}
    recorder = open_recorder(f"{config.trace}.draft-{pid}.jsonl", header, config.device)
    if recorder is None:
        return None
    recorder.wrap(end, "receive", describe=_received)
    recorder.wrap(end, "send", describe=_sent)
    recorder.wrap(engine, "answer", describe=_sent)
    recorder.wrap(engine, "work")
    from vllm_jetspecpp.runtime.draft_engine import DraftEngine

    if isinstance(engine, DraftEngine):
        _wrap_round(recorder, engine)
    return recorder


def _wrap_round(recorder: Recorder, engine: Any) -> None:
    from vllm_jetspecpp.foresight import foresight

    for name in ENGINE_STEPS:
        recorder.wrap(engine, name)
    for name in ROUND_STEPS:
        plain = getattr(foresight, name)
        setattr(foresight, name, _unless_compiling(plain, recorder.timed(name, plain)))


def _unless_compiling(plain: Callable[..., Any], timed: Callable[..., Any]) -> Callable[..., Any]:
    """A clock inside a compiled graph would break it in two."""
    import torch

    @functools.wraps(plain)
    def choose(*args: Any, **options: Any) -> Any:
        return (plain if torch.compiler.is_compiling() else timed)(*args, **options)

    return choose


def _received(batch: VerifiedBatch | None, *unused: Any) -> Details | None:
    """None while no message comes: an idle process records nothing."""
    return None if batch is None else {"step": batch.step}


def _sent(result: DraftBatch | None, batch: DraftBatch | VerifiedBatch) -> Details:
    return {"step": batch.step}
