"""What is simulated: method, machines, sharing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_jetspecpp.config import RoundConfig, check_range
from vllm_jetspecpp.evaluation.pipeline_simulator.acceptance import Acceptance
from vllm_jetspecpp.evaluation.pipeline_simulator.costs import PipelineCosts

MAX_TARGETS, MAX_BATCH = 1024, 4096


class Method(Enum):
    """How blocks are drafted."""

    PLAIN = "plain"
    """Not at all: one token a step."""
    INLINE = "inline"
    """After verification, on the target's device (DFlash, DSpark, Domino, JetSpec)."""
    PIPELINED = "jetspecpp"
    """While the target verifies, on a draft device; Eq. 3."""
    AUTOREGRESSIVE = "ssd"
    """Likewise, token by token: γ passes a round (SSD)."""


@dataclass(frozen=True)
class Setup:
    """One deployment: equal targets, each bound to one draft device, each with a fixed number of running requests."""

    costs: PipelineCosts
    round: RoundConfig
    acceptance: Acceptance
    """Of the pipelined methods. Drafting in line takes ``after_miss``: blocks from the verified context."""
    method: Method = Method.PIPELINED
    num_targets: int = 1
    num_draft_devices: int = 1
    """Target i drafts on device i modulo this number: its caches live there."""
    batch_size: int = 1
    """Requests a target verifies together; they go on for ever. The answer waits for the last of them."""
    merge: bool = False
    """A device that becomes idle takes all draft rounds (or fallbacks) that wait as one batch, not one at a time."""
    fallbacks_first: bool = False
    """Fallbacks overtake draft rounds that wait; what runs is never interrupted."""
    drop_queued: bool = False
    """A draft round that has not begun when verification ends is given up: fallback blocks are drafted instead."""

    def __post_init__(self) -> None:
        check_range("num_targets", self.num_targets, 1, MAX_TARGETS)
        check_range("num_draft_devices", self.num_draft_devices, 1, MAX_TARGETS)
        check_range("batch_size", self.batch_size, 1, MAX_BATCH)
        if len(self.acceptance.foreseen) != self.round.block_size:
            raise ValueError(
                f"acceptance has {len(self.acceptance.foreseen)} lengths, a round γ + 1 = {self.round.block_size}"
            )

    @property
    def uses_device(self) -> bool:
        """Whether drafting happens on a device of its own."""
        return self.method in (Method.PIPELINED, Method.AUTOREGRESSIVE)

    def draft_round_ms(self, num_requests: int) -> float:
        """T_draft of the method."""
        if self.method is Method.AUTOREGRESSIVE:
            return self.costs.autoregressive_round_ms(self.round, num_requests)
        return self.costs.draft_round_ms(self.round, num_requests)
