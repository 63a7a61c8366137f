"""Reads what the recorders of one engine wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_jetspecpp.config import check_choice

WORKER_END, DRAFT_END = ".worker.jsonl", ".draft-*.jsonl"


@dataclass(frozen=True)
class Span:
    """One call."""

    name: str
    start: int
    """Nanoseconds, on the clock of its process."""
    end: int
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """Both processes of one engine; each one's spans by start, outer before inner."""

    header: Mapping[str, Any]
    """What the worker said: shapes, dtype, names."""
    worker: list[Span]
    draft: list[Span]
    """Of every draft process the engine had."""
    aligned: bool
    """Whether both processes had one clock."""


def find_recordings(folder: Path) -> list[str]:
    """Names of the recordings in a folder, the oldest first."""
    files = folder.glob(f"*{WORKER_END}")
    return [path.name.removesuffix(WORKER_END) for path in sorted(files, key=lambda path: path.stat().st_mtime)]


def read_recording(folder: Path, name: str | None = None) -> Recording:
    """One recording of a folder, the newest by default.

    Raises:
        FileNotFoundError: there is none.
        ValueError: none of this name, or a file that is no recording.
    """
    names = find_recordings(folder)
    if not names:
        raise FileNotFoundError(f"no recording in {folder}: a server with option trace_directory writes one")
    if name is not None:
        check_choice("recording", name, names)
    name = name or names[-1]
    header, worker = _read(folder / f"{name}{WORKER_END}")
    draft: list[Span] = []
    aligned = True
    for path in sorted(folder.glob(f"{name}{DRAFT_END}")):
        other, spans = _read(path)
        aligned = aligned and bool(header["boot"]) and other["boot"] == header["boot"]
        draft += spans
    return Recording(header, ordered(worker), ordered(draft), aligned)


def ordered(spans: Iterable[Span]) -> list[Span]:
    """By start, outer before inner."""
    return sorted(spans, key=lambda span: (span.start, -span.end))


def _read(path: Path) -> tuple[dict[str, Any], list[Span]]:
    lines = path.read_text(encoding="utf8").splitlines()
    try:
        header = json.loads(lines[0])
        _ = header["process"], header["boot"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is no recording of jetspecpp: {error!r}") from error
    spans = []
    for number, line in enumerate(lines[1:], 2):
        try:
            spans.append(Span(*json.loads(line)))
        except (ValueError, TypeError) as error:
            if number < len(lines):  # the last line of a process that was killed may be torn
                raise ValueError(f"{path}:{number} is no span: {error!r}") from error
    return header, spans
