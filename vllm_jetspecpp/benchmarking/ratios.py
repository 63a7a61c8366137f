"""The ratios that `bench serve` is about, each taken within a repeat, beside the value wanted of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from vllm_jetspecpp.benchmarking.measures import Figures
from vllm_jetspecpp.benchmarking.methods import OURS, PLAIN

Table = Mapping[tuple[str, int], Sequence[Figures]]
AT_LEAST, AT_MOST = ">=", "<="
FULL_LOAD = 16


def paired(
    table: Table, left: tuple[str, int], right: tuple[str, int], combine: Callable[[Figures, Figures], float | None]
) -> list[float]:
    """``combine`` of both sides' figures, repeat by repeat, without those where something is missing."""
    if left not in table or right not in table:
        return []
    values = (combine(a, b) for a, b in zip(table[left], table[right], strict=False))
    return [value for value in values if value is not None]


def quotient(name: str, other: str | None = None) -> Callable[[Figures, Figures], float | None]:
    """Left's ``name`` over right's ``other``, by default of the same name."""

    def divide(left: Figures, right: Figures) -> float | None:
        top, bottom = left[name], right[other or name]
        return None if top is None or not bottom else top / bottom

    return divide


def host_over_plain(ours: Figures, plain: Figures) -> float | None:
    """Milliseconds per round outside verification and exposed drafting, above those of a step without drafting."""
    if ours["host_ms"] is None or plain["host_ms"] is None:
        return None
    return ours["host_ms"] - plain["host_ms"]


def of_the_limit(ours: Figures, same: Figures) -> float | None:
    """Tokens/s over τ / T_verify, which perfect hiding would reach; of the means, as blocks are of unequal length."""
    rate, tau, verify = ours["tok_s"], ours["tau"], ours["verify_mean_ms"]
    return rate * verify / 1e3 / tau if rate and tau and verify else None


def judged(values: Sequence[float], sense: str, wanted: float | None) -> dict[str, Any]:
    """Median and spread, and whether the median is as wanted."""
    value = median(values)
    said: dict[str, Any] = {"value": value, "min": min(values), "max": max(values), "repeats": len(values)}
    if wanted is not None:
        met = value >= wanted if sense == AT_LEAST else value <= wanted
        said |= {"wanted": f"{sense} {wanted:g}", "met": met}
    return said


def all_ratios(table: Table) -> dict[str, dict[str, Any]]:
    """By name; those whose methods were not measured are missing."""
    ours = (OURS, 1)
    found: list[tuple[str, list[float], str, float | None]] = []
    for other, wanted in ((PLAIN, 2.0), ("plain_2", 1.5), ("dflash", 1.4), ("dflash_2", 1.4)):
        found.append((f"{OURS}_over_{other}", paired(table, ours, (other, 1), quotient("tok_s")), AT_LEAST, wanted))
        with_prefill = paired(table, ours, (other, 1), quotient("total_tok_s"))
        found.append((f"{OURS}_over_{other}_with_prefill", with_prefill, AT_LEAST, None))
    for method, level in table:
        if level == 1 and method not in (PLAIN, OURS):
            found.append(
                (f"{method}_over_{PLAIN}", paired(table, (method, 1), (PLAIN, 1), quotient("tok_s")), "", None)
            )
    hits = paired(table, ours, ours, quotient("exposed_ms_hits", "verify_ms"))
    found += [
        ("exposed_on_hits_over_verify", hits, AT_MOST, 0.1),
        ("host_and_comm_over_plain_ms", paired(table, ours, (PLAIN, 1), host_over_plain), AT_MOST, 1.5),
        ("tok_s_over_tau_by_verify", paired(table, ours, ours, of_the_limit), AT_LEAST, 0.85),
    ]
    for other, full_load in ((PLAIN, 0.97), ("plain_2", None)):
        values = paired(table, (OURS, FULL_LOAD), (other, FULL_LOAD), quotient("total_tok_s"))
        found.append((f"concurrency_{FULL_LOAD}_over_{other}", values, AT_LEAST, full_load))
    return {name: judged(values, sense, wanted) for name, values, sense, wanted in found if values}
