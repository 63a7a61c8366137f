"""The picture: both processes over some rounds, and one hit and one miss from close by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_jetspecpp.tracing.phases import DRAFT_PHASES, WORKER_PHASES, Phase
from vllm_jetspecpp.tracing.rounds import Pieces, Round, Timeline

WORKER_ROW, DRAFT_ROW, HEIGHT = 1.0, 0.0, 0.52
OUTCOME_COLOUR, REPLY_COLOUR = "#7a3e9d", "#1b7837"
HIT_COLOUR, MISS_COLOUR = "#1b7837", "#b2182b"
BEFORE, BEFORE_RECEIVED, AFTER = 1.0, 4.0, 4.0
"""Milliseconds that the close views show: before the outcome is sent, at most so many before it is received, and after
the reply is in hand."""
MINOR_SHARE = 0.003
"""Phases with a smaller share of a view get no line in the legend for it."""


def choose_rounds(rounds: Sequence[Round], count: int) -> list[Round]:
    """Consecutive rounds with hits and misses, if there are such, as near as possible to the median duration."""
    count = min(count, len(rounds))
    durations = sorted(r.duration for r in rounds)
    median = durations[len(durations) // 2]

    def badness(start: int) -> tuple[int, int, float]:
        some = rounds[start : start + count]
        gaps = sum(a.end != b.start for a, b in pairwise(some))
        kinds = len({r.is_hit for r in some[:-1]})  # what follows a miss is to be seen too
        return gaps, -kinds, sum(abs(r.duration - median) for r in some)

    best = min(range(len(rounds) - count + 1), key=badness)
    return list(rounds[best : best + count])


def draw_timeline(path: Path, timeline: Timeline, count: int, skip: int = 0) -> None:
    """Write the picture.

    Args:
        count: rounds to show.
        skip: first rounds not to choose from.

    Raises:
        ValueError: there are no rounds, or the processes had different clocks.
    """
    rounds = timeline.rounds[skip:]
    if not rounds or not timeline.recording.aligned:
        raise ValueError("a timeline needs rounds, and both processes on one clock")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = choose_rounds(rounds, count)
    closer = [r for r in (typical(shown, hit=True), typical(shown, hit=False)) if r is not None]
    figure, axes = pyplot.subplots(
        2, 2, figsize=(20, 10.5), height_ratios=(1, 1), layout="constrained", gridspec_kw={"hspace": 0.06}
    )
    grid = axes[0, 0].get_gridspec()
    for axis in axes[0]:
        axis.remove()
    whole = figure.add_subplot(grid[0, :])
    zero = shown[0].start
    _draw(whole, timeline, shown, zero, shown[0].start, shown[-1].end)
    for axis, r in zip(axes[1], closer, strict=False):
        _draw_close(axis, timeline, r, zero)
    for axis in axes[1][len(closer) :]:
        axis.axis("off")
    whole.set_title(_title(timeline, shown), loc="left", fontsize=13, pad=34)
    _legend(figure, timeline, [(shown[0].start, shown[-1].end), *map(close_window, closer)])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def typical(rounds: Sequence[Round], hit: bool) -> Round | None:
    """Of these rounds' hits or misses the one whose wait is the median."""
    some = sorted((r for r in rounds if r.is_hit == hit and r.exchange is not None), key=lambda r: r.exposed)
    return some[len(some) // 2] if some else None


def _title(timeline: Timeline, shown: Sequence[Round]) -> str:
    header = timeline.recording.header
    return (
        f"{header['target']}, γ = {header['num_draft_tokens']}, B = {header['num_outcomes']}, "
        f"J{header['jacobi_passes']}-R{header['context_refreshes']}, {header['dtype']}: "
        f"rounds {shown[0].step} to {shown[-1].step}"
    )


def _draw(axis: Any, timeline: Timeline, rounds: Sequence[Round], zero: int, start: int, end: int) -> None:
    """Both processes from ``start`` to ``end`` (ns): boxes, arrows, and what each round's reply was."""
    _boxes(axis, timeline.worker, WORKER_PHASES, WORKER_ROW, zero, start, end)
    _boxes(axis, timeline.draft, DRAFT_PHASES, DRAFT_ROW, zero, start, end)
    for r in rounds:
        _arrows(axis, r, zero)
        _label(axis, r, zero)
    axis.set_xlim((start - zero) / 1e6, (end - zero) / 1e6)
    axis.set_ylim(DRAFT_ROW - 0.42, WORKER_ROW + 0.42)
    axis.set_yticks([WORKER_ROW, DRAFT_ROW], ["vLLM worker\n(target)", "draft\nprocess"], fontsize=12)
    axis.set_xlabel("ms")
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _boxes(axis: Any, pieces: Pieces, phases: Sequence[Phase], row: float, zero: int, start: int, end: int) -> None:
    """One collection of boxes for each phase; waits are hatched, idle time is an empty frame."""
    stretches: dict[str, list[tuple[float, float]]] = {}
    for piece in pieces.between(start, end):
        left = max(piece.start, start)
        width = min(piece.end, end) - left
        stretches.setdefault(piece.phase, []).append(((left - zero) / 1e6, width / 1e6))
    for phase in phases:
        if found := stretches.get(phase.name):
            axis.broken_barh(found, (row - HEIGHT / 2, HEIGHT), zorder=2, **_style(phase))


def _style(phase: Phase) -> dict[str, Any]:
    if phase.name == "wait":
        return {"facecolor": "white", "edgecolor": "#d62728", "hatch": "////", "linewidth": 0.8}
    if phase.name == "idle":
        return {"facecolor": "white", "edgecolor": "#999999", "linewidth": 0.8, "linestyle": ":"}
    return {"facecolor": phase.colour, "edgecolor": "white", "linewidth": 0.4}


def _arrows(axis: Any, r: Round, zero: int) -> None:
    """The outcome's way down and the reply's way up, from when it is sent to when it is in hand."""
    if r.exchange is None:
        return
    top, bottom = WORKER_ROW - HEIGHT / 2, DRAFT_ROW + HEIGHT / 2
    ways = (
        (r.send.start, top, r.exchange.received, bottom, OUTCOME_COLOUR),
        (r.exchange.replying, bottom, r.wait.end, top, REPLY_COLOUR),
    )
    for left, source, right, destination, colour in ways:
        arrow = axis.annotate(
            "",
            xy=((right - zero) / 1e6, destination),
            xytext=((left - zero) / 1e6, source),
            arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0},
            annotation_clip=False,
            zorder=4,
        )
        arrow.arrow_patch.set_clip_box(axis.bbox)


