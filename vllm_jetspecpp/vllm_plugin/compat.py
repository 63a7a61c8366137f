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
Scope = Literal["config", "worker", "cpu", "gpu"]


@dataclass(frozen=True)
class Symbol:
    """One symbol of vLLM."""

    scope: Scope
    """Which of our processes needs it: ``config`` where the engine is configured, the others in a worker."""
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
_RUNNER = "vllm.v1.worker.gpu_model_runner"
SYMBOLS = (
    Symbol("config", "vllm.engine.arg_utils", "EngineArgs.create_speculative_config", "accept the method [wrapped]"),
    Symbol("config", "vllm.engine.arg_utils", "get_kwargs", "offer --spec-method jetspecpp [wrapped]"),
    Symbol("config", _SPECULATIVE, "SpeculativeConfig.__post_init__", "resolve our options [overridden]"),
    Symbol("config", _SPECULATIVE, "SpeculativeConfig.compute_hash", "hash tapped layers [overridden]"),
    Symbol("config", "vllm.config.utils", "config", "declare our options as vLLM does"),
    Symbol("config", "vllm.config.parallel", "ParallelConfig", "choose the worker", mentions="worker_cls"),
    Symbol("config", "vllm.config.vllm", "VllmConfig.use_v2_model_runner", "select the V1 model runner"),
    Symbol(
        "config",
        "vllm.utils.ompmultiprocessing",
        "OMPProcessManager._parse_omp_threads_bind_env",
        "keep the target off the draft process's cores",
        mentions="VLLM_CPU_OMP_THREADS_BIND",
    ),
    Symbol("config", "vllm.platforms", "current_platform", "tell CPU from GPU"),
    Symbol("config", "vllm.utils.cpu_resource_utils", "get_allowed_cpu_list", "share out CPU cores"),
    Symbol("config", "vllm.utils.cpu_resource_utils", "parse_id_list", "read VLLM_CPU_OMP_THREADS_BIND"),
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
)


def needed_here() -> list[Symbol]:
    """The symbols that this platform needs: importing vLLM's CPU worker would change PyTorch on a GPU machine."""
    from vllm.platforms import current_platform

    other = "gpu" if current_platform.is_cpu() else "cpu"
    return [symbol for symbol in SYMBOLS if symbol.scope != other]


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
