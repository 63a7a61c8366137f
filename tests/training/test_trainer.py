"""The trainer as a user starts it: killed and resumed, in two processes, prolonged, out of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.training.conftest import SIZE_FLAGS

FLAGS = [
    *SIZE_FLAGS,
    "--anchors",
    "3",
    "--sequences",
    "2",
    "--held-out",
    "8",
    "--precision",
    "no",
    "--warmup-steps",
    "2",
]
Work = Callable[[str], Path]


def start(prepared: Path, work: Path, *more: str, part: str = "draft", processes: int = 1) -> subprocess.Popen[str]:
    """``jetspecpp train <part>`` in ``work``."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--master-port=0", "--standalone"]
    command = [sys.executable, *(launch if processes > 1 else []), "-m", "vllm_jetspecpp.cli"]
    return subprocess.Popen(
        [*command, "train", part, str(prepared / "target"), str(work), *FLAGS, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def weights(work: Path, part: str = "draft") -> dict[str, Tensor]:
    return load_file(work / f"{part}.safetensors")


def test_killed_and_resumed_is_not_killed(prepared: Path, new_work: Work) -> None:
    """SIGKILL in the middle, between two saved states: the resumed run ends with the same weights, bit for bit."""
    steps = ["--steps", "400", "--save-every", "40", "--validate-every", "100"]
    whole = start(prepared, new_work("whole"), *steps)
    killed_work = new_work("killed")
    killed = start(prepared, killed_work, *steps)
    deadline = time.monotonic() + 200
    while not list((killed_work / "draft").glob("state-[0-9]*")):
        assert time.monotonic() < deadline and killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert not (killed_work / "draft.safetensors").exists(), "it ended before it could be killed"
    output = finish(start(prepared, killed_work, *steps))
    assert "resumed at step" in output and "resumed at step 0" not in output
    finish(whole)
    one, other = weights(killed_work.parent / "whole"), weights(killed_work)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    records = [
        json.loads((work / "draft.json").read_text())["record"] for work in (killed_work, killed_work.parent / "whole")
    ]
    without_time = [[{k: v for k, v in entry.items() if k != "minutes"} for entry in record] for record in records]
    assert without_time[0] == without_time[1] and len(records[0]) == 5


def test_two_processes_equal_two_micro_batches(prepared: Path, new_work: Work) -> None:
    """Data parallel over gloo sees the batches that one process accumulates: the same weights but for rounding."""
    steps = ["--steps", "8", "--save-every", "100"]
    works = new_work("pair"), new_work("single")
    pair = start(prepared, works[0], *steps, part="adapter", processes=2)
    single = start(prepared, works[1], *steps, "--accumulate", "2", part="adapter")
    output = finish(pair)
    finish(single)
    assert output.count("validation:") == 2  # before and after: one process speaks for both
    one, other = (weights(work, "adapter") for work in works)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-5)
    run = json.loads((works[0] / "adapter.json").read_text())
    assert run["processes"] == 2 and run["step"] == 8


def test_out_of_time_is_saved_and_goes_on(prepared: Path, new_work: Work) -> None:
    """``--minutes`` ends a run with its state; the next run needs no other flag. TensorBoard's events are there."""
    work = new_work("timed")
    output = finish(start(prepared, work, "--steps", "30", "--minutes", "0"))
    assert "stopped at step 1 of 30: out of time, state saved" in output
    output = finish(start(prepared, work, "--steps", "30"))
    assert "resumed at step 1" in output
    assert list((work / "draft").rglob("events.out.tfevents.*"))
    assert json.loads((work / "draft.json").read_text())["step"] == 30


def test_a_diverging_run_stops(prepared: Path, new_work: Work) -> None:
    """A learning rate that makes the weights overflow ends the run with advice, not with weights of NaN."""
    work = new_work("diverging")
    process = start(prepared, work, "--steps", "500", "--learning-rate", "1e30", "--max-grad-norm", "1e30")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2 and "lower --learning-rate" in output and "Traceback" not in output
    assert not (work / "draft.safetensors").exists()


def test_help_shows_every_option_with_its_default() -> None:
    from dataclasses import fields

    from vllm_jetspecpp.training.config import AdapterConfig, DraftConfig

    for part, config in (("draft", DraftConfig), ("adapter", AdapterConfig)):
        command = [sys.executable, "-m", "vllm_jetspecpp.cli", "train", part, "--help"]
        text = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        for f in fields(config):
            assert f"--{f.name.replace('_', '-')}" in text
            if f.default not in (None, False):
                assert f"(default: {f.default})" in text


@pytest.mark.parametrize("flags", [["--mode", "dflsh"], ["--zero-share", "2"], ["--initialise", "nothing"]], ids=str)
def test_bad_options_end_at_once(prepared: Path, new_work: Work, flags: list[str]) -> None:
    process = start(prepared, new_work("bad"), *flags)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in output
