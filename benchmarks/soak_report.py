"""What a soak showed: its checks, its figures and its plot."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soak_load import Reference, Tally
from soak_memory import JUDGED, Recorder

from vllm_jetspecpp.demo.near_ties import Pair, judge

WARNING = "Requests go on without drafts"
SHOWN = 20
"""Failures and differences listed in full."""


@dataclass
class Kill:
    """One SIGKILL of the draft process; times in seconds from the start."""

    at: float
    pid: int
    acceptance_length: float
    """From the start to here."""
    rounds: int
    """Verified blocks, likewise; later those when the next process was seen."""
    new_pid: int | None = None
    resumed_at: float | None = None
    """When a block of the next process had been verified."""


@dataclass(frozen=True)
class Exit:
    """How the server ended."""

    status: int
    seconds: float
    processes_left: list[str]
    directories_left: list[str]

    @property
    def is_clean(self) -> bool:
        """Status 0 and nothing left."""
        return not (self.status or self.processes_left or self.directories_left)


def judge_differences(target: Path, references: Sequence[Reference], tally: Tally, exact: bool) -> dict[str, Any]:
    """How many greedy answers were the reference's, near ties of bfloat16 apart; ``exact`` allows none of those."""
    times = Counter(tally.differences)
    pairs = [Pair(references[i].prompt_ids, references[i].token_ids[: len(t)], t) for i, t in times]
    verdicts = [None] * len(pairs) if exact else judge(target, pairs)
    ties, wrong = 0, []
    for (index, tokens), pair, verdict in zip(times, pairs, verdicts, strict=True):
        if verdict is not None and verdict.is_near_tie:
            ties += times[index, tokens]
        else:
            where = f"position {verdict.position}, margin {verdict.margin:.1f}" if verdict else "not equal"
            wrong.append(f"{references[index].text[:60]!r}: {where}: {list(pair.right)[:60]}")
    return {"compared": tally.compared, "equal": tally.compared - len(tally.differences), "near_ties": ties} | {
        "wrong": len(wrong),
        "wrong_answers": wrong[:SHOWN],
    }


def requests_of(tally: Tally) -> dict[str, Any]:
    """Counts and times."""
    whole = sorted(seconds for _, seconds, kind in tally.finished if kind != "aborted") or [0.0]
    return {
        "sent": sum(tally.sent.values()),
        "by_kind": dict(tally.sent),
        "aborted": tally.aborted,
        "failed": len(tally.failures),
        "failures": tally.failures[:SHOWN],
        "tokens": tally.tokens,
        "seconds": {"median": statistics.median(whole), "max": whole[-1]},
    }


def checks_of(result: dict[str, Any]) -> dict[str, bool]:
    """What a soak must show; it passed when all are true."""
    counts, planned = result["draft_process"], len(result["kills"])
    return {
        "requests_answered": result["requests"]["sent"] > 0 and not result["requests"]["failed"],
        "greedy_answers_equal": result["greedy"]["compared"] > 0 and not result["greedy"]["wrong"],
        "killed_as_often_as_asked": planned == result["settings"]["kills"],
        "drafting_resumed": all(kill["resumed_at"] is not None for kill in result["kills"]),
        # Whatever else ended a draft process was silence for longer than the time limit.
        "no_unexplained_restart": counts["restarts"] == planned + counts["timeouts"],
        "one_warning_per_restart": counts["warnings"] == counts["restarts"],
        "memory_flat": all(process["flat"] is not False for process in result["memory"]),
        "clean_exit": result["exit"]["clean"],
    }


def report(
    settings: dict[str, Any],
    requests: dict[str, Any],
    greedy: dict[str, Any],
    kills: Sequence[Kill],
    recorder: Recorder,
    stats: dict[str, Any],
    log: str,
    end: Exit,
) -> dict[str, Any]:
    """The result, as plain values."""
    result: dict[str, Any] = {
        "settings": settings,
        "requests": requests,
        "greedy": greedy,
        "kills": [asdict(kill) for kill in kills],
        "draft_process": {
            "restarts": stats["client"]["restarts"],
            "timeouts": stats["client"]["timeouts"],
            "warnings": log.count(WARNING),
            "warning_lines": [line[-300:] for line in log.splitlines() if WARNING in line][:SHOWN],
            "rounds": stats["rounds"],
            "acceptance_length": stats["acceptance_length"],
            "hit_rate": stats["hit_rate"],
            "invalid_blocks": stats["invalid_blocks"],
        },
        "memory": recorder.judged(),
        "exit": asdict(end) | {"clean": end.is_clean},
    }
    result["checks"] = checks_of(result)
    result["passed"] = all(result["checks"].values())
    return result


def plot(path: Path, recorder: Recorder, tally: Tally, kills: Sequence[Kill], interval: float) -> None:
    """Memory of the processes above, requests a minute below."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (memory, rate) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6), height_ratios=(2, 1))
    roles = [role for role in JUDGED if any(series.role == role for series in recorder.series.values())]
    for series in recorder.series.values():
        if series.role in JUDGED:
            minutes = [seconds / 60 for seconds in series.seconds]
            colour = f"C{roles.index(series.role)}"
            first = series is next(s for s in recorder.series.values() if s.role == series.role)
            memory.plot(minutes, series.own, color=colour, label=series.role if first else None)
    for kill in kills:
        for axes in (memory, rate):
            axes.axvline(kill.at / 60, color="grey", linestyle=":")
    memory.set_ylabel("memory (MiB, without program files)")
    memory.set_ylim(bottom=0)
    memory.legend()
    width = max(interval, 10.0)
    counts = Counter(int(at / width) for at, _, _ in tally.finished)
    spans = range(max(counts, default=0) + 1)
    rate.step([(i + 0.5) * width / 60 for i in spans], [counts[i] * 60 / width for i in spans], where="mid")
    rate.set_ylabel("requests a minute")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("minutes; dotted: the draft process is killed")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
