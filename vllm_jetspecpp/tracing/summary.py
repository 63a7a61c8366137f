"""Figures of a recording: where a round's time goes, what stays exposed, and how far from the limit it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_jetspecpp.tracing.phases import (
    DRAFT_PHASES,
    IDLE,
    OTHER,
    VERIFY,
    WORKER_PHASES,
    Phase,
)
from vllm_jetspecpp.tracing.rounds import CAUSES, Round, Timeline

WARM_UP_ROUNDS = 8
"""Left out at the beginning: caches are cold, memory is fetched."""


def spread(nanoseconds: Iterable[float]) -> dict[str, float] | None:
    """Median, 90th percentile and mean in ms; None of nothing."""
    values = np.fromiter(nanoseconds, float) / 1e6
    if not len(values):
        return None
    return {
        "median_ms": round(float(np.median(values)), 4),
        "p90_ms": round(float(np.percentile(values, 90)), 4),
        "mean_ms": round(float(values.mean()), 4),
    }


def summarise(timeline: Timeline, skip: int = WARM_UP_ROUNDS) -> dict[str, Any]:
    """All figures, as plain values.

    Args:
        skip: first rounds that are left out.

    Raises:
        ValueError: no round is left.
    """
    rounds = timeline.rounds[skip:]
    if not rounds:
        raise ValueError(f"too few rounds to summarise: {len(timeline.rounds)} recorded, the first {skip} are left out")
    header = timeline.recording.header
    names = ("target", "checkpoint", "dtype", "num_draft_tokens", "num_outcomes", "jacobi_passes", "context_refreshes")
    return {
        "setting": {name: header.get(name) for name in names},
        "aligned": timeline.recording.aligned,
        **_speed(rounds),
        "worker": _table([r.phases for r in rounds], [r.duration for r in rounds], WORKER_PHASES),
        "exposed": _exposed(rounds),
        "T_comm": spread(time for r in rounds if (time := r.communication()) is not None),
        **_draft(timeline, rounds),
    }


def _speed(rounds: Sequence[Round]) -> dict[str, Any]:
    """Tokens a second of these rounds, and what it would be if a round were verification alone."""
    origins = [origin for r in rounds for origin in r.origins]
    hits, misses = origins.count("hit"), origins.count("fallback")
    blocks = sum(len(r.verified) for r in rounds)
    tokens, seconds = sum(r.num_committed for r in rounds), sum(r.duration for r in rounds) / 1e9
    verifying = sum(group_time(r.phases, WORKER_PHASES, VERIFY) for r in rounds) / 1e9
    return {
        "rounds": len(rounds),
        "hits": hits,
        "misses": misses,
        "hit_rate": round(hits / max(hits + misses, 1), 4),
        "tau": round(tokens / max(blocks, 1), 4),
        "tok_s": round(tokens / seconds, 2),
        "limit_tok_s": round(tokens / verifying, 2),
        "share_of_limit": round(verifying / seconds, 4),
        "round": spread(r.duration for r in rounds),
    }


def group_time(phases: Mapping[str, int], table: Sequence[Phase], group: str) -> int:
    """Nanoseconds of all phases of one group."""
    return sum(phases.get(phase.name, 0) for phase in table if phase.group == group)


def _table(sums: Sequence[Mapping[str, int]], durations: Sequence[int], table: Sequence[Phase]) -> dict[str, Any]:
    """Every group and phase: its spread over the rounds, and its share of all their time."""
    whole = sum(durations)

    def entry(time: Callable[[Mapping[str, int]], int]) -> dict[str, Any]:
        times = [time(phases) for phases in sums]
        return {**(spread(times) or {}), "share": round(sum(times) / max(whole, 1), 4)}

    groups = dict.fromkeys(phase.group for phase in table)
    return {
        "groups": {group: entry(lambda p, g=group: group_time(p, table, g)) for group in groups}  # type: ignore[misc]
        | {OTHER: entry(lambda p: p[OTHER])},
        "phases": {phase.name: entry(lambda p, n=phase.name: p.get(n, 0)) for phase in table},  # type: ignore[misc]
    }


def _exposed(rounds: Sequence[Round]) -> dict[str, Any]:
    """The worker's waits, of hits, copied blocks and misses apart, each with what it waited for."""
    kinds = {
        "hits": [r for r in rounds if r.is_hit],
        "copied": [r for r in rounds if r.is_copied],
        "misses": [r for r in rounds if r.origins and not (r.is_hit or r.is_copied)],
    }
    found: dict[str, Any] = {}
    for kind, some in kinds.items():
        verify = [group_time(r.phases, WORKER_PHASES, VERIFY) for r in some]
        causes = [c for r in some if (c := r.causes()) is not None]
        found[kind] = {
            "rounds": len(some),
            "exposed": spread(r.exposed for r in some),
            "share_of_T_verify": round(sum(r.exposed for r in some) / max(sum(verify), 1), 4),
            "waited_for": {cause: spread(c[cause] for c in causes) for cause in CAUSES},
        }
    return found


