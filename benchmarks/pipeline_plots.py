"""Plots of simulated pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_jetspecpp.evaluation.pipeline_simulator.events import Segment

COLOURS = {
    "verify": "#4878a8",
    "draft round": "#8fbc6b",
    "fallback": "#c44e52",
    "answer": "#555555",
    "draft in line": "#dd8452",
}


def _axes(count: int, height: float = 4.2, rows: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, count, figsize=(7 * count if count > 1 else 11, height))


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_devices(path: Path, records: Sequence[dict[str, Any]], name: str) -> None:
    """Speed of one deployment over the number of draft devices; at ``--plot``."""
    figure, axes = _axes(1)
    devices = [r["draft_devices"] for r in records]
    axes.plot(devices, [r["jetspecpp"]["tok_s"] for r in records], "o-", label="JetSpec++")
    if "inline" in records[0]:
        axes.plot(devices, [r["inline"]["tok_s"] for r in records], "--", label="drafting in line, no draft device")
    if "plain" in records[0]:
        axes.plot(devices, [r["plain"]["tok_s"] for r in records], ":", label="plain decoding")
    axes.set_xlabel("draft devices")
    axes.set_ylabel("tokens per second of a target (simulated)")
    axes.set_ylim(0, None)
    axes.set_title(f"{name}: {records[0]['targets']} targets, {records[0]['batch']} requests each")
    axes.legend()
    _save(figure, path)


def draw_sharing(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Eight targets: speed over DSpark, a target's above and a GPU's below, over the number of draft devices."""
    names = list(dict.fromkeys(r["deployment"].split(",")[0] for r in records))
    settings = list(dict.fromkeys(r["setting"] for r in records))
    fills = list(dict.fromkeys(r["fill"] for r in records))
    titles = {"over_inline": "speed of a target", "over_inline_per_gpu": "tokens per second and GPU"}
    figure, grid = _axes(len(names), 8, rows=2)
    for column, name in enumerate(names):
        for axes, (key, title) in zip(grid[:, column], titles.items(), strict=True):
            for setting, fill in ((s, f) for s in settings for f in fills):
                of = {"setting": setting, "fill": fill}
                points = [r for r in records if r["deployment"].startswith(name) and of.items() <= r.items()]
                if points:
                    style = {"color": f"C{settings.index(setting)}", "ls": ("-", "--")[fills.index(fill)]}
                    label = f"{setting}; the paper's J and R take {fill:g} T_verify"
                    axes.plot([p["draft_devices"] for p in points], [p[key] for p in points], "o", label=label, **style)
            axes.axhline(1, color="black", lw=0.8)
            axes.set_xlabel("draft devices of eight targets, one request each")
            axes.set_ylabel("over DSpark (simulated)")
            axes.set_title(f"{name}: {title}")
            axes.legend(fontsize=7)
    _save(figure, path)


def draw_timeline(path: Path, segments: Sequence[Segment], title: str) -> None:
    """Who works when; colour by kind, the number is the target's."""
    rows = sorted({s.row for s in segments}, reverse=True)
    figure, axes = _axes(1, 1.2 + 0.5 * len(rows))
    for segment in segments:
        y = rows.index(segment.row)
        bar = [(segment.start, segment.end - segment.start)]
        axes.broken_barh(bar, (y - 0.4, 0.8), color=COLOURS[segment.kind], edgecolor="white", lw=0.5)
        if segment.row.startswith("draft"):
            middle = (segment.start + segment.end) / 2
            axes.text(middle, y, str(segment.target), ha="center", va="center", fontsize=6, clip_on=True)
    for kind in dict.fromkeys(s.kind for s in segments):
        axes.plot([], [], lw=6, color=COLOURS[kind], label=kind)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("ms (simulated)")
    axes.set_title(title)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path)
