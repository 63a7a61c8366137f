"""The outcome cache: one pre-drafted block for each outcome that was thought likely, for every request slot."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_jetspecpp.types import DraftBlock, Outcome


@dataclass
class _Entry:
    anchor_position: int
    blocks: dict[Outcome, DraftBlock] = field(default_factory=dict)


class OutcomeCache:
    """Blocks by slot and outcome. Plain host data: a look-up costs no device work."""

    def __init__(self) -> None:
        self._slots: dict[int, _Entry] = {}

    def store(self, slot: int, anchor_position: int, blocks: dict[Outcome, DraftBlock]) -> None:
        """Replace the slot's content: pre-drafts for the verification of the block at ``anchor_position``."""
        self._slots[slot] = _Entry(anchor_position, blocks)

    def lookup(self, slot: int, anchor_position: int, outcome: Outcome) -> DraftBlock | None:
        """The pre-drafted block for ``outcome`` of the block anchored at ``anchor_position``; None is a miss."""
        entry = self._slots.get(slot)
        if entry is None or entry.anchor_position != anchor_position:
            return None
        return entry.blocks.get(outcome)

    def forget(self, slot: int) -> None:
        """Drop the slot's content."""
        self._slots.pop(slot, None)
