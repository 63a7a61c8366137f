"""The paper's serving figures (its Table 3, of which we have the text only) and what the simulator makes of its inputs.

Every number carries a mark: *input* stands in the paper's text; *fitted* was chosen so that the first row comes out;
*assumed* is ours, with a reason; what the simulation gives is *predicted*, or *fitted* where it had to come out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.evaluation.pipeline_simulator import (
    Acceptance,
    CostCurve,
    Method,
    PipelineCosts,
    Profile,
    Setup,
    inline_acceptance,
    simulate,
)
from vllm_jetspecpp.evaluation.pipeline_simulator.acceptance import acceptance_rate

NUM_DRAFT_TOKENS, NUM_OUTCOMES, SSD_DRAFT_TOKENS = 15, 4, 4
ALLOWED_ERROR = 0.10
SUSTAINED_FLOPS = 1e15
"""Assumed rate of one GPU in matrix products: it only sets what each further request adds to a time."""
ADAPTER_AND_DECODER_LAYERS, DRAFT_LAYERS = 12 + 2, 5
"""The paper's adapter (12) and decoder (2); five layers of the draft model are DFlash's (assumed)."""


@dataclass(frozen=True)
class TargetModel:
    """Weights that a forward reads, counted in decoder layers; the LM head as so many layers of them."""

    name: str
    layers: int
    layer_weights: float
    head_weights: float
    passes: tuple[int, int]
    """J, R of the paper's serving."""
    verify_ms: tuple[float, float]
    """Input: the range the paper gives for both benchmarks together."""

    def weights(self, layers: int) -> float:
        """Of so many layers and the LM head."""
        return layers * self.layer_weights + self.head_weights

    @property
    def verify(self) -> float:
        """Middle of the range."""
        return sum(self.verify_ms) / 2

    def each_more(self, layers: int) -> float:
        """Assumed ms that one more block of 16 tokens adds to a forward through so many layers."""
        return 2 * self.weights(layers) * (NUM_DRAFT_TOKENS + 1) / SUSTAINED_FLOPS * 1000


QWEN3_8B = TargetModel("Qwen3-8B", 36, 193e6, 622e6, (1, 1), (6.1, 6.3))
QWEN_27B = TargetModel("Qwen3.8-27B", 64, 382e6, 1271e6, (3, 3), (27.4, 27.8))


@dataclass(frozen=True)
class PaperRow:
    """What the text says of one target and benchmark; None where it says nothing."""

    target: TargetModel
    bench: str
    tau_dspark: float
    dspark_ms: float
    """DSpark's drafting a round."""
    tau: float | None
    """τ of JetSpec++ in serving."""
    tau_miss: float | None
    """τ of blocks at J_0 from true states: what a fallback block is."""
    tau_j1r1_offline: float | None
    hit_rate: float | None
    exposed_ms: float
    ratio: float
    """JetSpec++'s speed over DSpark's."""
    ssd: tuple[float, float, float] | None = None
    """SSD: τ, ms by which it outlasts verification, speed over plain decoding."""

    @property
    def name(self) -> str:
        return f"{self.target.name} {self.bench}"


ROWS = (
    PaperRow(QWEN3_8B, "GSM8K", 7.34, 3.76, 7.78, 5.70, None, 0.929, 0.61, 1.54, (4.06, 8.51, 1.52)),
    PaperRow(QWEN3_8B, "MATH-500", 8.98, 3.80, 9.41, 7.52, 9.63, 0.917, 0.66, 1.51, (4.20, 8.55, 1.55)),
    PaperRow(QWEN_27B, "GSM8K", 8.02, 4.46, None, None, 8.71, None, 0.71, 1.37),
    PaperRow(QWEN_27B, "MATH-500", 8.94, 4.52, None, None, 9.53, None, 0.77, 1.31),
)
FIT_ROW, MATH_8B = ROWS[0], ROWS[1]
MEAN_TAU = {(1, 1): 7.50, (3, 3): 8.94}
"""Input: mean τ of seven benchmarks, Qwen3-8B, temperature 0, budget 16, by (J, R)."""
FORESIGHT_KEEPS = 0.965
"""Input: middle of the 95 to 98 % of τ that blocks keep when they are drafted from predicted states."""


