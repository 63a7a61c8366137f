"""Ray's own processes die under a draft process: its cluster is started anew with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.draft_process_tools import assert_nothing_left, own_temp_dir
from tests.vllm_plugin.served import Fault, Served, served, suffer


def kill_ray(mark: str) -> Callable[[Served, pytest.MonkeyPatch], None]:
    def kill(served: Served, patch: pytest.MonkeyPatch) -> None:
        (pid,) = served.processes(mark)
        os.kill(pid, signal.SIGKILL)

    return kill


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_rays_own_processes_are_killed(
    tiny_model: Path,
    sequences_file: Path,
    prompts: list[list[int]],
    plain: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a cluster of the draft process's own, which is started anew with it and leaves nothing."""
    with own_temp_dir() as directory:
        with served(tiny_model, sequences_file, prompts, plain["outputs"], directory) as engine:
            for mark in ("raylet/raylet", "gcs/gcs_server"):
                suffer(engine, Fault(mark, "", outside=kill_ray(mark)), monkeypatch)
        assert_nothing_left(directory)
