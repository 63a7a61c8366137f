"""Worker and model runner for a target on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# First: it replaces what a CPU build of PyTorch lacks before anything else of vLLM's workers is imported.
import vllm.v1.worker.cpu_worker as vllm_cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_jetspecpp.vllm_plugin import compat, cpu_lora, cpu_sampler
from vllm_jetspecpp.vllm_plugin.hidden_states import HiddenStatesRunner
from vllm_jetspecpp.vllm_plugin.worker import SpecDecodeWorker


class CPUHiddenStatesRunner(HiddenStatesRunner, CPUModelRunner):
    """vLLM's CPU model runner with our proposer."""

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        # Without triton-cpu, vLLM's rejection sampler fails on a step without any draft token (each prefill, for one)
        # as soon as a request sets top-k. Such a step has one row a request, the one that follows a block elsewhere.
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            return self.sampler(
                logits=logits, sampling_metadata=self.input_batch.sampling_metadata, predict_bonus_token=True
            )
        return super()._sample(logits, spec_decode_metadata)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and leave alone the random streams of requests whose prefill goes on."""
        with self._without_generators_of_prefills():
            return super().sample_tokens(grammar_output)

    @contextmanager
    def _without_generators_of_prefills(self) -> Iterator[None]:
        """vLLM winds a generator back after a prefill chunk, which ends an engine on CPU: theirs know no offset."""
        generators, batch = self.input_batch.generators, self.input_batch
        unfinished = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        hidden = {index: generators.pop(index) for index in unfinished if index in generators}
        try:
            yield
        finally:
            generators.update(hidden)


class CPUSpecDecodeWorker(SpecDecodeWorker, CPUWorker):
    """vLLM's CPU worker with a draft process on cores of its own."""

    _former_cores: set[int] | None = None

    def init_device(self) -> None:
        """Repair vLLM's sampler and LoRA kernels if needed and build our model runner."""
        compat.require("cpu")
        if self.vllm_config.lora_config is not None:
            cpu_lora.repair()
        module, runner = self._runner()
        # CPUWorker.init_device builds the runner by the name that this module gives it.
        original = module.CPUModelRunner
        module.CPUModelRunner = runner
        try:
            super().init_device()
        finally:
            module.CPUModelRunner = original

    def _runner(self) -> tuple[Any, type]:
        """Module that names vLLM's runner, and ours in its place."""
        if not self.use_v2_model_runner:
            cpu_sampler.repair()
            return vllm_cpu_worker, CPUHiddenStatesRunner
        compat.require("v2_cpu")
        import vllm.v1.worker.cpu.model_runner as vllm_cpu_model_runner

        from vllm_jetspecpp.vllm_plugin.cpu_model_runner_v2 import CPUHiddenStatesRunnerV2

        return vllm_cpu_model_runner, CPUHiddenStatesRunnerV2

    def _make_client(self) -> Any:
        client = super()._make_client()
        if self.parallel_config.distributed_executor_backend == "uni":
            self._keep_off_draft_cores()
        return client

    def _keep_off_draft_cores(self) -> None:
        """vLLM binds the threads of worker processes; a worker inside the user's process is left to us."""
        cores = os.sched_getaffinity(0)
        left = cores - set(self.vllm_config.speculative_config.engine_cores or ())
        if left and left != cores:
            self._former_cores = cores
            os.sched_setaffinity(0, left)
            torch.set_num_threads(min(torch.get_num_threads(), len(left)))

    def _close_client(self) -> None:
        """A process that goes on, after a start that failed too, gets its cores back."""
        if self._former_cores is not None:
            os.sched_setaffinity(0, self._former_cores)
            self._former_cores = None
        super()._close_client()
