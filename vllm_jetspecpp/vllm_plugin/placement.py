"""Where the draft process runs: another device than the target's, or other cores of the same CPU."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from vllm_jetspecpp.config import check_range
from vllm_jetspecpp.vllm_plugin import environment

T = TypeVar("T")
logger = logging.getLogger("vllm.jetspecpp")
BIND = "VLLM_CPU_OMP_THREADS_BIND"
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"


def num_engines(parallel_config: Any) -> int:
    """Data parallel engines on this host; each has a draft process of its own."""
    return max(parallel_config.data_parallel_size_local, 1)


def num_workers(parallel_config: Any) -> int:
    """Workers of the target on this host."""
    return parallel_config.local_world_size * num_engines(parallel_config)


def share_out(items: Sequence[T], parts: int) -> list[list[T]]:
    """``items`` in ``parts`` pieces of consecutive ones; where they are too few, several pieces hold the same one."""
    if len(items) < parts:
        return [[items[part % len(items)]] for part in range(parts)]
    return [list(items[part * len(items) // parts : (part + 1) * len(items) // parts]) for part in range(parts)]


def resolve_draft_device(option: str, parallel_config: Any) -> str:
    """``cpu`` or ``cuda:N`` for option ``draft_device``; "auto" is the CPU beside a CPU target, else the next free GPU.

    With several engines it is one GPU for each, with commas between: ``cuda:2,cuda:3``.

    Raises:
        ValueError: there is no such device, the target runs on it, or they are not as many as engines.
    """
    from vllm.platforms import current_platform

    if not (option in ("auto", "cpu") or re.fullmatch(r"cuda:\d+(,cuda:\d+)*", option)):
        raise ValueError(f"draft_device must be 'auto', 'cpu' or 'cuda:N', got {option!r}")
    if option == "cpu" or (option == "auto" and current_platform.is_cpu()):
        return "cpu"
    count = current_platform.device_count() if current_platform.is_cuda_alike() else 0
    targets, wanted = _target_gpus(parallel_config) if count else set(), num_engines(parallel_config)
    if option == "auto":
        free = sorted(set(range(count)) - targets)[:wanted]
        if len(free) < wanted:
            found = "no GPU" if not free else f"{len(free)} GPU(s) for {wanted} engines"
            raise ValueError(
                f"draft_device 'auto' found {found} beside the target's {sorted(targets)}; 'cpu' is possible"
            )
        return ",".join(f"cuda:{index}" for index in free)
    indices = [int(device.removeprefix("cuda:")) for device in option.split(",")]
    if max(indices) >= count:
        raise ValueError(f"draft_device {option!r} does not exist: {count} CUDA device(s) found")
    if targets & set(indices):
        raise ValueError(f"draft_device {option!r} is the target's own, which uses {sorted(targets)} of {count} GPU(s)")
    if len(set(indices)) != wanted or len(indices) != wanted:
        raise ValueError(f"draft_device must name {wanted} GPU(s), one for each data parallel engine, got {option!r}")
    return option


def resolve_remote_device(option: str, num_gpus: float) -> str:
    """``cpu`` or ``cuda`` for option ``draft_device`` of a draft process that Ray may put on another node.

    Args:
        num_gpus: what ``draft_resources`` ask for; Ray hands that out.

    Raises:
        ValueError: a GPU by number, or one that Ray is not asked for.
    """
    if option == "auto":
        return "cuda" if num_gpus else "cpu"
    if option not in ("cpu", "cuda"):
        raise ValueError(
            f"draft_device must be 'auto', 'cpu' or 'cuda' for a draft process on any node (Ray chooses the GPU), got "
            f"{option!r}"
        )
    if option == "cuda" and not num_gpus:
        raise ValueError("draft_device 'cuda' on any node needs draft_resources with num_gpus")
    return option


def check_remote_cores(option: int | list[int] | None, device: str) -> None:
    """Check option ``draft_cores`` as far as it can be done without the node.

    Raises:
        ValueError: a number of cores (which ones is not known here), no distinct ids, or a GPU that needs none.
    """
    if option is None:
        return
    if device != "cpu":
        raise ValueError(f"draft_cores is for draft_device 'cpu', got draft_device {device!r}")
    if isinstance(option, int) or not option or len(set(option)) != len(option):
        raise ValueError(
            f"draft_cores must be distinct core ids of the node that draft_resources choose, with transport 'tcp', got "
            f"{option}"
        )


def _target_gpus(parallel_config: Any) -> set[int]:
    assigned = getattr(parallel_config, "assigned_physical_gpu_ids", None)
    return set(assigned or range(num_workers(parallel_config)))


def resolve_draft_cores(option: int | list[int] | None, engines: int = 1, workers: int = 1) -> tuple[int, ...]:
    """Core ids for option ``draft_cores``: the given ones, or the last ones that the target was not bound to.

    Args:
        option: as a number, of each engine's draft process; as a list, of all together, to be shared out.
        engines: data parallel engines on this host.
        workers: the target's, of all engines.

    Raises:
        ValueError: the cores do not exist, or none would be left to the target.
    """
    usable, bound = _usable_cores(), _cores_bound_by_user()
    if isinstance(option, list):
        cores = _check_cores(option)
        target = bound or set(usable)
        if target <= set(cores) and len(os.sched_getaffinity(0)) > 1:
            raise ValueError(
                f"draft_cores {option} take all the target's cores, {sorted(target)}: leave it at least one"
            )
        return cores
    count = 1 if option is None else option
    limit = max(1, (len(usable) - workers) // engines)
    check_range("draft_cores", count, 1, limit, f" ({workers} core(s) are the target's)")
    wanted = count * engines
    free = [core for core in usable if core not in bound]
    if bound and len(free) < wanted:
        logger.warning("%s leaves no %d core(s) to the draft process: it shares the target's", BIND, wanted)
        free = usable
    return tuple(free[-wanted:])


def _check_cores(cores: list[int]) -> tuple[int, ...]:
    allowed = os.sched_getaffinity(0)
    if not cores or len(set(cores)) != len(cores) or not set(cores) <= allowed:
        raise ValueError(f"draft_cores must be distinct cores of {sorted(allowed)}, got {cores}")
    return tuple(sorted(cores))


def keep_target_off(draft_cores: tuple[int, ...], workers: int) -> None:
    """Have vLLM bind the target's threads to the other cores, unless the user bound them.

    By itself vLLM gives each worker a NUMA node of its own and stops where there are too few of them.
    """
    if environment.given_by_user(BIND) is not None or environment.given_by_user(RESERVED) is not None:
        return
    nodes = _usable_nodes()
    left = [[core for core in node if core not in draft_cores] for node in nodes]
    left = [node for node in left if node]
    if not left and workers == 1:
        return
    if sum(map(len, left)) < workers:
        logger.warning(
            "%d core(s) are too few for %d worker(s) of the target and draft processes on %s: they share cores, which "
            "costs speed",
            sum(map(len, nodes)),
            workers,
            list(draft_cores),
        )
        left = nodes
    parts = _share_by_node(left, workers)
    environment.set_default(BIND, "|".join(",".join(map(str, part)) for part in parts))


def _share_by_node(nodes: list[list[int]], workers: int) -> list[list[int]]:
    """Cores of each worker: whole NUMA nodes where there are enough, else a share of one."""
    if workers <= len(nodes):
        return [[core for node in group for core in node] for group in share_out(nodes, workers)]
    workers_by_node = share_out(range(workers), len(nodes))
    return [
        part
        for node, its_workers in zip(nodes, workers_by_node, strict=True)
        for part in share_out(node, len(its_workers))
    ]


def _usable_cores() -> list[int]:
    return [core for node in _usable_nodes() for core in node]


def _usable_nodes() -> list[list[int]]:
    """Allowed logical cores by NUMA node, ascending; one for each physical core, as vLLM itself chooses on x86."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list

    cpus = sorted(get_allowed_cpu_list(), key=lambda cpu: cpu.id)
    last_of_core = {(cpu.numa_node, cpu.physical_core): cpu for cpu in cpus}
    nodes: dict[int, list[int]] = {}
    for cpu in sorted(last_of_core.values(), key=lambda cpu: (cpu.numa_node, cpu.id)):
        nodes.setdefault(cpu.numa_node, []).append(cpu.id)
    return list(nodes.values())


def _cores_bound_by_user() -> set[int]:
    from vllm.utils.cpu_resource_utils import parse_id_list

    given = environment.given_by_user(BIND)
    if given in (None, "auto", "nobind"):
        return set()
    assert given is not None
    return {core for rank in given.split("|") for core in parse_id_list(rank)}
