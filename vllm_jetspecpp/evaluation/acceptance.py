"""Acceptance length, hit rate and decoder agreement on benchmark prompts: target and draft engine in one process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_jetspecpp import __version__
from vllm_jetspecpp.config import EngineConfig, RoundConfig, check_choice
from vllm_jetspecpp.evaluation.datasets import Prompt
from vllm_jetspecpp.evaluation.replay_engine import ReplayEngine
from vllm_jetspecpp.evaluation.rounds import Rounds, hit_rates, log_scores, uncalibrated_scores
from vllm_jetspecpp.models.calibration import Calibration, load_calibration
from vllm_jetspecpp.models.networks import load_networks
from vllm_jetspecpp.runtime.offline import Generation, OfflineTarget, generate, generate_plainly
from vllm_jetspecpp.types import Origin, Outcome

STATES = ("predicted", "true")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class EvalConfig:
    """One evaluation."""

    target: str
    checkpoint: str
    round: RoundConfig
    states: str = "predicted"
    """``true``: blocks of hits are drafted from the target's own states, the bound of foresight."""
    max_new_tokens: int = 256
    dtype: str = "float32"
    """Of the target. In float32 the output equals plain decoding; in bfloat16 near ties may fall otherwise."""
    check_output: bool = True
    """Decode plainly too and compare."""

    def __post_init__(self) -> None:
        check_choice("states", self.states, STATES)
        check_choice("dtype", self.dtype, DTYPES)


CACHE_SIZES = (1, 2, 4, 8, 16)


@dataclass
class Tally:
    """Sums over rounds, and the rounds themselves."""

    generations: list[Generation] = field(default_factory=list)
    agreed: int = 0
    positions: int = 0
    agreed_reached: int = 0
    positions_reached: int = 0
    identical: int | None = None
    """Prompts whose answer is the target's own; None when that was not checked."""
    rounds: list[Rounds] = field(default_factory=list)

    def see(self, choices: Tensor, outcome: Outcome, logits: Tensor) -> None:
        """Compare the decoder's choices [γ + 1] with the target's."""
        same = choices == logits.argmax(-1)
        reached = outcome.num_accepted + 1
        self.agreed += int(same.sum())
        self.positions += len(same)
        self.agreed_reached += int(same[:reached].sum())
        self.positions_reached += reached

    def figures(self) -> dict[str, Any]:
        """Everything that is measured, by name."""
        rounds = [r for g in self.generations for r in g.rounds]
        whole = Generation(rounds=rounds)
        committed = {origin: [o.num_accepted + 1 for kind, o in rounds if kind is origin] for origin in Origin}
        return {
            "tau": round(whole.acceptance_length, 4),
            "hit_rate": round(whole.hit_rate, 4),
            "decoder_top1": round(self.agreed / max(self.positions, 1), 4),
            "decoder_top1_reached": round(self.agreed_reached / max(self.positions_reached, 1), 4),
            "tau_hit": _mean(committed[Origin.HIT]),
            "tau_miss": _mean(committed[Origin.FALLBACK]),
            "rounds": len(rounds),
            "tokens": sum(len(g.tokens) for g in self.generations),
            "prompts": len(self.generations),
            "identical_prompts": self.identical,
            "identical_to_target": None if self.identical is None else self.identical == len(self.generations),
        }

    def replayed_hit_rates(self, calibration: Calibration | None) -> dict[str, dict[int, float]]:
        """Hit rate by cache size, had the recorded rounds been served by each rule."""
        rounds = Rounds.join(self.rounds)
        rules = {"uncalibrated": uncalibrated_scores(rounds)}
        if calibration:
            rules["calibrated"] = log_scores(rounds, torch.tensor(calibration.weights), calibration.beta)
        rates = {name: hit_rates(rounds, scores, CACHE_SIZES) for name, scores in rules.items()}
        return {name: {size: round(rate, 4) for size, rate in by_size.items()} for name, by_size in rates.items()}