def rescaled(tau: float, known: float, refined: float) -> float:
    """τ after a change of the drafter that took ``known`` to ``refined`` elsewhere.

    Assumed: the change multiplies the odds that a draft token is rejected by one factor, whatever the benchmark.
    A plain ratio of τ would run past γ + 1.
    """

    def odds(value: float) -> float:
        rate = acceptance_rate(value, NUM_DRAFT_TOKENS)
        return (1 - rate) / rate

    changed = odds(tau) * odds(refined) / odds(known)
    rate = 1 / (1 + changed)
    return sum(rate**i for i in range(NUM_DRAFT_TOKENS + 1))


def solve(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """x in [low, high] with function(x) = wanted, for a rising function."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Fit:
    """All that was fitted, each from the first row alone."""

    decoder_error: float
    """Per committed token; from the hit rate."""
    comm_ms: float
    """T_comm; from the exposed time, once the fallback's share is taken off."""
    ssd_pass_ms: float
    """A pass of SSD's draft model; from the time it outlasts verification."""
    plain_ms: float
    """A step of plain decoding; from SSD's speed over it."""


@cache
def fit() -> Fit:
    """Fit to Qwen3-8B on GSM8K."""
    row = FIT_ROW
    assert row.tau is not None and row.tau_miss is not None and row.hit_rate is not None and row.ssd is not None
    tau_hit = (row.tau - (1 - row.hit_rate) * row.tau_miss) / row.hit_rate
    kept = solve(
        lambda x: Acceptance.compounding(1 - x, tau_hit, row.tau_miss, NUM_DRAFT_TOKENS).hit_rate, row.hit_rate, 0.9, 1
    )
    tau_ssd, beyond, over_plain = row.ssd
    return Fit(
        decoder_error=1 - kept,
        comm_ms=row.exposed_ms - (1 - row.hit_rate) * row.dspark_ms,
        ssd_pass_ms=(row.target.verify + beyond) / SSD_DRAFT_TOKENS,
        plain_ms=over_plain * (row.target.verify + beyond) / tau_ssd,
    )


def served_tau(row: PaperRow) -> float:
    """τ of JetSpec++ in serving: the paper's, else from its offline J1-R1 by what J, R and the cache size did to 8B."""
    if row.tau is not None:
        return row.tau
    assert row.tau_j1r1_offline is not None and MATH_8B.tau is not None and MATH_8B.tau_j1r1_offline is not None
    offline = rescaled(row.tau_j1r1_offline, MEAN_TAU[1, 1], MEAN_TAU[row.target.passes])
    return rescaled(offline, MATH_8B.tau_j1r1_offline, MATH_8B.tau)


def fallback_tau(row: PaperRow) -> float:
    """τ of a fallback block: the paper's J_0, else from its J1-R1 by what lies between the two on 8B."""
    if row.tau_miss is not None:
        return row.tau_miss
    assert row.tau_j1r1_offline is not None and MATH_8B.tau_j1r1_offline is not None and MATH_8B.tau_miss is not None
    return rescaled(row.tau_j1r1_offline, MATH_8B.tau_j1r1_offline, MATH_8B.tau_miss)


def acceptance(row: PaperRow) -> Acceptance:
    """With τ_hit such that the mean over hits and misses is the served τ."""
    miss, error = fallback_tau(row), fit().decoder_error

    def made(tau_hit: float) -> Acceptance:
        return Acceptance.compounding(error, tau_hit, miss, NUM_DRAFT_TOKENS)

    return made(solve(lambda tau_hit: made(tau_hit).tau, served_tau(row), miss, NUM_DRAFT_TOKENS + 1))


def costs(row: PaperRow, fill: float = 1.0, verify_ms: float | None = None) -> PipelineCosts:
    """Times of a deployment.

    The paper says only that the draft round of its J and R fits behind verification. T_pred and T_pass are therefore
    assumed: shares by the weights they read, scaled so that this draft round takes ``fill`` of T_verify. With
    ``fill`` ≤ 1 they do not touch Table 3; they decide what sharing costs.
    """
    target, fitted = row.target, fit()
    verify = target.verify if verify_ms is None else verify_ms
    predict, one_pass = target.weights(ADAPTER_AND_DECODER_LAYERS), target.weights(DRAFT_LAYERS)
    more_predict, more_pass = target.each_more(ADAPTER_AND_DECODER_LAYERS), target.each_more(DRAFT_LAYERS)
    jacobi, refreshes = target.passes
    beyond_first = (NUM_OUTCOMES - 1) * ((jacobi + 1) * more_pass + refreshes * more_predict)
    unit = (fill * verify - beyond_first) / ((1 + refreshes) * predict + (jacobi + 1) * one_pass)
    return PipelineCosts(
        verify=CostCurve.line(verify, target.each_more(target.layers)),
        predict=CostCurve.line(unit * predict, more_predict),
        draft_pass=CostCurve.line(unit * one_pass, more_pass),
        fallback=CostCurve.line(row.dspark_ms, more_pass),
        inline_draft=CostCurve.line(row.dspark_ms, more_pass),
        plain=CostCurve.line(fitted.plain_ms * target.verify / QWEN3_8B.verify, target.each_more(target.layers) / 16),
        comm_ms=fitted.comm_ms,
    )


def round_config(target: TargetModel) -> RoundConfig:
    """The paper's B, J and R."""
    return RoundConfig(NUM_DRAFT_TOKENS, NUM_OUTCOMES, *target.passes)


def deployment(row: PaperRow, fill: float = 1.0) -> Profile:
    """Everything about one row, to simulate anything with."""
    options = round_config(row.target)
    return Profile(costs(row, fill), options, acceptance(row), row.tau_dspark, row.name)


def ours(row: PaperRow, verify_ms: float | None = None) -> Setup:
    """JetSpec++ on two GPUs at batch 1."""
    return Setup(costs(row, verify_ms=verify_ms), round_config(row.target), acceptance(row))


def dspark(row: PaperRow, verify_ms: float | None = None) -> Setup:
    """DSpark on one GPU."""
    law = inline_acceptance(row.tau_dspark, NUM_DRAFT_TOKENS)
    return replace(ours(row, verify_ms), acceptance=law, method=Method.INLINE)


def ssd(row: PaperRow) -> Setup:
    """SSD on two GPUs; its misses are part of the fitted pass."""
    assert row.ssd is not None
    options = RoundConfig(SSD_DRAFT_TOKENS, NUM_OUTCOMES, 0, 0)
    law = Acceptance.of(1.0, row.ssd[0], row.ssd[0], SSD_DRAFT_TOKENS)
    passes = CostCurve.of(fit().ssd_pass_ms)
    own = PipelineCosts(verify=CostCurve.of(row.target.verify), draft_pass=passes)
    return Setup(own, options, law, Method.AUTOREGRESSIVE)


@dataclass(frozen=True)
class Check:
    """One figure of the paper beside ours."""

    row: str
    figure: str
    simulated: float
    paper: float | None
    mark: str

    @property
    def error(self) -> float | None:
        """(ours - paper) / paper; None where the text has no figure."""
        return None if self.paper is None else self.simulated / self.paper - 1

    @property
    def is_within(self) -> bool | None:
        """Within 10 %; None where there is nothing to compare."""
        return None if self.error is None else abs(self.error) <= ALLOWED_ERROR

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"error": self.error, "within_10_percent": self.is_within}


