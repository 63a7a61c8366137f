"""States that outlive their request: keys and values of vLLM's cached blocks, so that a cached prefix has its states.

vLLM does not compute the positions of a cached prefix again, so their states never arrive a second time. The store
keeps what the draft process made of them, by the id of vLLM's own block: which blocks a request may read is decided by
vLLM alone (tokens, LoRA, cache salt). A digest of all tokens up to the block's end is compared on top, so that an id
that changed hands unnoticed is a miss and never another request's states.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_jetspecpp.runtime.kv_cache import SlotCache, written_zeros


class _Entry(NamedTuple):
    place: int
    """In the pools."""
    digest: bytes


class PrefixStore:
    """Least recently used blocks go first. Copies run on the device; who is where is host data.

    Args:
        caches: the slots' caches that blocks are copied from and to.
        block_size: positions in one of vLLM's blocks.
        max_bytes: memory of the pools; what does not fill a block is left unused.
    """

    def __init__(self, caches: Sequence[SlotCache], block_size: int, max_bytes: int) -> None:
        self.block_size = block_size
        self._slots = [tensor for cache in caches for layer in cache.layers for tensor in layer]
        block_bytes = sum(t[0, :, :1].nbytes for t in self._slots) * block_size
        self.capacity = max_bytes // block_bytes
        shapes = [(self.capacity, t.shape[1], block_size, t.shape[3]) for t in self._slots]
        self._pools = [written_zeros(shape, t.dtype, t.device) for shape, t in zip(shapes, self._slots, strict=True)]
        self._free = list(range(self.capacity))
        self._entries: OrderedDict[int, _Entry] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Memory of the pools."""
        return sum(pool.nbytes for pool in self._pools)

    def __len__(self) -> int:
        return len(self._entries)

    def save(self, slot: int, blocks: Sequence[int], block_ids: Sequence[int], tokens: np.ndarray) -> None:
        """Keep complete blocks of a slot.

        Args:
            blocks: indices of the request's blocks, counted from position 0, ascending.
            block_ids: vLLM's ids of them.
            tokens: [count] int32, the slot's tokens, at least to the end of the last block.
        """
        if self.capacity == 0 or not blocks:
            return
        kept = list(zip(blocks, block_ids, self._digests(tokens, blocks), strict=True))[-self.capacity :]
        places = [self._place(block_id, digest) for _, block_id, digest in kept]
        where = self._index(places)
        for pool, cache in zip(self._pools, self._slots, strict=True):
            pool.index_copy_(0, where, self._blocks_of(cache, slot, [block for block, _, _ in kept]))

    def restore(self, slot: int, blocks: Sequence[int], block_ids: Sequence[int], tokens: np.ndarray) -> list[int]:
        """Copy what is kept of ``blocks`` into the slot; arguments as in :meth:`save`. Returns the blocks found."""
        found: list[int] = []
        places: list[int] = []
        for block, block_id, digest in zip(blocks, block_ids, self._digests(tokens, blocks), strict=True):
            entry = self._entries.get(block_id)
            if entry is not None and entry.digest == digest:
                self._entries.move_to_end(block_id)
                found.append(block)
                places.append(entry.place)
        if found:
            positions = self._index([p for b in found for p in range(b * self.block_size, (b + 1) * self.block_size)])
            where = self._index(places)
            for pool, cache in zip(self._pools, self._slots, strict=True):
                cache[slot].index_copy_(1, positions, pool.index_select(0, where).transpose(0, 1).flatten(1, 2))
        return found

    def drop(self, block_ids: Iterable[int]) -> None:
        """Forget blocks: other states stand in them now, or will."""
        for block_id in block_ids:
            if (entry := self._entries.pop(block_id, None)) is not None:
                self._free.append(entry.place)

    def _place(self, block_id: int, digest: bytes) -> int:
        self.drop([block_id])
        if not self._free:
            self._free.append(self._entries.popitem(last=False)[1].place)
        place = self._free.pop()
        self._entries[block_id] = _Entry(place, digest)
        return place

    def _blocks_of(self, cache: Tensor, slot: int, blocks: Sequence[int]) -> Tensor:
        """[blocks, heads, block_size, head_dim] of a slot's cache [heads, positions, head_dim]."""
        first, end = blocks[0], blocks[-1] + 1
        spanned = cache[slot, :, first * self.block_size : end * self.block_size]
        return spanned.unflatten(1, (end - first, self.block_size)).transpose(0, 1)[self._index(blocks) - first]

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._slots[0].device)

    def _digests(self, tokens: np.ndarray, blocks: Sequence[int]) -> list[bytes]:
        """Of all tokens up to each block's end: an incremental hash, copied where a block ends."""
        hasher, done, digests = hashlib.blake2b(digest_size=16), 0, []
        for block in blocks:
            end = (block + 1) * self.block_size
            hasher.update(tokens[done:end].tobytes())
            digests.append(hasher.digest())
            done = end
        return digests
