"""What the host knows of every slot: its tokens, and which positions have states. Asking costs no device work."""

from __future__ import annotations

import numpy as np
from torch import Tensor


class SlotHistory:
    """Kept from the worker's messages alone; like the caches it is written by position, and a resend overwrites."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        self._tokens = np.zeros((num_slots, max_length), np.int32)
        self._num_tokens = [0] * num_slots
        self._has_states = np.zeros((num_slots, max_length), np.bool_)

    def forget(self, slot: int) -> None:
        """Empty a slot."""
        self._num_tokens[slot] = 0
        self._has_states[slot] = False

    def set_tokens(self, slot: int, start: int, tokens: Tensor) -> None:
        """Tokens [count] int32 from position ``start`` on; what stood after them is no longer known."""
        self._num_tokens[slot] = start + len(tokens)
        self._tokens[slot, start : start + len(tokens)] = tokens.numpy()

    def set_states(self, slot: int, start: int, count: int) -> None:
        """The states of ``count`` positions from ``start`` on have come."""
        self._has_states[slot, start : start + count] = True

    def tokens(self, slot: int) -> np.ndarray:
        """All tokens of the slot, [count] int32."""
        return self._tokens[slot, : self._num_tokens[slot]]

    def have_states(self, slot: int, start: int, end: int) -> np.ndarray:
        """For every position of [start, end) whether it has states, bool."""
        return self._has_states[slot, start:end]

    def num_missing(self, slot: int, before: int) -> int:
        """Positions below ``before`` without states."""
        return before - int(np.count_nonzero(self._has_states[slot, :before]))
