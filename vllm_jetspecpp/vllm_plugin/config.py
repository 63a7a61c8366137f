"""The options of ``--speculative-config`` for method ``jetspecpp``, checked before any model loads."""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.utils.hashing import safe_hash

from vllm_jetspecpp.config import (
    AUTO,
    TRANSPORTS,
    EngineConfig,
    RoundConfig,
    check_choice,
    check_draft_weights,
    check_probability,
    check_range,
    nearest,
    resolve_class,
)
from vllm_jetspecpp.draft_process.placement import PlacementConfig
from vllm_jetspecpp.planning.acceptance import Acceptance, unmeasured
from vllm_jetspecpp.planning.costs import load_costs
from vllm_jetspecpp.planning.plan import OUTCOMES, Options
from vllm_jetspecpp.tracing.recorder import check_directory
from vllm_jetspecpp.types import ALL_OUTCOMES, RoundChoice
from vllm_jetspecpp.vllm_plugin import environment, placement
from vllm_jetspecpp.vllm_plugin.plugin import METHOD
from vllm_jetspecpp.vllm_plugin.target_checks import check_target, check_weights

logger = logging.getLogger("vllm.jetspecpp")
WHERE = "speculative_config"
NOT_SERVED = {"num_draft_tokens", "anchor_replacement"}
"""Of a round: vLLM names γ otherwise, and without anchor replacement rounds are only measured."""
DEFAULT_ENGINE = "vllm_jetspecpp.runtime.draft_engine.DraftEngine"
MAX_DRAFT_SLOTS = 4096
MAX_PREFIX_STORE_MIB = 1 << 24
DEFAULT_DRAFT_SLOTS = 8
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
DEFAULT_SHAPE: tuple[int | str, int | str, int | str] = (4, 1, 1)
"""B, J and R where none are given; ``AUTO`` leaves one to the planner."""
SHAPE = ("num_outcomes", "jacobi_passes", "context_refreshes", "num_refined")
UNPLANNED = (4, 1, 1, ALL_OUTCOMES)
"""What stands for ``AUTO`` where nothing could be measured."""
MOST_PASSES = 3
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
    num_outcomes: int | str = DEFAULT_SHAPE[0]
    """B, outcomes drafted for ahead of each verification; ``auto``: chosen step by step, with γ up to
    ``num_speculative_tokens``, or no drafting where plain decoding is faster."""
    jacobi_passes: int | str = DEFAULT_SHAPE[1]
    """J, refinement passes of each draft, or ``auto``."""
    context_refreshes: int | str = DEFAULT_SHAPE[2]
    """R ≤ J + 1, context refreshes, one before each of the first R passes (see ``RoundConfig``), or ``auto``."""
    num_refined: int | str = AUTO
    """Outcomes, the likeliest ones, whose drafts are refined; the others keep the initial draft (not the paper's).
    ``auto``: the planner's choice, all without it."""
    copy_drafts: bool = False
    """Hand out tokens copied from the request itself, from after the last place where its latest tokens stood, where
    they promise more than drafted ones (prompt lookup, not the paper's). At most ``num_speculative_tokens``."""
    min_accept_prob: float | str = AUTO
    """Draft tokens that will be accepted less probably than this, going by running averages, are not verified, but for
    the first of a block; 0 verifies whole blocks. ``auto``: where it pays by the planner's times, and 0 without it."""
    plan_profile: str | None = None
    """With ``auto``: file of times that ``jetspecpp plan --save`` wrote, instead of measuring at each start."""
    selection: str = AUTO
    """How outcomes are scored: ``calibrated``, ``conformal``, ``uncalibrated``, or what the checkpoint allows."""
    fallback_passes: int = 0
    """Refinement passes of the block after a miss, which the step waits for; 0 is the paper's J_0."""
    fallback_refreshes: int = 0
    """Context refreshes of that block, at most ``fallback_passes``."""
    draft_device: str = "auto"
    """``cpu``, ``cuda:N`` or ``auto``: where the draft process computes. With data parallel engines one GPU for each,
    as in ``cuda:2,cuda:3``. On another node ``cuda``, one GPU that Ray chooses there, or ``cpu``; ``auto`` there is
    ``cuda`` if ``draft_resources`` ask for ``num_gpus``."""
    draft_cores: int | list[int] | None = None
    """Draft process on CPU: its cores, as a number or as core ids; by default one. With data parallel engines a number
    is for each, and ids are shared out. On another node core ids of that node; by default any, with as many threads as
    ``draft_resources`` ask for ``num_cpus``."""
    draft_resources: dict[str, float] | None = None
    """Further Ray resources that the draft process asks for."""
    ray_address: str | None = None
    """Ray cluster to start the draft process in; by default the current one or a local one."""
    transport: str = "shared_memory"
    """``shared_memory``: a process of its own on this host. ``tcp``: on any node of the cluster at ``ray_address``
    that has ``draft_resources``. ``local``: inside the worker, for tests."""
    draft_slots: int | None = None
    """Requests drafted for at once; further ones decode plainly. By default min(max_num_seqs, 8)."""
    prefix_store_mib: int = 256
    """Memory for the states of prefixes that vLLM has cached, which it does not compute again; 0 keeps none."""
    draft_window: int | None = None
    """Positions before a block that the draft networks read. By default all, or as many as the checkpoint was made for
    where ``max_model_len`` is larger."""
    reply_timeout: float = 5.0
    """Seconds that a step waits for drafts before it goes on without."""
    start_timeout: float = 300.0
    """Seconds that the draft process may take to start."""
    draft_weights: str = AUTO
    """``int8``: matrices of a draft process on a CPU are packed as int8. ``plain``: they are of the target's dtype.
    ``auto``: int8 in bfloat16 where the CPU has instructions for it."""
    trace_directory: str | None = None
    """Existing folder in which worker and draft process record their steps, for ``jetspecpp trace --from``."""
    draft_engine: str = DEFAULT_ENGINE
    """Dotted path of the class that drafts."""
    target_layer_ids: list[int] | None = None
    """Tapped layers, 0-based. The checkpoint says them; an option only with another ``draft_engine``."""
    cache_bytes_per_position: int = 0
    """Of the draft process; found out here, no option."""
    metrics_directory: str | None = None
    """Where the worker leaves its counts for ``/metrics``. Not an option: ``create_config`` sets it."""

    def __post_init__(self) -> None:
        # Not super().__post_init__(): it would look for a draft model that vLLM itself can run.
        self._check_options()
        if self.target_model_config is None:
            return
        check_target(self.target_model_config, self.target_parallel_config)
        self._resolve_checkpoint()
        self._check_length()
        self._check_schedule()
        self._check_plan()
        self._resolve_placement()
        check_draft_weights(self.draft_weights, self.draft_device, self._dtype)
        self._resolve_runner()

    def _check_options(self) -> None:
        check_choice("transport", self.transport, TRANSPORTS)
        for name in ("reply_timeout", "start_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if self.draft_slots is not None:
            check_range("draft_slots", self.draft_slots, 1, MAX_DRAFT_SLOTS)
        if self.min_accept_prob != AUTO:
            if isinstance(self.min_accept_prob, str):
                near = nearest(self.min_accept_prob, [AUTO])
                raise ValueError(f"min_accept_prob must be a number or {AUTO!r}, got {self.min_accept_prob!r}{near}")
            check_probability("min_accept_prob", self.min_accept_prob)
        check_range("prefix_store_mib", self.prefix_store_mib, 0, MAX_PREFIX_STORE_MIB)
        if self.trace_directory is not None:
            check_directory(self.trace_directory)
            if self.transport == "local":
                raise ValueError("trace_directory needs a draft process of its own, which transport 'local' has not")
        # γ may still be unknown; everything else is checked with a valid one.
        self._round(self.num_speculative_tokens or 1)

    def _round(self, num_draft_tokens: int) -> RoundConfig:
        served = {f.name for f in fields(RoundConfig)} - NOT_SERVED
        return RoundConfig(num_draft_tokens, **{name: getattr(self, name) for name in served} | self._largest())

    @property
    def planned(self) -> bool:
        """Whether the planner chooses the shape of rounds."""
        return AUTO in (self.num_outcomes, self.jacobi_passes, self.context_refreshes)

    def _largest(self) -> dict[str, int]:
        """B, J and R as given, and where they are left to the planner the largest it may choose."""
        given = {name: getattr(self, name) for name in SHAPE}
        for name, value in given.items():
            if isinstance(value, str) and value != AUTO:
                raise ValueError(f"{name} must be an integer or {AUTO!r}, got {value!r}{nearest(value, [AUTO])}")
        outcomes, passes, refreshes, refined = given.values()
        if passes == AUTO:
            passes = MOST_PASSES if refreshes == AUTO else max(MOST_PASSES, refreshes)
        if refreshes == AUTO:
            refreshes = min(MOST_PASSES, passes + 1)
        return {
            "num_outcomes": OUTCOMES[-1] if outcomes == AUTO else outcomes,
            "jacobi_passes": passes,
            "context_refreshes": refreshes,
            "num_refined": ALL_OUTCOMES if refined == AUTO else refined,
        }

    @property
    def unplanned_choice(self) -> RoundChoice:
        """The shape of rounds where nothing could be measured."""
        given = [getattr(self, name) for name in SHAPE]
        outcomes, passes, refreshes, refined = (
            u if g == AUTO else int(g) for g, u in zip(given, UNPLANNED, strict=True)
        )
        if passes < refreshes and self.jacobi_passes == AUTO:
            passes = refreshes
        return RoundChoice(self.num_speculative_tokens, outcomes, passes, min(passes + 1, refreshes), refined)

    def acceptance(self) -> Acceptance:
        """What the checkpoint's drafts are worth, as recorded or, where it says nothing, as assumed."""
        known = None
        if self.draft_engine == DEFAULT_ENGINE:
            from vllm_jetspecpp.models.acceptance import load_acceptance

            known = load_acceptance(Path(self.model or ""))
        return unmeasured(self.num_speculative_tokens) if known is None else known

    def plan_options(self, acceptance: Acceptance) -> Options:
        """What the planner may choose from."""
        given = {name: getattr(self, name) for name in SHAPE}
        numbers = {name: None if value == AUTO else int(value) for name, value in given.items()}
        return Options.within(acceptance, self.num_speculative_tokens, **numbers, copies=self.copy_drafts)

    def _check_plan(self) -> None:
        if not self.planned:
            if self.plan_profile is not None:
                raise ValueError(f"plan_profile is for options that are {AUTO!r}, and none is")
            return
        self.plan_options(self.acceptance())
        if self.plan_profile is not None:
            load_costs(Path(self.plan_profile))
        elif environment.given_by_user(V2_RUNNER) == "1":
            raise ValueError(
                f"options that are {AUTO!r} need plan_profile with {V2_RUNNER}=1: its steps cannot be measured"
            )
        elif self.target_parallel_config.world_size > 1:
            raise ValueError(
                f"options that are {AUTO!r} need plan_profile with several workers an engine: measuring at start was "
                "not made to run there"
            )

    @property
    def round_config(self) -> RoundConfig:
        """The fixed shapes of a round."""
        return self._round(self.num_speculative_tokens)

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

        target = self.target_model_config
        info = check_checkpoint(Path(self.model), target.hf_text_config)
        check_weights(target, info.deepest_tap)
        tapped = list(info.target_layer_ids)
        if self.target_layer_ids not in (None, tapped):
            raise ValueError(f"target_layer_ids come from the checkpoint, {tapped}; got {self.target_layer_ids}")
        self.target_layer_ids = tapped
        if self.num_speculative_tokens is None:
            self.num_speculative_tokens = info.block_size - 1
        limit, why = info.block_size - 1, f" (block_size of {self.model} less the anchor)"
        check_range("num_speculative_tokens", self.num_speculative_tokens, 1, limit, why)
        check_selection(self.selection, load_calibration(info.folder, self.num_speculative_tokens))
        model = self.target_model_config
        self.cache_bytes_per_position = info.cache_bytes_per_position(model.hf_text_config, model.dtype.itemsize)
        if self.draft_window is None and model.max_model_len > info.max_position_embeddings:
            self.draft_window = info.max_position_embeddings
            logger.warning(
                "the checkpoint was made for %d positions and max_model_len is %d: drafts are made from the last %d",
                self.draft_window,
                model.max_model_len,
                self.draft_window,
            )

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
        if self.draft_window is not None:
            check_range("draft_window", self.draft_window, 1, max_model_len, " (max_model_len)")

    def _check_schedule(self) -> None:
        """vLLM's schedule of draft tokens by batch size: its scheduler cuts K at γ and fills the gaps."""
        schedule = self.num_speculative_tokens_per_batch_size
        if schedule is None:
            return
        from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

        try:
            validate_and_normalize_dynamic_sd_schedule(schedule)
        except ValueError as error:
            raise ValueError(f"num_speculative_tokens_per_batch_size {schedule}: {error}") from None

    def _resolve_placement(self) -> None:
        from vllm.platforms import current_platform

        if self.on_any_node:
            gpus = self.placement_config.bundle.get("GPU", 0)
            self.draft_device = placement.resolve_remote_device(self.draft_device, gpus)
            placement.check_remote_cores(self.draft_cores, self.draft_device)
            return
        self.draft_device = placement.resolve_draft_device(self.draft_device, self.target_parallel_config)
        if self.draft_device != "cpu":
            if self.draft_cores is not None:
                raise ValueError(f"draft_cores is for draft_device 'cpu', got draft_device {self.draft_device!r}")
        elif self.transport != "local":
            parallel = self.target_parallel_config
            engines, workers = placement.num_engines(parallel), placement.num_workers(parallel)
            cores = placement.resolve_draft_cores(self.draft_cores, engines, workers)
            self.draft_cores = list(cores)
            if current_platform.is_cpu():
                placement.keep_target_off(cores, workers)
        _ = self.placement_config  # checks draft_resources

    def _resolve_runner(self) -> None:
        """Choose worker class and model runner, and say where the runner finds the tapped layers."""
        from vllm.platforms import current_platform

        # vLLM takes V2 on GPUs by itself. With us V2 was run on the CPU only, and V1 knows all that it knows; so V1,
        # unless the user asks for V2.
        environment.set_default(V2_RUNNER, "0")
        self._check_runner()
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
        # As it stands now: an engine core that is one of several makes the original its own.
        self.draft_parallel_config = copy.copy(parallel)

    @property
    def engine_cores(self) -> tuple[int, ...] | None:
        """``draft_cores`` of this engine's draft process, where there are several engines; None: any."""
        if not isinstance(self.draft_cores, list):
            return None
        return tuple(self._engine_share(self.draft_cores))

    @property
    def engine_device(self) -> str:
        """``draft_device`` of this engine's draft process."""
        return self._engine_share(self.draft_device.split(","))[0]

    def _engine_share(self, items: list[Any]) -> list[Any]:
        engines = placement.num_engines(self.draft_parallel_config) if self.draft_parallel_config else 1
        return placement.share_out(items, engines)[self.target_parallel_config.data_parallel_rank_local or 0]

    @staticmethod
    def _check_runner() -> None:
        from vllm.triton_utils import HAS_TRITON

        wanted = os.environ[V2_RUNNER]
        if wanted not in ("0", "1"):
            raise ValueError(f"{V2_RUNNER} must be 0 or 1, got {wanted!r}")
        if wanted == "1" and not HAS_TRITON:
            raise ValueError(f"{V2_RUNNER}=1 needs Triton with a backend for this machine, and there is none: unset it")

    @property
    def on_any_node(self) -> bool:
        """Whether the draft process may run on another node of a cluster than the worker's."""
        address = self.ray_address or environment.given_by_user("RAY_ADDRESS")
        return self.transport == "tcp" and address not in (None, "", "local")

    @property
    def placement_config(self) -> PlacementConfig:
        """Where the draft process runs."""
        placement = PlacementConfig(self.engine_cores, ray_address=self.ray_address, any_node=self.on_any_node)
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
            target_revision=model.revision,
            download_dir=vllm_config.load_config.download_dir,
            max_model_len=model.max_model_len,
            dtype=self._dtype,
            device=self.engine_device,
            num_threads=self._num_threads,
            prefix_store_bytes=self.prefix_store_mib << 20 if vllm_config.cache_config.enable_prefix_caching else 0,
            window=self.draft_window,
            weights=self.draft_weights,
            engine=self.draft_engine,
        )

    @property
    def _dtype(self) -> str:
        return str(self.target_model_config.dtype).removeprefix("torch.")

    @property
    def _num_threads(self) -> int:
        if self.engine_cores is not None:
            return len(self.engine_cores)
        return max(1, int(self.placement_config.bundle.get("CPU", 1))) if self.on_any_node else 1

    def memory_of(self, engine: EngineConfig) -> str:
        """What the draft process keeps of contexts, for people: fixed at start, whatever is served.

        Beyond it there are only the weights and the tensors of one round.
        """
        caches = engine.num_slots * (engine.max_model_len + 1) * self.cache_bytes_per_position
        return (
            f"{caches / 2**20:.0f} MiB of caches ({engine.num_slots} requests of {engine.max_model_len} positions) and "
            f"{engine.prefix_store_bytes / 2**20:.0f} MiB of cached prefixes"
        )

    def compute_hash(self) -> str:
        """Hash of what changes the target's graph: it returns the states of the tapped layers."""
        return safe_hash(str((METHOD, self.target_layer_ids)).encode(), usedforsecurity=False).hexdigest()

    def __repr__(self) -> str:
        options = {name: getattr(self, name) for name in OPTIONS if name != "method"}
        given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        return f"SpeculativeConfig(method={METHOD!r}, {given})"


INHERITED = {"model", "num_speculative_tokens_per_batch_size"}
"""Options of vLLM's own that mean the same here."""
NO_OPTIONS = {"cache_bytes_per_position", "metrics_directory"}
OPTIONS = sorted({*INHERITED, *JetSpecConfig.__annotations__} - NO_OPTIONS)
