"""Memory of a server's processes over time, and whether it is flat."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

INTERVAL = 10.0
"""Seconds between two samples."""
WARM_UP_SHARE = 0.25
"""Of a process's samples, the first ones: caches, rings and allocators fill up."""
RELATIVE_LIMIT, ABSOLUTE_LIMIT = 0.03, 16.0
"""Growth over all samples after the warm-up that still counts as flat: this share of the median plus so many MiB."""
MIN_SECONDS, MIN_SAMPLES = 600.0, 8
"""After the warm-up; a process that was watched for less is not judged. Measured: in the first minutes the worker of
plain vLLM grows by a third under this load."""
ROLES = {
    "VLLM::EngineCore": "engine core",
    "VLLM::Worker": "worker",
    "ray::DraftActor": "draft process",
    "vllm_jetspecpp.draft_process.keeper": "keeper",
    "/ray/": "Ray's own",
    "ray::": "Ray's own",
}
JUDGED = ("server", "engine core", "worker", "draft process")


def role_of(command: str, root: bool) -> str | None:
    """What a process of the server's tree does; None for helpers such as a resource tracker."""
    if root:
        return "server"
    return next((role for mark, role in ROLES.items() if mark in command), None)


def tree(root: int) -> dict[int, str]:
    """Process ids with roles of ``root`` and everything below it."""
    found = {}
    try:
        process = psutil.Process(root)
        processes = [process, *process.children(recursive=True)]
    except psutil.Error:
        return {}
    for process in processes:
        try:
            role = role_of(" ".join(process.cmdline()), process.pid == root)
        except psutil.Error:
            continue
        if role is not None:
            found[process.pid] = role
    return found


def memory_of(pid: int) -> dict[str, float] | None:
    """MiB, shared pages by halves, thirds, ...; None when the process is gone.

    ``own`` leaves out pages of files: program code counts more or less as other programs that use it come and go.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    if "Pss" not in kilobytes:
        return None
    own = kilobytes["Pss_Anon"] + kilobytes["Pss_Shmem"]
    return {"own": own / 1024, "pss": kilobytes["Pss"] / 1024, "rss": kilobytes["Rss"] / 1024}


@dataclass
class Series:
    """Samples of one process."""

    role: str
    pid: int
    seconds: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    pss: list[float] = field(default_factory=list)
    rss: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians, growth and verdict; ``flat`` is None where there is too little to judge."""
        skip = round(len(self.seconds) * WARM_UP_SHARE)
        seconds, own = self.seconds[skip:], self.own[skip:]
        result: dict[str, Any] = {
            "role": self.role,
            "pid": self.pid,
            "samples": len(self.seconds),
            "seconds": [self.seconds[0], self.seconds[-1]],
            "median_mib": statistics.median(self.own),
            "max_mib": max(self.own),
            "max_pss_mib": max(self.pss),
            "max_rss_mib": max(self.rss),
            "flat": None,
        }
        if len(seconds) >= MIN_SAMPLES and seconds[-1] - seconds[0] >= MIN_SECONDS:
            slope = statistics.linear_regression(seconds, own).slope
            growth, limit = slope * (seconds[-1] - seconds[0]), RELATIVE_LIMIT * statistics.median(own) + ABSOLUTE_LIMIT
            result |= {"slope_mib_per_hour": slope * 3600, "growth_mib": growth, "limit_mib": limit}
            result["flat"] = growth <= limit
        return result


class Recorder:
    """Series of all processes of a server, one for each process id."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.series: dict[int, Series] = {}

    def sample(self, seconds: float) -> None:
        """Look at every process now."""
        for pid, role in tree(self._root).items():
            memory = memory_of(pid)
            if memory is None:
                continue
            series = self.series.setdefault(pid, Series(role, pid))
            series.role = role  # Ray gives a process its title when it has its actor
            series.seconds.append(seconds)
            for name, value in memory.items():
                getattr(series, name).append(value)

    def draft_process(self) -> int | None:
        """Id of the draft process that runs now."""
        return next((pid for pid, role in tree(self._root).items() if role == "draft process"), None)

    def judged(self) -> list[dict[str, Any]]:
        """Summaries of the processes that must stay flat."""
        return [s.summary() for s in self.series.values() if s.role in JUDGED and s.seconds]
