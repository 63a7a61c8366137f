"""Whether every method answers as plain vLLM does: lossless, but for near ties of the target's logits in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_jetspecpp.benchmarking.methods import PLAIN
from vllm_jetspecpp.benchmarking.records import Run
from vllm_jetspecpp.benchmarking.workload import Workload
from vllm_jetspecpp.demo.near_ties import Pair, judge


def first_answers(runs: Sequence[Run]) -> dict[str, dict[int, list[int]]]:
    """Method → prompt → tokens, of the first repeat at batch 1."""
    found: dict[str, dict[int, list[int]]] = {}
    for run in runs:
        if run.concurrency == 1 and run.repeat == 0:
            found.setdefault(run.method, {}).update({r.prompt: r.tokens for r in run.requests})
    return found


def compare_answers(target: Path, workload: Workload, runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Per method how many answers equal plain's, part at a near tie (``demo/near_ties.py``), or differ otherwise."""
    answers = first_answers(runs)
    plain = answers.pop(PLAIN, None)
    if plain is None:
        return {}
    keys = [(method, prompt) for method, own in answers.items() for prompt in own if prompt in plain]
    pairs = [Pair(workload.items[p].token_ids, plain[p], answers[m][p]) for m, p in keys]
    counts = {method: {"compared": 0, "equal": 0, "near_ties": 0, "different": 0} for method in answers}
    for (method, _), difference in zip(keys, judge(target, pairs), strict=True):
        kind = "equal" if difference is None else "near_ties" if difference.is_near_tie else "different"
        counts[method]["compared"] += 1
        counts[method][kind] += 1
    return {method: dict(count) for method, count in counts.items()}
