"""Acceptance length, hit rate and decoder agreement on benchmark prompts: target and draft engine in one process."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_jetspecpp.evaluation.answers import Answer, Answerer
from vllm_jetspecpp.evaluation.baselines.autoregressive import AutoregressiveEngine, follow_autoregressive
from vllm_jetspecpp.evaluation.datasets import Prompt
from vllm_jetspecpp.evaluation.methods import Engines, EvalConfig
from vllm_jetspecpp.evaluation.repetition import RepetitionLoop
from vllm_jetspecpp.evaluation.replay_engine import ReplayEngine
from vllm_jetspecpp.evaluation.rounds import Rounds
from vllm_jetspecpp.evaluation.tally import AnswerObserver, RoundObserver, Tally
from vllm_jetspecpp.models.target_parts import resolve_folder
from vllm_jetspecpp.runtime.offline import Generation, OfflineTarget, follow, generate, generate_plainly

MAX_KNOWN_BYTES = 2 << 30
"""Memory for states of recorded answers."""


class Bench:
    """A target in memory, for one evaluation or many.

    Args:
        config: the first evaluation's; later ones may differ in everything but target, dtype and device.
        say: called with a line of progress after every prompt.
    """

    def __init__(self, config: EvalConfig, say: Callable[[str], None] | None = None) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.config, self.say = config, say or (lambda line: print(line, file=sys.stderr, flush=True))
        folder = resolve_folder(config.target)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.dtype), use_safetensors=True)
        model = model.to(config.device).eval()
        self.max_length = min(model.config.max_position_embeddings, 4096)
        self.engines = Engines(folder, self.max_length)
        self.target = OfflineTarget(model, ())
        eos = model.generation_config.eos_token_id
        self.eos = eos[0] if isinstance(eos, list) else eos
        self.answerer = Answerer(model, AutoTokenizer.from_pretrained(folder), self.max_length, self.eos)
        self._known: OrderedDict[tuple[str, int, tuple[int, ...]], tuple[Tensor, Tensor]] = OrderedDict()
        self._plain: dict[tuple[str, int], list[int]] = {}

    def engine(self, config: EvalConfig) -> Any:
        """An engine for ``config``; the target taps what it reads."""
        engine = self.engines(config)
        self.target.target_layer_ids = list(engine.target_layer_ids)
        return engine

    def plain(self, name: str, ids: list[int], max_tokens: int) -> list[int]:
        """The target's own greedy answer, kept for the next evaluation."""
        key = (name, max_tokens)
        if key not in self._plain:
            stop = RepetitionLoop()
            self._plain[key] = generate_plainly(
                self.target, ids, max_tokens=max_tokens, eos_token_id=self.eos, stop=stop
            )
        return self._plain[key]

    def run(self, config: EvalConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Speculative decoding of ``prompts``, every block verified by the target; one dict of figures."""
        engine, tally, start = self.engine(config), Tally(), time.monotonic()
        observer = RoundObserver(engine, tally) if isinstance(engine, ReplayEngine) else None
        generator = torch.Generator().manual_seed(config.seed)
        room = config.max_new_tokens + 2 * config.round.block_size
        for number, prompt in enumerate(prompts, 1):
            replies: list[str] = []
            for turn in range(len(prompt.turns)):
                ids = self.answerer.encode(prompt.turns[: turn + 1], replies, room)
                result = generate(
                    self.target,
                    engine,
                    ids,
                    max_tokens=config.max_new_tokens,
                    eos_token_id=self.eos,
                    temperature=config.temperature,
                    generator=generator,
                    on_round=observer,
                    stop=RepetitionLoop(),
                )
                tally.generations.append(result)
                replies.append(self.answerer.tokenizer.decode(result.tokens, skip_special_tokens=True))
                if config.check_output and not config.temperature:
                    same = result.tokens == self.plain(f"{prompt.id}/{turn}", ids, config.max_new_tokens)
                    tally.identical = (tally.identical or 0) + same
            self._progress(tally, number, len(prompts), prompt.id, start)
        return self._result(engine, tally)

    def follow(self, config: EvalConfig, answers: Sequence[Answer]) -> dict[str, Any]:
        """The same rounds along recorded answers (:func:`~vllm_jetspecpp.runtime.offline.follow`), far cheaper."""
        engine = self.engine(config)
        return self._result(engine, self._follow(engine, answers))

    def tally(self, config: EvalConfig, answers: Sequence[Answer]) -> Tally:
        """The rounds along recorded answers, with what each of them saw."""
        return self._follow(self.engine(config), answers)

    def record(self, config: EvalConfig, answers: Sequence[Answer]) -> Rounds:
        """The rounds of the method along recorded answers.

        Raises:
            ValueError: there was not one round.
        """
        rounds = self.tally(config, answers).rounds
        if not rounds:
            raise ValueError("not one round was recorded: the answers are too short")
        return Rounds.join(rounds)

    def _follow(self, engine: Any, answers: Sequence[Answer]) -> Tally:
        tally, start = Tally(), time.monotonic()
        for number, answer in enumerate(answers, 1):
            span = {"prompt_length": answer.prompt_length, "counted": answer.counted}
            if isinstance(engine, AutoregressiveEngine):
                rounds = follow_autoregressive(engine, answer.tokens, **span)
                counted = answer.tokens[answer.prompt_length :][: answer.counted]
                tally.generations.append(Generation(counted, rounds))
            else:
                states, choices = self._states(answer, tuple(engine.target_layer_ids))
                observer = AnswerObserver(engine, tally, choices) if isinstance(engine, ReplayEngine) else None
                tally.generations.append(follow(engine, answer.tokens, states, **span, on_round=observer))
            self._progress(tally, number, len(answers), answer.id, start)
        return tally

    def _states(self, answer: Answer, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """An answer's true states and the target's choice after each token, kept for the next method."""
        if not taps:
            return torch.empty(len(answer.tokens), 0), torch.empty(0)
        key = (answer.id, hash(tuple(answer.tokens)), taps)
        if key not in self._known:
            states, logits = self.forward(answer, taps)
            self._known[key] = states, logits.argmax(-1)
            while sum(states.nbytes for states, _ in self._known.values()) > MAX_KNOWN_BYTES and len(self._known) > 1:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    @torch.inference_mode()
    def forward(self, answer: Answer, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """True states [length, num_taps * hidden] of an answer's tokens, and the target's logits [length, vocab]."""
        self.target.reset()
        self.target.target_layer_ids = list(taps)
        logits, states = self.target.forward(answer.tokens)
        return states, logits

    def _progress(self, tally: Tally, number: int, total: int, name: str, start: float) -> None:
        left = (time.monotonic() - start) / number * (total - number) / 60
        whole = Generation(rounds=[r for g in tally.generations for r in g.rounds])
        said = f"tau {whole.acceptance_length:.3f}, hit rate {whole.hit_rate:.3f}"
        self.say(f"{number}/{total} {name}: {said}; {left:.1f} min left")

    def _result(self, engine: Any, tally: Tally) -> dict[str, Any]:
        figures = tally.figures(engine.has_cache)
        if isinstance(engine, ReplayEngine):
            figures["hit_rate_by_cache_size"] = tally.replayed_hit_rates(engine.selector.calibration)
        return figures


def describe(config: EvalConfig) -> dict[str, Any]:
    """What was run, for the JSON beside the figures."""
    return {
        "jacobi": config.round.jacobi_passes,
        "refresh": config.round.context_refreshes,
        "num_draft_tokens": config.round.num_draft_tokens,
        "num_outcomes": config.round.num_outcomes,
        "selection": config.round.selection,
        **{k: v for k, v in asdict(config).items() if k not in ("round", "target", "check_output")},
        "target": Path(config.target).name,
    }
