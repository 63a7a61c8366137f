"""Serving methods by name: vLLM's speculative config of each, and how many cores it may use."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_jetspecpp.config import nearest
from vllm_jetspecpp.models.json_files import read_json

PLAIN, OURS = "plain", "jetspecpp"
BOTH_CORES = "_2"
"""Ending of a method whose target computes on two cores; by itself one core is the target's."""
DEFAULTS = (
    PLAIN,
    "plain_2",
    "ngram",
    "suffix",
    "dflash",
    "dflash_2",
    "eagle3",
    "jetspecpp_drafted",
    OURS,
)
ON_DISK = ("dflash", "eagle3")
"""Methods with a draft model below ``checkpoints/rivals``."""
PLANNED = {"method": OURS, "num_outcomes": "auto", "jacobi_passes": "auto", "context_refreshes": "auto"}
BUILT_IN: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    # Without the cache of earlier answers: prompts come again in every repeat, so it would know all of them.
    "suffix": {"method": "suffix", "num_speculative_tokens": 7, "suffix_decoding_max_cached_requests": 0},
    # Its best here: 3 draft tokens are faster than 5, 7 and 15, as it accepts few and drafts while the target waits.
    "dflash": {"method": "dflash", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 5},
    OURS: {**PLANNED, "copy_drafts": True},
    "jetspecpp_drafted": PLANNED,
}


@dataclass(frozen=True)
class Method:
    """One way to serve."""

    name: str
    speculative: Mapping[str, Any]
    """Empty: without drafting."""
    cores: tuple[int, ...] | None
    """The target's, one thread on each; None: it places itself, with one thread."""

    @property
    def engine(self) -> str:
        """Methods that agree in this can share an engine: the same drafting on other cores."""
        return json.dumps([self.cores is None, dict(self.speculative)], sort_keys=True)

    @property
    def threads(self) -> int:
        """Of the target."""
        return len(self.cores or "1")


@dataclass(frozen=True)
class Choice:
    """What `bench serve` compares."""

    names: Sequence[str] = DEFAULTS
    changes: Mapping[str, Mapping[str, Any]] | None = None
    """Speculative options by method, over the built-in ones. A name that is not built in adds a method and needs
    ``method``."""
    checkpoint: Path = Path("checkpoints/smollm2-135m-instruct")
    rivals: Path = Path("checkpoints/rivals")
    cores: tuple[int, int] = (0, 1)
    """The target's, and the one more that some methods use."""


def base_name(name: str) -> str:
    """``dflash_2`` → ``dflash``."""
    return name.removesuffix(BOTH_CORES)


def check_names(choice: Choice) -> None:
    """Raise ValueError for the first method that is neither built in nor described."""
    changes = choice.changes or {}
    for name in [*choice.names, *changes]:
        if base_name(name) not in BUILT_IN and "method" not in changes.get(name, {}):
            known = sorted({*DEFAULTS, *BUILT_IN})
            raise ValueError(
                f"unknown method {name!r}{nearest(name, known)}; known: {', '.join(known)}; {BOTH_CORES!r} at its end "
                "means both cores, and --method-config adds others"
            )


def make_method(name: str, choice: Choice, unpacked: Path) -> tuple[Method | None, str]:
    """A method ready to start, or None and why it cannot run.

    Args:
        unpacked: folder for draft models that are stored small, which vLLM does not read.
    """
    base, (target_core, other_core) = base_name(name), choice.cores
    changes = dict((choice.changes or {}).get(name, {}))
    options = {**BUILT_IN.get(base, {}), **changes}
    if options.get("method") == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        return None, "needs arctic-inference (pip install --no-deps arctic-inference==0.1.1, which compiles)"
    if options.get("method") == OURS:
        options = {"model": str(choice.checkpoint), "draft_cores": [other_core], **options}
        return Method(name, options, None), ""
    if options.get("method") in ON_DISK and "model" not in options:
        folder = choice.rivals / options["method"]
        if not (folder / "config.json").is_file():
            return None, f"no draft model in {folder}"
        options["model"] = str(folder)
    if "model" in options and is_packed(Path(options["model"])):
        options["model"] = str(unpacked / options["method"])
    return Method(name, options, choice.cores if name.endswith(BOTH_CORES) else (target_core,)), ""


def is_packed(folder: Path) -> bool:
    """Whether a draft model is stored small, as this package alone reads it: as differences, or an EAGLE-3 head."""
    path = folder / "config.json"
    return path.is_file() and not {"delta_of", "small"}.isdisjoint(read_json(path).get("jetspecpp", {}))
