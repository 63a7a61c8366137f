"""Questions of a user who has GPUs to share out, answered by simulation with the inputs of pipeline_paper.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pipeline_paper import (
    FALLBACK_SHARES,
    FORESIGHT_KEEPS,
    MEAN_TAU,
    ROWS,
    PaperRow,
    deployment,
    exposed_by_fallback,
    fallback_tau,
    fit,
    rescaled,
)

from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.evaluation.pipeline_simulator import (
    Acceptance,
    Figures,
    Method,
    Profile,
    Setup,
    inline_acceptance,
    simulate,
)
from vllm_jetspecpp.evaluation.pipeline_simulator.bounds import saturated_round_ms, targets_per_device, throughput_eq4

Record = dict[str, Any]
NUM_TARGETS = 8
BATCHES = (1, 2, 4, 8, 16, 32)
FILLS = (1.0, 0.5)
"""Assumed draft round at the paper's J and R, as a share of T_verify: the most that hides, and half of it."""
POLICIES: dict[str, dict[str, bool]] = {
    "first come, first served": {},
    "fallbacks first": {"fallbacks_first": True},
    "what waits is merged": {"merge": True},
    "what is late is dropped": {"drop_queued": True},
}
POLICY_DEVICES = (1, 2, 4)


def inline_setup(profile: Profile, **options: Any) -> Setup:
    """The profile's method that drafts in line, on the targets alone.

    Raises:
        ValueError: the profile has no ``tau_inline``.
    """
    if profile.tau_inline is None:
        raise ValueError(f"profile {profile.name}: 'tau_inline' is missing, so there is no method to compare with")
    law = inline_acceptance(profile.tau_inline, profile.round.num_draft_tokens)
    return Setup(profile.costs, profile.round, law, Method.INLINE, **options)


def pipelined_setup(profile: Profile, **options: Any) -> Setup:
    """JetSpec++ in this deployment."""
    return Setup(profile.costs, profile.round, profile.acceptance, **options)


@cache
def rival_figures(setup: Setup, rounds: int, seed: int) -> Figures:
    """Simulated once, however many numbers of draft devices it is compared with."""
    return simulate(setup, rounds, seed=seed).figures


def compare(profile: Profile, rounds: int, seed: int = 0, **options: Any) -> Record:
    """JetSpec++ and what else the profile has times for, by the same seed; speeds as ratios too."""
    setup = pipelined_setup(profile, **options)
    figures = simulate(setup, rounds, seed=seed).figures
    record: Record = {
        "deployment": profile.name,
        "targets": setup.num_targets,
        "draft_devices": setup.num_draft_devices,
        "batch": setup.batch_size,
        "jetspecpp": figures.to_dict(),
        "eq4_tok_s": throughput_eq4(setup),
        "saturated_round_ms": saturated_round_ms(setup),
        "targets_per_device": targets_per_device(setup),
    }
    sizes = {"num_targets": setup.num_targets, "batch_size": setup.batch_size}
    gpus = setup.num_targets + min(setup.num_draft_devices, setup.num_targets)
    if profile.tau_inline is not None:
        rival = rival_figures(inline_setup(profile, **sizes), rounds, seed)
        per_gpu = figures.total_tok_s / gpus / (rival.total_tok_s / setup.num_targets)
        record |= {"inline": rival.to_dict(), "over_inline": figures.tok_s / rival.tok_s}
        record |= {"over_inline_per_gpu": per_gpu}
    if any(ms for _, ms in profile.costs.plain.points):
        plain = rival_figures(replace(setup, method=Method.PLAIN, num_draft_devices=1), 200, seed)
        record |= {"plain": plain.to_dict(), "over_plain": figures.tok_s / plain.tok_s}
    return record


def with_passes(row: PaperRow, jacobi: int, refreshes: int, fill: float) -> Profile:
    """The deployment with other J and R: 8B's J_0 and J1-R1 are the paper's, the rest follows by ``rescaled``.

    T_pred and T_pass stay what ``fill`` made them at the paper's own J and R.
    """
    profile = deployment(row, fill)
    if (jacobi, refreshes) == row.target.passes:
        return profile
    if (jacobi, refreshes) == (0, 0):
        tau_hit = FORESIGHT_KEEPS * fallback_tau(row)
    elif (jacobi, refreshes) == (1, 1):
        tau_hit = rescaled(profile.acceptance.after_hit.mean, MEAN_TAU[row.target.passes], MEAN_TAU[1, 1])
    else:
        raise ValueError(f"J{jacobi}-R{refreshes} is not among the settings that the paper has figures for")
    gamma = profile.round.num_draft_tokens
    law = Acceptance.compounding(fit().decoder_error, tau_hit, fallback_tau(row), gamma)
    options = RoundConfig(gamma, profile.round.num_outcomes, jacobi, refreshes)
    return replace(profile, round=options, acceptance=law, name=f"{row.name}, J{jacobi}-R{refreshes}")