def table_3(rounds: int = 20_000, seed: int = 0) -> list[Check]:
    """Every figure of the text about serving, simulated."""
    checks = []
    for row in ROWS:
        pipelined, inline, plain = (
            simulate(setup, rounds, seed=seed).figures
            for setup in (ours(row), dspark(row), replace(ours(row), method=Method.PLAIN))
        )
        assert pipelined.hit_rate is not None
        mark = "fitted" if row is FIT_ROW else "predicted"
        checks += [
            Check(row.name, "hit rate", pipelined.hit_rate, row.hit_rate, mark),
            Check(row.name, "exposed ms, JetSpec++", pipelined.exposed_ms, row.exposed_ms, mark),
            Check(row.name, "speed over DSpark", pipelined.tok_s / inline.tok_s, row.ratio, "predicted"),
            Check(row.name, "τ, JetSpec++", pipelined.tau, row.tau, "input" if row.tau else "predicted"),
            Check(row.name, "exposed ms, DSpark", inline.exposed_ms, row.dspark_ms, "input"),
            Check(row.name, "tok/s, JetSpec++", pipelined.tok_s, None, "predicted"),
            Check(row.name, "speed over plain, JetSpec++", pipelined.tok_s / plain.tok_s, None, "predicted"),
        ]
        if row.ssd is not None:
            rival = simulate(ssd(row), rounds, seed=seed).figures
            _, beyond, over_plain = row.ssd
            checks += [
                Check(row.name, "exposed ms, SSD", rival.exposed_ms, beyond, mark),
                Check(row.name, "speed over plain, SSD", rival.tok_s / plain.tok_s, over_plain, mark),
            ]
    return checks


