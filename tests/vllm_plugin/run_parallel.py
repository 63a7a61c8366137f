"""Run by test_parallel.py as a program: an engine of several workers or several engines, reported as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


def layout(wrapper: Any) -> dict[str, Any]:
    """What a worker says of itself."""
    worker = wrapper.worker
    spec = worker.vllm_config.speculative_config
    return {
        "rank": worker.rank,
        "engine": worker.parallel_config.data_parallel_rank_local,
        "drafts": worker.draft_client is not None,
        "draft_cores": list(spec.engine_cores),
        "stats": worker.jetspecpp_stats(),
    }


async def run(request: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**request["engine"]))
    engines = request["engine"].get("data_parallel_size", 1)

    async def generate(index: int, prompt: list[int]) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
        rank = index % engines if engines > 1 else None
        tokens: list[int] = []
        stream = llm.generate({"prompt_token_ids": prompt}, params, str(index), data_parallel_rank=rank)
        async for output in stream:
            tokens = list(output.outputs[0].token_ids)
        return tokens

    outputs = await asyncio.gather(*(generate(i, p) for i, p in enumerate(request["prompts"])))
    by_engine = await llm.engine_core.call_utility_all_async("collective_rpc", layout, None, (), {})
    llm.shutdown()
    print(json.dumps({"outputs": outputs, "workers": [worker for workers in by_engine for worker in workers]}))


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
