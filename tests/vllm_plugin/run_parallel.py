"""Run by test_parallel.py as a program: an engine of several workers or several engines, reported as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

COMMITTED = ("rounds", "accepted_tokens", "plain_tokens")
METRICS_TIMEOUT = 60.0


async def metrics_page(num_tokens: int) -> str:
    """What ``/metrics`` shows once the workers' files, written every second, are up to date."""
    from prometheus_client import REGISTRY, generate_latest

    from tests.scraping import parse

    names = {f"vllm:jetspecpp_{name}_total" for name in COMMITTED}
    deadline = time.monotonic() + METRICS_TIMEOUT
    while True:
        page = generate_latest(REGISTRY).decode()
        shown = sum(value for (name, _), value in parse(page).items() if name in names)
        if shown == num_tokens or time.monotonic() > deadline:
            return page
        await asyncio.sleep(0.2)


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
    page = await metrics_page(sum(map(len, outputs)))
    llm.shutdown()
    workers = [worker for workers in by_engine for worker in workers]
    print(json.dumps({"outputs": outputs, "workers": workers, "metrics": page}))


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
