"""Tables (Markdown and JSON) and plots from the finished cells of paper_tables.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paper_cells import MATH, NO_REPLACEMENT, OURS, RIVALS, Cell, Results

from vllm_jetspecpp.evaluation.datasets import BENCHMARKS

Rows = dict[str, dict[str, Any]]


@dataclass
class Table:
    """One table: rows of cells that are numbers, text or None."""

    number: int
    title: str
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    paper: str = ""
    """What the paper's text says of it."""

    def markdown(self) -> str:
        """As a section."""

        def shown(value: Any) -> str:
            return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

        lines = [f"## Table {self.number}: {self.title}", "", f"| {' | '.join(self.columns)} |"]
        lines += ["| " + " | ".join("---" for _ in self.columns) + " |"]
        lines += [f"| {' | '.join(map(shown, row))} |" for row in self.rows]
        return "\n".join([*lines, "", f"The paper's text: {self.paper or 'no figures.'}", ""])


def mean(values: list[Any]) -> float | None:
    """Mean of what is complete; None where something is missing."""
    return None if any(v is None for v in values) or not values else sum(values) / len(values)


def tau(rows: Rows, label: str, bench: str, temperature: float = 0.0, budget: int = 16) -> float | None:
    """τ of one cell."""
    row = rows.get(Cell(label, bench, temperature, budget).key)
    return None if row is None else row["tau"]


PAPER_TABLE_1 = {
    (0.0, 16): "mean τ DSpark 6.89, J1-R1 7.50, J3-R3 8.94; MATH-500: DSpark 9.01, J1-R1 9.63 (Qwen3-8B).",
    (0.0, 32): "MATH-500: DSpark 8.66, J1-R1 11.45; JetSpec gains, DFlash, DSpark and Domino lose against 16.",
    (1.0, 16): "JetSpec++ ahead of every baseline on all seven benchmarks.",
    (1.0, 32): "J1-R1 gains on every benchmark against 16.",
}


def table_1(rows: Rows) -> list[Table]:
    """τ of every method; one table a temperature and budget."""
    tables = []
    for (temperature, budget), paper in PAPER_TABLE_1.items():
        title = f"acceptance length τ, temperature {temperature:g}, budget {budget}"
        table = Table(1, title, ["method", *BENCHMARKS, "mean"], paper=paper)
        for label in (*RIVALS, *OURS):
            values = [tau(rows, label, bench, temperature, budget) for bench in BENCHMARKS]
            if any(v is not None for v in values):
                table.rows.append([label, *values, mean(values)])
        if table.rows:
            tables.append(table)
    return tables


def by_passes(
    rows: Rows, number: int, title: str, models: dict[str, str], passes: tuple[str, ...], paper: str
) -> Table:
    """τ of draft models alone over J, on the two benchmarks."""
    columns = ["draft model", *(f"{bench} {name}" for bench in MATH for name in passes)]
    table = Table(number, title, columns, paper=paper)
    for model, said in models.items():
        values = [tau(rows, f"{model}: {name}", bench) for bench in MATH for name in passes]
        if any(v is not None for v in values):
            table.rows.append([said, *values])
    return table


def table_5(rows: Rows) -> Table:
    """Passes alone, with refresh, with refresh and replacement."""
    paper = (
        "passes alone add .42 to 1.27 from J0 to J3; refresh with replacement adds .92 to 1.55 at J1-R1 and 1.72 to "
        "2.97 at J3-R3 over the same passes alone; refresh alone at most .84."
    )
    table = Table(5, "context refresh and anchor replacement (τ)", ["setting", *MATH], paper=paper)
    labels = ["J0", "J1", f"J1-R1{NO_REPLACEMENT}", "J1-R1", "J3", f"J3-R3{NO_REPLACEMENT}", "J3-R3"]
    table.rows = [[label, *(tau(rows, label, bench) for bench in MATH)] for label in labels]
    return table


def table_6(rows: Rows) -> Table:
    """What the blocks of hits are drafted from."""
    paper = "predicted states keep 95 to 98 % of τ; at J0 they recover 95 % of the gap from copied to true states."
    columns = ["benchmark", "J", "copied last state", "predicted", "true", "kept", "gap recovered"]
    table = Table(6, "states that pre-drafted blocks read (τ, R = 0)", columns, paper=paper)
    for bench in MATH:
        for name in ("J0", "J1", "J3"):
            copied, true = (tau(rows, f"{name}, {states}", bench) for states in ("copied", "true"))
            ours = tau(rows, name, bench)
            kept = recovered = None
            if copied and true and ours:
                kept = ours / true
                recovered = (ours - copied) / (true - copied) if true > copied else None
            table.rows.append([bench, name, copied, ours, true, kept, recovered])
    return table


