"""Discrete-event simulation of drafting beside verification: targets, draft devices, and who waits for whom.

One round of a target with JetSpec++, as the events run::

    answer sent ─┬─ target: verify ──────────────┐
                 └─ device queue: draft round ───┴─ both over: T_comm ─ all foreseen ── next verification
                                                       └─ some missed: device queue: fallback ─┘

All times are milliseconds. Every draw comes from a seed and a target's number: the same call gives the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_jetspecpp.config import check_range
from vllm_jetspecpp.evaluation.pipeline_simulator.draft_device import DraftDevice
from vllm_jetspecpp.evaluation.pipeline_simulator.events import EventLoop, Segment, Timeline
from vllm_jetspecpp.evaluation.pipeline_simulator.figures import Figures, figures_of
from vllm_jetspecpp.evaluation.pipeline_simulator.setup import Method, Setup
from vllm_jetspecpp.evaluation.pipeline_simulator.target import Target

MAX_ROUNDS = 10_000_000


@dataclass(frozen=True)
class Simulation:
    """Figures and bars of one run."""

    figures: Figures
    segments: tuple[Segment, ...]


def simulate(
    setup: Setup, rounds: int = 5000, warm_up: int = 100, seed: int = 0, timeline_ms: float = 0.0
) -> Simulation:
    """Run until one target has finished ``rounds`` rounds, or a few more, after ``warm_up``.

    Targets begin one after the other within the time of one verification, so that they do not queue in step.

    Raises:
        ValueError: ``rounds`` or ``warm_up`` is out of range, or a round would take no time.
    """
    check_range("rounds", rounds, 1, MAX_ROUNDS)
    check_range("warm_up", warm_up, 1, MAX_ROUNDS)
    first = (
        setup.costs.plain(setup.batch_size) if setup.method is Method.PLAIN else setup.costs.verify(setup.batch_size)
    )
    if first <= 0:
        which = "plain" if setup.method is Method.PLAIN else "verify"
        raise ValueError(f"method {setup.method.value!r} needs {which} above 0 ms in the costs, got {first:g}")
    loop, timeline = EventLoop(), Timeline(timeline_ms)
    count = setup.num_draft_devices if setup.uses_device else 0
    devices = [DraftDevice(f"draft device {i}", loop, setup, timeline) for i in range(count)]
    targets = [
        Target(i, setup, loop, timeline, devices[i % count] if count else None, seed) for i in range(setup.num_targets)
    ]
    for i, target in enumerate(targets):
        loop.after(first * i / setup.num_targets, target.begin)
    while max(len(t.rounds.ends) for t in targets) < warm_up + rounds or not _all_warm(targets, warm_up):
        for _ in range(8 * setup.num_targets):  # looking after every event would take as long as the events
            loop.step()
    used = [d for i, d in enumerate(devices) if i < setup.num_targets]
    return Simulation(figures_of(setup, targets, used, warm_up), tuple(timeline.segments))


def _all_warm(targets: Sequence[Target], warm_up: int) -> bool:
    return all(len(t.rounds.ends) > warm_up for t in targets)
