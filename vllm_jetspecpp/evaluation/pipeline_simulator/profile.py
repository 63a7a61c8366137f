"""A deployment as a JSON file: what is measured once and simulated often."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm_jetspecpp.config import RoundConfig, check_keys, from_dict
from vllm_jetspecpp.evaluation.pipeline_simulator.acceptance import Acceptance
from vllm_jetspecpp.evaluation.pipeline_simulator.costs import PipelineCosts


@dataclass(frozen=True)
class Profile:
    """All that a simulation of one deployment needs, as one JSON file."""

    costs: PipelineCosts
    round: RoundConfig
    acceptance: Acceptance
    tau_inline: float | None = None
    """τ of the method that drafts in line, where ``costs.inline_draft`` is its time."""
    name: str = "profile"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "profile") -> Profile:
        """From ``{"costs": …, "round": …, "acceptance": {"hit_rate", "tau_hit", "tau_miss"}, "tau_inline": …}``.

        ``hit_rate`` is one number or γ + 1 of them (``decoder_error`` may stand for it); a ``tau`` is a mean or γ + 1
        probabilities.

        Raises:
            ValueError: an unknown or missing key, or a value that makes no sense; the message says which.
        """
        check_keys(values, [*(f.name for f in fields(cls)), "made_by"], where)
        for key in ("costs", "round", "acceptance"):
            if not isinstance(values.get(key), Mapping):
                raise ValueError(f"{where}: {key!r} is missing or no object; needed: costs, round, acceptance")
        options: RoundConfig = from_dict(RoundConfig, dict(values["round"]), f"{where}: round")
        return cls(
            costs=PipelineCosts.from_dict(values["costs"], f"{where}: costs"),
            round=options,
            acceptance=_acceptance(values["acceptance"], options.num_draft_tokens, f"{where}: acceptance"),
            tau_inline=values.get("tau_inline"),
            name=str(values.get("name", "profile")),
        )

    @classmethod
    def from_json(cls, path: Path) -> Profile:
        """From a file; ValueError names it."""
        try:
            values = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(f"profile {path} cannot be read: {error.strerror}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"profile {path} is not JSON: {error}") from None
        if not isinstance(values, Mapping):
            raise ValueError(f"profile {path} must hold a JSON object")
        return cls.from_dict(values, str(path))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``from_dict`` reads them."""
        law = self.acceptance
        used = ("num_draft_tokens", "num_outcomes", "jacobi_passes", "context_refreshes")
        return {
            "name": self.name,
            "costs": self.costs.to_dict(),
            "round": {name: getattr(self.round, name) for name in used},
            "acceptance": {
                "hit_rate": list(law.foreseen),
                "tau_hit": list(law.after_hit.law),
                "tau_miss": list(law.after_miss.law),
            },
            "tau_inline": self.tau_inline,
        }


def _acceptance(values: Mapping[str, Any], num_draft_tokens: int, where: str) -> Acceptance:
    check_keys(values, ("hit_rate", "decoder_error", "tau_hit", "tau_miss"), where)
    missing = [key for key in ("tau_hit", "tau_miss") if key not in values]
    if missing or ("hit_rate" in values) == ("decoder_error" in values):
        raise ValueError(f"{where} needs tau_hit, tau_miss and one of hit_rate and decoder_error, got {list(values)}")
    taus = values["tau_hit"], values["tau_miss"]
    try:
        if "hit_rate" in values:
            return Acceptance.of(values["hit_rate"], *taus, num_draft_tokens)
        return Acceptance.compounding(float(values["decoder_error"]), *taus, num_draft_tokens)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
