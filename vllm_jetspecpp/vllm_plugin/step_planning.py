"""The planner's eyes and ears in the worker: what each step was, how long it took, and what is to be chosen next."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from vllm_jetspecpp.planning.planner import FixedChoice, Planner
from vllm_jetspecpp.planning.running import Step, Verification
from vllm_jetspecpp.types import Origin, RoundChoice

if TYPE_CHECKING:
    from vllm_jetspecpp.vllm_plugin.proposer import VerifiedRows


class StepPlanning:
    """Order of calls in a step: ``outcomes``, ``choose``, ``answered``."""

    def __init__(self, planner: Planner | FixedChoice) -> None:
        self.planner = planner
        self.min_accept_prob = 0.0
        """Least probability of acceptance of a draft token that is worth verifying in the next step."""
        self._choice: RoundChoice | None = None
        self._ahead: RoundChoice | None = None
        self._answers: list[Origin] = []
        self._began: float | None = None
        self._members: frozenset[str] = frozenset()
        self._exposed = 0.0

    def outcomes(
        self, requests: Sequence[VerifiedRows], verifications: Sequence[Verification], exposed_seconds: float
    ) -> None:
        """A step is over.

        Args:
            requests: of the step.
            verifications: of the blocks that were verified in it.
            exposed_seconds: all the time that steps have waited for drafts so far.
        """
        now, members = perf_counter(), frozenset(rows.request_id for rows in requests)
        decoding = all(rows.num_sampled and rows.num_rows == 1 + rows.num_draft_tokens for rows in requests)
        if requests and decoding:
            # Between steps of the same requests nothing else happened: the time from one to the next is the step's.
            known = self._began is not None and members == self._members
            step = Step(
                choice=self._choice,
                ahead=self._ahead,
                batch=len(requests),
                drafted=len(verifications),
                seconds=now - self._began if known and self._began is not None else None,
                exposed=exposed_seconds - self._exposed,
                verifications=tuple(verifications),
                answers=tuple(self._answers),
            )
            self.planner.see(step)
        self._began, self._members, self._exposed = now, members, exposed_seconds

    def choose(self, batch: int, drafted: int) -> RoundChoice | None:
        """For the next step of ``batch`` requests, ``drafted`` of which may get drafts."""
        self._ahead, self._choice = self._choice, self.planner.choose(batch, drafted)
        self.min_accept_prob = self.planner.min_accept_prob(batch, drafted)
        self._answers = []
        return self._choice

    def answered(self, origin: Origin) -> None:
        """A block came for the next step."""
        self._answers.append(origin)
