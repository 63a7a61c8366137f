"""The model runner: taps hidden states and hands every verified step to the proposer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_jetspecpp.vllm_plugin import named_logprobs
from vllm_jetspecpp.vllm_plugin.proposer import Proposer, VerifiedRows

PROPOSER = f"{Proposer.__module__}.{Proposer.__qualname__}"


class HiddenStatesRunner(GPUModelRunner):
    """vLLM's V1 model runner with :class:`Proposer` as its drafter."""

    drafter: Proposer

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        check_target(vllm_config.model_config)
        with _as_custom_class(vllm_config.speculative_config):
            super().__init__(vllm_config, device)
        # load_model() then has the target return the states of the tapped layers.
        self.use_aux_hidden_state_outputs = True

    def initialize_kv_cache(self, kv_cache_config: Any, *options: Any, **more: Any) -> None:
        """Allocate the KV cache, whose blocks are known for good by now."""
        super().initialize_kv_cache(kv_cache_config, *options, **more)
        self.drafter.cache_block_size = shared_block_size(self.cache_config, kv_cache_config)

    def _update_states(self, scheduler_output: Any) -> Any:
        """Free the slots of requests that ended; a new request under a known id continues a streamed one."""
        self.drafter.withdraw(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        self.drafter.forget(scheduler_output.finished_req_ids)
        self.drafter.forget(request.req_id for request in scheduler_output.scheduled_new_reqs)
        return super()._update_states(scheduler_output)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: the proposer trims each request on its own, where vLLM asks once for the whole batch."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor],
        *unused: Any,
    ) -> list[list[int]]:
        """Send the step to the draft process; ``take_draft_token_ids`` fetches the drafts, after vLLM's own work.

        Args:
            scheduler_output: what was scheduled.
            sampled_token_ids: accepted draft tokens and the target's own, for each request; empty in a prefill chunk.
            aux_hidden_states: one [num_rows, hidden_size] for each tapped layer.
        """
        requests = self._verified_rows(scheduler_output, sampled_token_ids)
        self.drafter.propose(requests, aux_hidden_states, scheduler_output.num_spec_tokens_to_schedule)
        return [[] for _ in sampled_token_ids]

    def _verified_rows(self, scheduler_output: Any, sampled_token_ids: list[list[int]]) -> list[VerifiedRows]:
        batch = self.input_batch
        requests, first_row = [], 0
        for index, request_id in enumerate(batch.req_ids):
            num_rows = scheduler_output.num_scheduled_tokens[request_id]
            requests.append(
                VerifiedRows(
                    request_id=request_id,
                    first_row=first_row,
                    num_rows=num_rows,
                    position=int(batch.num_computed_tokens_cpu[index]),
                    num_draft_tokens=len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())),
                    num_sampled=len(sampled_token_ids[index]),
                    token_ids=batch.token_ids_cpu[index, : batch.num_tokens_no_spec[index]],
                    max_num_tokens=self._max_num_tokens(request_id, int(batch.num_prompt_tokens[index])),
                    block_ids=next(iter(self.requests[request_id].block_ids), ()),
                )
            )
            first_row += num_rows
        return requests

    def _max_num_tokens(self, request_id: str, num_prompt_tokens: int) -> int:
        params = self.requests[request_id].sampling_params
        if params is None or params.max_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, num_prompt_tokens + params.max_tokens)

    def take_draft_token_ids(self) -> Any:
        """Wait for the drafts of the last step and return them to the scheduler."""
        if self._draft_token_req_ids:
            drafts = self.drafter.collect(self._draft_token_req_ids)
            limits = map(self._max_draft_tokens, self._draft_token_req_ids)
            self._draft_token_ids = [tokens[:limit] for tokens, limit in zip(drafts, limits, strict=True)]
        return super().take_draft_token_ids()

    def _max_draft_tokens(self, request_id: str) -> int | None:
        """Draft tokens that keep the whole block below ``min_tokens``; None for any number.

        vLLM forbids the tokens that stop a request to the token after a block as well, by the length before the block.
        """
        request = self.requests[request_id]
        params, num_tokens = request.sampling_params, len(request.output_token_ids)
        if params is None or not params.all_stop_token_ids or num_tokens >= params.min_tokens:
            return None
        return params.min_tokens - num_tokens - 1

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        """Sample as vLLM does; log-probabilities of tokens that a request names are right after drafts too."""
        metadata = self.input_batch.sampling_metadata
        named = metadata.logprob_token_ids
        if spec_decode_metadata is None or not named:
            return super()._sample(logits, spec_decode_metadata)
        num_logprobs = max(metadata.max_num_logprobs or 0, *map(len, named.values()))
        self.input_batch.sampling_metadata = replace(metadata, logprob_token_ids=None, max_num_logprobs=num_logprobs)
        try:
            with named_logprobs.gathering(self.sampler, named, len(spec_decode_metadata.num_draft_tokens)):
                return super()._sample(logits, spec_decode_metadata)
        finally:
            self.input_batch.sampling_metadata = metadata


def shared_block_size(cache_config: Any, kv_cache_config: Any) -> int:
    """Positions in a block that vLLM's prefix cache may give to a later request; 0 where there are no such blocks.

    With several groups of layers (sliding windows, recurrent states) a cached prefix is not one list of blocks: nothing
    is kept then, and the draft process does without the states of cached positions.
    """
    groups = kv_cache_config.kv_cache_groups
    if not cache_config.enable_prefix_caching or len(groups) != 1:
        return 0
    return groups[0].kv_cache_spec.block_size


def check_target(model_config: Any) -> None:
    """Raise ValueError, before weights load, for a target whose layers vLLM cannot tap."""
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    model_class = get_model_cls(model_config)
    if not supports_eagle3(model_class):
        raise ValueError(
            f"method 'jetspecpp' needs a target whose hidden states vLLM can return, not {model_class.__name__}"
        )


@contextmanager
def _as_custom_class(speculative_config: Any) -> Iterator[None]:
    """Have the runner's constructor take its own branch for drafters from outside vLLM, with ours."""
    method, model = speculative_config.method, speculative_config.model
    speculative_config.method, speculative_config.model = "custom_class", PROPOSER
    try:
        yield
    finally:
        speculative_config.method, speculative_config.model = method, model