def _mean(values: Sequence[int]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


class Bench:
    """A target and a checkpoint in memory, for one evaluation or many.

    Args:
        config: the first evaluation's; later ones may differ in everything but target, checkpoint and dtype.
        say: called with a line of progress after every prompt.
    """

    def __init__(self, config: EvalConfig, say: Callable[[str], None] | None = None) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.config, self.say = config, say or (lambda line: print(line, file=sys.stderr, flush=True))
        self.tokenizer = AutoTokenizer.from_pretrained(config.target)
        model = AutoModelForCausalLM.from_pretrained(config.target, dtype=getattr(torch, config.dtype)).eval()
        self.max_length = min(model.config.max_position_embeddings, 4096)
        self.nets, self.info = load_networks(self._engine_config(config))
        self.target = OfflineTarget(model, self.info.target_layer_ids)
        eos = model.generation_config.eos_token_id
        self.eos = eos[0] if isinstance(eos, list) else eos
        self._plain: dict[tuple[str, int], list[int]] = {}

    def _engine_config(self, config: EvalConfig) -> EngineConfig:
        return EngineConfig(config.target, config.checkpoint, config.round, 1, self.max_length, "bfloat16")

    def engine(self, config: EvalConfig) -> ReplayEngine:
        """An engine for ``config``.

        Raises:
            ValueError: γ is longer than the checkpoint was made for, or the selection rule needs a calibration.
        """
        limit = self.info.block_size - 1
        if config.round.num_draft_tokens > limit:
            given = config.round.num_draft_tokens
            raise ValueError(f"num_draft_tokens must be at most {limit} with this checkpoint, got {given}")
        calibration = load_calibration(self.info.folder, config.round.num_draft_tokens)
        engine = ReplayEngine.from_networks(self._engine_config(config), self.nets, calibration)
        engine.true_states = config.states == "true"
        return engine

    def encode(self, prompt: Prompt, room: int) -> list[int]:
        """Token ids of a prompt with the chat template, cut to leave ``room`` tokens."""
        chat = [{"role": "user", "content": prompt.text}]
        ids = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids[: self.max_length - room]

    def plain(self, prompt: Prompt, ids: list[int], max_tokens: int) -> list[int]:
        """The target's own answer, kept for the next evaluation."""
        key = (prompt.id, max_tokens)
        if key not in self._plain:
            self._plain[key] = generate_plainly(self.target, ids, max_tokens=max_tokens, eos_token_id=self.eos)
        return self._plain[key]

    def run(self, config: EvalConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Evaluate ``config`` greedily on ``prompts``; one dict of figures."""
        engine, tally, start = self.engine(config), Tally(), time.monotonic()

        def on_round(outcome: Outcome, logits: Tensor) -> None:
            tally.see(engine.decoder_choices(), outcome, logits)
            tally.rounds.append(engine.recorded(outcome))

        for number, prompt in enumerate(prompts, 1):
            ids = self.encode(prompt, config.max_new_tokens + 2 * config.round.block_size)
            result = generate(
                self.target,
                engine,
                ids,
                max_tokens=config.max_new_tokens,
                eos_token_id=self.eos,
                on_round=on_round,
            )
            tally.generations.append(result)
            if config.check_output:
                same = result.tokens == self.plain(prompt, ids, config.max_new_tokens)
                tally.identical = (tally.identical or 0) + same
            spent = time.monotonic() - start
            figures, left = tally.figures(), spent / number * (len(prompts) - number) / 60
            self.say(
                f"{number}/{len(prompts)} {prompt.id}: tau {figures['tau']:.3f}, hit rate {figures['hit_rate']:.3f}, "
                f"decoder top-1 {figures['decoder_top1']:.3f}; {left:.1f} min left"
            )
        return tally.figures() | {"hit_rate_by_cache_size": tally.replayed_hit_rates(engine.selector.calibration)}


def describe(config: EvalConfig) -> dict[str, Any]:
    """What was run, for the JSON beside the figures."""
    return {
        "method": "jetspecpp",
        "jacobi": config.round.jacobi_passes,
        "refresh": config.round.context_refreshes,
        "num_draft_tokens": config.round.num_draft_tokens,
        "num_outcomes": config.round.num_outcomes,
        "selection": config.round.selection,
        **{k: v for k, v in asdict(config).items() if k not in ("round", "target", "check_output")},
        "target": Path(config.target).name,
    }


def provenance() -> dict[str, Any]:
    """Command, commit, versions, machine and date: what every figure carries."""
    import transformers

    root = Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": git.stdout.strip() or None,
        "versions": {
            "vllm_jetspecpp": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
    }
