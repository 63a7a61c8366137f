"""Run by test_model_runner_v2.py as a program: vLLM's model runner V2 on the CPU, reported as JSON on the last line.

V2's kernels are Triton's. On the CPU they run in Triton's interpreter, once vLLM is shown a CPU backend; both must be
set before vLLM is imported, which is why this is a program of its own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.vllm_plugin.triton_on_cpu import pretend_cpu_backend

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
pretend_cpu_backend()

import torch  # noqa: E402

from tests.engines import SwitchableEngine  # noqa: E402
from tests.vllm_plugin.conftest import generate, running_engine, worker_of  # noqa: E402


def warm_up_as_on_gpus() -> None:
    """Have the CPU worker warm up as the GPU worker does: with requests that vLLM makes up."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    original = CPUWorker.compile_or_warm_up_model

    def compile_or_warm_up_model(self: Any) -> Any:
        assert run_mixed_prefill_decode_warmup(self.model_runner, self.execute_model, self.sample_tokens, 20)
        return original(self)

    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model


def take_stats(llm: Any) -> dict[str, Any]:
    return llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})[0]


def measured(llm: Any, prompts: list[list[int]], **sampling: Any) -> dict[str, Any]:
    """Outputs with the statistics of this call."""
    take_stats(llm)
    return {"outputs": generate(llm, prompts, **sampling), "stats": take_stats(llm)}


def preempting(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """All prompts together, in an engine that has blocks for about half of them."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preemptions: list[Any] = []
    original = scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **kwargs: preemptions.append(args) or original(*args, **kwargs)
    try:
        return measured(llm, prompts, max_tokens=max_tokens) | {"preemptions": len(preemptions)}
    finally:
        scheduler._preempt_request = original


def cached_prefix(llm: Any, prompt: list[int]) -> dict[str, Any]:
    """The same prompt twice: what the draft process hears of it the second time."""
    generate(llm, [prompt], max_tokens=4)
    num_messages = len(SwitchableEngine.last.messages)
    output = generate(llm, [prompt], max_tokens=4)[0]
    first = SwitchableEngine.last.messages[num_messages].requests[0]
    return {
        "output": output,
        "reset": first.reset,
        "token_start": first.token_start,
        "num_tokens": len(first.tokens),
        "state_start": first.state_start,
        "num_states": len(first.states),
    }


def abort(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """All prompts together, every second one aborted after three steps."""
    from vllm import SamplingParams

    engine, outputs = llm.llm_engine, {}
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"abort-{i}", {"prompt_token_ids": prompt}, params)
    step = 0
    while engine.has_unfinished_requests():
        step += 1
        for output in engine.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
        if step == 3:
            engine.abort_request([f"abort-{i}" for i in range(1, len(prompts), 2)])
    kept = generate(llm, prompts[:1])  # the next step also tells the worker what ended before it
    runner = worker_of(llm).model_runner
    return {
        "outputs": [outputs[f"abort-{i}"] for i in range(0, len(prompts), 2)],
        "next": kept,
        "num_known": len(runner.speculator._requests),
        "num_free_slots": len(runner.drafter._free_slots),
    }


def state_error(llm: Any, model: str, prompt: list[int]) -> dict[str, Any]:
    """Relative error of the states that the draft process got, against Hugging Face's."""
    from transformers import AutoModelForCausalLM

    llm.reset_prefix_cache()
    generate(llm, [prompt])
    engine = SwitchableEngine.last
    slot = engine.messages[-1].requests[-1].slot
    history, states = engine.history[slot], engine.states[slot]
    hf_model = AutoModelForCausalLM.from_pretrained(model)
    with torch.inference_mode():
        hidden = hf_model(torch.tensor([history]), output_hidden_states=True).hidden_states
    taps = worker_of(llm).vllm_config.speculative_config.target_layer_ids
    expected = torch.cat([hidden[tap + 1][0] for tap in taps], dim=-1)[: len(history) - 1]
    actual = torch.stack([states[position] for position in sorted(states)])
    complete = sorted(states) == list(range(len(history) - 1))
    error = torch.linalg.norm(actual - expected) / torch.linalg.norm(expected)
    return {"complete": complete, "num_tokens": len(history), "error": float(error)}


def with_test_engine(request: dict[str, Any]) -> dict[str, Any]:
    prompts = request["prompts"]
    with running_engine(request["model"], **request["engine"], speculative_config=request["switchable"]) as llm:
        runner = worker_of(llm).model_runner
        report: dict[str, Any] = {
            "runner": [c.__name__ for c in type(runner).__mro__],
            "start": take_stats(llm) | {"messages": len(SwitchableEngine.last.messages)},
        }
        for mode, max_tokens in request["modes"].items():
            SwitchableEngine.mode = mode
            report[f"batch {mode}"] = preempting(llm, prompts, max_tokens)
        SwitchableEngine.mode = "mixed"
        report["states"] = state_error(llm, request["model"], prompts[3])
        SwitchableEngine.mode = "echo"
        report["alone"] = [measured(llm, [prompts[i]]) for i in request["alone"]]
        report["stop"] = measured(llm, prompts, stop_token_ids=[request["stop_token"]])
        report["cached"] = cached_prefix(llm, prompts[5])
        report["abort"] = abort(llm, prompts)
    return report


def with_draft_engine(request: dict[str, Any]) -> dict[str, Any]:
    """All prompts together, then one of several blocks alone, with a cold and with a warm prefix cache."""
    options, prompts = request["engine"] | {"num_gpu_blocks_override": None}, request["prompts"]
    with running_engine(request["model"], **options, speculative_config=request["checkpoint"]) as llm:
        report = measured(llm, prompts, max_tokens=request["max_tokens"])
        llm.reset_prefix_cache()
        return report | {name: measured(llm, [prompts[5]], max_tokens=8) for name in ("cold", "warm")}


if __name__ == "__main__":
    warm_up_as_on_gpus()
    asked = json.loads(sys.argv[1])
    report = with_test_engine(asked) | {"draft engine": with_draft_engine(asked)}
    print(json.dumps(report))
