"""A server under mixed load for an hour, while clients break off and the draft process is killed.

::

    python benchmarks/soak.py --minutes 60 --kills 2 --json -    # the shipped checkpoint and the demo's target
    python benchmarks/soak.py --minutes 1 --tiny                 # a tiny model in float32, as the tests run it

Greedy answers are compared with those of plain vLLM, which is served first to record them: token for token in float32,
near ties of bfloat16 aside otherwise. Memory is flat when its fitted growth after the warm-up stays below the limit in
``soak_memory.py``. ``<out>`` gets ``soak.json`` (with every memory sample) and ``soak.png``; the exit status is 0 when
every check holds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from soak_load import Load, Mix, Reference, Tally, record_references
from soak_memory import Recorder
from soak_report import Exit, Kill, judge_differences, plot, report, requests_of

from vllm_jetspecpp.demo.run import SERVE_ARGUMENTS, SERVE_ENV, split_cores
from vllm_jetspecpp.demo.server import STOP_TIMEOUT, Server, ServerError, explain

ROOT = Path(__file__).parents[1]
MODEL = "demo"
TICK = 0.5
GRACE = 60.0
"""Seconds after the server's end that processes and directories get to go."""
RESUME_LIMIT = 300.0
"""Seconds after a kill at the end of the soak that drafting gets to resume."""
SHARED = (
    *("--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "512"),  # long prompts come in chunks, beside requests that decode
    *("--num-gpu-blocks-override", "64"),  # of 128 tokens: all requests fit; less memory than by default
)
FEW_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
"""oneDNN keeps 1,024 kernels, one for each shape it has met: for an hour that looks like a leak (docs/LOG.md)."""
METHOD: dict[str, Any] = {
    "method": "jetspecpp",
    "num_speculative_tokens": 7,
    "draft_slots": 6,  # two of eight requests at once find no slot and decode plainly
    "reply_timeout": 30,  # a busy machine is no fault; what is killed is noticed at once
}


@dataclass(frozen=True)
class Setup:
    """A target with all that its servers are started with."""

    target: Path
    checkpoint: Path
    arguments: tuple[str, ...]
    texts: tuple[str, ...]
    max_tokens: int
    exact: bool
    """Whether greedy answers are compared token for token to their end."""


def tiny_setup(folder: Path) -> Setup:
    """A target with random weights in float32."""
    sys.path.insert(0, str(ROOT))
    from tests.tiny_chat import make_tiny_chat

    target, checkpoint = make_tiny_chat(folder)
    arguments = ("--served-model-name", MODEL, "--max-model-len", "512", "--enforce-eager", "--dtype", "float32")
    texts = tuple(f"{i}: " + "the quick brown fox " * (1, 3, 6, 15)[i % 4] for i in range(12))
    return Setup(target, checkpoint, arguments, texts, 48, exact=True)


def real_setup(args: argparse.Namespace) -> Setup:
    """The demo's target in bfloat16; short questions, and every fourth one long."""
    from vllm_jetspecpp.commands.evaluation import eval_target
    from vllm_jetspecpp.evaluation.datasets import benchmark

    questions = [p.turns[0] for name in ("gsm8k", "mbpp", "mtbench", "math500") for p in benchmark(name, 8)]
    texts = [q if i % 4 else "\n\n".join(questions[i : i + 8]) for i, q in enumerate(questions)]
    return Setup(Path(eval_target(args)), Path(args.checkpoint), SERVE_ARGUMENTS, tuple(texts), 128, exact=False)


class Runner:
    """One soak: its server, its clients, and what is done to them."""

    def __init__(self, args: argparse.Namespace, setup: Setup, folder: Path) -> None:
        self.args, self.setup, self.folder = args, setup, folder
        self.console = Console(stderr=True)
        self.kills: list[Kill] = []
        self.stats: dict[str, Any] = {}

    def server(self, name: str, method: dict[str, Any] | None) -> Server:
        """A server with everything temporary in ``folder``, so that what it leaves is seen."""
        cores = split_cores(os.sched_getaffinity(0)).target_cores
        bind = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "TMPDIR": str(self.folder / "tmp")}
        options = ["--speculative-config", json.dumps(method)] if method else []
        arguments = [*self.setup.arguments, *SHARED, *options]
        return Server(
            str(self.setup.target), arguments, SERVE_ENV | FEW_PRIMITIVES | bind, self.args.out / f"{name}.log"
        )

    def record(self) -> list[Reference]:
        """Plain vLLM's greedy answers."""
        texts = self.setup.texts
        with self.server("plain", None) as server, self.progress("plain vLLM's answers", len(texts)) as done:
            server.wait_ready()
            return record_references(server.port, MODEL, texts, self.setup.max_tokens, done)

    def run(self) -> dict[str, Any]:
        """Record, soak, judge, write; returns the result."""
        (self.folder / "tmp").mkdir()
        references = self.record()
        method = METHOD | {"model": str(self.setup.checkpoint)}
        server = self.server("soak", method)
        try:
            server.wait_ready()
            recorder = Recorder(server.process.pid)
            load = Load(server.port, Mix(MODEL, references, self.args.seed), references, self.args.seed)
            self.soak(server, load, recorder)
            self.stats = server.stats()
            end = self.end(server)
        finally:
            server.stop()
        return self.write(references, load.tally, recorder, end, server.log.read_text(errors="replace"))

    def soak(self, server: Server, load: Load, recorder: Recorder) -> None:
        """Load for the given time; kills at equal distances."""
        total, kills = self.args.minutes * 60, self.args.kills
        due = [total * (i + 1) / (kills + 1) for i in range(kills)]
        interval, next_sample, began = self.args.interval, 0.0, time.monotonic()
        load.start()
        try:
            with self.progress("soak", total) as show:
                while (now := time.monotonic() - began) < total or self.waits(now, total):
                    load.look()
                    if server.process.poll() is not None:
                        raise ServerError(f"the server ended during the soak; {explain(server.log)}")
                    if now >= next_sample:
                        recorder.sample(now)
                        next_sample = now + interval
                    if due and now >= due[0] and self.kill(server, recorder, now):
                        del due[0]
                    self.look_for_drafts(server, recorder, began)
                    show(min(now, total), **self.counts(load.tally))
                    time.sleep(TICK)
        finally:
            load.finish()

    def waits(self, now: float, total: float) -> bool:
        """Whether drafting has still to resume after the last kill."""
        return bool(self.kills) and self.kills[-1].resumed_at is None and now < total + RESUME_LIMIT

    def kill(self, server: Server, recorder: Recorder, now: float) -> bool:
        """Kill the draft process; False when that must wait."""
        pid, before = recorder.draft_process(), counters(server)
        if pid is None or before is None:
            return False
        os.kill(pid, signal.SIGKILL)
        self.kills.append(Kill(now, pid, before["acceptance_length"], before["rounds"]))
        return True

    def look_for_drafts(self, server: Server, recorder: Recorder, began: float) -> None:
        """After a kill: note when the next process's drafts are verified."""
        if not self.kills or self.kills[-1].resumed_at is not None:
            return
        kill, pid = self.kills[-1], recorder.draft_process()
        if pid in (None, kill.pid):
            return
        stats = counters(server)
        if stats is None:
            return
        rounds = stats["rounds"]
        if kill.new_pid is None:  # it may still be starting: nothing of it has been verified yet
            kill.new_pid, kill.rounds = pid, rounds
        elif rounds > kill.rounds:
            kill.new_pid, kill.resumed_at = pid, time.monotonic() - began

    def end(self, server: Server) -> Exit:
        """Stop as Ctrl-C does, then look for what is left."""
        started = psutil.Process(server.process.pid).children(recursive=True)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):  # it is killed below
            server.process.wait(STOP_TIMEOUT)
        seconds = time.monotonic() - began
        _, alive = psutil.wait_procs(started, timeout=GRACE)
        left = [f"{process.pid} {process.name()}" for process in alive]
        deadline = time.monotonic() + GRACE
        while (directories := self.directories()) and time.monotonic() < deadline:
            time.sleep(TICK)
        return Exit(server.stop(), seconds, left, directories)

    def directories(self) -> list[str]:
        """What Ray clusters of draft processes have left."""
        return [path.name for path in (self.folder / "tmp").glob("jspp-*")]

    def write(
        self, references: list[Reference], tally: Tally, recorder: Recorder, end: Exit, log: str
    ) -> dict[str, Any]:
        """Judge the greedy answers and write both files."""
        from vllm_jetspecpp.evaluation.provenance import provenance

        names = ("minutes", "kills", "tiny", "seed", "interval")
        settings = {name: getattr(self.args, name) for name in names} | {"method": METHOD}
        greedy = judge_differences(self.setup.target, references, tally, self.setup.exact)
        requests = requests_of(tally)
        result = report(settings, requests, greedy, self.kills, recorder, self.stats, log, end)
        samples = [asdict(series) for series in recorder.series.values()]
        whole = {**result, "samples": samples, "made_by": provenance()}
        (self.args.out / "soak.json").write_text(json.dumps(whole, indent=1) + "\n")
        plot(self.args.out / "soak.png", recorder, tally, self.kills, self.args.interval)
        return {**result, "made_by": whole["made_by"]}

    @staticmethod
    def counts(tally: Tally) -> dict[str, Any]:
        """For the progress bar."""
        with tally.lock:
            return {"text": f"{sum(tally.sent.values())} requests, {len(tally.failures)} failed"}

    @contextmanager
    def progress(self, title: str, total: float) -> Iterator[Callable[..., None]]:
        """A bar with the time left; where there is no terminal, a line a minute."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        said = time.monotonic()
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(title, total=total, text="")

            def show(done: float, text: str = "") -> None:
                nonlocal said
                bar.update(task, completed=done, text=text)
                if not self.console.is_terminal and time.monotonic() > said + 60:
                    said = time.monotonic()
                    self.console.print(f"{title}: {done:.0f} of {total:.0f}, {text}")

            yield show


def counters(server: Server) -> dict[str, Any] | None:
    """The worker's; None when a long step keeps it from answering in time."""
    try:
        return server.stats()
    except ServerError:
        return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=2, help="SIGKILLs of the draft process, at equal distances")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with random weights, in float32")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between two samples of memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default=None, help="default: $JETSPECPP_DEMO_TARGET or the demo's")
    parser.add_argument("--checkpoint", default=str(ROOT / "checkpoints/smollm2-135m-instruct"))
    parser.add_argument(
        "--out", type=Path, default=None, help="default: benchmarks/results/soak, .cache/soak if --tiny"
    )
    parser.add_argument("--json", default=None, metavar="FILE", help="also write the result there; - is stdout")
    args = parser.parse_args()
    if args.minutes <= 0 or args.kills < 0 or args.interval <= 0:
        parser.error("--minutes and --interval must be positive, --kills 0 or more")
    args.out = args.out or (Path(".cache/soak") if args.tiny else Path("benchmarks/results/soak"))
    return args


def main() -> int:
    """The exit status: 0 when every check holds."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is stopped
    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        setup = tiny_setup(folder) if args.tiny else real_setup(args)
        result = Runner(args, setup, folder).run()
    except ServerError as error:
        print(f"soak failed: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(result, indent=1)
    if args.json == "-":
        print(text)
    elif args.json:
        Path(args.json).write_text(text + "\n")
    failed = [name for name, holds in result["checks"].items() if not holds]
    print(f"soak failed: {', '.join(failed)}" if failed else "soak passed", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
