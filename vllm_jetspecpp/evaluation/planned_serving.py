"""``jetspecpp plan``: vLLM itself in this process, measured, planned for, and held to the plan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_jetspecpp.config import AUTO
from vllm_jetspecpp.evaluation.datasets import benchmark
from vllm_jetspecpp.planning.acceptance import Acceptance
from vllm_jetspecpp.planning.costs import Costs
from vllm_jetspecpp.planning.plan import Options, Plan, Prediction
from vllm_jetspecpp.types import NO_DRAFTING, RoundChoice

BENCHMARKS = ("gsm8k", "humaneval", "mtbench")
MAX_MODEL_LEN = 2048
WARM_UP = 2
"""Answers a request before those that count."""
REFERENCE = RoundChoice(7, 4, 1, 1)
"""The method's usual shape, for comparison."""


@dataclass(frozen=True)
class PlanConfig:
    """What is planned for."""

    target: str
    checkpoint: str
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    num_draft_tokens: int | None = None
    """Longest γ; None: all that the checkpoint was made for."""
    max_tokens: int = 64
    """Of an answer when the plan is held to."""
    prompts: int = 3
    """Answers for each request of a batch."""
    profile: str | None = None
    """Times that were saved before."""
    copy_drafts: bool = False
    """Whether tokens copied from the requests themselves are drafts too."""


@contextmanager
def planned_engine(config: PlanConfig) -> Iterator[Any]:
    """vLLM's ``LLM`` in this process with the planner on, gone afterwards."""
    # Before vLLM is imported: one process and one thread of the target's, the draft process on another core.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) - 1, 1)))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    speculative = {
        "method": "jetspecpp",
        "model": config.checkpoint,
        "num_speculative_tokens": config.num_draft_tokens,
        "num_outcomes": AUTO,
        "jacobi_passes": AUTO,
        "context_refreshes": AUTO,
        "draft_slots": max(config.batches),
        "plan_profile": config.profile,
        "copy_drafts": config.copy_drafts,
    }
    llm = LLM(
        config.target,
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(config.batches),
        kv_cache_memory_bytes=1 << 30,
        speculative_config=speculative,
        seed=0,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def read_plan(llm: Any) -> Plan:
    """What the engine's planner starts from, without what it has learnt.

    Raises:
        ValueError: the engine could not measure; its log says why.
    """
    said = llm.collective_rpc("jetspecpp_plan")[0]
    if not said:
        raise ValueError("the engine measured nothing to plan with; its log says why")
    options = Options(**{name: tuple(map(_frozen, values)) for name, values in said["options"].items()})
    acceptance = Acceptance.from_dict(said["acceptance"], "acceptance")
    return Plan(Costs.from_dict(_plain(said["costs"]), "costs"), acceptance, options)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def shortlist(rows: Sequence[Prediction], count: int = 10) -> list[Prediction]:
    """For people: no drafting, and of each B, J and R the best γ, fastest first."""
    plain, *candidates = rows
    best: dict[tuple[int, ...], Prediction] = {}
    for row in candidates:
        assert row.choice is not None
        key = row.choice[1:4]
        if key not in best or row.throughput > best[key].throughput:
            best[key] = row
    ordered = sorted(best.values(), key=lambda row: -row.throughput)[:count]
    return [plain, *ordered]


def as_dict(row: Prediction) -> dict[str, Any]:
    """A row of the table, in milliseconds and tokens a second."""
    return {
        "choice": str(row.choice or NO_DRAFTING),
        "shape": None if row.choice is None else list(row.choice),
        "verify_ms": round(1e3 * row.verify, 3),
        "draft_ms": round(1e3 * row.draft, 3),
        "hidden": row.hidden,
        "fallback_ms": round(1e3 * row.fallback, 3),
        "step_ms": round(1e3 * row.seconds, 3),
        "hit_rate": round(row.hit_rate, 4),
        "tau": round(row.tau, 4),
        "tok_s": round(row.throughput, 2),
    }


def hold_to(llm: Any, plan: Plan, batch: int, choices: Sequence[RoundChoice | None], config: PlanConfig) -> list[Any]:
    """Serve ``batch`` requests at a time under each of ``choices`` and compare with what was promised.

    Only steps in which all requests decode count, as in Eq. 4. The first answers do not count, so that running averages
    know this text and this choice.
    """
    from vllm import SamplingParams

    count = -(-batch * (config.prompts + WARM_UP) // len(BENCHMARKS))
    prompts = [prompt.turns[0] for name in BENCHMARKS for prompt in benchmark(name, count)]
    prompts = [prompts[(index % 3) * count + index // 3] for index in range(batch * (config.prompts + WARM_UP))]
    params = SamplingParams(temperature=0.0, max_tokens=config.max_tokens, ignore_eos=True)
    found = []
    for choice in choices:
        llm.collective_rpc("jetspecpp_pin", args=(None if choice is None else list(choice),))
        before: dict[str, float] = {}
        for start in range(0, len(prompts), batch):
            if start == batch * WARM_UP:
                before = _served(llm, batch)
            chats = [[{"role": "user", "content": text}] for text in prompts[start : start + batch]]
            llm.chat(chats, params, use_tqdm=False)
        after = _served(llm, batch)
        llm.collective_rpc("jetspecpp_pin", args=([],))
        counts = {name: after[name] - before.get(name, 0) for name in after}
        predicted = plan.plain(batch) if choice is None else plan.predict(choice, batch)
        seconds = counts["seconds"]
        measured, learnt = counts["tokens"] / seconds, counts["promised_tokens"] / seconds
        found.append(
            {
                "batch": batch,
                "choice": str(choice or NO_DRAFTING),
                "steps": counts["steps"],
                "predicted_tok_s": round(predicted.throughput, 2),
                "predicted_while_serving_tok_s": round(learnt, 2),
                "measured_tok_s": round(measured, 2),
                "error": round(predicted.throughput / measured - 1, 4),
                "error_while_serving": round(learnt / measured - 1, 4),
                "predicted_tau": round(predicted.tau, 3),
                "measured_tau": round(counts["tokens"] / counts["steps"] / batch, 3),
                "predicted_step_ms": round(1e3 * predicted.seconds, 2),
                "measured_step_ms": round(1e3 * seconds / counts["steps"], 2),
                "step_error": round(predicted.seconds * counts["steps"] / seconds - 1, 4),
            }
        )
    return found


def _served(llm: Any, batch: int) -> dict[str, float]:
    return llm.collective_rpc("jetspecpp_plan")[0]["state"]["served"].get(str(batch), {})


def save_profile(costs: Costs, path: Path, made_by: dict[str, Any]) -> None:
    """Write times for option ``plan_profile``."""
    Costs(**{**vars(costs), "made_by": {**costs.made_by, **made_by}}).save(path)
