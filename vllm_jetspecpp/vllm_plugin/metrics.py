"""The API server's side of ``/metrics``: a Prometheus collector that shows what the workers' files hold.

The names begin with ``vllm:jetspecpp_`` and have vLLM's own labels ``model_name`` and ``engine``. Rates and shares are
left to queries. Whatever fails here leaves our metrics out of ``/metrics``, and nothing else.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import tempfile
from collections.abc import Iterable
from typing import Any

from prometheus_client import REGISTRY, Metric, multiprocess
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from vllm_jetspecpp.vllm_plugin import compat, metrics_file

logger = logging.getLogger("vllm.jetspecpp")

PREFIX = "vllm:jetspecpp_"
DIRECTORY_VARIABLE = "JETSPECPP_METRICS_DIRECTORY"
"""Set for the API servers that the process which configures the engine starts when there are several."""
LABELS = ("model_name", "engine")
COUNTERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("rounds", ("verified_by_origin",), "Draft blocks verified, by where the block came from."),
    ("accepted_tokens", ("accepted_by_origin",), "Draft tokens accepted, by where the block came from."),
    ("draft_tokens", ("drafted",), "Draft tokens verified."),
    ("plain_tokens", ("plain_tokens",), "Tokens generated without a draft block under verification."),
    ("drafts", ("blocks_by_origin",), "Draft blocks received, by where the block came from."),
    ("hits", ("blocks_by_origin", "hit"), "Draft blocks that had been drafted ahead for the outcome that came true."),
    ("misses", ("blocks_by_origin", "fallback"), "Draft blocks drafted after an outcome that nobody foresaw."),
    ("invalid_blocks", ("invalid_blocks",), "Draft blocks cut or dropped because they were not valid."),
    ("exposed_drafting_seconds", ("client", "exposed_seconds"), "Time that steps waited for drafts."),
    ("replies", ("client", "replies"), "Answers of the draft process, one for each step that wanted drafts."),
    ("timeouts", ("client", "timeouts"), "Answers of the draft process that did not come in time."),
    ("draft_process_restarts", ("client", "restarts"), "Restarts of the draft process."),
    ("verify_seconds", ("verify_seconds",), "Time from handing over drafts to their verified outcome."),
    ("verify_steps", ("verify_steps",), "Steps that verified any draft block."),
    ("context_positions", ("context_positions",), "Context positions that draft blocks were drafted from."),
    ("missing_context_positions", ("missing_positions",), "Those of them whose hidden states were never seen."),
)
"""Name, where the worker's counts have it, and help; an entry with parts by origin gets the label ``origin``."""
ACCEPTED = "accepted_tokens_per_round"
ALIVE = "draft_process_alive"

Sample = tuple[tuple[str, ...], float]


class StatisticsCollector(Collector):
    """What the files of some directories hold at the time of a scrape.

    Of two engines with the same labels the one configured last is shown, as vLLM shows it.
    """

    def __init__(self) -> None:
        self._directories: list[str] = []

    def add(self, directory: str) -> None:
        """Show the files of one more directory, for as long as it is there."""
        self._directories = [d for d in self._directories if os.path.isdir(d)] + [directory]

    def describe(self) -> Iterable[Metric]:
        """All families, empty: the registry wants their names."""
        return _Families().all

    def collect(self) -> Iterable[Metric]:
        """All families with every engine's samples; none where no engine has written yet."""
        try:
            return self._collect()
        except Exception:
            logger.exception("metrics of jetspecpp cannot be shown")
            return []

    def _collect(self) -> list[Metric]:
        metrics_file.flush_here()
        engines: dict[tuple[str, ...], dict[str, Any]] = {}
        for directory in self._directories:
            for content in metrics_file.read_files(directory):
                labels = tuple(str(content.get(name, "")) for name in LABELS)
                engines[labels] = content
        families = _Families()
        added = [families.add(labels, content.get("counts")) for labels, content in engines.items()]
        return families.all if any(added) else []