def replay_tables(rows: Rows) -> list[Table]:
    """Tables 9 to 11 from the recorded rounds."""
    replays = {bench: rows[f"replay|{bench}"] for bench in MATH if f"replay|{bench}" in rows}
    if not replays:
        return []
    nine = Table(
        9,
        "decoders over the adapter's predictions, at positions that accepted drafts reach",
        ["decoder", *(f"{bench} {what}" for bench in replays for what in ("top-1", "KL"))],
        paper="fine-tuning raises top-1 by .001 and KL from .043 to .247.",
    )
    for decoder in next(iter(replays.values()))["decoder_top1"]:
        nine.rows.append([decoder, *(r[f"decoder_{w}"][decoder] for r in replays.values() for w in ("top1", "kl"))])
    sizes = ["1", "2", "4", "8", "16"]
    columns = [f"{bench} B={size}" for bench in replays for size in sizes]
    ten = Table(10, "hit rate under other decoders (served rule)", ["decoder", *columns])
    ten.paper = "fine-tuning raises the hit rate by at most .032."
    eleven = Table(11, "hit rate under other rules", ["rule", *columns])
    eleven.paper = (
        "at B = 4 the served rule leads the uncalibrated one by .008 (GSM8K) and .039 (MATH-500), the draft-model rule "
        "by .186 and .171, the geometric fan-out with the decoder's anchors by .640 and .687."
    )
    for table, key in ((ten, "decoders"), (eleven, "rules")):
        for name in next(iter(replays.values()))[key]:
            table.rows.append([name, *(r[key][name][size] for r in replays.values() for size in sizes)])
    return [nine, ten, eleven]


def all_tables(rows: Rows) -> list[Table]:
    """Every table, in the paper's order."""
    passes = ("J0", "J1", "J3")
    controls = {
        "ours": "token inputs, clean prefix (ours)",
        "noise-noised": "token inputs, fully noised",
        "mask-prefix": "mask inputs, clean prefix",
        "mask-noised": "mask inputs, fully noised",
    }
    unpipelined = Table(16, "refresh without pipelining: every block from true states (τ)", ["setting", *MATH])
    for name in ("J0", "J1", "J1-R1", "J3", "J3-R3"):
        unpipelined.rows.append([name, *(tau(rows, f"{name}, unpipelined", bench) for bench in MATH)])
    return [
        *table_1(rows),
        by_passes(
            rows,
            4,
            "what a draft model must be trained on to refine (small models, τ from true states)",
            controls,
            passes,
            "fully noised token inputs draft as well at J0 and do not refine; mask inputs with the schedule keep 42 "
            "and 54 % of the gain from J0 to J3.",
        ),
        table_5(rows),
        table_6(rows),
        *replay_tables(rows),
        by_passes(
            rows,
            12,
            "the final draft models under refinement (τ from true states)",
            {
                "mask-noised": "JetSpec (mask inputs), small, from the target's layers",
                "jetspec": "JetSpec (mask inputs), from JetSpec++'s weights",
                "jetspecpp": "JetSpec++",
                "every-prefix": "JetSpec++, 1,200 steps with every prefix at once (not shipped)",
            },
            passes,
            "JetSpec 5.86 to 2.39 at J1 on GSM8K and 7.51 to 2.57 on MATH-500; JetSpec++ 5.70 to 6.97 and 7.52 to 8.98 "
            "at J3.",
        ),
        by_passes(
            rows,
            14,
            "training loss (small models, τ from true states)",
            {"ours": "forward KL", "cross-entropy": "cross-entropy (SFT)", "reverse-kl": "reverse KL"},
            passes,
            "forward KL leads SFT by up to .27 and reverse KL by up to 2.72, in every cell.",
        ),
        by_passes(
            rows,
            15,
            "attention inside the block (small models, τ from true states)",
            {"ours": "causal", "bidirectional": "bidirectional"},
            passes,
            "equal at J0; causal leads by .15 at J3 on MATH-500.",
        ),
        unpipelined,
    ]


def headline(rows: Rows) -> list[str]:
    """The claims that the comparison stands for, in one line each."""
    taus = {label: mean([tau(rows, label, bench) for bench in BENCHMARKS]) for label in (*RIVALS, *OURS)}
    known = {label: value for label, value in taus.items() if value is not None}
    lines = []
    for label, margin in (("J1-R1", 1.09), ("J3-R3", 1.30)):
        if label in known:
            ratios = ", ".join(f"{r} {known[label] / known[r]:.3f}" for r in RIVALS if r in known)
            lines.append(
                f"- {label} ({known[label]:.3f}) over each rival's mean τ: {ratios} (the paper's margin: {margin})"
            )
    wider = {label: mean([tau(rows, label, bench, 0.0, 32) for bench in BENCHMARKS]) for label in (*RIVALS, *OURS)}
    changes = [f"{label} {wider[label] - known[label]:+.3f}" for label in known if wider[label] is not None]
    if changes:
        lines.append(f"- budget 32 against 16, mean τ at temperature 0: {', '.join(changes)}")
    return lines


