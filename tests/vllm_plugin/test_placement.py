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


def use_cores(monkeypatch: pytest.MonkeyPatch, cores: list[int], nodes: int = 1) -> None:
    from vllm.utils import cpu_resource_utils

    cpus = [
        SimpleNamespace(id=core, physical_core=core, numa_node=i * nodes // len(cores)) for i, core in enumerate(cores)
    ]
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


@pytest.mark.parametrize(
    ("cores", "nodes", "engines", "workers", "draft", "target"),
    [
        (4, 1, 1, 2, (3,), "0|1,2"),
        (2, 1, 1, 2, (1,), "0|1"),  # shared with the draft process
        (2, 1, 2, 2, (0, 1), "0|1"),
        (3, 1, 2, 2, (1, 2), "0|1,2"),
        (1, 1, 1, 2, (0,), "0|0"),
        (8, 2, 1, 2, (7,), "0,1,2,3|4,5,6"),
        (8, 2, 2, 4, (6, 7), "0,1|2,3|4|5"),  # two engines of two workers
        (8, 4, 1, 2, (7,), "0,1,2,3|4,5,6"),
        (8, 4, 1, 1, (7,), "0,1,2,3,4,5,6"),
    ],
)
def test_several_workers_and_engines(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cores: int,
    nodes: int,
    engines: int,
    workers: int,
    draft: tuple[int, ...],
    target: str,
) -> None:
    """vLLM gives worker i the i-th part of the binding; a worker stays on whole NUMA nodes or inside one."""
    use_cores(monkeypatch, list(range(cores)), nodes)
    assert resolve_draft_cores(None, engines, workers) == draft
    with caplog.at_level("WARNING", logger="vllm.jetspecpp"):
        keep_target_off(draft, workers)
    assert os.environ[BIND] == target and RESERVED not in os.environ
    bound = {int(core) for part in target.split("|") for core in part.split(",")}
    assert ("they share cores" in caplog.text) == bool(bound & set(draft))


def test_cores_of_each_engine() -> None:
    assert placement.share_out([4, 5, 6, 7], 2) == [[4, 5], [6, 7]]
    assert placement.share_out([7], 2) == [[7], [7]]
    assert resolve_draft_cores(1, engines=2, workers=2) == (2, 3)
    with pytest.raises(
        ValueError, match=r"draft_cores must be an integer from 1 to 1 \(2 core\(s\) are the target's\)"
    ):
        resolve_draft_cores(2, engines=2, workers=2)


@pytest.mark.parametrize(
    ("option", "result"),
    [("auto", "cuda:1"), ("cuda:2", "cuda:2"), ("cpu", "cpu"), ("cuda:0", ValueError), ("cuda:3", ValueError)],
)
def test_devices_beside_a_gpu_target(
    monkeypatch: pytest.MonkeyPatch, option: str, result: str | type[Exception]
) -> None:
    use_gpus(monkeypatch, 3)
    parallel = gpu_parallel()
    if isinstance(result, str):
        assert placement.resolve_draft_device(option, parallel) == result
    else:
        with pytest.raises(result, match=option):
            placement.resolve_draft_device(option, parallel)


def test_no_gpu_left(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, 2)
    with pytest.raises(ValueError, match=r"no GPU beside the target's \[0, 1\]"):
        placement.resolve_draft_device("auto", gpu_parallel(workers=2))


@pytest.mark.parametrize(
    ("option", "result"),
    [
        ("auto", "cuda:2,cuda:3"),
        ("cuda:3,cuda:2", "cuda:3,cuda:2"),
        ("cpu", "cpu"),
        ("cuda:2", "must name 2 GPU"),
        ("cuda:2,cuda:2", "must name 2 GPU"),
        ("cuda:1,cuda:2", "is the target's own"),
        ("cuda:2,cuda:4", "does not exist"),
    ],
)
def test_a_gpu_for_each_data_parallel_engine(monkeypatch: pytest.MonkeyPatch, option: str, result: str) -> None:
    use_gpus(monkeypatch, 4)
    if result.startswith(("cuda", "cpu")):
        assert placement.resolve_draft_device(option, gpu_parallel(engines=2)) == result
    else:
        with pytest.raises(ValueError, match=result):
            placement.resolve_draft_device(option, gpu_parallel(engines=2))


def test_too_few_gpus_for_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, 3)
    with pytest.raises(ValueError, match=r"found 1 GPU\(s\) for 2 engines beside the target's \[0, 1\]"):
        placement.resolve_draft_device("auto", gpu_parallel(engines=2))


def gpu_parallel(workers: int = 1, engines: int = 1) -> SimpleNamespace:
    return SimpleNamespace(local_world_size=workers, data_parallel_size_local=engines, assigned_physical_gpu_ids=None)


def test_worker_in_the_users_process_leaves_the_draft_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from vllm_jetspecpp.vllm_plugin.cpu_worker import CPUSpecDecodeWorker

    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: calls.append(("cores", cores)))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: calls.append(("threads", count)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    worker = CPUSpecDecodeWorker.__new__(CPUSpecDecodeWorker)
    worker.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(engine_cores=(3,)))
    worker._keep_off_draft_cores()
    assert calls == [("cores", {0, 1, 2}), ("threads", 3)] and worker._former_cores == {0, 1, 2, 3}


def use_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True, device_count=lambda: count)
    monkeypatch.setattr("vllm.platforms._current_platform", platform)
