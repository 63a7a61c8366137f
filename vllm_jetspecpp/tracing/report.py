"""From a folder of recordings to the files that people open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_jetspecpp.tracing.chrome import write_trace
from vllm_jetspecpp.tracing.recording import read_recording
from vllm_jetspecpp.tracing.rounds import Timeline
from vllm_jetspecpp.tracing.summary import WARM_UP_ROUNDS, summarise
from vllm_jetspecpp.tracing.timeline import draw_timeline

TRACE, PICTURE, SUMMARY = "trace.json", "timeline.png", "summary.json"


def render(
    recordings: Path,
    out: Path,
    made_by: dict[str, Any],
    name: str | None = None,
    show: int = 6,
    skip: int = WARM_UP_ROUNDS,
) -> dict[str, Any]:
    """Write trace, picture and summary of one recording into ``out``; returns the summary.

    Args:
        recordings: folder that worker and draft process recorded into.
        made_by: where the figures come from.
        name: of a recording; by default the newest.
        show: rounds in the picture.
        skip: first rounds that are left out of picture and summary.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: it cannot be read, or has too few rounds.
    """
    timeline = Timeline.of(read_recording(recordings, name))
    summary = {**summarise(timeline, skip), "made_by": made_by}
    out.mkdir(parents=True, exist_ok=True)
    write_trace(out / TRACE, timeline, {"setting": summary["setting"], "made_by": made_by})
    (out / SUMMARY).write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf8")
    if timeline.recording.aligned:
        draw_timeline(out / PICTURE, timeline, show, skip)
    return summary
