"""Times inside a step, from outside: the model runner of an engine in this process is wrapped, and has no clocks."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any


class StepClock:
    """Watches one worker of vLLM's; see :class:`~vllm_jetspecpp.benchmarking.closed_loop.Phases`.

    Verification runs from the start of ``_model_forward`` to the end of ``_sample``. vLLM's own methods draft in
    ``propose_draft_token_ids``, all of it exposed. JetSpec++ only sends there, and counts its wait for the reply.
    """

    def __init__(self, worker: Any) -> None:
        worker = getattr(worker, "worker", worker)  # vLLM may hand out the wrapper around it
        self._runner = worker.model_runner
        self._drafts_beside = hasattr(worker, "jetspecpp_stats")
        self._forward_began = 0.0
        self._verify = 0.0
        self._draft = 0.0
        self._counts = self._totals()
        self._wrap("_model_forward", before=self._on_forward)
        self._wrap("_sample", after=self._on_sampled)
        if not self._drafts_beside:
            self._wrap("propose_draft_token_ids", after=self._on_drafted)

    def _wrap(
        self,
        name: str,
        before: Callable[[], None] = lambda: None,
        after: Callable[[float], None] = lambda began: None,
    ) -> None:
        original = getattr(self._runner, name)

        def timed(*args: Any, **options: Any) -> Any:
            before()
            began = perf_counter()
            result = original(*args, **options)
            after(began)
            return result

        setattr(self._runner, name, timed)

    def _on_forward(self) -> None:
        self._forward_began = perf_counter()

    def _on_sampled(self, began: float) -> None:
        self._verify += perf_counter() - self._forward_began

    def _on_drafted(self, began: float) -> None:
        self._draft += perf_counter() - began

    def _totals(self) -> tuple[float, ...]:
        """Seconds of waiting; hits, misses and copied blocks so far."""
        if not self._drafts_beside:
            return 0.0, 0, 0, 0
        totals = self._runner.drafter.totals()
        blocks = totals["blocks_by_origin"]
        return totals["client"]["exposed_seconds"], *(blocks[name] for name in ("hit", "fallback", "copied"))

    def take(self) -> tuple[float, float, tuple[int, ...]]:
        """See :class:`~vllm_jetspecpp.benchmarking.closed_loop.Phases`."""
        now = self._totals()
        waited, *blocks = (a - b for a, b in zip(now, self._counts, strict=True))
        taken = self._verify, self._draft + waited, tuple(map(int, blocks))
        self._counts, self._verify, self._draft = now, 0.0, 0.0
        return taken
