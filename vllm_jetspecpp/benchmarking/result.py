"""The one JSON object of `bench serve`."""

from __future__ import annotations

from typing import Any

from vllm_jetspecpp.benchmarking.answers import compare_answers
from vllm_jetspecpp.benchmarking.measures import by_repeat, summary
from vllm_jetspecpp.benchmarking.ratios import all_ratios
from vllm_jetspecpp.benchmarking.runner import BenchConfig, Outcome
from vllm_jetspecpp.evaluation.provenance import provenance


def settings(config: BenchConfig, outcome: Outcome) -> dict[str, Any]:
    """What was run, without paths of this machine."""
    return {
        "prompts": [item.id for item in outcome.workload.items],
        "max_tokens": config.max_tokens,
        "repeats": outcome.repeats,
        "dtype": config.dtype,
        "compiled": config.compiled,
        "cores": list(config.choice.cores),
        "start_seconds": round(outcome.start_seconds, 1),
        "idle_cores": round(outcome.idle_cores, 3),
    }


def speculative_options(options: dict[str, Any]) -> dict[str, Any]:
    """Of a method, with the model's name alone instead of where it lies."""
    return options | ({"model": options["model"].rstrip("/").rpartition("/")[2]} if "model" in options else {})


def build_result(config: BenchConfig, outcome: Outcome) -> dict[str, Any]:
    """Figures of every method at batch 1, all levels under ``concurrency``, ratios, and where they come from."""
    table = by_repeat(outcome.runs)
    answers = compare_answers(config.target, outcome.workload, outcome.runs)
    methods: dict[str, Any] = {}
    for name, method in outcome.methods.items():
        levels = {str(level): summary(table[key]) for key in sorted(table) if key[0] == name for level in [key[1]]}
        if "1" in levels:
            methods[name] = {
                **levels["1"],
                "concurrency": levels,
                "answers": answers.get(name),
                "threads": method.threads,
                "speculative_config": speculative_options(dict(method.speculative)),
            }
    return {
        "methods": methods,
        "ratios": all_ratios(table),
        "skipped": outcome.skipped,
        "settings": settings(config, outcome),
        "provenance": provenance(),
    }
