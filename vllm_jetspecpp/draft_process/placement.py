"""Where the draft process runs: cores, Ray resources, GPU."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_CORES = 4096


@dataclass(frozen=True)
class PlacementConfig:
    """Plain values, as a user writes them."""

    draft_cores: tuple[int, ...] | None = None
    """CPU cores the draft process is pinned to, of the machine it runs on; None: any core there."""
    draft_resources: Mapping[str, float] = field(default_factory=lambda: {"num_cpus": 1})
    """What Ray reserves: ``num_cpus``, ``num_gpus`` and names of custom resources."""
    ray_address: str | None = None
    """Of a Ray cluster to join. None: the one in ``RAY_ADDRESS``, else the one this process already uses, else a
    private one. ``local``: always a private one."""
    log_to_driver: bool = False
    """Print what the draft process prints."""
    any_node: bool = False
    """Any node of the cluster that has the resources, not only this host; needs a transport that reaches it."""

    def __post_init__(self) -> None:
        if self.draft_cores is not None:
            object.__setattr__(self, "draft_cores", tuple(self.draft_cores))  # a list, when it comes from JSON
            known = MAX_CORES if self.any_node else os.cpu_count() or 1  # another node checks its own
            if not self.draft_cores or not all(isinstance(c, int) and 0 <= c < known for c in self.draft_cores):
                raise ValueError(f"draft_cores must name cores from 0 to {known - 1}, got {list(self.draft_cores)}")
        for name, amount in self.draft_resources.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
                raise ValueError(f"draft_resources: {name} must be a number from 0 on, got {amount!r}")
        if self.ray_address is not None and "://" in self.ray_address:
            raise ValueError(f"ray_address must be the HOST:PORT of a cluster, or 'local', got {self.ray_address!r}")

    @property
    def keeper_cores(self) -> set[int]:
        """Cores of this host for the keeper and a private cluster: the draft process's own, if it is to run here."""
        everywhere = self.draft_cores is None or self.any_node
        return set(range(os.cpu_count() or 1)) if everywhere else set(self.draft_cores or ())

    @property
    def bundle(self) -> dict[str, float]:
        """The resources under the names that Ray's placement groups use; those of amount 0 left out."""
        ray_names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        return {ray_names.get(name, name): float(n) for name, n in self.draft_resources.items() if n}

    def private_cluster_resources(self) -> dict[str, object]:
        """``ray.init`` arguments of a cluster that holds the draft process and nothing else."""
        custom = {name: n for name, n in self.bundle.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": math.ceil(self.bundle.get("CPU", 0)),
            "num_gpus": math.ceil(self.bundle.get("GPU", 0)),
            "resources": custom,
        }


def actor_environment(num_threads: int, device: str) -> dict[str, str]:
    """Variables of the draft process that replace what it would inherit from a vLLM worker.

    vLLM binds its OpenMP threads with ``GOMP_CPU_AFFINITY`` and preloads libraries for them. A variable cannot be
    unset on the way through Ray, but ``OMP_PROC_BIND=false`` takes precedence over the binding.

    Args:
        device: ``cuda:N`` is pinned here, N counting the GPUs that this process sees, as vLLM does; without N the GPU
            is the one that Ray hands out.
    """
    environment = {
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_PROC_BIND": "false",
        "LD_PRELOAD": "",
        "PYTHONPATH": module_path(),  # a cluster that was there before has another one
    }
    if device.startswith("cuda:"):
        environment["CUDA_VISIBLE_DEVICES"] = _visible_gpu(int(device.removeprefix("cuda:")))
        environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    return environment


def module_path() -> str:
    """``PYTHONPATH`` under which another process finds the modules this one finds, an engine of the user's too."""
    return os.pathsep.join(path for path in sys.path if path)


def device_inside(device: str) -> str:
    """The same device as the draft process sees it: it sees one GPU at most."""
    return "cuda:0" if device.startswith("cuda") else device


def _visible_gpu(index: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    if index >= len(gpus):
        raise ValueError(f"device cuda:{index} is not among CUDA_VISIBLE_DEVICES={visible}: make the draft GPU visible")
    return gpus[index]
