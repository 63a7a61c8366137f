"""What a user may set, checked before anything is loaded. No torch, no vLLM, no Ray in here."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from vllm_jetspecpp.types import ALL_OUTCOMES

MAX_DRAFT_TOKENS = 63
MAX_OUTCOMES = ALL_OUTCOMES
MAX_PASSES = 16
AUTO, CALIBRATED, CONFORMAL, UNCALIBRATED = "auto", "calibrated", "conformal", "uncalibrated"
SELECTIONS = (AUTO, CALIBRATED, CONFORMAL, UNCALIBRATED)
INT8, PLAIN = "int8", "plain"
DRAFT_WEIGHTS = (AUTO, INT8, PLAIN)
TRANSPORTS = ("shared_memory", "tcp", "local")


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest allowed name, or the empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_keys(given: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raise ValueError for the first key that is not allowed, naming the nearest one that is."""
    names = list(allowed)
    for key in given:
        if key not in names:
            allowed_names = ", ".join(sorted(names))
            raise ValueError(f"{where}: unknown option {key!r}{nearest(key, names)}; allowed: {allowed_names}")


def check_range(name: str, value: Any, low: int, high: int, why: str = "") -> None:
    """Raise ValueError unless ``value`` is an int in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}{why}, got {value!r}")


def check_probability(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number from 0 to below 1, got {value!r}")


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    names = list(allowed)
    if value not in names:
        options = ", ".join(map(repr, names))
        raise ValueError(f"{name} must be one of {options}, got {value!r}{nearest(str(value), names)}")


def check_draft_weights(weights: str, device: str, dtype: str) -> None:
    """Raise ValueError unless a draft process on ``device`` can have such weights."""
    check_choice("draft_weights", weights, DRAFT_WEIGHTS)
    if weights == INT8 and (device != "cpu" or dtype != "bfloat16"):
        raise ValueError(
            f"draft_weights 'int8' is for a draft process on a CPU and a target in bfloat16, got {device} and {dtype}"
        )


def resolve_class(path: str, option: str) -> type:
    """The class at a dotted path.

    Raises:
        ValueError: there is no such module or class; the message names ``option``.
    """
    module_name, _, class_name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{option}: no class at {path!r} ({error})") from error


@dataclass(frozen=True)
class RoundConfig:
    """The fixed shapes of one round: they never change while a draft process runs (invariant 3)."""

    num_draft_tokens: int
    """γ, draft tokens a block; vLLM's ``num_speculative_tokens``."""
    num_outcomes: int = 4
    """B, outcomes pre-drafted per round."""
    jacobi_passes: int = 1
    """J, refinement passes after the initial draft (Eq. 8)."""
    context_refreshes: int = 1
    """R ≤ J + 1, context refreshes with anchor replacement, one before each of the first R passes. With R = J + 1 the
    first one comes before the initial draft and reads the anchor alone (ours, not the paper's)."""
    selection: str = AUTO
    """How outcomes are scored: ``calibrated`` by Eq. 12, ``conformal`` too but only above the threshold,
    ``uncalibrated`` by Eq. 6, ``auto`` calibrated where the checkpoint is."""
    fallback_passes: int = 0
    """Refinement passes of the block after a miss; 0 is the paper's J_0. They are not hidden behind verification."""
    fallback_refreshes: int = 0
    """Context refreshes of that block, at most ``fallback_passes`` + 1."""

    num_refined: int = MAX_OUTCOMES
    """Outcomes, the likeliest ones, whose drafts are refined; the others keep the initial draft. B or more: all."""
    copy_drafts: bool = False
    """Whether tokens copied from the request itself are handed out where they promise more than drafted ones."""
    anchor_replacement: bool = True
    """False: a context refresh only lets the next pass read the predicted states, and no token is fixed. For
    measurements; the paper finds most of the gain in the replacement."""

    def __post_init__(self) -> None:
        check_range("num_speculative_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        check_range("num_outcomes", self.num_outcomes, 1, MAX_OUTCOMES)
        check_range("num_refined", self.num_refined, 1, MAX_OUTCOMES)
        for passes, refreshes in (("jacobi_passes", "context_refreshes"), ("fallback_passes", "fallback_refreshes")):
            given = {name: getattr(self, name) for name in (passes, refreshes)}
            for name, value in given.items():
                check_range(name, value, 0, MAX_PASSES)
            if given[refreshes] > given[passes] + self.anchor_replacement:
                raise ValueError(
                    f"{refreshes} must be at most {passes} + 1 (a refresh stands before a pass), "
                    f"got {refreshes}={given[refreshes]}, {passes}={given[passes]}"
                )
        check_choice("selection", self.selection, SELECTIONS)
        if not isinstance(self.copy_drafts, bool):
            raise ValueError(f"copy_drafts must be true or false, got {self.copy_drafts!r}")

    @property
    def block_size(self) -> int:
        """Anchor and draft tokens: what the target verifies at once."""
        return self.num_draft_tokens + 1


@dataclass(frozen=True)
class EngineConfig:
    """All a draft process needs to know at start; plain values only, so that Ray and pickle carry it."""

    target: str
    """Folder (or hub name) of the target's weights."""
    checkpoint: str
    """Folder of draft model, adapter and manifest."""
    round: RoundConfig
    num_slots: int
    """Requests that can be drafted for at once; each owns one slot of every cache."""
    max_model_len: int
    dtype: str = "bfloat16"
    """``float32``, ``bfloat16`` or ``float16``: of weights, caches and the states on the wire."""
    device: str = "cpu"
    num_threads: int = 1
    target_revision: str | None = None
    """Of a hub name: branch, tag or commit."""
    download_dir: str | None = None
    """Of a hub name: where its files are kept; None is Hugging Face's own cache."""
    prefix_store_bytes: int = 0
    """Memory for the states of prefixes that vLLM has cached."""
    window: int | None = None
    """Positions before a block that the draft networks read; None: all."""
    weights: str = AUTO
    """``int8``: the matrices of a draft process on a CPU are packed as int8. ``plain``: they are of ``dtype``.
    ``auto``: int8 where ``dtype`` is bfloat16 and the CPU has instructions for it."""
    trace: str | None = None
    """Where the step recorder's files begin; None: nothing is recorded."""
    engine: str = "vllm_jetspecpp.runtime.draft_engine.DraftEngine"
    """Dotted path of the engine class: the place where researchers (and tests) plug in another drafter."""

    def __post_init__(self) -> None:
        check_range("num_slots", self.num_slots, 1, 4096)
        check_range("max_model_len", self.max_model_len, 2, 1 << 24)
        check_range("prefix_store_bytes", self.prefix_store_bytes, 0, 1 << 50)
        if self.window is not None:
            check_range("window", self.window, 1, 1 << 24)
        check_choice("dtype", self.dtype, ("float32", "bfloat16", "float16"))
        check_draft_weights(self.weights, self.device, self.dtype)


def from_dict(cls: type, values: dict[str, Any], where: str) -> Any:
    """Build a frozen config from a dict; unknown keys are errors that name the nearest valid key."""
    check_keys(values, [f.name for f in fields(cls)], where)
    return cls(**values)