def _draft(timeline: Timeline, rounds: Sequence[Round]) -> dict[str, Any]:
    """The draft process's rounds, and what Eq. 3 asks of them: drafting takes no longer than a verification."""
    steps = {r.step for r in rounds}
    made = [d for d in timeline.draft_rounds() if d.step in steps]
    if not made:
        return {"draft": None, "draft_round": None}
    busy = [d.duration - group_time(d.phases, DRAFT_PHASES, IDLE) for d in made]
    return {
        "draft": _table([d.phases for d in made], [d.duration for d in made], DRAFT_PHASES),
        "draft_round": spread(busy),
    }


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """The tables that a person reads."""
    setting, limit = summary["setting"], summary["share_of_limit"]
    console.print(
        f"{setting['target']}, γ = {setting['num_draft_tokens']}, B = {setting['num_outcomes']}, "
        f"J{setting['jacobi_passes']}-R{setting['context_refreshes']}, {setting['dtype']}: {summary['rounds']} rounds"
    )
    console.print(
        f"τ {summary['tau']:.2f}, hit rate {summary['hit_rate']:.2f}, {summary['tok_s']:.1f} tokens/s in the rounds; "
        f"τ / T_verify would be {summary['limit_tok_s']:.1f}: {limit:.0%} of the limit are reached"
    )
    console.print(_phase_table("worker, per round", summary["worker"], WORKER_PHASES))
    if summary["draft"] is not None:
        console.print(_phase_table("draft process, from outcome to outcome", summary["draft"], DRAFT_PHASES))
    console.print(_exposed_table(summary["exposed"]))
    if not summary["aligned"]:
        console.print("The two processes had different clocks: what the worker waited for and T_comm are not known.")


def _phase_table(title: str, figures: Mapping[str, Any], phases: Sequence[Phase]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("phase")
    for column in ("median, ms", "p90, ms", "share"):
        table.add_column(column, justify="right")
    for group, entry in figures["groups"].items():
        inside = [phase for phase in phases if phase.group == group]
        table.add_row(group, *_cells(entry), style="bold")
        for phase in inside if len(inside) > 1 else ():
            table.add_row(f"  {phase.text}", *_cells(figures["phases"][phase.name]))
    return table


def _cells(entry: Mapping[str, float]) -> tuple[str, str, str]:
    return f"{entry['median_ms']:.2f}", f"{entry['p90_ms']:.2f}", f"{entry['share']:.1%}"


def _exposed_table(exposed: Mapping[str, Any]) -> Table:
    table = Table(title="exposed: the worker waits for the reply", title_justify="left")
    table.add_column("rounds")
    for column in ("number", "median, ms", "p90, ms", "of T_verify", *(f"{cause}, ms" for cause in CAUSES)):
        table.add_column(column, justify="right")
    for kind, entry in exposed.items():
        if entry["exposed"] is None:
            continue
        times = [f"{entry['exposed'][name]:.2f}" for name in ("median_ms", "p90_ms")]
        causes = [f"{cause['median_ms']:.2f}" if cause else "?" for cause in entry["waited_for"].values()]
        table.add_row(kind, str(entry["rounds"]), *times, f"{entry['share_of_T_verify']:.1%}", *causes)
    return table
