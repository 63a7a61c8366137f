"""The one JSON object of `jetspecpp bench`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_jetspecpp.benchmarking.measures import summary
from vllm_jetspecpp.benchmarking.ratios import Table, all_ratios
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


def made_by() -> dict[str, Any]:
    """Provenance with vLLM's version, paths of this machine left out of the command."""
    import vllm

    said = provenance()
    words = [Path(word).name if word.startswith("/") else word for word in said["command"].split()]
    return said | {"command": " ".join(words), "versions": said["versions"] | {"vllm": vllm.__version__}}


def method_figures(outcome: Outcome, table: Table) -> dict[str, dict[str, Any]]:
    """Figures at the lowest concurrency of every method that has some, and of all under ``concurrency``."""
    methods: dict[str, Any] = {}
    for name, method in outcome.methods.items():
        levels = {str(level): summary(table[of, level]) for of, level in sorted(table) if of == name}
        if levels:
            methods[name] = {
                **next(iter(levels.values())),
                "concurrency": levels,
                "threads": method.threads,
                "speculative_config": speculative_options(dict(method.speculative)),
            }
    return methods


def build_result(
    config: BenchConfig, outcome: Outcome, table: Table, answers: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Figures of every method, ratios, and where they come from.

    Args:
        table: figures of each repeat by method and concurrency.
        answers: by method, how its answers compare with plain vLLM's.
    """
    methods = method_figures(outcome, table)
    for name, counts in answers.items():
        methods[name]["answers"] = dict(counts)
    return {
        "methods": methods,
        "ratios": all_ratios(table),
        "skipped": outcome.skipped,
        "settings": settings(config, outcome),
        "provenance": made_by(),
    }
