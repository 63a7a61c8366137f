"""All the engine knows of its requests on the device: tokens, which states have arrived, and their keys and values."""

from __future__ import annotations

from enum import Flag, auto

import torch
from torch import Tensor

from vllm_jetspecpp.foresight.foresight import Context, Prefix
from vllm_jetspecpp.models.attention import Rope
from vllm_jetspecpp.models.networks import Networks
from vllm_jetspecpp.runtime.kv_cache import SlotCache, View

CONTEXT_STEP, CPU_CONTEXT_STEP = 128, 32
"""Contexts are padded to a multiple of this: few shapes, so few CUDA graphs; on a CPU no more attention than needed."""
CHUNK = 256
"""Longest piece of a prefill that is committed at once."""


class Parts(Flag):
    """Whose caches a commit writes."""

    DRAFT_MODEL = auto()
    FORESIGHT = auto()
    """Adapter and decoder."""
    ALL = DRAFT_MODEL | FORESIGHT


class RequestStates:
    """Slots of tokens, state marks and caches. Idempotent by position: a second write replaces the first.

    Args:
        window: positions before a block (or before a piece of a prefill) that are read; None: all. Cost and attention
            then stop growing with the context.
    """

    def __init__(
        self, nets: Networks, num_slots: int, max_length: int, block_size: int, window: int | None = None
    ) -> None:
        config, embedding = nets.layer_config, nets.target.embedding
        self.window = window
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
    def caches(self) -> tuple[SlotCache, ...]:
        """Of all networks."""
        return self.draft_model, self.adapter, self.decoder

    @property
    def num_bytes(self) -> int:
        """Memory of all caches, in bytes."""
        return sum(cache.num_bytes for cache in self.caches)

    def forget(self, slot: int) -> None:
        """Empty a slot: no state of an earlier request is ever seen by a later one."""
        self.arrived[slot] = False

    def set_tokens(self, slot: int, start: int, tokens: Tensor) -> None:
        """Write ``tokens`` [count] at positions from ``start``."""
        self.tokens[slot, start : start + len(tokens)] = tokens.to(self.device, torch.int64)

    def context_length(self, longest: int) -> int:
        """Padded length that covers positions below ``longest``."""
        step = CPU_CONTEXT_STEP if self.device.type == "cpu" else CONTEXT_STEP
        return min(-(-longest // step) * step, self.max_length)

    def mark(self, slot: int, start: int, end: int) -> None:
        """States of positions [start, end) were written into the caches by somebody else."""
        self.arrived[slot, start:end] = True

    def prefix(self, slots: list[int], anchors: list[int]) -> Prefix:
        """The verified context of ``slots`` before their anchors, gathered once for a round."""
        anchor = torch.tensor(anchors, device=self.device)
        view = self._view(slots, anchor, max(anchors))
        context = Context(*([cache.read_all(view)] for cache in self.caches))
        longest = self.context_length(max(anchors)) + 2 * self.block_size
        tokens = view.rows_of(self.tokens[:, :longest])
        return Prefix(context, self._seen(view, anchor), anchor, tokens)

    def _view(self, slots: list[int], before: Tensor, longest: int) -> View:
        """What a context that ends before positions ``before`` [rows], at most ``longest``, is read from."""
        rows = torch.tensor(slots, device=self.device)
        # On a GPU the slot is data, so that one captured graph serves all of them.
        only = slots[0] if len(slots) == 1 and self.device.type == "cpu" else None
        if self.window is None or longest <= self.window:
            return View(rows, self.context_length(max(longest, 1)), only_slot=only)
        length = self.context_length(self.window)
        return View(rows, length, (before - length).clamp(min=0))

    def _seen(self, view: View, before: Tensor) -> Tensor:
        """[rows, length] bool: positions of ``view`` before ``before`` whose states have arrived."""
        positions = view.positions
        seen = self.arrived[view.slots[:, None], positions] & (positions < before[:, None])
        return seen if self.window is None else seen & (positions >= before[:, None] - self.window)

    def commit(self, slots: list[int], starts: list[int], states: list[Tensor], parts: Parts = Parts.ALL) -> None:
        """True states of committed tokens: ``states[i]`` [count, num_taps * hidden] at positions from ``starts[i]``.

        A decoding step is one padded batch, on a GPU of a block's size; longer pieces (prefill) go chunk by chunk.

        Args:
            parts: whose caches are written; a block can be drafted when the draft model's are.
        """
        short = [i for i, s in enumerate(states) if 0 < len(s) <= self.block_size]
        if short:
            chosen = [slots[i] for i in short], [starts[i] for i in short], [states[i] for i in short]
            # On a GPU one shape, on a CPU no more rows than needed.
            longest = max(len(states[i]) for i in short)
            self._commit_padded(*chosen, longest if self.device.type == "cpu" else self.block_size, parts)
        for slot, start, rows in zip(slots, starts, states, strict=True):
            if len(rows) > self.block_size:
                for first in range(0, len(rows), CHUNK):
                    self._commit_padded([slot], [start + first], [rows[first : first + CHUNK]], CHUNK, parts)

    def _commit_padded(
        self, slots: list[int], starts: list[int], states: list[Tensor], size: int, parts: Parts
    ) -> None:
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
        positions = positions.clamp(max=self.max_length - 1)
        rope = self.nets.target.rotary(positions)
        if Parts.DRAFT_MODEL in parts:
            self.draft_model.write_all(rows, where, self.nets.draft_model.context_keys_values(padded, rope))
            self.arrived[rows[:, None], where] = inside
        if Parts.FORESIGHT in parts:
            self.adapter.write_all(rows, where, self.nets.adapter.context_keys_values(padded, rope))
            view = self._view(slots, start, max(starts))
            self._write_decoder(view, start, self.nets.deepest(padded), rope, where)

    def _write_decoder(self, view: View, start: Tensor, x: Tensor, rope: Rope, where: Tensor) -> None:
        """The decoder's layers run over true states too: a layer's keys need the output of the layer below."""
        rows = view.slots
        size = where.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=self.device).tril().expand(len(rows), -1, -1)
        before = self._seen(view, start).unsqueeze(1).expand(-1, size, -1)
        mask = torch.cat([before, causal], dim=-1)
        layers = self.nets.target.decoder.layers
        for index, layer in enumerate(layers):
            if index == len(layers) - 1:
                own = layer.context_keys_values(x, rope)
            else:
                x, own = layer(x, rope, [self.decoder.read(index, view)], mask)
            self.decoder.write(index, rows, where, own)
