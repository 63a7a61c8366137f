"""The process between the vLLM worker and Ray: it is Ray's driver, so that the worker need not be one.

A Ray driver is ended by Ray when the GCS is away for a minute, gets Ray's signal handlers, and its threads take turns
on the GIL: none of it may reach a server (the draft process never stops it). So the worker starts this small process,
``python -m vllm_jetspecpp.draft_process.keeper``, which places one actor, watches it, and cleans up when the actor or
the worker ends. Job in: one line of JSON on stdin. Stdin closed: stop. Out: why the draft process ended, on stdout.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm_jetspecpp.draft_process.placement import PlacementConfig, device_inside
from vllm_jetspecpp.draft_process.ray_actor import DraftActor
from vllm_jetspecpp.draft_process.sweep import sweep, sweep_after_me
from vllm_jetspecpp.transport.processes import publish

NAMESPACE = "vllm_jetspecpp"
_OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum; nothing goes through it
_LOOK_AT_WORKER = 0.2


def main() -> None:
    """Do one job; the exit status is 0 when the worker asked for the end."""
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Ray prints must not mix with the report
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to handle
    job = json.loads(sys.stdin.readline())
    sweep_after_me(job["directory"])
    try:
        reason = keep(job)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        print(reason, file=report, flush=True)
        sys.exit(1)


def keep(job: dict[str, Any]) -> str | None:
    """Run one draft process to its end; returns why it ended, None when the worker ended it or is gone.

    Args:
        job: ``engine``, ``handle`` and ``placement`` as dicts, ``transport`` and the descriptors ``inherited`` for it,
            ``environment`` of the actor, ``directory`` of a private cluster, ``worker`` (pid), ``deadline`` (on the
            machine's monotonic clock) for resources and a process.
    """
    placement = PlacementConfig(**job["placement"])
    for descriptor in job["inherited"]:
        os.set_inheritable(descriptor, False)
    os.sched_setaffinity(0, placement.keeper_cores)  # all of a private cluster inherits it
    with (
        contextlib.suppress(_EndWanted),
        contextlib.closing(_Worker(job["worker"], job["deadline"])) as worker,
        _connected(placement, job["directory"], worker),
        _placement_group(placement, worker) as group,
    ):
        return _run_actor(job, placement, group, worker)
    return None


class _EndWanted(Exception):
    """While something is waited for, the worker wanted the end or ended itself."""


class _Worker:
    """The vLLM worker, as seen from here."""

    def __init__(self, pid: int, deadline: float) -> None:
        self._deadline = deadline
        self._pidfd = os.pidfd_open(pid)  # stdin is not enough: a fork of the worker would hold it open
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        self._poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)

    def wants_end(self, timeout: float) -> bool:
        """Whether it closed our stdin or ended, waiting ``timeout`` seconds for that."""
        return bool(self._poll.poll(timeout * 1000))

    def wait(self, look: Callable[[], bool]) -> bool:
        """Whether ``look``, which waits about a second for something, succeeds while the worker waits for the start.

        Raises:
            _EndWanted: it waits no longer.
        """
        while not look():
            if self.wants_end(0):
                raise _EndWanted
            if time.monotonic() > self._deadline:
                return False
        return True

    def close(self) -> None:
        os.close(self._pidfd)


@contextlib.contextmanager
def _connected(placement: PlacementConfig, directory: str, worker: _Worker) -> Iterator[None]:
    """Join the cluster that ``placement`` names, or start a private one in ``directory`` and remove it after."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    private = placement.ray_address in (None, "local")
    if private:
        _private_environment()
    import ray

    common: dict[str, Any] = {
        "log_to_driver": placement.log_to_driver,
        "logging_level": "error",
        "namespace": NAMESPACE,
    }
    try:
        if private:
            _wait_for_node(worker)
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=directory,
                _plasma_directory=directory,
                _system_config={
                    "enable_worker_prestart": False,
                    "prestart_worker_first_driver": False,
                    "worker_niceness": 0,
                },
                **placement.private_cluster_resources(),
                **common,
            )
        else:
            ray.init(address=placement.ray_address, **common)
        yield
    finally:
        ray.shutdown()
        if private:
            sweep(directory, spare={os.getpid()})


