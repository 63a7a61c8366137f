"""Closed forms: what a simulation must come to where nobody queues, and what no queue can beat."""

from __future__ import annotations

import math

from vllm_jetspecpp.evaluation.pipeline_simulator.setup import Method, Setup


def expected_fallback_ms(setup: Setup) -> float:
    """Mean time of a round's fallback: the number that missed is binomial, and one call drafts for all of them."""
    n, miss = setup.batch_size, 1 - setup.acceptance.hit_rate
    return sum(math.comb(n, k) * miss**k * (1 - miss) ** (n - k) * setup.costs.fallback(k) for k in range(1, n + 1))


def throughput_eq4(setup: Setup) -> float:
    """Eq. 4 for one target with a draft device of its own: tokens per second of all its requests.

    With several requests the fallback of Eq. 4 is the mean over how many missed. Drafting in line and plain decoding
    are one division.
    """
    costs, n = setup.costs, setup.batch_size
    if setup.method is Method.PLAIN:
        return 1000 * n / (costs.plain(n) + costs.step_ms)
    if setup.method is Method.INLINE:
        return 1000 * n * setup.acceptance.after_miss.mean / (costs.verify(n) + costs.inline_draft(n) + costs.step_ms)
    round_ms = max(costs.verify(n), setup.draft_round_ms(n)) + costs.comm_ms + costs.step_ms
    return 1000 * n * setup.acceptance.tau / (round_ms + expected_fallback_ms(setup))


def saturated_round_ms(setup: Setup) -> float:
    """Least time of a round that a shared device allows: the work of all its targets, one after the other.

    Targets are spread evenly; the fullest device counts. No bound where rounds are merged or dropped.
    """
    sharing = math.ceil(setup.num_targets / setup.num_draft_devices)
    return sharing * (setup.draft_round_ms(setup.batch_size) + expected_fallback_ms(setup))


def targets_per_device(setup: Setup) -> float:
    """How many such targets one draft device can serve before it is the bottleneck: alone-round over device work."""
    costs, n = setup.costs, setup.batch_size
    alone = max(costs.verify(n), setup.draft_round_ms(n)) + costs.comm_ms + costs.step_ms + expected_fallback_ms(setup)
    return alone / (setup.draft_round_ms(n) + expected_fallback_ms(setup))
