"""Program of a child process: one engine, idle until the parent sends a command. JSON lines in, JSON lines out.

Started as ``python -m vllm_jetspecpp.benchmarking.child`` with its threads already chosen in the environment, since
OpenMP reads them when torch is imported. The first line in is ``{"engine": {…}, "cores": […] | null}``; each further
one is a run. Standard output belongs to the answers alone: what libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, TextIO

from vllm_jetspecpp.benchmarking.closed_loop import closed_loop
from vllm_jetspecpp.benchmarking.step_clock import StepClock


def pin(cores: list[int]) -> None:
    """Every thread of this process to ``cores``; threads made later inherit them."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


class Child:
    """One engine in this process, its worker in it too."""

    def __init__(self, engine: dict[str, Any], cores: list[int] | None) -> None:
        from vllm import LLM

        self.llm = LLM(**engine)
        if cores is not None:
            pin(cores)
        clocks: list[StepClock] = []
        self.llm.collective_rpc(lambda worker: clocks.append(StepClock(worker)))
        self.clock = clocks[0]

    def run(
        self, prompts: list[tuple[int, list[int]]], concurrency: int, max_tokens: int, stop_token_ids: list[int]
    ) -> dict[str, Any]:
        """Greedy answers to all ``prompts``; see :func:`closed_loop`."""
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


def main() -> int:
    """Serve the parent until it closes the channel."""
    out = own_stdout()

    def answer(said: dict[str, Any]) -> None:
        out.write(json.dumps(said) + "\n")
        out.flush()

    try:
        child = Child(**json.loads(sys.stdin.readline()))
    except Exception as error:
        traceback.print_exc()
        answer({"error": " ".join(str(error).split()) or repr(error)})
        return 1
    try:
        answer({"ready": True})
        for line in sys.stdin:
            try:
                answer(child.run(**json.loads(line)))
            except Exception as error:
                traceback.print_exc()
                answer({"error": " ".join(str(error).split()) or repr(error)})
                return 1
    finally:
        child.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
