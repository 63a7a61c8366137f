"""Where the draft process runs: another device than the target's, or other cores of the same CPU."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from vllm_jetspecpp.config import check_range
from vllm_jetspecpp.vllm_plugin import environment

logger = logging.getLogger("vllm.jetspecpp")
BIND = "VLLM_CPU_OMP_THREADS_BIND"
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"


def resolve_draft_device(option: str, parallel_config: Any) -> str:
    """``cpu`` or ``cuda:N`` for option ``draft_device``; "auto" is the CPU beside a CPU target, else the next free GPU.

    Raises:
        ValueError: there is no such device, or the target runs on it.
    """
    from vllm.platforms import current_platform

    if not (option in ("auto", "cpu") or re.fullmatch(r"cuda:\d+", option)):
        raise ValueError(f"draft_device must be 'auto', 'cpu' or 'cuda:N', got {option!r}")
    if option == "cpu" or (option == "auto" and current_platform.is_cpu()):
        return "cpu"
    count = current_platform.device_count() if current_platform.is_cuda_alike() else 0
    targets = _target_gpus(parallel_config) if count else set()
    if option == "auto":
        free = sorted(set(range(count)) - targets)
        if not free:
            raise ValueError(
                f"draft_device 'auto' found no GPU beside the target's {sorted(targets)}; 'cpu' is possible"
            )
        return f"cuda:{free[0]}"
    index = int(option.removeprefix("cuda:"))
    if index >= count:
        raise ValueError(f"draft_device {option!r} does not exist: {count} CUDA device(s) found")
    if index in targets:
        raise ValueError(f"draft_device {option!r} is the target's own, which uses {sorted(targets)} of {count} GPU(s)")
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
    return set(assigned or range(parallel_config.world_size))


def resolve_draft_cores(option: int | list[int] | None) -> tuple[int, ...]:
    """Core ids for option ``draft_cores``: the given ones, or the last ones that the target was not bound to.

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
    check_range("draft_cores", count, 1, max(1, len(usable) - 1), " (one core is the target's)")
    free = [core for core in usable if core not in bound]
    if len(free) < count:
        logger.warning("%s leaves no %d core(s) to the draft process: it shares the target's", BIND, count)
        free = usable
    return tuple(free[-count:])


def _check_cores(cores: list[int]) -> tuple[int, ...]:
    allowed = os.sched_getaffinity(0)
    if not cores or len(set(cores)) != len(cores) or not set(cores) <= allowed:
        raise ValueError(f"draft_cores must be distinct cores of {sorted(allowed)}, got {cores}")
    return tuple(sorted(cores))


def keep_target_off(draft_cores: tuple[int, ...], num_workers: int) -> None:
    """Have vLLM bind the target's threads to the other cores, unless the user bound them."""
    if environment.given_by_user(BIND) is not None or environment.given_by_user(RESERVED) is not None:
        return
    target = [core for core in _usable_cores() if core not in draft_cores]
    if num_workers == 1 and target:
        environment.set_default(BIND, ",".join(map(str, target)))
    elif num_workers > 1:
        # vLLM gives each worker its own NUMA node and reserves the last cores of each.
        environment.set_default(RESERVED, str(num_workers * len(draft_cores)))


def _usable_cores() -> list[int]:
    """Allowed logical cores, ascending by NUMA node; one for each physical core, as vLLM itself chooses on x86."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list

    cpus = sorted(get_allowed_cpu_list(), key=lambda cpu: cpu.id)
    last_of_core = {(cpu.numa_node, cpu.physical_core): cpu for cpu in cpus}
    return [cpu.id for cpu in sorted(last_of_core.values(), key=lambda cpu: (cpu.numa_node, cpu.id))]


def _cores_bound_by_user() -> set[int]:
    from vllm.utils.cpu_resource_utils import parse_id_list

    given = environment.given_by_user(BIND)
    if given in (None, "auto", "nobind"):
        return set()
    assert given is not None
    return {core for rank in given.split("|") for core in parse_id_list(rank)}
