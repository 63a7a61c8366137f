"""Markdown and plots of a `jetspecpp bench` result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = (
    ("tok/s", "tok_s", 1),
    ("τ", "tau", 2),
    ("hit rate", "hit_rate", 2),
    ("copied", "copied_share", 2),
    ("T_verify ms", "verify_ms", 1),
    ("exposed ms", "exposed_ms", 2),
    ("… on hits", "exposed_ms_hits", 2),
    ("host ms", "host_ms", 2),
    ("TTFT ms", "ttft_ms", 0),
    ("ITL p50 ms", "itl_p50_ms", 1),
    ("ITL p99 ms", "itl_p99_ms", 1),
    ("total tok/s", "total_tok_s", 1),
)


def shown(value: float | None, digits: int) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def with_spread(figures: dict[str, Any], name: str, digits: int) -> str:
    """``31.2 (30.9–31.4)``; the value alone where all repeats agree."""
    text, spread = shown(figures[name], digits), figures["spread"].get(name)
    if spread is None:
        return text
    low, high = shown(spread["min"], digits), shown(spread["max"], digits)
    return text if low == high else f"{text} ({low}–{high})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def methods_table(result: dict[str, Any], level: str) -> str:
    """All methods at one concurrency."""
    rows = []
    for name, method in result["methods"].items():
        figures = method["concurrency"].get(level)
        if figures is not None:
            rows.append([name, *(with_spread(figures, key, digits) for _, key, digits in COLUMNS)])
    return table(["method", *(title for title, _, _ in COLUMNS)], rows)


def ratios_table(result: dict[str, Any]) -> str:
    """Every ratio beside what is wanted of it."""
    rows = []
    for name, said in result["ratios"].items():
        met = {True: "yes", False: "no", None: ""}[said.get("met")]
        spread = f"{said['min']:.2f}–{said['max']:.2f}"
        rows.append([name, f"{said['value']:.2f}", spread, said.get("wanted", ""), met])
    return table(["ratio", "median", "spread", "wanted", "met"], rows)


def answers_table(result: dict[str, Any]) -> str:
    """How many answers equal plain vLLM's."""
    keys = ("compared", "equal", "near_ties", "different")
    found = [(name, method["answers"]) for name, method in result["methods"].items() if "answers" in method]
    return table(["answers", *keys], [[name, *(str(counts[key]) for key in keys)] for name, counts in found])


def levels(result: dict[str, Any]) -> list[str]:
    """Concurrencies that were measured, ascending."""
    return sorted({level for m in result["methods"].values() for level in m["concurrency"]}, key=int)


def markdown(result: dict[str, Any]) -> str:
    """The whole report; figures are medians of repeats, lowest and highest behind them."""
    made, said = result["provenance"], result["settings"]
    parts = [
        "# Serving methods compared",
        f"`{made['command']}`, commit {made['commit']}, {made['date']}, {made['machine']}; "
        + ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        f"{len(said['prompts'])} prompts, at most {said['max_tokens']} tokens, {said['repeats']} repeats, greedy, "
        f"{said['dtype']}, {'compiled' if said['compiled'] else 'eager'}. Medians of repeats (lowest–highest). "
        "Definitions: `vllm_jetspecpp/benchmarking/measures.py`. "
        f"Idle processes kept {said['idle_cores']:.3f} cores busy.",
    ]
    for level in levels(result):
        parts += [f"## {level} at a time", methods_table(result, level)]
    parts += ["## Ratios", ratios_table(result)]
    if any("answers" in method for method in result["methods"].values()):
        parts += ["## Answers against plain vLLM's", answers_table(result)]
    if result["skipped"]:
        parts += ["## Skipped", "\n".join(f"* `{name}`: {why}" for name, why in result["skipped"].items())]
    return "\n\n".join(parts) + "\n"


def write_report(result: dict[str, Any], folder: Path) -> None:
    """``result.json``, ``README.md`` and plots."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    (folder / "README.md").write_text(markdown(result))
    draw_rates(result, folder / "tokens_per_second.png")
    if len(levels(result)) > 1:
        for name, title in (("total_tok_s", "tokens/s in total"), ("itl_p99_ms", "inter-token latency p99, ms")):
            draw_over_concurrency(result, name, title, folder / f"{name}_over_concurrency.png")


def draw_rates(result: dict[str, Any], path: Path) -> None:
    """Bars of tokens/s at batch 1 with lowest and highest repeat."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(result["methods"])
    figures = [result["methods"][name] for name in names]
    heights = [f["tok_s"] for f in figures]
    below = [f["tok_s"] - f["spread"]["tok_s"]["min"] for f in figures]
    above = [f["spread"]["tok_s"]["max"] - f["tok_s"] for f in figures]
    canvas, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    axes.bar(names, heights, yerr=(below, above), capsize=4)
    axes.set_ylabel("tokens/s, one request")
    axes.tick_params(axis="x", rotation=30)
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)


def draw_over_concurrency(result: dict[str, Any], name: str, title: str, path: Path) -> None:
    """One line a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for method, said in result["methods"].items():
        points = [(int(level), f[name]) for level, f in said["concurrency"].items() if f[name] is not None]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=method)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("requests at a time")
    axes.set_ylabel(title)
    axes.legend()
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)
