"""Every symbol of vLLM that we override, replace or call, in one table that is checked before use.

vLLM has no stable interface for speculators, so a release may move any of these. A missing one is an error that names
it, and only where the method is used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

TESTED_VERSIONS = ("0.32", "0.33")
Scope = Literal["config", "metrics", "worker", "cpu", "gpu", "v2", "v2_cpu", "bench", "trace", "trace_v2"]


@dataclass(frozen=True)
class Symbol:
    """One symbol of vLLM."""

    scope: Scope
    """Which of our processes needs it: ``config`` where the engine is configured, ``metrics`` there too, but serving
    goes on without; ``bench`` for `jetspecpp bench` alone; the others in a worker, ``v2`` and ``v2_cpu`` with vLLM's
    model runner V2 alone, ``trace`` and ``trace_v2`` with option ``trace_directory`` alone."""
    module: str
    attribute: str
    """Dotted path inside the module."""
    why: str
    mentions: str | None = None
    """A name its source must contain: for what is set or branched on inside a function."""

    @property
    def name(self) -> str:
        """Full dotted path."""
        return f"{self.module}.{self.attribute}"

    def problem(self) -> str | None:
        """One line on what is wrong with it in the installed vLLM, or None."""
        try:
            found: Any = reduce(getattr, self.attribute.split("."), importlib.import_module(self.module))
        except (ImportError, AttributeError):
            return f"{self.name} is missing (needed to {self.why})"
        if self.mentions is not None and self.mentions not in inspect.getsource(inspect.unwrap(found)):
            return f"{self.name} does not know {self.mentions!r} (needed to {self.why})"
        return None


_SPECULATIVE = "vllm.config.speculative"
_PARALLEL = "vllm.config.parallel"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu"
_V2_RUNNER = f"{_V2}.model_runner"
SYMBOLS = (
    Symbol("config", "vllm.engine.arg_utils", "EngineArgs.create_speculative_config", "accept the method [wrapped]"),
    Symbol("config", "vllm.engine.arg_utils", "get_kwargs", "offer --spec-method jetspecpp [wrapped]"),
    Symbol("config", _SPECULATIVE, "SpeculativeConfig.__post_init__", "resolve our options [overridden]"),
    Symbol("config", _SPECULATIVE, "SpeculativeConfig.compute_hash", "hash tapped layers [overridden]"),
    Symbol("config", "vllm.config.utils", "config", "declare our options as vLLM does"),
    Symbol("config", _PARALLEL, "ParallelConfig", "choose the worker", mentions="worker_cls"),
    Symbol("config", "vllm.config.vllm", "VllmConfig.use_v2_model_runner", "select the model runner"),
    Symbol("config", "vllm.triton_utils", "HAS_TRITON", "tell whether the V2 model runner can run"),
    Symbol("config", "vllm.engine.arg_utils", "EngineArgs.async_scheduling", "keep steps from overlapping"),
    Symbol(
        "config",
        "vllm.utils.ompmultiprocessing",
        "OMPProcessManager._parse_omp_threads_bind_env",
        "keep the target off the draft process's cores",
        mentions="VLLM_CPU_OMP_THREADS_BIND",
    ),
    Symbol(
        "config",
        "vllm.v1.spec_decode.dynamic.utils",
        "validate_and_normalize_dynamic_sd_schedule",
        "check num_speculative_tokens_per_batch_size",
    ),
    Symbol("config", "vllm.platforms", "current_platform", "tell CPU from GPU"),
    Symbol("config", "vllm.utils.cpu_resource_utils", "get_allowed_cpu_list", "share out CPU cores"),
    Symbol("config", "vllm.utils.cpu_resource_utils", "parse_id_list", "read VLLM_CPU_OMP_THREADS_BIND"),
    Symbol(
        "metrics",
        "prometheus_client.multiprocess",
        "MultiProcessCollector.collect",
        "show our metrics with several API servers [wrapped]",
    ),
    Symbol(
        "metrics",
        "vllm.v1.metrics.prometheus",
        "get_prometheus_registry",
        "show our metrics",
        mentions="MultiProcessCollector",
    ),
    Symbol("metrics", _PARALLEL, "ParallelConfig", "tell several API servers apart", mentions="_api_process_rank"),
    Symbol("metrics", _PARALLEL, "ParallelConfig", "label an engine's metrics", mentions="data_parallel_index"),
    Symbol("metrics", "vllm.config.model", "ModelConfig", "label an engine's metrics", mentions="served_model_name"),
    Symbol("worker", "vllm.v1.worker.gpu_worker", "Worker.init_device", "start the draft process [overridden]"),
    Symbol("worker", "vllm.v1.worker.gpu_worker", "Worker.load_model", "end it when loading fails [overridden]"),
    Symbol("worker", "vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", "wait for its start [overridden]"),
    Symbol("worker", "vllm.v1.worker.gpu_worker", "Worker.shutdown", "end the draft process [overridden]"),
    Symbol("worker", _RUNNER, "GPUModelRunner.__init__", "install the proposer [overridden]", mentions="custom_class"),
    Symbol(
        "worker",
        _RUNNER,
        "GPUModelRunner._setup_eagle3_aux_hidden_state_outputs",
        "tap hidden states",
        mentions="use_aux_hidden_state_outputs",
    ),
    Symbol(
        "worker",
        _RUNNER,
        "GPUModelRunner._get_eagle3_aux_layers_from_config",
        "choose the tapped layers",
        mentions="eagle_aux_hidden_state_layer_ids",
    ),
    Symbol("worker", _RUNNER, "GPUModelRunner.initialize_kv_cache", "know the cache's blocks [overridden]"),
    Symbol("worker", "vllm.v1.worker.gpu_input_batch", "CachedRequestState", "know a request's blocks"),
    Symbol("worker", _RUNNER, "GPUModelRunner._update_states", "see requests end [overridden]"),
    Symbol("worker", _RUNNER, "GPUModelRunner._input_fits_in_drafter", "trim per request [overridden]"),
    Symbol("worker", _RUNNER, "GPUModelRunner.propose_draft_token_ids", "send what was verified [overridden]"),
    Symbol(
        "worker",
        _RUNNER,
        "GPUModelRunner.take_draft_token_ids",
        "collect drafts [overridden]",
        mentions="_draft_token_req_ids",
    ),
    Symbol(
        "worker", _RUNNER, "GPUModelRunner._get_draft_token_ids_cpu", "return drafts as lists", mentions="isinstance"
    ),
    Symbol(
        "worker",
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        "draft as many tokens as the schedule allows",
        mentions="num_spec_tokens_to_schedule",
    ),
    Symbol(
        "worker",
        _RUNNER,
        "GPUModelRunner._sample",
        "return log-probabilities of named tokens [overridden]",
        mentions="sampling_metadata",
    ),
    Symbol("worker", "vllm.v1.sample.metadata", "SamplingMetadata", "see which tokens a request names"),
    Symbol(
        "worker",
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler._get_logprobs_tensors",
        "return log-probabilities of named tokens",
        mentions="gather_logprobs",
    ),
    Symbol(
        "worker",
        "vllm.v1.sample.sampler",
        "Sampler.gather_logprobs",
        "return log-probabilities of named tokens [replaced in steps that need it]",
    ),
    Symbol("worker", "vllm.sampling_params", "SamplingParams.all_stop_token_ids", "respect min_tokens"),
    Symbol("worker", "vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", "install the proposer"),
    *(
        Symbol("worker", "vllm.v1.core.sched.output", name, "measure steps of the target")
        for name in ("SchedulerOutput.make_empty", "CachedRequestData.make_empty", "NewRequestData")
    ),
    *(
        Symbol("worker", "vllm.v1.worker.gpu_worker", f"Worker.{name}", "measure steps of the target")
        for name in ("execute_model", "sample_tokens")
    ),
    Symbol(
        "worker",
        _RUNNER,
        "GPUModelRunner._update_states",
        "take a measured step back",
        mentions="num_output_tokens < len(req_state.output_token_ids)",
    ),
    Symbol("worker", "vllm.model_executor.model_loader.utils", "get_model_cls", "check the target before it loads"),
    Symbol("worker", "vllm.model_executor.models.interfaces", "supports_eagle3", "check that its layers can be tapped"),
    Symbol("cpu", "vllm.v1.worker.cpu_worker", "CPUWorker.init_device", "run on CPU", mentions="CPUModelRunner"),
    Symbol("cpu", "vllm.v1.worker.cpu_worker", "CPUModelRunner", "run on CPU [replaced during init_device]"),
    Symbol(
        "cpu",
        _RUNNER,
        "GPUModelRunner._sample",
        "sample steps without drafts plainly [overridden]",
        mentions="spec_decode_metadata is None",
    ),
    Symbol("cpu", _RUNNER, "GPUModelRunner.sample_tokens", "keep seeds across prefill chunks [overridden]"),
    Symbol(
        "cpu",
        _RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        "keep seeds across prefill chunks",
        mentions="discard_request_mask",
    ),
    Symbol(
        "cpu",
        "vllm.v1.sample.sampler",
        "Sampler.forward",
        "sample steps without drafts plainly",
        mentions="predict_bonus_token",
    ),
    Symbol("cpu", "vllm.v1.spec_decode.metadata", "SpecDecodeMetadata", "count drafts", mentions="num_draft_tokens"),
    Symbol("cpu", "vllm.triton_utils.dispatcher", "register_kernels", "repair the CPU sampler"),
    Symbol("cpu", "vllm.v1.sample.rejection_sampler", "expand_kernel", "repair the CPU sampler [replaced if broken]"),
    Symbol("cpu", "vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens", "tell whether the sampler is broken"),
    *(
        Symbol("cpu", module, name, "keep adapters off requests without one [replaced if broken]")
        for module in ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.punica_wrapper.punica_cpu")
        for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
    ),
    Symbol("gpu", "vllm.v1.worker.gpu_worker", "Worker._make_model_runner", "run on GPU [overridden]"),
    Symbol("v2", _V2_RUNNER, "init_speculator", "install the speculator [replaced during __init__]"),
    Symbol("v2", _V2_RUNNER, "GPUModelRunner.__init__", "install it [overridden]", mentions="init_speculator"),
    Symbol("v2", _V2_RUNNER, "GPUModelRunner.load_model", "tap hidden states", mentions="use_aux_hidden_state_outputs"),
    Symbol(
        "v2",
        f"{_V2}.spec_decode.eagle.eagle3_utils",
        "get_eagle3_aux_layers_from_config",
        "choose the tapped layers",
        mentions="eagle_aux_hidden_state_layer_ids",
    ),
    Symbol(
        "v2",
        _V2_RUNNER,
        "GPUModelRunner.finish_requests",
        "see requests end [overridden]",
        mentions="preempted_req_ids",
    ),
    Symbol(
        "v2", _V2_RUNNER, "GPUModelRunner.add_requests", "see requests begin [overridden]", mentions="prefill_token_ids"
    ),
    Symbol(
        "v2",
        _V2_RUNNER,
        "GPUModelRunner.update_requests",
        "know a request's blocks [overridden]",
        mentions="new_block_ids",
    ),
    Symbol("v2", _V2_RUNNER, "GPUModelRunner.initialize_kv_cache", "know the cache's blocks [overridden]"),
    Symbol("v2", _V2_RUNNER, "GPUModelRunner.sample", "verify point masses", mentions="draft_logits"),
    Symbol(
        "v2",
        _V2_RUNNER,
        "GPUModelRunner.sample_tokens",
        "send what was verified, after its tokens are written",
        mentions="postprocess_sampled",
    ),
    Symbol(
        "v2",
        _V2_RUNNER,
        "GPUModelRunner.sample_tokens",
        "draft as many tokens as the schedule allows",
        mentions="num_speculative_tokens=",
    ),
    Symbol(
        "v2",
        _V2_RUNNER,
        "GPUModelRunner.take_draft_token_ids",
        "collect drafts [overridden]",
        mentions="draft_tokens_handler",
    ),
    Symbol(
        "v2",
        f"{_V2}.spec_decode.utils",
        "DraftTokensHandler.set_draft_tokens",
        "know whose drafts and how many",
        mentions="self.num_draft_tokens",
    ),
    Symbol("v2", "vllm.v1.outputs", "DraftTokenIds", "return drafts"),
    Symbol(
        "v2",
        f"{_V2}.spec_decode.speculator",
        "BaseSpeculator.propose",
        "be its speculator [overridden]",
        mentions="num_sampled",
    ),
    *(
        Symbol("v2", f"{_V2}.states", "RequestState", "read and write requests' tokens", mentions=name)
        for name in ("self.all_token_ids", "self.draft_tokens", "self.max_seq_len", "self.req_id_to_index")
    ),
    *(
        Symbol("v2", f"{_V2}.input_batch", "InputBatch", "read what a step verified", mentions=name)
        for name in (
            "idx_mapping_np",
            "query_start_loc_np",
            "num_scheduled_tokens",
            "num_computed_tokens_np",
            "num_draft_tokens_per_req",
        )
    ),
    Symbol("v2", "vllm.distributed", "get_tp_group", "give every rank the same drafts"),
    *(
        Symbol("trace", _RUNNER, f"GPUModelRunner.{name}", "time the target's step [wrapped]")
        for name in ("_model_forward", "_sample", "execute_model", "sample_tokens", "take_draft_token_ids")
    ),
    *(
        Symbol("trace_v2", _V2_RUNNER, f"GPUModelRunner.{name}", "time the target's step [wrapped]")
        for name in ("sample", "execute_model", "sample_tokens", "take_draft_token_ids")
    ),
    Symbol("v2_cpu", "vllm.v1.worker.cpu_worker", "CPUWorker.init_device", "run on CPU", mentions="CPUModelRunnerV2"),
    Symbol("v2_cpu", "vllm.v1.worker.cpu.model_runner", "CPUModelRunner", "run on CPU [replaced during init_device]"),
    Symbol("bench", "vllm.v1.engine.llm_engine", "LLMEngine.add_request", "drive the engine step by step"),
    Symbol("bench", "vllm.v1.engine.llm_engine", "LLMEngine.step", "drive the engine step by step"),
    Symbol("bench", "vllm.sampling_params", "RequestOutputKind.DELTA", "see what each step brings"),
    Symbol("bench", _RUNNER, "GPUModelRunner._model_forward", "time verification [wrapped]"),
    Symbol("bench", _RUNNER, "GPUModelRunner._sample", "time verification [wrapped]"),
    Symbol("bench", _RUNNER, "GPUModelRunner.propose_draft_token_ids", "time drafting in line [wrapped]"),
    Symbol(
        "bench",
        "vllm.model_executor.models.qwen3_dflash",
        "DFlashQwen3Model._normalize_context_k",
        "give each of dflash's layers its own key norm on CPU [replaced]",
        mentions="_k_norm_weights",
    ),
)


def needed_here() -> list[Symbol]:
    """The symbols that this platform needs: importing vLLM's CPU worker would change PyTorch on a GPU machine.

    Those of the model runner V2 only where the environment asks for it.
    """
    import vllm.envs
    from vllm.platforms import current_platform

    scopes = ["config", "metrics", "worker", "cpu" if current_platform.is_cpu() else "gpu"]
    if vllm.envs.VLLM_USE_V2_MODEL_RUNNER:
        scopes += ["v2", "v2_cpu"] if current_platform.is_cpu() else ["v2"]
    return [symbol for symbol in SYMBOLS if symbol.scope in scopes]


def check(scopes: Iterable[Scope]) -> list[str]:
    """One line for every symbol of these scopes that the installed vLLM lacks."""
    wanted = tuple(scopes)
    problems = (symbol.problem() for symbol in SYMBOLS if symbol.scope in wanted)
    return [problem for problem in problems if problem is not None]


def require(*scopes: Scope) -> None:
    """Stop where a symbol is missing.

    Raises:
        RuntimeError: names the first missing symbol, the installed vLLM and the versions that work.
    """
    problems = check(scopes)
    if problems:
        import vllm

        others = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise RuntimeError(
            f"speculative method 'jetspecpp' does not work with vLLM {vllm.__version__}: {problems[0]}{others}; "
            f"it works with vLLM {', '.join(TESTED_VERSIONS)}"
        )
