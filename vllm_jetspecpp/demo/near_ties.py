"""Whether two greedy answers part at a near-tie of the target's own logits, or for a reason that needs looking into.

bfloat16 keeps 8 bits of significand, and its sums depend on the shape of the batch: verifying 8 tokens at once rounds
otherwise than computing them one by one, in plain vLLM too. Where the target's two best tokens are closer than that
rounding, either may come out on top. The judge is the target in float32 on the tokens both answers share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MARGIN_STEPS = 4.0
"""How far below the top logit a token may be and still count as tied with it, in bfloat16 steps at that logit.

Measured on 1,154 answer positions of SmolLM2-135M-Instruct in bfloat16, against float32 on the same tokens: the gap
between the two best logits is off by .4 steps (median), 2.3 (99 %) and 5.5 (99.9 %). Computing 8 tokens at once instead
of one by one changes the best token at 15 positions, all of them with a margin of at most 2.0 steps. Twice the largest
of those is allowed, which is still below the 99.9 % point of the error.
"""


@dataclass(frozen=True)
class Difference:
    """Where two answers part."""

    position: int
    """Index into the answers of the first token that differs."""
    margin: float
    """Bfloat16 steps from the target's top logit down to the lower of the two tokens; inf when an answer ends here."""

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.margin <= MARGIN_STEPS


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs; the shorter length when one answer begins the other; None when equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def bfloat16_step(value: float) -> float:
    """Distance between neighbouring bfloat16 numbers at ``value``: .125 from 16 up to 32.

    >>> bfloat16_step(20.0)
    0.125
    """
    return 2.0 ** (math.frexp(abs(value))[1] - 8)


def margin_in_steps(
    logits: torch.Tensor,  # [vocab] float32, of the target at the first position that differs
    tokens: Sequence[int],
) -> float:
    """Bfloat16 steps from the top logit down to the lowest of ``tokens``."""
    top = float(logits.max())
    lowest = min(float(logits[token]) for token in tokens)
    return (top - lowest) / bfloat16_step(top)


@dataclass(frozen=True)
class Pair:
    """Two answers of the same target to one prompt, as token ids."""

    prompt: Sequence[int]
    left: Sequence[int]
    right: Sequence[int]


def judge(target: Path, pairs: Sequence[Pair]) -> list[Difference | None]:
    """Where each pair parts, and by what margin; None for equal answers. Loads ``target`` when any differ."""
    positions = [first_difference(pair.left, pair.right) for pair in pairs]
    if all(position is None for position in positions):
        return [None] * len(pairs)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, use_safetensors=True)

    def judge_one(pair: Pair, position: int | None) -> Difference | None:
        if position is None:
            return None
        if position == min(len(pair.left), len(pair.right)):
            return Difference(position, math.inf)
        with torch.inference_mode():
            logits = model(torch.tensor([[*pair.prompt, *pair.left[:position]]]), logits_to_keep=1).logits[0, -1]
        return Difference(position, margin_in_steps(logits, (pair.left[position], pair.right[position])))

    return [judge_one(pair, position) for pair, position in zip(pairs, positions, strict=True)]
