"""The drafter of vLLM's model runner V2: :class:`Proposer` behind vLLM's ``BaseSpeculator``.

V2 keeps tokens, lengths and drafts on the device. The proposer wants them on the host, so each step brings the tokens
that it committed over, in one small copy, and a :class:`HostRequest` keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_jetspecpp.vllm_plugin.proposer import Proposer, VerifiedRows


class HostRequest:
    """What the host knows of one request: prompt and committed tokens, and its blocks of the KV cache."""

    def __init__(self, tokens: Sequence[int], max_num_tokens: int) -> None:
        self.block_ids: list[int] = []
        self._buffer = np.empty(max_num_tokens, dtype=np.int32)  # pages that are never written take no memory
        self._length = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:  # [num_tokens] int32
        """All tokens; a view that later tokens do not change."""
        return self._buffer[: self._length]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append what a step committed."""
        self._buffer[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)


class JetSpecSpeculator(BaseSpeculator):
    """Tells the proposer what was verified; drafts are collected later, when the runner hands them to the scheduler."""

    supports_mm_inputs = False
    draft_logits = None
    """None makes vLLM verify point-mass proposals."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        """As ``init_speculator`` is called.

        Args:
            req_states: the runner's ``RequestState``.
        """
        self.proposer = Proposer(vllm_config)
        self.device = device
        self.req_states = req_states
        self._requests: dict[str, HostRequest] = {}

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """No graphs: nothing is computed here."""

    def capture(self) -> None:
        """No graphs: nothing is computed here."""

    def add_requests(self, new_requests: Iterable[Any]) -> None:
        """Requests begin, are resumed after preemption, or continue a stream under a known id.

        One whose tokens are those we know keeps its slot: what the draft process stored for it is still right.
        """
        for request in new_requests:
            known = self._requests.get(request.req_id)
            if known is None or not np.array_equal(known.tokens, request.prefill_token_ids):
                self.proposer.forget([request.req_id])
                known = HostRequest(request.prefill_token_ids, self.req_states.max_model_len)
                self._requests[request.req_id] = known
            known.block_ids = list(next(iter(request.block_ids), ()))

    def update_requests(
        self, request_ids: Iterable[str], new_block_ids: Iterable[tuple[list[int], ...] | None]
    ) -> None:
        """Requests go on, with more blocks of the KV cache; one list for each group of layers, of which we need one."""
        for request_id, groups in zip(request_ids, new_block_ids, strict=True):
            if groups:
                self._requests[request_id].block_ids.extend(groups[0])

    def finish_requests(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        """Requests ended, or lost their place and their blocks for now."""
        self.proposer.withdraw(preempted)
        self.proposer.forget(finished)
        for request_id in finished:
            self._requests.pop(request_id, None)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,  # for each tapped layer [num_rows, hidden_size]
        num_sampled: torch.Tensor,  # [num_reqs] int32
        *unused: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **unused_too: Any,
    ) -> torch.Tensor:  # [num_reqs, γ] int64
        """Send the step to the draft process.

        Returns:
            Zeros, which are in any vocabulary; ``collect`` replaces them before the scheduler hears of any draft.
        """
        # Without a client: ranks that do not draft, and vLLM's warm-up with requests and positions that it made up.
        if not dummy_run and self.proposer.client is not None:
            assert aux_hidden_states is not None
            requests = self._verified_rows(input_batch, num_sampled)
            self.proposer.propose(requests, aux_hidden_states, num_speculative_tokens)
        # New ones each time: the runner writes into them.
        shape = (input_batch.num_reqs, self.proposer.num_draft_tokens)
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _verified_rows(self, input_batch: Any, num_sampled: torch.Tensor) -> list[VerifiedRows]:
        known = [self._requests[request_id] for request_id in input_batch.req_ids]
        sampled = self._sampled_tokens(input_batch.idx_mapping, num_sampled, known)
        num_draft_tokens, states = input_batch.num_draft_tokens_per_req, self.req_states
        requests = []
        for index, request_id in enumerate(input_batch.req_ids):
            known[index].extend(sampled[index])
            max_seq_len = int(states.max_seq_len[input_batch.idx_mapping_np[index]])
            requests.append(
                VerifiedRows(
                    request_id=request_id,
                    first_row=int(input_batch.query_start_loc_np[index]),
                    num_rows=int(input_batch.num_scheduled_tokens[index]),
                    position=int(input_batch.num_computed_tokens_np[index]),
                    num_draft_tokens=0 if num_draft_tokens is None else int(num_draft_tokens[index]),
                    num_sampled=len(sampled[index]),
                    token_ids=known[index].tokens,
                    max_num_tokens=min(states.max_model_len, max_seq_len),
                    block_ids=known[index].block_ids,
                )
            )
        return requests

    def _sampled_tokens(
        self,
        idx_mapping: torch.Tensor,  # [num_reqs] int64
        num_sampled: torch.Tensor,  # [num_reqs] int32
        known: list[HostRequest],
    ) -> list[list[int]]:
        """Accepted draft tokens and the target's own, for each request: the runner has just written them."""
        token_ids = self.req_states.all_token_ids.gpu  # [max_num_reqs, max_model_len] int32
        starts = torch.tensor([len(request) for request in known])
        positions = starts[:, None] + torch.arange(self.proposer.num_draft_tokens + 1)
        positions = positions.clamp_(max=token_ids.shape[1] - 1).to(self.device)
        newest = token_ids[idx_mapping[:, None], positions]
        rows = torch.cat([num_sampled[:, None].to(newest.dtype), newest], dim=1).tolist()
        return [row[1 : 1 + row[0]] for row in rows]

    def collect(self, request_ids: Sequence[str], limit: int) -> list[list[int]]:
        """Wait for the drafts of the last step and put them where the runner reads them.

        The scheduler is told of each request's own number of draft tokens, at most ``limit``, so that nothing but
        drafts is verified.
        """
        drafts = [tokens[:limit] for tokens in self.proposer.collect(request_ids)]
        group = get_tp_group()
        if group.world_size > 1 or any(drafts):
            rows = torch.zeros((len(drafts), self.proposer.num_draft_tokens), dtype=torch.int64)
            for row, tokens in zip(rows, drafts, strict=True):
                row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            indices = [self.req_states.req_id_to_index[request_id] for request_id in request_ids]
            # Every rank runs the target on the same drafts; only the first has them.
            rows = group.broadcast(rows.to(self.device), src=0)
            self.req_states.draft_tokens[torch.tensor(indices, device=self.device)] = rows
        return drafts
