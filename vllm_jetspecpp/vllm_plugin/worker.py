"""The worker: starts the draft process beside the target, and ends it with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_jetspecpp.config import EngineConfig
from vllm_jetspecpp.draft_process.client import DraftClient, make_client
from vllm_jetspecpp.tracing.recorder import Recorder
from vllm_jetspecpp.vllm_plugin import compat
from vllm_jetspecpp.vllm_plugin.metrics_file import MetricsWriter
from vllm_jetspecpp.vllm_plugin.orphans import watch_server
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
                # Not before: the V2 runner warms up with steps that look like any other.
                self.model_runner.drafter.client = self.draft_client
                self._write_metrics()
                self.recorder = trace_worker(self.model_runner, self.draft_client, self.engine_config)
            return times

    def _write_metrics(self) -> None:
        directory = self.vllm_config.speculative_config.metrics_directory
        if directory is not None and self.metrics_writer is None:
            name, engine = self.model_config.served_model_name, self.parallel_config.data_parallel_index
            self.metrics_writer = MetricsWriter(directory, name, engine, self.model_runner.drafter.totals)

    def jetspecpp_stats(self, reset: bool = False) -> dict[str, Any]:
        """Counts and times since start or the last reset; for ``collective_rpc``. Empty on ranks that do not draft."""
        return self.model_runner.drafter.stats(reset)

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