def settings_of(row: PaperRow) -> list[tuple[int, int]]:
    """J and R to try, fewest first."""
    return [(0, 0), (1, 1)] if row.target.passes == (1, 1) else [(0, 0), (1, 1), row.target.passes]


@dataclass(frozen=True)
class Study:
    """How long to simulate."""

    rounds: int = 2000
    seed: int = 0

    def two_gpus(self) -> Iterator[Record]:
        """One target and one draft device, one request."""
        for row in ROWS:
            yield compare(deployment(row), self.rounds * 5, self.seed)

    def batches(self) -> Iterator[Record]:
        """The same with several requests: every J and R, at both assumed draft rounds."""
        for row in ROWS[::2]:
            for fill in FILLS:
                for jacobi, refreshes in settings_of(row):
                    for batch in BATCHES:
                        profile = with_passes(row, jacobi, refreshes, fill)
                        record = compare(profile, self.rounds, self.seed, batch_size=batch)
                        yield record | {"fill": fill, "setting": f"J{jacobi}-R{refreshes}"}

    def sharing(self) -> Iterator[Record]:
        """Eight targets on one to eight draft devices: every J and R, first come first served."""
        for row in ROWS[::2]:
            for fill in FILLS:
                for jacobi, refreshes in settings_of(row):
                    for devices in range(1, NUM_TARGETS + 1):
                        profile = with_passes(row, jacobi, refreshes, fill)
                        shared = {"num_targets": NUM_TARGETS, "num_draft_devices": devices}
                        record = compare(profile, self.rounds, self.seed, **shared)
                        yield record | {"fill": fill, "setting": f"J{jacobi}-R{refreshes}"}

    def policies(self) -> Iterator[Record]:
        """What the device may do about a queue, at the paper's J and R."""
        for row in ROWS[::2]:
            for fill in FILLS:
                for name, policy in POLICIES.items():
                    for devices in POLICY_DEVICES:
                        shared = {"num_targets": NUM_TARGETS, "num_draft_devices": devices}
                        record = compare(deployment(row, fill), self.rounds, self.seed, **shared, **policy)
                        yield record | {"fill": fill, "policy": name}

    def run(self) -> Iterator[tuple[str, Record]]:
        """Every record with the question it answers."""
        for question in (self.two_gpus, self.batches, self.sharing, self.policies):
            for record in question():
                yield question.__name__, record


def count_records() -> int:
    """How many records a study has, for its progress bar."""
    settings = sum(len(settings_of(row)) for row in ROWS[::2])
    policies = len(ROWS[::2]) * len(FILLS) * len(POLICIES) * len(POLICY_DEVICES)
    return len(ROWS) + settings * len(FILLS) * (len(BATCHES) + NUM_TARGETS) + policies


def break_even(records: list[Record]) -> list[Record]:
    """Per deployment, J-R and fill: fewest draft devices at which eight targets gain, and at which every GPU does."""
    groups: dict[tuple[str, str, float], list[Record]] = {}
    for record in records:
        groups.setdefault((record["deployment"].split(",")[0], record["setting"], record["fill"]), []).append(record)
    made = []
    for (name, setting, fill), group in groups.items():

        def fewest(key: str, above: float, group: list[Record] = group) -> int | None:
            return min((r["draft_devices"] for r in group if r[key] >= above), default=None)

        best = max(group, key=lambda r: r["over_inline_per_gpu"])
        alone = max(r["over_inline"] for r in group)
        made.append(
            {
                "deployment": name,
                "setting": setting,
                "fill": fill,
                "targets_per_device_at_saturation": round(group[0]["targets_per_device"], 2),
                "faster_than_inline_from": fewest("over_inline", 1.0),
                "within_2_percent_of_own_devices_from": fewest("over_inline", 0.98 * alone),
                "more_per_gpu_than_inline_from": fewest("over_inline_per_gpu", 1.0),
                "best_per_gpu": {"draft_devices": best["draft_devices"], "ratio": best["over_inline_per_gpu"]},
            }
        )
    return made


def table(columns: list[str], rows: list[list[Any]]) -> list[str]:
    """Markdown."""

    def shown(value: Any) -> str:
        return "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [f"| {' | '.join(columns)} |", "| " + " | ".join("---" for _ in columns) + " |"]
    return lines + [f"| {' | '.join(map(shown, row))} |" for row in rows]


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def tokens(value: float) -> str:
    return f"{value:,.0f}"