def report(folder: Path) -> None:
    """Write ``README.md``, ``tables.json`` and the plots beside the cells."""
    rows = Results(folder).read()
    if not rows:
        print(f"{folder} holds no cell yet")
        return
    tables = [table for table in all_tables(rows) if any(v is not None for row in table.rows for v in row[1:])]
    made = [row["made_by"] for row in rows.values()]
    cells = [row for row in rows.values() if "prompts" in row]
    origin = {
        "commits": sorted({m["commit"] for m in made if m["commit"]}),
        "versions": made[-1]["versions"],
        "machine": made[-1]["machine"],
        "dates": sorted({m["date"] for m in made}),
        "answers": sorted({row["prompts"] for row in cells}),
        "max_new_tokens": sorted({row["max_new_tokens"] for row in cells}),
        "command": made[-1]["command"],
    }
    text = ["# The paper's tables for SmolLM2-135M-Instruct", ""]
    text += [f"- {name}: {value}" for name, value in origin.items()]
    text += ["", *headline(rows), "", *(table.markdown() for table in tables)]
    (folder / "README.md").write_text("\n".join(text).rstrip() + "\n")
    as_json = {"made_by": origin, "tables": [vars(table) for table in tables]}
    (folder / "tables.json").write_text(json.dumps(as_json, indent=1, ensure_ascii=False) + "\n")
    for draw in (draw_methods, draw_passes, draw_hit_rates, draw_positions):
        draw(folder, rows)
    print(f"wrote {folder}/README.md, {len(rows)} cells")


def figure(path: Path, title: str, fill: Callable[[Any], bool]) -> None:
    """One plot, if ``fill`` drew something."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(figsize=(10, 4))
    if fill(axes):
        axes.set_title(title)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        drawn.tight_layout()
        drawn.savefig(path, dpi=110)
    plt.close(drawn)


def draw_methods(folder: Path, rows: Rows) -> None:
    """τ per method and benchmark."""

    def fill(axes: Any) -> bool:
        labels = [label for label in (*RIVALS, *OURS) if any(tau(rows, label, b) is not None for b in BENCHMARKS)]
        width = 0.8 / max(len(labels), 1)
        for i, label in enumerate(labels):
            at = [x + (i - len(labels) / 2) * width for x in range(len(BENCHMARKS))]
            cells = [rows.get(Cell(label, b).key, {}) for b in BENCHMARKS]
            errors = [c.get("tau_error") or 0 for c in cells]
            axes.bar(at, [c.get("tau") or 0 for c in cells], width, yerr=errors, label=label, error_kw={"lw": 0.6})
        axes.set_xticks(range(len(BENCHMARKS)), BENCHMARKS, fontsize=8)
        axes.set_ylim(1, None)
        axes.set_ylabel("τ")
        return bool(labels)

    figure(folder / "tau_by_method.png", "acceptance length, temperature 0, budget 16 (error over answers)", fill)


def draw_passes(folder: Path, rows: Rows) -> None:
    """τ over J."""

    def fill(axes: Any) -> bool:
        series = {
            "JetSpec++, passes alone": ("J0", "J1", "J3"),
            "JetSpec++, refresh and replacement": ("J0", "J1-R1", "J3-R3"),
            "JetSpec, passes alone": ("jetspec: J0", "jetspec: J1", "jetspec: J3"),
        }
        drawn = False
        for bench in MATH:
            for name, labels in series.items():
                values = [tau(rows, label, bench) for label in labels]
                if None not in values:
                    axes.plot([0, 1, 3], values, "o-", label=f"{name}, {bench}")
                    drawn = True
        axes.set_xlabel("J")
        axes.set_ylabel("τ")
        return drawn

    figure(folder / "tau_over_passes.png", "acceptance length over refinement passes", fill)


def draw_hit_rates(folder: Path, rows: Rows) -> None:
    """Hit rate over B."""

    def fill(axes: Any) -> bool:
        for bench, style in zip(MATH, ("-", ":"), strict=True):
            for rule, rates in rows.get(f"replay|{bench}", {}).get("rules", {}).items():
                axes.plot([int(b) for b in rates], list(rates.values()), style, label=f"{rule}, {bench}")
        axes.set_xlabel("B")
        axes.set_ylabel("hit rate")
        return any(f"replay|{bench}" in rows for bench in MATH)

    figure(folder / "hit_rate_over_cache_size.png", "hit rate over cache size, J1-R1's rounds", fill)


def draw_positions(folder: Path, rows: Rows) -> None:
    """Acceptance by position."""

    def fill(axes: Any) -> bool:
        drawn = False
        for label in (*RIVALS, *OURS):
            cells = [rows[key] for b in BENCHMARKS if (key := Cell(label, b).key) in rows]
            if cells:
                total = sum(c["rounds"] for c in cells)
                longest = max(len(c["accepted_by_position"]) for c in cells)
                shares = [
                    sum((c["accepted_by_position"] + [0] * longest)[i] * c["rounds"] for c in cells) / total
                    for i in range(longest)
                ]
                axes.plot(range(1, longest + 1), shares, "o-", ms=3, label=label)
                drawn = True
        axes.set_xlabel("draft position")
        axes.set_ylabel("share of rounds that accept up to here")
        return drawn

    figure(folder / "acceptance_by_position.png", "acceptance by position, temperature 0, budget 16", fill)
