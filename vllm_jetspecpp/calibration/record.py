"""Recording calibration rounds: the method runs on held-out prompts, and every round is kept."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_jetspecpp.evaluation.acceptance import Bench, EvalConfig
from vllm_jetspecpp.evaluation.datasets import Prompt
from vllm_jetspecpp.evaluation.rounds import Rounds
from vllm_jetspecpp.runtime.offline import generate

SAY_EVERY = 8


def record(bench: Bench, config: EvalConfig, prompts: Sequence[Prompt]) -> Rounds:
    """Run ``prompts`` greedily and keep every round."""
    engine, parts = bench.engine(config), list[Rounds]()
    room = config.max_new_tokens + 2 * config.round.block_size
    for number, prompt in enumerate(prompts, 1):
        generate(
            bench.target,
            engine,
            bench.encode(prompt, room),
            max_tokens=config.max_new_tokens,
            eos_token_id=bench.eos,
            on_round=lambda outcome, _: parts.append(engine.recorded(outcome)),
        )
        if number % SAY_EVERY == 0 or number == len(prompts):
            bench.say(f"recorded {number}/{len(prompts)} prompts, {len(parts)} rounds")
    return Rounds.join(parts)
