"""Every method that can be measured, by name: what it needs and how its engine is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from vllm_jetspecpp.config import DRAFT_WEIGHTS, PLAIN, EngineConfig, RoundConfig, check_choice
from vllm_jetspecpp.evaluation.baselines.autoregressive import AutoregressiveEngine, read_laws
from vllm_jetspecpp.evaluation.baselines.base import PlainEngine, SequenceEngine
from vllm_jetspecpp.evaluation.baselines.ngram import NgramEngine
from vllm_jetspecpp.evaluation.baselines.parallel import ParallelEngine, Rival
from vllm_jetspecpp.evaluation.fan_out import integer_fan_out
from vllm_jetspecpp.evaluation.replay_engine import STATES, ReplayEngine
from vllm_jetspecpp.models.calibration import load_calibration
from vllm_jetspecpp.models.checkpoint import CheckpointInfo
from vllm_jetspecpp.models.networks import Networks, load_networks
from vllm_jetspecpp.models.small_model import load_small_model

JETSPECPP, SSD = "jetspecpp", "ssd"
PARALLEL = ("dflash", "jetspec", "dspark", "domino")
DRAFT_ONLY = "draft-only"
"""Any parallel draft model by itself, ours too: J passes from true states, no context refresh."""
METHODS = ("plain", "ngram", *PARALLEL, SSD, JETSPECPP, DRAFT_ONLY)
DTYPES = ("float32", "bfloat16")
LONGEST_BLOCK = 64
RIVALS = Path("checkpoints/rivals")


def default_checkpoint(method: str, ours: Path) -> Path | None:
    """Where a method's weights are looked for: ``ours``, or a folder of its name below ``checkpoints/rivals``."""
    if method in ("plain", "ngram"):
        return None
    return ours if method in (JETSPECPP, DRAFT_ONLY) else RIVALS / method


@dataclass(frozen=True)
class EvalConfig:
    """One evaluation."""

    target: str
    checkpoint: str
    round: RoundConfig
    states: str = "predicted"
    """What the blocks of hits are drafted from: ``predicted`` states; ``true`` ones, the bound of foresight;
    ``copied``, the last verified state at every position, its floor; ``unpipelined``: no foresight at all, every block
    is drafted and refined from the verified context."""
    max_new_tokens: int = 256
    dtype: str = "float32"
    """Of the target. In float32 the output equals plain decoding; in bfloat16 near ties may fall otherwise."""
    check_output: bool = True
    """Decode plainly too and compare (greedy decoding alone)."""
    method: str = JETSPECPP
    temperature: float = 0.0
    seed: int = 0
    device: str = "cpu"
    draft_weights: str = PLAIN
    """``plain``, or ``int8`` as a draft process on a CPU has them."""

    def __post_init__(self) -> None:
        check_choice("states", self.states, STATES)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("method", self.method, METHODS)
        check_choice("draft_weights", self.draft_weights, DRAFT_WEIGHTS)
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")


Replay = TypeVar("Replay", bound=ReplayEngine)


class Engines:
    """Makes engines, and keeps loaded weights for the next one.

    Args:
        target: folder of the target.
        max_length: longest sequence.
    """

    def __init__(self, target: Path, max_length: int) -> None:
        self.target, self.max_length = target, max_length
        self.max_positions = max_length + 2 * LONGEST_BLOCK
        self._rivals: dict[Path, Rival] = {}
        self._small: dict[Path, Any] = {}
        self._networks: dict[str, tuple[Networks, CheckpointInfo]] = {}

    def networks(self, config: EvalConfig) -> tuple[Networks, CheckpointInfo]:
        """Draft model, adapter and decoder of a JetSpec++ checkpoint."""
        if config.checkpoint not in self._networks:
            longest = RoundConfig(LONGEST_BLOCK - 1)
            self._networks[config.checkpoint] = load_networks(self._engine_config(config, longest))
        return self._networks[config.checkpoint]

    def _engine_config(self, config: EvalConfig, shape: RoundConfig) -> EngineConfig:
        options: dict[str, Any] = {"device": config.device, "weights": config.draft_weights}
        return EngineConfig(config.target, config.checkpoint, shape, 1, self.max_length, **options)

    def __call__(self, config: EvalConfig) -> SequenceEngine | ReplayEngine:
        """An engine for ``config``.

        Raises:
            FileNotFoundError: the method's weights are not there; the message says how to make them.
            ValueError: the weights do not fit, or are those of another method.
        """
        count = config.round.num_draft_tokens
        if config.method == "plain":
            return PlainEngine(count)
        if config.method == "ngram":
            return NgramEngine(count)
        folder = Path(config.checkpoint)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{folder} holds no draft model for method {config.method!r}: train one with "
                f"`python benchmarks/train_rivals.py {config.method}`, or name another with --checkpoint"
            )
        if config.method == JETSPECPP:
            return self.jetspecpp(config)
        if config.method == SSD:
            budget = config.round.num_outcomes
            after_hit, after_miss = (integer_fan_out(law, count, budget) for law in read_laws(folder))
            if folder not in self._small:
                self._small[folder] = load_small_model(folder, self.target, torch.bfloat16, config.device)
            return AutoregressiveEngine(self._small[folder], count, after_hit, after_miss)
        if folder not in self._rivals:
            self._rivals[folder] = Rival.load(folder, self.target, self.max_positions, device=config.device)
        engine = ParallelEngine(self._rivals[folder], count, config.round.jacobi_passes)
        if config.method not in (engine.info.method, DRAFT_ONLY):
            raise ValueError(f"{folder} holds a draft model of {engine.info.method!r}, not of {config.method!r}")
        return engine

    def jetspecpp(self, config: EvalConfig, kind: type[Replay] = ReplayEngine) -> Replay:  # type: ignore[assignment]
        """The method's own engine, or a kind of it that shows more."""
        nets, info = self.networks(config)
        calibration = load_calibration(info.folder, config.round.num_draft_tokens)
        engine = kind.from_networks(self._engine_config(config, config.round), nets, calibration)
        engine.drafts_from = config.states
        engine.target_layer_ids = info.target_layer_ids
        return engine
