"""Program of a child process: one engine, idle until the parent sends a command. JSON lines in, JSON lines out.

Started as ``python -m vllm_jetspecpp.benchmarking.child`` with the most threads it may use in the environment, since
OpenMP reads them when torch is imported. The first line in has the engine's arguments; each further one is a run.
Standard output belongs to the answers alone: what libraries print goes to standard error. When the parent is gone the
child ends, in the middle of a run too.
"""

from __future__ import annotations

import _thread
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

from vllm_jetspecpp.benchmarking import dflash_on_cpu
from vllm_jetspecpp.benchmarking.closed_loop import closed_loop
from vllm_jetspecpp.benchmarking.step_clock import StepClock
from vllm_jetspecpp.vllm_plugin import compat


class Child:
    """One engine in this process, its worker in it too."""

    def __init__(self, engine: dict[str, Any]) -> None:
        import torch

        self._set_num_threads = torch.set_num_threads  # vLLM's CPU worker puts a warning in its place
        from vllm import LLM

        compat.require("bench")
        if (engine.get("speculative_config") or {}).get("method") == "dflash":
            dflash_on_cpu.repair()
        self.llm = LLM(**engine)
        clocks: list[StepClock] = []
        self.llm.collective_rpc(lambda worker: clocks.append(StepClock(worker)))
        self.clock = clocks[0]

    def pin(self, cores: list[int]) -> None:
        """Every thread of this process to ``cores``, and one thread of the target's on each."""
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
        self._set_num_threads(len(cores))

    def run(
        self,
        cores: list[int] | None,
        prompts: list[tuple[int, list[int]]],
        concurrency: int,
        max_tokens: int,
        stop_token_ids: list[int],
    ) -> dict[str, Any]:
        """Greedy answers to all ``prompts``; see :func:`closed_loop`."""
        if cores is not None:
            self.pin(cores)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        def params() -> SamplingParams:
            return SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )

        return closed_loop(self.llm.llm_engine, self.clock, prompts, concurrency, params)

    def stop(self) -> None:
        """End the engine and what it started."""
        self.llm.llm_engine.engine_core.shutdown()


def own_stdout() -> TextIO:
    """The real standard output; from now on everything else that writes there writes to standard error."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return channel


def commands() -> Iterator[dict[str, Any]]:
    """What the parent asks, until it closes the channel; a command at work then is interrupted."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    at_work = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")
        if at_work.is_set():
            _thread.interrupt_main()

    threading.Thread(target=read, daemon=True).start()
    while line := lines.get():
        at_work.set()
        yield json.loads(line)
        at_work.clear()


def main() -> int:
    """Serve the parent until it closes the channel."""
    out, asked = own_stdout(), commands()

    def answer(said: dict[str, Any]) -> None:
        out.write(json.dumps(said) + "\n")
        out.flush()

    try:
        child = Child(next(asked))
    except KeyboardInterrupt:
        return 0
    except Exception as error:
        traceback.print_exc()
        answer({"error": " ".join(str(error).split()) or repr(error)})
        return 1
    try:
        answer({"ready": True})
        for command in asked:
            answer(child.run(**command))
    except KeyboardInterrupt:
        return 0
    except Exception as error:
        traceback.print_exc()
        answer({"error": " ".join(str(error).split()) or repr(error)})
        return 1
    finally:
        child.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
