"""Static key-value caches of the draft process: a slot a request, written by position, so that a resend overwrites.

Nothing is ever rolled back: predicted states stay in the round's own tensors, only true states come here, and a
position that was written for a rejected token is overwritten when its true state arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vllm_jetspecpp.models.attention import KeysValues


def written_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take their memory now: a fresh page of a CPU would else take it when it is first written to."""
    return torch.empty(tuple(shape), dtype=dtype, device=device).zero_()


@dataclass(frozen=True)
class View:
    """The positions of some slots that a context is read from: ``length`` of them, from 0 or from each row's start."""

    slots: Tensor  # [rows] int64
    length: int
    start: Tensor | None = None  # [rows] int64; None: position 0, and a slice is read where else is gathered
    only_slot: int | None = None
    """The slot where it is one alone and its number is known to the host: on a CPU nothing is copied for it."""

    @cached_property
    def positions(self) -> Tensor:
        """[rows, length] int64; every layer of every network reads them."""
        offset = torch.arange(self.length, device=self.slots.device)
        return offset.expand(len(self.slots), -1) if self.start is None else self.start[:, None] + offset

    def rows_of(self, slots: Tensor) -> Tensor:
        """The view's slots out of ``slots`` [num_slots, ...]."""
        only = self.only_slot
        return slots.index_select(0, self.slots) if only is None else slots[only : only + 1]


class SlotCache:
    """Keys and values of some layers for every slot and position, and one junk position for padded writes."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, max_length + 1, head_dim)
        self._whole = KeysValues(*(written_zeros(shape, dtype, device) for _ in KeysValues._fields))
        self.layers = [KeysValues(*layer) for layer in zip(*self._whole, strict=True)]

    @property
    def num_bytes(self) -> int:
        """Memory of all layers, in bytes."""
        return sum(tensor.nbytes for tensor in self._whole)

    def write(self, layer: int, slots: Tensor, positions: Tensor, segment: KeysValues) -> None:
        """Store a segment.

        Args:
            slots: [rows] int64.
            positions: [rows, length] int64; ``max_length`` for padding.
            segment: [rows, num_kv_heads, length, head_dim] each.
        """
        for cache, new in zip(self.layers[layer], segment, strict=True):
            cache[slots[:, None], :, positions] = new.transpose(1, 2)

    def write_all(self, slots: Tensor, positions: Tensor, segments: Sequence[KeysValues]) -> None:
        """:meth:`write` for every layer at once."""
        for cache, new in zip(self._whole, zip(*segments, strict=True), strict=True):
            # Indices apart from each other come first: [rows, length, layers, num_kv_heads, head_dim].
            cache[:, slots[:, None], :, positions] = torch.stack(new).permute(1, 3, 0, 2, 4)

    def read(self, layer: int, view: View) -> KeysValues:
        """What a view shows of one layer: [rows, num_kv_heads, length, head_dim] each."""
        keys, values = self.layers[layer]
        if view.start is None:
            read = (view.rows_of(tensor[:, :, : view.length]) for tensor in (keys, values))
        else:
            slots, positions = view.slots[:, None], view.positions
            read = (tensor[slots, :, positions].transpose(1, 2) for tensor in (keys, values))
        return KeysValues(*read)

    def read_all(self, view: View) -> list[KeysValues]:
        """:meth:`read` for every layer."""
        return [self.read(layer, view) for layer in range(len(self.layers))]
