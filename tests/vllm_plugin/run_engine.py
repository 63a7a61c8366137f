"""Run by test_processes.py as a program: an engine with vLLM's own processes, reported as JSON on the last line."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def layout(wrapper: Any) -> dict[str, Any]:
    """What a worker says of itself."""
    return {
        "pid": os.getpid(),
        "class": type(wrapper.worker).__name__,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "draft_cores": wrapper.vllm_config.speculative_config.draft_cores,
    }


def main(request: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**request["engine"])
    params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    report = {
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "stats": llm.collective_rpc("jetspecpp_stats")[0],
        "layout": llm.collective_rpc(layout)[0],
        "pid": os.getpid(),
    }
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