class _Families:
    """The metric families of one scrape."""

    def __init__(self) -> None:
        self._counters: list[Metric] = []
        for name, path, help_text in COUNTERS:
            labels = (*LABELS, "origin") if path[-1].endswith("by_origin") else LABELS
            self._counters.append(CounterMetricFamily(PREFIX + name, help_text, labels=labels))
        self._accepted = HistogramMetricFamily(
            PREFIX + ACCEPTED, "Draft tokens accepted in a verification, the bonus token not included.", labels=LABELS
        )
        self._alive = GaugeMetricFamily(
            PREFIX + ALIVE, "1 while a draft process runs, 0 while requests go on without drafts.", labels=LABELS
        )

    @property
    def all(self) -> list[Metric]:
        return [*self._counters, self._accepted, self._alive]

    def add(self, labels: tuple[str, ...], counts: Any) -> bool:
        """Add one engine's samples, all or, if any is not what it should be, none."""
        try:
            counters = [_samples(labels, counts, path) for _, path, _ in COUNTERS]
            buckets = _buckets([_number(n) for n in counts["accepted_lengths"]])
            accepted, alive = _number(counts["accepted"]), _number(counts["alive"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return False
        for family, samples in zip(self._counters, counters, strict=True):
            for values, number in samples:
                family.add_metric(values, number)  # type: ignore[attr-defined]
        self._accepted.add_metric(labels, buckets, accepted)
        self._alive.add_metric(labels, alive)
        return True


def _samples(labels: tuple[str, ...], counts: Any, path: tuple[str, ...]) -> list[Sample]:
    found = functools.reduce(lambda value, key: value[key], path, counts)
    if isinstance(found, dict):
        return [((*labels, str(origin)), _number(value)) for origin, value in found.items()]
    return [(labels, _number(found))]


def _number(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"not a count: {value!r}")
    return number


def _buckets(rounds: list[float]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them: ``rounds[k]`` rounds accepted k draft tokens."""
    totals = [sum(rounds[: k + 1]) for k in range(len(rounds))]
    return [(f"{k:.1f}", total) for k, total in enumerate(totals)] + [("+Inf", totals[-1] if totals else 0.0)]


_collector = StatisticsCollector()


def prepare(engine_args: Any) -> str | None:
    """Have this process show an engine's counts, and say where its workers are to write them.

    Called for every engine that is configured, in each process that serves it. None where vLLM's own statistics are
    off, or when it fails: then ``/metrics`` lacks ours.
    """
    if engine_args.disable_log_stats:
        return None
    try:
        if problems := compat.check(["metrics"]):
            raise RuntimeError(problems[0])
        directory = _find_directory(engine_args._api_process_count, engine_args._api_process_rank)
        if directory is not None:
            _show(directory)
        return directory
    except Exception as error:
        logger.warning("/metrics goes without those of jetspecpp: %s: %s", type(error).__name__, error)
        return None


def _find_directory(num_servers: int, server_rank: int) -> str | None:
    """The directory of the process that started this API server, else a new one."""
    if num_servers > 1 and server_rank >= 0:
        return os.environ.get(DIRECTORY_VARIABLE)
    directory = tempfile.mkdtemp(prefix="jetspecpp-metrics-")  # of mode 0700
    atexit.register(_remove_at_exit, directory, os.getpid())
    if num_servers > 1:
        os.environ[DIRECTORY_VARIABLE] = directory
    return directory


def _remove_at_exit(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a process forked off it
        metrics_file.remove_directory(directory)


def _show(directory: str) -> None:
    _collector.add(directory)
    if _collector not in REGISTRY._collector_to_names:
        REGISTRY.register(_collector)
    _join_multiprocess_mode()


def _join_multiprocess_mode() -> None:
    """With several API servers ``/metrics`` shows what files of vLLM's metrics hold, through a registry made for each
    scrape, and nothing of the process's own registry: let our families follow those of the files.
    """
    original = multiprocess.MultiProcessCollector.collect
    if getattr(original, "__globals__", None) is globals():
        return

    @functools.wraps(original)
    def collect(self: Any) -> Iterable[Metric]:
        return [*original(self), *_collector.collect()]

    multiprocess.MultiProcessCollector.collect = collect  # type: ignore[method-assign]
