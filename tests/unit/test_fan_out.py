"""Proposition 2(a) with the paper's numbers, and against a search over allocations."""

from __future__ import annotations

import itertools

import pytest

from vllm_jetspecpp.evaluation.fan_out import (
    accepted_length_law,
    geometric_fan_out,
    surrogate_hit_mass,
    surrogate_optimum,
)


def test_worked_example() -> None:
    """α = .6, ρ = 1, γ = 4, B = 10: dropping length 3 is better than the series over all lengths."""
    law = accepted_length_law(0.6, 4)
    assert sum(law) == pytest.approx(1)
    series = geometric_fan_out(law, 1.0, 10, range(5))
    assert series == pytest.approx([2.934, 2.273, 1.760, 1.364, 1.670], abs=5e-4)
    assert surrogate_hit_mass(law, 1.0, series) == pytest.approx(0.5353, abs=5e-5)
    best = surrogate_optimum(law, 1.0, 10)
    assert [k for k, f in enumerate(best) if f] == [0, 1, 2, 4]
    assert surrogate_hit_mass(law, 1.0, best) == pytest.approx(0.5670, abs=5e-5)


@pytest.mark.parametrize(("alpha", "exponent", "budget"), [(0.6, 1.0, 10), (0.8, 0.5, 6), (0.3, 2.0, 4)])
def test_no_allocation_on_a_grid_is_better(alpha: float, exponent: float, budget: int) -> None:
    law = accepted_length_law(alpha, 3)
    best = surrogate_hit_mass(law, exponent, surrogate_optimum(law, exponent, budget))
    grid = [0.0, *(1 + i / 4 for i in range(4 * budget))]
    for fan_out in itertools.product(grid, repeat=4):
        if sum(fan_out) <= budget:
            assert surrogate_hit_mass(law, exponent, fan_out) <= best + 1e-9
