"""JSON files of a checkpoint. Whatever stands in them is checked before it is used: a ValueError names file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_jetspecpp.config import check_range, nearest

MAX_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError where the file is missing, broken, or holds something else."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"checkpoint file {path} has {path.stat().st_size} bytes, allowed are {MAX_JSON_BYTES}")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"checkpoint file {path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"checkpoint file {path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"checkpoint file {path} must hold a JSON object, got {_short(value)}")
    return value


def require(config: dict[str, Any], key: str, path: Path) -> Any:
    """``config[key]``; ValueError names the file and the nearest key where there is none."""
    if key not in config:
        raise ValueError(f"{path}: key {key!r} is missing{nearest(key, config)}; found: {', '.join(sorted(config))}")
    return config[key]


def require_int(config: dict[str, Any], key: str, path: Path, low: int, high: int) -> int:
    """``config[key]``, an integer from ``low`` to ``high``."""
    value = require(config, key, path)
    check_range(f"{path}: {key}", value, low, high)
    return value


def require_ints(config: dict[str, Any], key: str, path: Path, low: int, high: int) -> list[int]:
    """``config[key]``, a list of integers from ``low`` to ``high``, not empty."""
    values = require(config, key, path)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{path}: {key} must be a list of integers, not empty, got {_short(values)}")
    for value in values:
        check_range(f"{path}: each of {key}", value, low, high)
    return values


def section(config: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """The object under ``key``; an empty one where there is none."""
    value = config.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {key} must be an object, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
