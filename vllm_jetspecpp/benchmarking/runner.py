"""All methods in one run: their processes stay alive and idle while one after the other answers the same prompts.

The order changes from group to group, so that whatever else the machine does meets all methods alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_jetspecpp.benchmarking.children import ChildError, ChildProcess, idle_cores
from vllm_jetspecpp.benchmarking.methods import Choice, Method, check_names, is_packed, make_method
from vllm_jetspecpp.benchmarking.records import Run
from vllm_jetspecpp.benchmarking.workload import BENCHES, Workload, load_workload
from vllm_jetspecpp.models.eagle3 import is_head, materialise
from vllm_jetspecpp.models.json_files import read_json
from vllm_jetspecpp.models.rival_checkpoint import unpack_rival
from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.target_parts import load_target_config

Report = Callable[[str], None]
CACHE_BLOCK = 128
"""Positions in a block of vLLM's cache on CPU."""
IDLE_SECONDS = 2.0
WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class BenchConfig:
    """What `bench serve` was asked for."""

    target: Path
    choice: Choice = field(default_factory=Choice)
    per_bench: int = 2
    max_tokens: int = 96
    repeats: int = 3
    concurrency: Sequence[int] = (16,)
    """Levels above 1, which is always measured."""
    loaded: Sequence[str] | None = None
    """Methods measured at these levels; None: all."""
    group_size: int = 3
    """Prompts that one method answers before the next one's turn, at batch 1."""
    dtype: str = "bfloat16"
    compiled: bool = False
    budget: float | None = None
    """Seconds from the start within which a further repeat must end, judged by the longest so far."""
    work: Path = Path(".cache/bench")

    @property
    def num_reports(self) -> int:
        """About how often a run says what it does next: for a progress bar."""
        methods, loaded = len(self.choice.names), len(self.choice.names if self.loaded is None else self.loaded)
        groups = -(-self.per_bench * len(BENCHES) // self.group_size)
        return 2 * methods + self.repeats * (groups * methods + len(self.concurrency) * loaded) + 3


@dataclass
class Outcome:
    """All that was measured."""

    workload: Workload
    methods: dict[str, Method] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Methods without figures, and why."""
    start_seconds: float = 0.0
    idle_cores: float = 0.0
    """Cores kept busy by all processes together while none has work."""
    repeats: int = 0


def turns(names: Sequence[str], index: int) -> list[str]:
    """Order of the methods at their ``index``-th turn: there, back, and then with another one in front.

    >>> [turns("abc", i) for i in range(3)]
    [['a', 'b', 'c'], ['c', 'b', 'a'], ['b', 'c', 'a']]
    """
    start = index // 2 % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if index % 2 else order


def cache_bytes(target_config: Any, positions: int, dtype: str) -> int:
    """Of the target's keys and values of one request; enough for a draft model's of a third as many layers beside."""
    config = LayerConfig.from_hf(target_config)
    layers = target_config.num_hidden_layers * 4 // 3 + 1
    blocks = positions // CACHE_BLOCK + 2
    return 2 * layers * config.num_kv_heads * config.head_dim * getattr(torch, dtype).itemsize * blocks * CACHE_BLOCK


def engine_options(config: BenchConfig, workload: Workload) -> dict[str, Any]:
    """``LLM`` arguments that all methods share."""
    most = max([1, *config.concurrency])
    limit = read_json(config.target / "config.json").get("max_position_embeddings", 2048)
    length = min(limit, -(-(workload.longest + 64) // 128) * 128)
    return {
        "model": str(config.target),
        "skip_tokenizer_init": True,
        "enforce_eager": not config.compiled,
        "dtype": config.dtype,
        "max_model_len": length,
        "max_num_seqs": most,
        "kv_cache_memory_bytes": cache_bytes(load_target_config(config.target), length, config.dtype) * (most + 1),
        # Prompts come again in every repeat: prefill is to be part of each.
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        "seed": 0,
    }


def unpack_rivals(methods: Mapping[str, Method], config: BenchConfig) -> None:
    """Write out draft models that are stored small."""
    for method in methods.values():
        folder = Path(method.speculative.get("model", ""))
        packed = config.choice.rivals / folder.name
        if folder.parent != config.work / "unpacked" or not is_packed(packed):
            continue
        if is_head(packed):
            materialise(packed, config.target, folder)
        else:
            unpack_rival(packed, config.target, load_target_config(config.target), folder)


def by_engine(methods: Iterable[Method]) -> list[list[Method]]:
    """Methods that can share an engine."""
    groups: dict[str, list[Method]] = {}
    for method in methods:
        groups.setdefault(method.engine, []).append(method)
    return list(groups.values())


@contextmanager
def started(outcome: Outcome, config: BenchConfig, say: Report) -> Iterator[dict[str, ChildProcess]]:
    """Method → child, one starting after the other, as some measure when they start; all ended on the way out."""
    options = engine_options(config, outcome.workload)
    children: dict[str, ChildProcess] = {}

    def start(methods: list[Method]) -> None:
        names = [method.name for method in methods]
        say(f"starting {', '.join(names)}")
        child = ChildProcess(methods, options, config.work / f"{names[0]}.log")
        try:
            child.wait_ready()
            children.update(dict.fromkeys(names, child))
        except ChildError as error:
            outcome.skipped.update(dict.fromkeys(names, str(error).splitlines()[0]))
            child.stop()
        except BaseException:
            child.stop()
            raise

    try:
        for methods in by_engine(outcome.methods.values()):
            start(methods)
        yield {name: children[name] for name in outcome.methods if name in children}
    finally:
        say("stopping")
        with ThreadPoolExecutor() as pool:
            list(pool.map(ChildProcess.stop, set(children.values())))


class Schedule:
    """Runs children in turn and keeps what they answer."""

    def __init__(self, config: BenchConfig, outcome: Outcome, children: dict[str, ChildProcess], say: Report) -> None:
        self.config, self.outcome, self.children, self.say = config, outcome, children, say
        self._turn = 0

    def ask(self, name: str, indices: Sequence[int], concurrency: int, max_tokens: int) -> dict[str, Any] | None:
        """One run of one method; None, and the method is out, when it fails."""
        workload = self.outcome.workload
        try:
            return self.children[name].run(
                self.outcome.methods[name],
                prompts=workload.prompts(indices),
                concurrency=concurrency,
                max_tokens=max_tokens,
                stop_token_ids=workload.stop_token_ids,
            )
        except ChildError as error:
            child = self.children[name]
            child.stop()
            for other in [other for other in self.children if self.children[other] is child]:
                self.outcome.skipped[other] = str(error).splitlines()[0]
                del self.children[other]
            return None

    def warm_up(self) -> None:
        """A few tokens of every method at both ends of what follows, not counted."""
        for name in list(self.children):
            self.say(f"warming up {name}")
            for concurrency in sorted({1, *self._levels(name)}):
                if name in self.children:
                    self.ask(name, range(concurrency), concurrency, WARM_UP_TOKENS if concurrency == 1 else 8)

    def _levels(self, name: str) -> Sequence[int]:
        return self.config.concurrency if self.config.loaded is None or name in self.config.loaded else ()

    def repeat(self, repeat: int) -> None:
        """Every method over all prompts at batch 1, then at each level of concurrency."""
        count, size = len(self.outcome.workload.items), self.config.group_size
        groups = [range(first, min(first + size, count)) for first in range(0, count, size)]
        for index, group in enumerate(groups):
            self._group(repeat, index, group, 1)
        for level in self.config.concurrency:
            self._group(repeat, 0, range(max(level, count)), level)

    def _group(self, repeat: int, index: int, indices: Sequence[int], concurrency: int) -> None:
        names = [name for name in self.children if concurrency == 1 or concurrency in self._levels(name)]
        for name in turns(names, self._turn) if names else ():
            self.say(f"repeat {repeat + 1}, {concurrency} at a time, prompts {indices[0]}..{indices[-1]}: {name}")
            said = self.ask(name, indices, concurrency, self.outcome.workload.max_tokens)
            if said is not None:
                self.outcome.runs.append(Run.from_json(name, concurrency, repeat, index, said))
        self._turn += 1


def prepare(config: BenchConfig) -> Outcome:
    """The workload, and every method that can be tried.

    Raises:
        ValueError: an unknown method.
        FileNotFoundError: there is no target.
    """
    check_names(config.choice)
    outcome = Outcome(load_workload(config.target, config.per_bench, config.max_tokens, BENCHES))
    for name in config.choice.names:
        method, why_not = make_method(name, config.choice, config.work / "unpacked")
        if method is None:
            outcome.skipped[name] = why_not
        else:
            outcome.methods[name] = method
    unpack_rivals(outcome.methods, config)
    return outcome


def run_bench(config: BenchConfig, say: Report) -> Outcome:
    """Start, warm up, measure, stop.

    Raises:
        ValueError: an unknown method, or none that runs.
        FileNotFoundError: there is no target.
    """
    began = time.monotonic()
    outcome = prepare(config)
    with started(outcome, config, say) as children:
        outcome.start_seconds = time.monotonic() - began
        schedule = Schedule(config, outcome, children, say)
        schedule.warm_up()
        say("waiting for idle")
        outcome.idle_cores = idle_cores(set(children.values()), IDLE_SECONDS)
        longest = 0.0
        for repeat in range(config.repeats):
            repeat_began = time.monotonic()
            if config.budget is not None and repeat and repeat_began - began + longest > config.budget:
                break
            schedule.repeat(repeat)
            outcome.repeats += 1
            longest = max(longest, time.monotonic() - repeat_began)
    if not outcome.runs:
        raise ValueError(f"no method runs: {outcome.skipped}")
    return outcome
