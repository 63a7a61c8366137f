"""The worker: starts the draft process beside the target, and ends it with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_jetspecpp.config import EngineConfig
from vllm_jetspecpp.draft_process.client import DraftClient, make_client
from vllm_jetspecpp.planning.costs import Costs, load_costs
from vllm_jetspecpp.planning.planner import FixedChoice, Planner
from vllm_jetspecpp.tracing.recorder import Recorder
from vllm_jetspecpp.types import RoundChoice
from vllm_jetspecpp.vllm_plugin import compat
from vllm_jetspecpp.vllm_plugin.measuring import measure
from vllm_jetspecpp.vllm_plugin.metrics_file import MetricsWriter
from vllm_jetspecpp.vllm_plugin.orphans import watch_server
from vllm_jetspecpp.vllm_plugin.step_planning import StepPlanning
from vllm_jetspecpp.vllm_plugin.step_trace import recording_name, trace_worker

logger = logging.getLogger("vllm.jetspecpp")


class SpecDecodeWorker(Worker):
    """What the CPU and the GPU worker share. Only rank 0 drafts: the tapped states are the same on every rank."""

    draft_client: DraftClient | None = None
    metrics_writer: MetricsWriter | None = None
    recorder: Recorder | None = None
    engine_config: EngineConfig

    def init_device(self) -> None:
        """Start the draft process, which then starts while the target loads, and build the model runner."""
        compat.require("worker")
        if self.use_v2_model_runner:
            compat.require("v2")
        if self.rank == 0:
            watch_server()
            self.draft_client = self._make_client()
        with self._closing_on_error():
            super().init_device()

    def _make_client(self) -> DraftClient:
        spec = self.vllm_config.speculative_config
        engine = spec.engine_config(self.vllm_config)
        trace = recording_name(spec.trace_directory, self.parallel_config.data_parallel_index)
        self.engine_config = engine = replace(engine, trace=trace)
        if spec.cache_bytes_per_position:
            logger.info("the draft process keeps %s", spec.memory_of(engine))
        return make_client(
            engine,
            spec.placement_config,
            spec.transport,
            spec.reply_timeout,
            spec.start_timeout,
        )

    def load_model(self, **options: Any) -> None:
        """Load the target."""
        with self._closing_on_error():
            super().load_model(**options)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up the target, then wait until the draft process is ready too.

        Raises:
            DraftProcessError: it did not start; the message has the engine's own error.
            TimeoutError: it takes longer than ``start_timeout``.
        """
        with self._closing_on_error():
            times = super().compile_or_warm_up_model()
            if self.draft_client is not None:
                self.draft_client.wait_started(self.vllm_config.speculative_config.start_timeout)
            planner = self._make_planner()
            if self.draft_client is not None:
                drafter = self.model_runner.drafter
                # Not before: the V2 runner warms up with steps that look like any other, and we measure with such.
                drafter.client = self.draft_client
                drafter.begin_counting()
                drafter.planning = None if planner is None else StepPlanning(planner)
                self._write_metrics()
                self.recorder = trace_worker(self.model_runner, self.draft_client, self.engine_config)
            return times

    def _make_planner(self) -> Planner | FixedChoice | None:
        """Measure, where the speculative config asks for it; only the rank that drafts gets a planner.

        A machine that cannot be measured is served with the method's usual shape: the warning says why.
        """
        spec = self.vllm_config.speculative_config
        if not spec.planned:
            return None
        try:
            costs = self._measure(spec) if spec.plan_profile is None else load_costs(Path(spec.plan_profile))
        except Exception as error:
            choice, kind = spec.unplanned_choice, type(error).__name__
            logger.warning("times could not be measured (%s: %s): every round is of %s", kind, error, choice)
            return FixedChoice(choice)
        if self.draft_client is None or costs is None:
            return None
        acceptance = spec.acceptance()
        planner = Planner(costs, acceptance, spec.plan_options(acceptance))
        logger.info("plan by batch size: %s", planner.summary(self.scheduler_config.max_num_seqs))
        return planner

    def _measure(self, spec: Any) -> Costs | None:
        """Times of this machine; None on ranks that do not draft."""
        engine = spec.engine_config(self.vllm_config)
        limits = RoundChoice(*(getattr(engine.round, name) for name in RoundChoice._fields))
        width = len(spec.target_layer_ids) * self.model_config.get_hidden_size()
        costs = measure(self, self.draft_client, limits, engine, width, concurrent=spec.transport != "local")
        if costs is not None:
            logger.info("measured for the planner in %.1f s", costs.made_by["measured_in_seconds"])
        return costs

    def jetspecpp_plan(self) -> dict[str, Any]:
        """Times, rates and options that the planner works with; for ``collective_rpc``. Empty where there is none."""
        planning = getattr(self.model_runner.drafter, "planning", None)
        return {} if planning is None else planning.planner.describe()

    def _write_metrics(self) -> None:
        directory = self.vllm_config.speculative_config.metrics_directory
        if directory is not None and self.metrics_writer is None:
            name, engine = self.model_config.served_model_name, self.parallel_config.data_parallel_index
            self.metrics_writer = MetricsWriter(directory, name, engine, self.model_runner.drafter.totals)

    def jetspecpp_stats(self, reset: bool = False) -> dict[str, Any]:
        """Counts and times since start or the last reset; for ``collective_rpc``. Empty on ranks that do not draft."""
        return self.model_runner.drafter.stats(reset)

    def jetspecpp_pin(self, choice: list[int] | None) -> None:
        """Take γ, B, J and R of ``choice`` from now on (None: no drafting), for measurements; ``[]`` chooses again."""
        planning = getattr(self.model_runner.drafter, "planning", None)
        if planning is None or isinstance(planning.planner, FixedChoice):
            return
        if choice == []:
            planning.planner.unpin()
        else:
            planning.planner.pin(None if choice is None else RoundChoice(*choice))

    def shutdown(self) -> None:
        """End the draft process, then the worker."""
        if self.metrics_writer is not None:
            self.metrics_writer.close()
            self.metrics_writer = None
        self._close_client()
        super().shutdown()

    def _close_client(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None
        if self.draft_client is not None:
            self.draft_client.close()
            self.draft_client = None

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._close_client()
            raise
