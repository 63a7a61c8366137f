"""States for prefixes that vLLM has cached: taken from the store when a request begins, put there as they come."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_jetspecpp.runtime.prefix_store import PrefixStore
from vllm_jetspecpp.runtime.request_states import RequestStates
from vllm_jetspecpp.runtime.slot_history import SlotHistory
from vllm_jetspecpp.transport.messages import Verified, VerifiedBatch


class CachedPrefixes:
    """Moves whole blocks of vLLM's KV cache between slots and :class:`PrefixStore`, as the worker's messages say.

    Args:
        max_bytes: memory of the store, which is made with the first message that says how large vLLM's blocks are; 0
            for none.
    """

    def __init__(self, states: RequestStates, history: SlotHistory, max_bytes: int) -> None:
        self.states, self.history, self.max_bytes = states, history, max_bytes
        self.store: PrefixStore | None = None

    def overwritten(self, batch: VerifiedBatch) -> None:
        """Drop the blocks that are others' now. To be called before anything else of the message is looked at."""
        if self.store is None and batch.cache_block_size and self.max_bytes:
            self.store = PrefixStore(self.states.caches, batch.cache_block_size, self.max_bytes)
        if self.store is not None:
            self.store.drop(batch.overwritten)

    def restore(self, request: Verified) -> bool:
        """Give positions before the message's own states those that the store has, where they have none yet.

        Returns:
            Whether the store had all that were wanted.
        """
        if self.store is None or not request.block_ids:
            return True
        slot, size, tokens = request.slot, self.store.block_size, self.history.tokens(request.slot)
        end = min(request.first_block + len(request.block_ids), min(request.state_start, len(tokens)) // size)
        blocks = [
            block
            for block in range(request.first_block, end)
            if not self.history.have_states(slot, block * size, (block + 1) * size).any()
        ]
        ids = [request.block_ids[block - request.first_block] for block in blocks]
        found = self.store.restore(slot, blocks, ids, tokens)
        for block in found:
            self.history.set_states(slot, block * size, size)
            self.states.mark(slot, block * size, (block + 1) * size)
        return len(found) == len(blocks)

    def save(self, requests: Iterable[Verified]) -> None:
        """Keep every block that these messages, committed by now, have completed; drop those they have begun."""
        if self.store is None:
            return
        size = self.store.block_size
        for r in requests:
            first = max(r.state_start // size, r.first_block)
            last = min(-(-(r.state_start + len(r.states)) // size), r.first_block + len(r.block_ids))
            ids = {block: r.block_ids[block - r.first_block] for block in range(first, last)}
            whole = [b for b in ids if self.history.have_states(r.slot, b * size, (b + 1) * size).all()]
            self.store.drop(ids[block] for block in ids if block not in whole)
            self.store.save(r.slot, whole, [ids[block] for block in whole], self.history.tokens(r.slot))
