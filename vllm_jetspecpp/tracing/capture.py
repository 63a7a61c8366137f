"""Runs vLLM with the recorder on, in a process of its own: some variables must be set before Python starts.

``python -m vllm_jetspecpp.tracing.capture`` is that process. Job in: one line of JSON on stdin. Out: a line of JSON on
stdout for each prompt answered; vLLM's log on stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_jetspecpp.demo.run import SERVE_ENV
from vllm_jetspecpp.demo.server import explain

MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 4
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class CaptureJob:
    """What to run."""

    target: str
    speculative: Mapping[str, Any]
    """For ``--speculative-config``, ``trace_directory`` included."""
    prompts: Sequence[str]
    """Each is asked alone; from the first again after the last, until there are enough rounds."""
    rounds: int
    max_tokens: int = 200


class CaptureError(RuntimeError):
    """vLLM ended before it was done; the message carries the end of its log."""


def capture(job: CaptureJob, target_cores: int, log: Path) -> Iterator[dict[str, Any]]:
    """Run the job; yields ``rounds``, ``tokens`` and ``seconds`` so far, after each prompt.

    Args:
        target_cores: threads for the target; the draft process takes its core by itself.
        log: file for what vLLM says.

    Raises:
        CaptureError: the process failed.
    """
    environment = {
        **os.environ,
        **SERVE_ENV,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler, front end and worker in one process, as near as can be
        "OMP_NUM_THREADS": str(target_cores),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_jetspecpp.tracing.capture"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(asdict(job)) + "\n")
        process.stdin.close()
        for line in process.stdout:
            yield json.loads(line)
        if process.wait(STOP_SECONDS):
            raise CaptureError(f"vLLM ended with status {process.returncode}; {explain(log)}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_SECONDS)
        process.stdout.close()


def main() -> None:
    """Do one job."""
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what vLLM prints must not mix with the report
    job = CaptureJob(**json.loads(sys.stdin.readline()))
    for progress in answer(job):
        print(json.dumps(progress), file=report, flush=True)


def answer(job: CaptureJob) -> Iterator[dict[str, Any]]:
    """Answer prompts until there are enough rounds."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        job.target,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        enforce_eager=True,
        speculative_config=dict(job.speculative),
    )
    try:
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens)
        rounds = tokens = turn = 0
        began = time.perf_counter()
        while rounds < job.rounds:
            message = {"role": "user", "content": job.prompts[turn % len(job.prompts)]}
            (output,) = llm.chat([message], params, use_tqdm=False)
            before, rounds = rounds, llm.collective_rpc("jetspecpp_stats")[0]["rounds"]
            tokens += len(output.outputs[0].token_ids)
            turn += 1
            yield {"rounds": rounds, "tokens": tokens, "seconds": time.perf_counter() - began}
            if rounds == before and turn % len(job.prompts) == 0:
                return  # nothing is drafted: the recording says so
    finally:
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
