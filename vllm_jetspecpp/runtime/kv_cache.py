"""Static key-value caches of the draft process: a slot a request, written by position, so that a resend overwrites.

Nothing is ever rolled back: predicted states stay in the round's own tensors, only true states come here, and a
position that was written for a rejected token is overwritten when its true state arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_jetspecpp.models.attention import KeysValues


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
        shape = (num_slots, num_kv_heads, max_length + 1, head_dim)
        self.layers = [
            KeysValues(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        """Memory of all layers, in bytes."""
        return sum(t.nbytes for layer in self.layers for t in layer)

    def write(self, layer: int, slots: Tensor, positions: Tensor, segment: KeysValues) -> None:
        """Store a segment.

        Args:
            slots: [rows] int64.
            positions: [rows, length] int64; ``max_length`` for padding.
            segment: [rows, num_kv_heads, length, head_dim] each.
        """
        for cache, new in zip(self.layers[layer], segment, strict=True):
            cache[slots[:, None], :, positions] = new.transpose(1, 2)

    def read(self, layer: int, slots: Tensor, length: int) -> KeysValues:
        """The first ``length`` positions of ``slots`` [rows], gathered: [rows, num_kv_heads, length, head_dim] each."""
        keys, values = self.layers[layer]
        return KeysValues(keys[:, :, :length].index_select(0, slots), values[:, :, :length].index_select(0, slots))

    def read_all(self, slots: Tensor, length: int) -> list[KeysValues]:
        """:meth:`read` for every layer."""
        return [self.read(layer, slots, length) for layer in range(len(self.layers))]