def ratio_range(row: PaperRow, rounds: int, seed: int = 0) -> tuple[float, float]:
    """Speed over DSpark at both ends of the paper's range of T_verify."""
    low, high = (
        simulate(ours(row, ms), rounds, seed=seed).figures.tok_s
        / simulate(dspark(row, ms), rounds, seed=seed).figures.tok_s
        for ms in reversed(row.target.verify_ms)
    )
    return low, high


FALLBACK_SHARES = (0.5, 0.75, 1.0, 1.25)


def exposed_by_fallback() -> list[dict[str, Any]]:
    """How much rests on T_fallback = DSpark's drafting: exposed ms (closed form) were it a share of that.

    T_comm is fitted anew to the first row for each share.
    """
    made = []
    for row in ROWS:
        entry: dict[str, Any] = {"row": row.name, "paper": row.exposed_ms}
        for share in FALLBACK_SHARES:
            comm = FIT_ROW.exposed_ms - (1 - acceptance(FIT_ROW).hit_rate) * share * FIT_ROW.dspark_ms
            entry[f"{share:g}"] = round(comm + (1 - acceptance(row).hit_rate) * share * row.dspark_ms, 3)
        made.append(entry)
    return made


def given() -> list[dict[str, Any]]:
    """Every number that goes in, with its mark and where it comes from."""
    fitted = fit()
    first = FIT_ROW.name
    entries = [
        ("decoder error per committed token", fitted.decoder_error, "fitted", f"hit rate of {first}"),
        ("T_comm, ms", fitted.comm_ms, "fitted", f"exposed ms of {first}, less its misses' fallbacks"),
        ("pass of SSD's draft model, ms", fitted.ssd_pass_ms, "fitted", f"SSD's exposed ms of {first}"),
        ("plain step of Qwen3-8B, ms", fitted.plain_ms, "fitted", f"SSD's speed over plain of {first}"),
    ]
    for row in ROWS:
        target, law = row.target, acceptance(row)
        low, high = target.verify_ms
        from_8b = "its J1-R1 of Table 2, by what J, R and B = 4 did to Qwen3-8B"
        j0 = "its J1-R1 of Table 2, by J_0 over J1-R1 of Qwen3-8B, MATH-500"
        entries += [
            (f"{row.name}: T_verify, ms", target.verify, "input", f"middle of {low} to {high}, both benchmarks"),
            (f"{row.name}: DSpark's drafting, ms", row.dspark_ms, "input", "Table 3's text"),
            (f"{row.name}: T_fallback, ms", row.dspark_ms, "assumed", "as DSpark: one block in line"),
            (f"{row.name}: τ DSpark", row.tau_dspark, "input", f"text of Table {3 if row.tau else 2}"),
            (f"{row.name}: τ", served_tau(row), *(("input", "Table 3's text") if row.tau else ("assumed", from_8b))),
            (f"{row.name}: τ_miss", law.after_miss.mean, *(("input", "J_0") if row.tau_miss else ("assumed", j0))),
            (f"{row.name}: τ_hit", law.after_hit.mean, "assumed", "so that hits and misses average τ"),
        ]
    keys = ("what", "value", "mark", "source")
    return [dict(zip(keys, entry, strict=True)) for entry in entries]
