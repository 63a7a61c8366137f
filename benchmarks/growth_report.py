"""Tables (Markdown), figures (JSON) and plot of growth.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from growth_fit import Exponent

NAMES = {
    "answer_hit": "answer, hit",
    "answer_miss": "answer, miss",
    "work": "work",
    "flops": "GFLOP",
    "bytes": "MiB made",
}
UNITS = {"flops": 1e9, "bytes": 2**20}
LABELS = {
    "context": "positions",
    "batch": "requests",
    "num_outcomes": "outcomes B",
    "num_draft_tokens": "draft tokens γ",
}


def table(axis: str, found: dict[str, Any], fitted: dict[str, Exponent]) -> str:
    """One axis."""
    field = found["field"]
    columns = [LABELS[field], *(f"{name}, ms" if part not in UNITS else name for part, name in NAMES.items())]
    lines = [
        f"## {axis.capitalize()}",
        "",
        f"| {' | '.join(columns)} |",
        "| " + " | ".join("---" for _ in columns) + " |",
    ]
    for point in found["points"]:
        cells = [str(point[field])]
        for part in NAMES:
            if part in UNITS:
                cells.append(f"{point[part] / UNITS[part]:.3f}")
            else:
                cells.append("{ms:.2f} ({low:.2f} to {high:.2f})".format(**point[part]))
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"| exponent | {' | '.join(str(fitted[part]) for part in NAMES)} |")
    tails = ("–" if fitted[part].tail != fitted[part].tail else f"{fitted[part].tail:.2f}" for part in NAMES)
    lines.append(f"| exponent, last two | {' | '.join(tails)} |")
    return "\n".join([*lines, ""])


def heading(result: dict[str, Any]) -> str:
    """What was measured, and whether anything grows with the square of the context."""
    made = result["made_by"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    faults = result["square_in_context"]
    verdict = (
        "**Something grows faster than linearly with the context:** " + "; ".join(faults)
        if faults
        else "**Nothing in a round grows with the square of the context**: matrix products and new tensors, counted, "
        "grow linearly or not at all, and no fitted time's interval lies above linear growth."
    )
    if late := result["dearer_at_the_end"]:
        verdict += (
            f"\nBetween the two largest contexts these times grow faster than linearly: {'; '.join(late)}. "
            "The counted work does not: it is memory."
        )
    malloc = "glibc's own memory settings" if result["default_malloc"] else "memory settings of the demo's server"
    machine = f"{made['machine']}, {result['threads']} thread(s), {result['dtype']}, {malloc}"
    return f"""# Growth of a round

`{made["command"]}` at {made["commit"]}, {made["date"]}; {versions}; {machine}.

Medians of {result["repeats"]} rounds (quartiles in brackets) whose sizes took turns. Where an axis says nothing else:
context 256, one request, B = 4, γ = 7, J1-R1. Tokens and states are random: cost, not acceptance. The draft model was
trained for γ up to {result["trained_block"]}; longer blocks run the same weights. The target was made for
{result["max_position_embeddings"]} positions; what stands beyond them reads a longer rotary table.

An exponent is p of (cost - cost at the smallest size) ∝ (size - smallest size)^p, by least squares over logarithms,
with the interval of 95 % of the fits to resampled repeats; "last two" is between the two largest sizes. FLOPs (of the
matrix products that PyTorch's counter knows) and bytes of new tensors are counted, of a round with a miss.

{verdict}
"""


def write(out: Path, result: dict[str, Any], fitted: dict[str, dict[str, Exponent]]) -> None:
    """README.md, growth.json and growth.png."""
    out.mkdir(parents=True, exist_ok=True)
    tables = [table(axis, found, fitted[axis]) for axis, found in result["axes"].items()]
    (out / "README.md").write_text("\n".join([heading(result), "![growth](growth.png)", "", *tables]))
    (out / "growth.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(out / "growth.png", result["axes"])


def plot(path: Path, axes: dict[str, Any]) -> None:
    """Milliseconds over size, an axis a panel; both logarithmic, so that slopes are exponents of the whole cost."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(axes), figsize=(3.4 * len(axes), 3.4), squeeze=False)
    for panel, (axis, found) in zip(panels[0], axes.items(), strict=True):
        field = found["field"]
        sizes = [point[field] for point in found["points"]]
        for part in ("work", "answer_miss", "answer_hit"):
            low, middle, high = ([point[part][key] for point in found["points"]] for key in ("low", "ms", "high"))
            panel.plot(sizes, middle, marker="o", markersize=3, label=NAMES[part])
            panel.fill_between(sizes, low, high, alpha=0.2)
        panel.set(xscale="log", yscale="log", title=axis, xlabel=LABELS[field])
        panel.set_xticks(sizes, [str(size) for size in sizes], fontsize=6)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("milliseconds")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
