"""vLLM's model runner V2 with our speculator: taps hidden states and hands every verified step to the proposer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm.v1.worker.gpu.model_runner as vllm_model_runner
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_jetspecpp.vllm_plugin.hidden_states import check_target, shared_block_size
from vllm_jetspecpp.vllm_plugin.proposer import Proposer
from vllm_jetspecpp.vllm_plugin.speculator import JetSpecSpeculator


class HiddenStatesRunnerV2(GPUModelRunner):
    """vLLM's V2 model runner with :class:`JetSpecSpeculator` as its drafter."""

    speculator: JetSpecSpeculator

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        check_target(vllm_config.model_config)
        if vllm_config.scheduler_config.async_scheduling:
            raise ValueError("method 'jetspecpp' does not support async scheduling: add --no-async-scheduling")
        with _our_speculator():
            super().__init__(vllm_config, device)
        # load_model() then has the target return the states of the tapped layers.
        self.use_aux_hidden_state_outputs = True

    @property
    def drafter(self) -> Proposer:
        """What the V1 runner keeps under this name."""
        return self.speculator.proposer

    def initialize_kv_cache(self, kv_cache_config: Any, *options: Any, **more: Any) -> None:
        """Allocate the KV cache, whose blocks are known for good by now."""
        super().initialize_kv_cache(kv_cache_config, *options, **more)
        self.drafter.cache_block_size = shared_block_size(self.cache_config, kv_cache_config)

    def finish_requests(self, scheduler_output: Any) -> None:
        """Free the slots of requests that ended."""
        self.speculator.finish_requests(scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or ())
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: Any) -> None:
        """Take up new requests; resumed ones come as new, with all tokens they have."""
        self.speculator.add_requests(scheduler_output.scheduled_new_reqs)
        super().add_requests(scheduler_output)

    def update_requests(self, scheduler_output: Any) -> None:
        """Take up the blocks that running requests were given."""
        cached = scheduler_output.scheduled_cached_reqs
        self.speculator.update_requests(cached.req_ids, cached.new_block_ids)
        super().update_requests(scheduler_output)

    def take_draft_token_ids(self) -> Any:
        """Wait for the drafts of the last step and return them to the scheduler."""
        handler = self.draft_tokens_handler
        drafts = self.speculator.collect(handler.req_ids, handler.num_draft_tokens)
        return DraftTokenIds(handler.req_ids, drafts)


@contextmanager
def _our_speculator() -> Iterator[None]:
    """Have the runner's constructor build our speculator."""
    original = vllm_model_runner.init_speculator
    vllm_model_runner.init_speculator = JetSpecSpeculator
    try:
        yield
    finally:
        vllm_model_runner.init_speculator = original
