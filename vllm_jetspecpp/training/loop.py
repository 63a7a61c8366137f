"""The plain training loop both trainers share: AdamW, cosine schedule over a time budget, a line every few steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm_jetspecpp.training.blocks import BlockBatch


@dataclass(frozen=True)
class LoopConfig:
    """How long and how fast."""

    minutes: float = 30.0
    """Processor time per thread, so that a shared machine does not shorten the training."""
    learning_rate: float = 6e-4
    warmup_steps: int = 50
    report_every: int = 20
    validate_every: int = 200
    prompt_share: float = 0.25
    """Share of the blocks that start in a prompt."""
    zero_share: float = 0.5
    """Draft model: share of the blocks without a clean prefix (m = 0 in Eq. 9)."""
    position_decay: float = 0.85
    """Draft model: position i of a block weighs this to the power i - 1: it counts only if all before it are right."""
    held_out: int = 64
    """Sequences set aside for validation."""


def train(
    model: nn.Module,
    data: Iterator[BlockBatch],
    loss_of: Callable[[BlockBatch], tuple[Tensor, dict[str, float]]],
    validate: Callable[[], dict[str, float]],
    config: LoopConfig,
) -> list[dict[str, float]]:
    """Train ``model`` in bfloat16 autocast with float32 weights until the budget is spent.

    Returns:
        The validation record: one dict each time, with ``step`` and ``minutes``.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    start, record, step, seen = time.process_time(), [], 0, dict[str, float]()

    def minutes() -> float:
        return (time.process_time() - start) / 60 / torch.get_num_threads()

    while (spent := minutes()) < config.minutes:
        if step % config.validate_every == 0:
            record.append({"step": step, "minutes": round(spent, 2), **validate()})
            print("validation", {k: round(v, 4) for k, v in record[-1].items()}, flush=True)
        rate = (
            0.5
            * (1 + math.cos(math.pi * min(spent / config.minutes, 1.0)))
            * min(1.0, (step + 1) / config.warmup_steps)
        )
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * max(rate, 0.02)
        with torch.autocast("cpu", torch.bfloat16):
            loss, parts = loss_of(next(data))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        for name, value in parts.items():
            seen[name] = 0.95 * seen.get(name, value) + 0.05 * value
        if step % config.report_every == 0:
            parts_text = ", ".join(f"{k} {v:.4f}" for k, v in seen.items())
            pace = minutes() / step
            print(
                f"step {step}: {parts_text}; {pace * 60:.2f} s/step, {config.minutes - minutes():.1f} min left",
                flush=True,
            )
    record.append({"step": step, "minutes": round(minutes(), 2), **validate()})
    print("validation", {k: round(v, 4) for k, v in record[-1].items()}, flush=True)
    return record