def two_gpus_table(records: list[Record]) -> list[str]:
    columns = ["deployment", "plain, 1 GPU", "DSpark, 1 GPU", "JetSpec++, 2 GPUs", "over plain", "over DSpark"]
    columns += ["the same per GPU", "exposed ms", "draft device works"]
    rows = [
        [
            r["deployment"],
            *(tokens(r[m]["tok_s"]) for m in ("plain", "inline", "jetspecpp")),
            *(r[k] for k in ("over_plain", "over_inline", "over_inline_per_gpu")),
            r["jetspecpp"]["exposed_ms"],
            percent(r["jetspecpp"]["utilisation"]),
        ]
        for r in records
    ]
    return table(columns, rows)


def grid_table(records: list[Record], over: str, value: str) -> list[str]:
    """A line for every deployment, J-R and fill; a column for every value of ``over``."""
    places = sorted({r[over] for r in records})
    lines: dict[tuple[Any, ...], dict[int, float]] = {}
    for r in records:
        key = (r["deployment"].split(",")[0], r.get("setting", r.get("policy")), r["fill"])
        lines.setdefault(key, {})[r[over]] = r[value] if value in r else r["jetspecpp"][value]
    return table(
        ["deployment", "setting", "draft round / T_verify", *(f"{over.replace('_', ' ')} {p}" for p in places)],
        [[*key, *(cells.get(place) for place in places)] for key, cells in lines.items()],
    )


def figures_by_device(records: list[Record]) -> list[str]:
    columns = ["deployment", "setting", "draft round / T_verify", "draft devices", "tok/s a target", "exposed ms"]
    columns += ["waiting ms a job", "devices work", "over DSpark", "per GPU"]
    rows = [
        [
            *(r["deployment"].split(",")[0], r["setting"], r["fill"], r["draft_devices"]),
            tokens(r["jetspecpp"]["tok_s"]),
            *(r["jetspecpp"][k] for k in ("exposed_ms", "wait_ms")),
            percent(r["jetspecpp"]["utilisation"]),
            *(r[k] for k in ("over_inline", "over_inline_per_gpu")),
        ]
        for r in records
    ]
    return table(columns, rows)


def markdown(results: dict[str, list[Record]], checks: list[Record], inputs: list[Record], made_by: Record) -> str:
    """The whole report."""
    even = break_even(results["sharing"])
    even_rows = [
        [*(e[k] for k in list(e)[:-1]), f"{e['best_per_gpu']['ratio']:.2f} at {e['best_per_gpu']['draft_devices']}"]
        for e in even
    ]
    check_columns = ["row", "figure", "simulated", "the paper's", "error", "mark"]
    check_rows = [
        [c["row"], c["figure"], round(c["simulated"], 3), c["paper"]]
        + ["–" if c["error"] is None else f"{100 * c['error']:+.1f} %", c["mark"]]
        for c in checks
    ]
    input_rows = [[i["what"], f"{i['value']:.4g}", i["mark"], i["source"]] for i in inputs]
    parts = [
        "# Simulated, not measured",
        "",
        "Made by `benchmarks/simulate_pipeline.py --study`; `docs/scaling.md` says what is assumed and what it means.",
        "",
        *(f"- {name}: {value}" for name, value in made_by.items()),
        "",
        *("## The paper's Table 3", "", *table(check_columns, check_rows)),
        *("", "Exposed ms were T_fallback that share of DSpark's drafting (T_comm fitted anew):", ""),
        *table(
            ["row", "the paper's", *(f"share {share:g}" for share in FALLBACK_SHARES)],
            [list(entry.values()) for entry in exposed_by_fallback()],
        ),
        *("", "What went in:", "", *table(["what", "value", "mark", "source"], input_rows), ""),
        *("## Two GPUs, one request (tokens per second)", "", *two_gpus_table(results["two_gpus"]), ""),
        *("## Two GPUs, several requests: speed over DSpark on one", ""),
        *(*grid_table(results["batches"], "batch", "over_inline"), "", "Exposed ms a round:", ""),
        *(*grid_table(results["batches"], "batch", "exposed_ms"), ""),
        *("## Eight targets, one request each: speed over DSpark on the eight", ""),
        *(*grid_table(results["sharing"], "draft_devices", "over_inline"), ""),
        *("Tokens per second and GPU, draft devices counted, over those of DSpark:", ""),
        *(*grid_table(results["sharing"], "draft_devices", "over_inline_per_gpu"), ""),
        *("From how many draft devices on it pays (– : never up to eight):", ""),
        *(*table([k.replace("_", " ") for k in even[0]], even_rows), ""),
        *("What a full device may do about its queue (speed over DSpark):", ""),
        *(*grid_table(results["policies"], "draft_devices", "over_inline"), "", "All figures of the sharing:", ""),
        *(*figures_by_device(results["sharing"]), ""),
    ]
    return "\n".join(parts)
