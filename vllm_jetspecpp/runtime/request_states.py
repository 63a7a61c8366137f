"""All the engine knows of its requests on the device: tokens, which states have arrived, and their keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_jetspecpp.foresight.foresight import Context, Prefix
from vllm_jetspecpp.models.networks import Networks
from vllm_jetspecpp.runtime.kv_cache import SlotCache

CONTEXT_STEP = 128
"""Contexts are padded to a multiple of this: few shapes, so few CUDA graphs, and little wasted attention."""
CHUNK = 256
"""Longest piece of a prefill that is committed at once."""


class RequestStates:
    """Slots of tokens, state marks and caches. Idempotent by position: a second write replaces the first."""

    def __init__(self, nets: Networks, num_slots: int, max_length: int, block_size: int) -> None:
        config, embedding = nets.layer_config, nets.target.embedding
        self.nets, self.max_length, self.block_size, self.device = nets, max_length, block_size, embedding.device

        def cache(num_layers: int) -> SlotCache:
            sizes = (config.num_kv_heads, max_length, config.head_dim)
            return SlotCache(num_layers, num_slots, *sizes, embedding.dtype, self.device)

        self.draft_model = cache(len(nets.draft_model.layers))
        self.adapter = cache(nets.adapter.num_layers)
        self.decoder = cache(len(nets.target.decoder.layers))
        # Beyond max_length there is room for the block under verification and the one after it.
        self.tokens = torch.zeros(num_slots, max_length + 2 * block_size, dtype=torch.int64, device=self.device)
        self.arrived = torch.zeros(num_slots, max_length + 1, dtype=torch.bool, device=self.device)

    @property
    def num_bytes(self) -> int:
        """Memory of all caches, in bytes."""
        return self.draft_model.num_bytes + self.adapter.num_bytes + self.decoder.num_bytes

    def forget(self, slot: int) -> None:
        """Empty a slot: no state of an earlier request is ever seen by a later one."""
        self.arrived[slot] = False

    def set_tokens(self, slot: int, start: int, tokens: Tensor) -> None:
        """Write ``tokens`` [count] at positions from ``start``."""
        self.tokens[slot, start : start + len(tokens)] = tokens.to(self.device, torch.int64)

    def context_length(self, longest: int) -> int:
        """Padded length that covers positions below ``longest``."""
        return min(-(-longest // CONTEXT_STEP) * CONTEXT_STEP, self.max_length)

    def prefix(self, slots: list[int], anchors: list[int]) -> Prefix:
        """The verified context of ``slots`` before their anchors, gathered once for a round."""
        length = self.context_length(max(anchors))
        rows = torch.tensor(slots, device=self.device)
        anchor = torch.tensor(anchors, device=self.device)
        context = Context(
            [self.draft_model.read_all(rows, length)],
            [self.adapter.read_all(rows, length)],
            [self.decoder.read_all(rows, length)],
        )
        tokens = self.tokens[:, : length + 2 * self.block_size].index_select(0, rows)
        return Prefix(context, self._seen(rows, anchor, length), anchor, tokens)

    def _seen(self, rows: Tensor, before: Tensor, length: int) -> Tensor:
        position = torch.arange(length, device=self.device)
        return self.arrived[:, :length].index_select(0, rows) & (position < before[:, None])

    def commit(self, slots: list[int], starts: list[int], states: list[Tensor]) -> None:
        """True states of committed tokens: ``states[i]`` [count, num_taps * hidden] at positions from ``starts[i]``.

        A decoding step is one padded batch of a block's size; longer pieces (prefill) go chunk by chunk.
        """
        short = [i for i, s in enumerate(states) if 0 < len(s) <= self.block_size]
        if short:
            self._commit_padded(
                [slots[i] for i in short], [starts[i] for i in short], [states[i] for i in short], self.block_size
            )
        for slot, start, rows in zip(slots, starts, states, strict=True):
            if len(rows) > self.block_size:
                for first in range(0, len(rows), CHUNK):
                    self._commit_padded([slot], [start + first], [rows[first : first + CHUNK]], CHUNK)

    def _commit_padded(self, slots: list[int], starts: list[int], states: list[Tensor], size: int) -> None:
        rows, start = torch.tensor(slots, device=self.device), torch.tensor(starts, device=self.device)
        counts = torch.tensor([len(s) for s in states], device=self.device)
        padded = torch.zeros(
            len(states), size, states[0].shape[1], dtype=self.nets.target.embedding.dtype, device=self.device
        )
        for row, values in zip(padded, states, strict=True):
            row[: len(values)] = values
        offset = torch.arange(size, device=self.device)
        inside = offset < counts[:, None]
        positions = start[:, None] + offset
        where = torch.where(inside, positions, self.max_length)
        self._write(rows, start, padded, positions.clamp(max=self.max_length - 1), where, max(starts))
        self.arrived[rows[:, None], where] = inside

    def _write(
        self, rows: Tensor, start: Tensor, states: Tensor, positions: Tensor, where: Tensor, longest: int
    ) -> None:
        """Keys and values of new states in all three caches. ``where`` sends padding to the junk position."""
        rope = self.nets.target.rotary(positions)
        for cache, network in ((self.draft_model, self.nets.draft_model), (self.adapter, self.nets.adapter)):
            for layer, segment in enumerate(network.context_keys_values(states, rope)):
                cache.write(layer, rows, where, segment)
        self._write_decoder(
            rows, start, self.nets.deepest(states), positions, where, self.context_length(max(longest, 1))
        )

    def _write_decoder(
        self, rows: Tensor, start: Tensor, x: Tensor, positions: Tensor, where: Tensor, length: int
    ) -> None:
        """The decoder's layers run over true states too: a layer's keys need the output of the layer below."""
        rope, size = self.nets.target.rotary(positions), positions.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=self.device).tril().expand(len(rows), -1, -1)
        before = self._seen(rows, start, length).unsqueeze(1).expand(-1, size, -1)
        mask = torch.cat([before, causal], dim=-1)
        layers = self.nets.target.decoder.layers
        for index, layer in enumerate(layers):
            if index == len(layers) - 1:
                own = layer.context_keys_values(x, rope)
            else:
                x, own = layer(x, rope, [self.decoder.read(index, rows, length)], mask)
            self.decoder.write(index, rows, where, own)