def _private_environment() -> None:
    """Of this process and of the cluster it starts: loopback only, and access by a token of its own, in no file.

    To be called before Ray is imported, which reads it once.
    """
    # A cluster that no other machine may join, as Ray makes them on macOS and Windows. Its node is 127.0.0.1 (as an
    # argument Ray would replace that by an outer address), and every server of Ray binds to that alone.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if os.environ.get("RAY_AUTH_MODE", "token") == "token":
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def _wait_for_node(worker: _Worker) -> None:
    """Give Ray's node as long to come up as the worker waits: Ray (2.60) gives it 30 s on any machine."""
    from ray._private import services

    look = getattr(services, "get_node", None)
    if look is None:
        return

    @functools.wraps(look)
    def get_node(*where: Any) -> Any:
        def is_there() -> bool:
            try:
                look(*where)
            except RuntimeError:
                time.sleep(_LOOK_AT_WORKER)
                return False
            return True

        worker.wait(is_there)
        return look(*where)

    services.get_node = get_node


@contextlib.contextmanager
def _placement_group(placement: PlacementConfig, worker: _Worker) -> Iterator[Any]:
    """Resources on this host or on any node. Raises TimeoutError when the cluster has not got them."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    here = f"node:{ray.util.get_node_ip_address()}"
    bundle, where = placement.bundle, "any node"
    if not placement.any_node:
        bundle, where = {**bundle, here: 0.001}, here
    group = placement_group([bundle], strategy="STRICT_PACK")
    try:
        if not worker.wait(lambda: group.wait(1)):  # whole seconds: Ray cuts off the rest
            raise TimeoutError(
                f"Ray found no place for the draft process in time: it wants {placement.bundle} on {where}, "
                f"available: {ray.available_resources()}"
            )
        yield group
    finally:
        with contextlib.suppress(Exception):  # Ray itself may be what died
            remove_placement_group(group)


def _run_actor(job: dict[str, Any], placement: PlacementConfig, group: Any, worker: _Worker) -> str | None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    custom = {name: n for name, n in placement.bundle.items() if name not in ("CPU", "GPU")}
    actor = (
        ray.remote(DraftActor)
        .options(
            num_cpus=placement.bundle.get("CPU", 0),
            num_gpus=placement.bundle.get("GPU", 0),
            resources=custom,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
            max_concurrency=2,
            max_restarts=0,  # a restart needs a new handle: it comes from the worker
            runtime_env={"env_vars": job["environment"]},
        )
        .remote()
    )
    whereabouts = actor.whereabouts.remote()
    if not worker.wait(lambda: bool(ray.wait([whereabouts], timeout=_LOOK_AT_WORKER)[0])):
        raise TimeoutError(f"Ray started no process in time for the draft process, which has {placement.bundle}")
    node, pid = ray.get(whereabouts)
    here = ray.get_runtime_context().get_node_id()
    engine = {**job["engine"], "device": device_inside(job["engine"]["device"])}
    handle = publish(job["transport"], job["handle"], ray.util.get_node_ip_address())
    cores = None if placement.draft_cores is None else sorted(placement.draft_cores)
    serving = actor.serve.remote(engine, job["transport"], handle, cores)
    try:
        # Wait before looking at the worker: it too asks for the end when an engine fails, and that error is to be told.
        while not (ended := ray.wait([serving], timeout=_LOOK_AT_WORKER)[0]) and not worker.wants_end(0):
            pass
        if ended:
            ray.get(serving)
        return None  # it returns when the worker closed the connection, and the worker knows why it did
    except ray.exceptions.RayActorError:
        return f"process {pid} was killed or crashed" + ("" if node == here else f", or its node {node} was lost")
    finally:
        _kill_here(pid) if node == here else _kill_elsewhere(actor)


def _kill_here(pid: int) -> None:
    """By signal, because a stopped or spinning process does not hear Ray."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill_elsewhere(actor: Any) -> None:
    """By Ray: its daemon on that node insists when the process does not hear."""
    import ray

    with contextlib.suppress(Exception):  # the node, or Ray itself, may be what died
        ray.kill(actor)


if __name__ == "__main__":
    main()