def _label(axis: Any, r: Round, zero: int) -> None:
    """Above the end of a round: what the reply was; above its middle: what was accepted, and the time."""
    colour = HIT_COLOUR if r.is_hit else MISS_COLOUR
    end, middle = (r.end - zero) / 1e6, (r.start + r.end) / 2e6 - zero / 1e6
    axis.axvline(end, color=colour, linewidth=0.9, linestyle="--", zorder=1)
    accepted = ", ".join(str(k) for *_, k in r.verified)
    text = f"{'hit' if r.is_hit else 'MISS'}, k = {accepted}"
    times = f"{r.duration / 1e6:.1f} ms, {r.exposed / 1e6:.2f} exposed"
    axis.text(middle, WORKER_ROW + 0.53, text, ha="center", color=colour, fontsize=12, fontweight="bold", clip_on=False)
    axis.text(middle, WORKER_ROW + 0.44, times, ha="center", color="#444444", fontsize=9.5, clip_on=False)


def close_window(r: Round) -> tuple[int, int]:
    """Start and end (ns) of the close view of a round's exchange."""
    assert r.exchange is not None
    start = max(r.send.start - int(BEFORE * 1e6), r.exchange.received - int(BEFORE_RECEIVED * 1e6))
    return start, r.wait.end + int(AFTER * 1e6)


def _draw_close(axis: Any, timeline: Timeline, r: Round, zero: int) -> None:
    """The exchange at the end of one round: from sending its outcome to going on with the reply."""
    _draw(axis, timeline, [], zero, *close_window(r))
    _arrows(axis, r, zero)
    colour = HIT_COLOUR if r.is_hit else MISS_COLOUR
    causes = ", ".join(f"{cause} {time / 1e6:.2f}" for cause, time in (r.causes() or {}).items() if time >= 5e3)
    what = f"the {'hit' if r.is_hit else 'miss'} of round {r.step} from close by: exposed {r.exposed / 1e6:.2f} ms"
    axis.set_title(f"{what}\n({causes})", loc="left", color=colour, fontsize=11.5)


def _legend(figure: Any, timeline: Timeline, views: Sequence[tuple[int, int]]) -> None:
    """A line for each phase that one can see in one of the views, and for the arrows."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    arrows = [
        Line2D([], [], color=colour, marker=">", label=text)
        for colour, text in ((OUTCOME_COLOUR, "outcome"), (REPLY_COLOUR, "reply"))
    ]
    for where, title, pieces, phases, columns in (
        ("left", "vLLM worker", timeline.worker, WORKER_PHASES, 3),
        ("right", "draft process", timeline.draft, DRAFT_PHASES, 4),
    ):
        times = [(pieces.phases(start, end), end - start) for start, end in views]
        seen = {name for sums, whole in times for name, time in sums.items() if time > MINOR_SHARE * whole}
        patches = [Patch(label=phase.text, **_style(phase)) for phase in phases if phase.name in seen]
        figure.legend(
            handles=[*patches, *(arrows if where == "left" else ())],
            loc=f"outside lower {where}",
            title=title,
            title_fontproperties={"weight": "bold"},
            alignment="left",
            ncols=columns,
            frameon=False,
            fontsize=10,
        )
