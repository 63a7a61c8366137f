"""Cores and devices: the draft process and the target keep apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from vllm_jetspecpp.vllm_plugin import environment, placement
from vllm_jetspecpp.vllm_plugin.placement import BIND, RESERVED, keep_target_off, resolve_draft_cores


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_cores(monkeypatch, [0, 1, 2, 3])
    for name in (BIND, RESERVED):
        monkeypatch.delenv(name, raising=False)
    yield
    environment.release()


def use_cores(monkeypatch: pytest.MonkeyPatch, cores: list[int]) -> None:
    from vllm.utils import cpu_resource_utils

    cpus = [SimpleNamespace(id=core, physical_core=core, numa_node=0) for core in cores]
    monkeypatch.setattr(cpu_resource_utils, "get_allowed_cpu_list", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))


@pytest.mark.parametrize(
    ("option", "bound", "cores", "target"),
    [
        (None, None, (3,), "0,1,2"),
        (2, None, (2, 3), "0,1"),
        ([0, 2], None, (0, 2), "1,3"),
        (None, "1-3", (0,), "1-3"),
        (None, "auto", (3,), "auto"),
        (None, "0-3", (3,), "0-3"),
        ([1], "0-1", (1,), "0-1"),
    ],
)
def test_cores(
    monkeypatch: pytest.MonkeyPatch,
    option: int | list[int] | None,
    bound: str | None,
    cores: tuple[int, ...],
    target: str,
) -> None:
    if bound is not None:
        monkeypatch.setenv(BIND, bound)
    assert resolve_draft_cores(option) == cores
    keep_target_off(cores, 1)
    assert os.environ[BIND] == target
    # Resolved once more, as when vLLM copies its config: nothing changes.
    assert resolve_draft_cores(list(cores)) == cores


def test_one_core_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cores(monkeypatch, [5])
    for option in (None, 1, [5]):
        assert resolve_draft_cores(option) == (5,)
    keep_target_off((5,), 1)
    assert BIND not in os.environ


@pytest.mark.parametrize("bound", [None, "0-3", "2"])
def test_target_keeps_a_core(monkeypatch: pytest.MonkeyPatch, bound: str | None) -> None:
    if bound is not None:
        monkeypatch.setenv(BIND, bound)
    with pytest.raises(ValueError, match="leave it at least one"):
        resolve_draft_cores([0, 1, 2, 3])


def test_tensor_parallel_workers_reserve_on_each_node() -> None:
    keep_target_off((3,), 2)
    assert os.environ[RESERVED] == "2" and BIND not in os.environ


@pytest.mark.parametrize(
    ("option", "result"),
    [("auto", "cuda:1"), ("cuda:2", "cuda:2"), ("cpu", "cpu"), ("cuda:0", ValueError), ("cuda:3", ValueError)],
)
def test_devices_beside_a_gpu_target(
    monkeypatch: pytest.MonkeyPatch, option: str, result: str | type[Exception]
) -> None:
    use_gpus(monkeypatch, 3)
    parallel = SimpleNamespace(world_size=1, assigned_physical_gpu_ids=None)
    if isinstance(result, str):
        assert placement.resolve_draft_device(option, parallel) == result
    else:
        with pytest.raises(result, match=option):
            placement.resolve_draft_device(option, parallel)


def test_no_gpu_left(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, 2)
    parallel = SimpleNamespace(world_size=2, assigned_physical_gpu_ids=None)
    with pytest.raises(ValueError, match=r"no GPU beside the target's \[0, 1\]"):
        placement.resolve_draft_device("auto", parallel)


def test_worker_in_the_users_process_leaves_the_draft_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from vllm_jetspecpp.vllm_plugin.cpu_worker import CPUSpecDecodeWorker

    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: calls.append(("cores", cores)))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: calls.append(("threads", count)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    worker = CPUSpecDecodeWorker.__new__(CPUSpecDecodeWorker)
    worker.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(draft_cores=[3]))
    worker._keep_off_draft_cores()
    assert calls == [("cores", {0, 1, 2}), ("threads", 3)] and worker._former_cores == {0, 1, 2, 3}


def use_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True, device_count=lambda: count)
    monkeypatch.setattr("vllm.platforms._current_platform", platform)
