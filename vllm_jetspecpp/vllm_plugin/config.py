"""The options of ``--speculative-config`` for method ``jetspecpp``, checked before any model loads."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.utils.hashing import safe_hash

from vllm_jetspecpp.config import (
    AUTO,
    TRANSPORTS,
    EngineConfig,
    RoundConfig,
    check_choice,
    check_keys,
    check_range,
    resolve_class,
)
from vllm_jetspecpp.draft_process.placement import PlacementConfig
from vllm_jetspecpp.vllm_plugin import compat, environment, placement
from vllm_jetspecpp.vllm_plugin.plugin import METHOD

WHERE = "speculative_config"
NOT_SERVED = {"num_draft_tokens", "anchor_replacement"}
"""Of a round: vLLM names γ otherwise, and without anchor replacement rounds are only measured."""
DEFAULT_ENGINE = "vllm_jetspecpp.runtime.draft_engine.DraftEngine"
MAX_DRAFT_SLOTS = 4096
DEFAULT_DRAFT_SLOTS = 8
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
CPU_WORKER = "vllm_jetspecpp.vllm_plugin.cpu_worker.CPUSpecDecodeWorker"
GPU_WORKER = "vllm_jetspecpp.vllm_plugin.gpu_worker.GPUSpecDecodeWorker"


@config
class JetSpecConfig(SpeculativeConfig):
    """vLLM's speculative config with the options of JetSpec++.

    ``model`` is the checkpoint folder; ``num_speculative_tokens`` (γ) defaults to all that the checkpoint was made for.
    """

    method: Literal["jetspecpp"] = "jetspecpp"  # type: ignore[assignment]
    num_speculative_tokens: int = Field(default=None, gt=0)  # type: ignore[assignment]
    """γ, draft tokens a block; by default all that the checkpoint was made for."""
    num_outcomes: int = 4
    """B, outcomes drafted for ahead of each verification."""
    jacobi_passes: int = 1
    """J, refinement passes of each draft."""
    context_refreshes: int = 1
    """R ≤ J, context refreshes, one before each of the first R passes."""
    selection: str = AUTO
    """How outcomes are scored: ``calibrated``, ``conformal``, ``uncalibrated``, or what the checkpoint allows."""
    fallback_passes: int = 0
    """Refinement passes of the block after a miss, which the step waits for; 0 is the paper's J_0."""
    fallback_refreshes: int = 0
    """Context refreshes of that block, at most ``fallback_passes``."""
    draft_device: str = "auto"
    """``cpu``, ``cuda:N`` or ``auto``: where the draft process computes."""
    draft_cores: int | list[int] | None = None
    """Draft process on CPU: its cores, as a number or as core ids; by default one."""
    draft_resources: dict[str, float] | None = None
    """Further Ray resources that the draft process asks for."""
    ray_address: str | None = None
    """Ray cluster to start the draft process in; by default the current one or a local one."""
    transport: str = "shared_memory"
    """``shared_memory``: a process of its own on this host. ``local``: inside the worker, for tests."""
    draft_slots: int | None = None
    """Requests drafted for at once; further ones decode plainly. By default min(max_num_seqs, 8)."""
    reply_timeout: float = 5.0
    """Seconds that a step waits for drafts before it goes on without."""
    start_timeout: float = 300.0
    """Seconds that the draft process may take to start."""
    draft_engine: str = DEFAULT_ENGINE
    """Dotted path of the class that drafts."""
    target_layer_ids: list[int] | None = None
    """Tapped layers, 0-based. The checkpoint says them; an option only with another ``draft_engine``."""

    def __post_init__(self) -> None:
        # Not super().__post_init__(): it would look for a draft model that vLLM itself can run.
        self._check_options()
        if self.target_model_config is None:
            return
        self._check_target()
        self._resolve_checkpoint()
        self._check_length()
        self._resolve_placement()
        self._resolve_runner()

    def _check_options(self) -> None:
        check_choice("transport", self.transport, TRANSPORTS)
        for name in ("reply_timeout", "start_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if self.draft_slots is not None:
            check_range("draft_slots", self.draft_slots, 1, MAX_DRAFT_SLOTS)
        # γ may still be unknown; everything else is checked with a valid one.
        self._round(self.num_speculative_tokens or 1)

    def _round(self, num_draft_tokens: int) -> RoundConfig:
        served = {f.name for f in fields(RoundConfig)} - NOT_SERVED
        return RoundConfig(num_draft_tokens, **{name: getattr(self, name) for name in served})

    @property
    def round_config(self) -> RoundConfig:
        """The fixed shapes of a round."""
        return self._round(self.num_speculative_tokens)

    def _check_target(self) -> None:
        model, parallel = self.target_model_config, self.target_parallel_config
        if model.is_multimodal_model:
            raise ValueError(f"method {METHOD!r} does not support multimodal targets, got {model.model}")
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if getattr(parallel, name) > 1:
                raise ValueError(f"method {METHOD!r} needs {name} 1, got {getattr(parallel, name)}")

    def _resolve_checkpoint(self) -> None:
        """Fill in γ and the tapped layers."""
        if self.draft_engine != DEFAULT_ENGINE:
            resolve_class(self.draft_engine, "draft_engine")
            self._choose_layers()
            if self.num_speculative_tokens is None:
                raise ValueError("num_speculative_tokens is required with a draft_engine of your own")
            return
        if not self.model:
            raise ValueError(f"{WHERE}: 'model' is missing: the folder of a JetSpec++ checkpoint")
        if not Path(self.model).is_dir():
            raise ValueError(f"{WHERE}: model {self.model!r} is not a folder; it must be a JetSpec++ checkpoint's")
        from vllm_jetspecpp.models.calibration import check_selection, load_calibration
        from vllm_jetspecpp.models.checkpoint import check_checkpoint

        info = check_checkpoint(Path(self.model), self.target_model_config.hf_text_config)
        tapped = list(info.target_layer_ids)
        if self.target_layer_ids not in (None, tapped):
            raise ValueError(f"target_layer_ids come from the checkpoint, {tapped}; got {self.target_layer_ids}")
        self.target_layer_ids = tapped
        if self.num_speculative_tokens is None:
            self.num_speculative_tokens = info.block_size - 1
        limit, why = info.block_size - 1, f" (block_size of {self.model} less the anchor)"
        check_range("num_speculative_tokens", self.num_speculative_tokens, 1, limit, why)
        check_selection(self.selection, load_calibration(info.folder, self.num_speculative_tokens))

    def _choose_layers(self) -> None:
        """Tapped layers for an engine of the user's: the given ones, else evenly spaced over 1..L-3."""
        num_layers = self.target_model_config.get_total_num_hidden_layers()
        if self.target_layer_ids is None:
            last = max(num_layers - 3, 1)
            self.target_layer_ids = sorted({1 + round(i * (last - 1) / 4) for i in range(5)})
        ids = self.target_layer_ids
        if not ids or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < num_layers:
            raise ValueError(f"target_layer_ids must rise strictly within 0..{num_layers - 1}, got {ids}")

    def _check_length(self) -> None:
        _ = self.round_config  # γ is known by now, and checked here
        given, max_model_len = self.num_speculative_tokens, self.target_model_config.max_model_len
        if given >= max_model_len:
            raise ValueError(f"num_speculative_tokens must be less than max_model_len {max_model_len}, got {given}")

    def _resolve_placement(self) -> None:
        from vllm.platforms import current_platform

        self.draft_device = placement.resolve_draft_device(self.draft_device, self.target_parallel_config)
        if self.draft_device != "cpu":
            if self.draft_cores is not None:
                raise ValueError(f"draft_cores is for draft_device 'cpu', got draft_device {self.draft_device!r}")
        elif self.transport != "local":
            cores = placement.resolve_draft_cores(self.draft_cores)
            self.draft_cores = list(cores)
            if current_platform.is_cpu():
                placement.keep_target_off(cores, self.target_parallel_config.world_size)
        _ = self.placement_config  # checks draft_resources

    def _resolve_runner(self) -> None:
        """Choose worker class and model runner, and say where the runner finds the tapped layers."""
        from vllm.platforms import current_platform

        wanted = environment.given_by_user(V2_RUNNER)
        if wanted is not None and wanted.strip().lower() not in ("0", "false"):
            raise ValueError(f"method {METHOD!r} needs vLLM's V1 model runner: unset {V2_RUNNER}, got {wanted!r}")
        environment.set_default(V2_RUNNER, "0")
        parallel = self.target_parallel_config
        worker = CPU_WORKER if current_platform.is_cpu() else GPU_WORKER
        if parallel.worker_cls not in ("auto", worker):
            raise ValueError(f"method {METHOD!r} sets --worker-cls {worker}; {parallel.worker_cls!r} conflicts with it")
        parallel.worker_cls = worker
        # vLLM's runners read the tapped layers from the draft model's config; a layer's output is the next one's input.
        draft = copy.copy(self.target_model_config)
        draft.hf_config = copy.copy(draft.hf_config)
        draft.hf_config.eagle_aux_hidden_state_layer_ids = [layer + 1 for layer in self.target_layer_ids or ()]
        self.draft_model_config = draft
        self.draft_parallel_config = parallel

    @property
    def placement_config(self) -> PlacementConfig:
        """Where the draft process runs."""
        cores = tuple(self.draft_cores) if isinstance(self.draft_cores, list) else None
        placement = PlacementConfig(draft_cores=cores, ray_address=self.ray_address)
        return placement if self.draft_resources is None else replace(placement, draft_resources=self.draft_resources)

    def engine_config(self, vllm_config: Any) -> EngineConfig:
        """What the draft process is started with.

        Args:
            vllm_config: the engine's ``VllmConfig``.
        """
        model = vllm_config.model_config
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        return EngineConfig(
            target=model.model,
            checkpoint=self.model or "",
            round=self.round_config,
            num_slots=min(self.draft_slots or DEFAULT_DRAFT_SLOTS, max_num_seqs),
            max_model_len=model.max_model_len,
            dtype=str(model.dtype).removeprefix("torch."),
            device=self.draft_device,
            num_threads=len(self.draft_cores) if isinstance(self.draft_cores, list) else 1,
            engine=self.draft_engine,
        )

    def compute_hash(self) -> str:
        """Hash of what changes the target's graph: it returns the states of the tapped layers."""
        return safe_hash(str((METHOD, self.target_layer_ids)).encode(), usedforsecurity=False).hexdigest()

    def __repr__(self) -> str:
        options = {name: getattr(self, name) for name in OPTIONS if name != "method"}
        given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        return f"SpeculativeConfig(method={METHOD!r}, {given})"


OPTIONS = sorted({"model", "num_speculative_tokens", *JetSpecConfig.__annotations__})


def create_config(engine_args: Any, target_model_config: Any, target_parallel_config: Any) -> JetSpecConfig:
    """What ``EngineArgs.create_speculative_config`` returns for our method.

    Raises:
        ValueError: an option is unknown, out of range or does not fit the target; one line.
        RuntimeError: this vLLM lacks a symbol we need.
    """
    compat.require("config")
    options = _collect_options(engine_args)
    _check_names(options)
    _check_engine(engine_args)
    try:
        return JetSpecConfig(
            **options, target_model_config=target_model_config, target_parallel_config=target_parallel_config
        )
    except ValidationError as error:
        raise ValueError(_one_line(error)) from None


def _check_engine(engine_args: Any) -> None:
    """Refuse what vLLM could only refuse later: in the worker, or request by request."""
    if engine_args.async_scheduling:
        raise ValueError(f"method {METHOD!r} does not support async scheduling: remove --async-scheduling")
    if engine_args.logits_processors:
        raise ValueError(
            f"method {METHOD!r} does not support logits processors of your own, as no speculative method of vLLM's "
            f"does: remove --logits-processors, got {engine_args.logits_processors}"
        )
    guided = engine_args.structured_outputs_config
    backend = guided.get("backend") if isinstance(guided, dict) else guided.backend
    if backend == "lm-format-enforcer":
        raise ValueError(
            f"structured outputs backend {backend!r} cannot take drafts back, which method {METHOD!r} needs; "
            "use 'auto', 'xgrammar', 'guidance' or 'outlines'"
        )


def _collect_options(engine_args: Any) -> dict[str, Any]:
    """Options of ``--speculative-config`` and of the ``--spec-*`` flags, which must not repeat each other."""
    options = {key.replace("-", "_"): value for key, value in (engine_args.speculative_config or {}).items()}
    for flag, key in (("spec_method", "method"), ("spec_model", "model"), ("spec_tokens", "num_speculative_tokens")):
        value = getattr(engine_args, flag, None)
        if value is None:
            continue
        if key in options:
            raise ValueError(f"--{flag.replace('_', '-')} and --speculative-config[{key!r}] are mutually exclusive")
        options[key] = value
    return {key: value for key, value in options.items() if value is not None}


def _check_names(options: dict[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS and name in SpeculativeConfig.__dataclass_fields__:
            raise ValueError(f"{WHERE}: option {name!r} has no meaning for method {METHOD!r}; remove it")
    check_keys(options, OPTIONS, WHERE)


def _one_line(error: ValidationError) -> str:
    """Pydantic's first complaint without its frame; our own messages come through as they are."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return str(cause)
    return f"{WHERE}: {'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}"
