"""Options of the trainers, with what the command line says of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_jetspecpp.config import check_choice, check_range

LOSSES = ("forward_kl", "reverse_kl", "cross_entropy")
MODES: dict[str, tuple[str, str]] = {
    "jetspecpp": ("noise", "causal"),
    "jetspec": ("mask", "causal"),
    "dflash": ("mask", "block"),
    "dspark": ("mask", "block"),
    "domino": ("mask", "block"),
    "ssd": ("none", "causal"),
    "eagle3": ("none", "causal"),
}
"""Method → inputs at unknown positions, and what a block position sees."""
AUTO = "auto"
INITIALISATIONS = ("target", "random")
PRECISIONS = ("bf16", "no")


def option(default: Any, text: str, **more: Any) -> Any:
    """A field with its help text; ``more`` goes to argparse."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True)
class TrainConfig:
    """What both trainers share."""

    steps: int = option(4000, "optimiser steps; a run that is resumed with more goes on")
    learning_rate: float = option(6e-4, "highest learning rate")
    warmup_steps: int = option(50, "steps over which the learning rate rises")
    decay_share: float = option(0.3, "last share of the steps, over which the learning rate falls to 0")
    weight_decay: float = option(0.01, "AdamW's")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm")
    sequences: int = option(4, "sequences per process and micro-batch")
    anchors: int = option(16, "blocks per sequence")
    accumulate: int = option(1, "micro-batches per step")
    prompt_share: float = option(0.1, "share of the blocks that start in a prompt")
    held_out: int = option(64, "sequences set aside for validation")
    precision: str = option("bf16", "bf16: autocast over float32 weights; no: float32", choices=PRECISIONS)
    live_states: bool = option(False, "compute the target's states for every batch instead of reading them from disk")
    report_every: int = option(20, "steps between lines on the console")
    validate_every: int = option(250, "steps between validations")
    save_every: int = option(250, "steps between saved states, which a killed run resumes from")
    minutes: float | None = option(None, "stop after so many minutes, state saved; the next run goes on", type=float)
    initialise: str = option("target", "'target': layers copied from it; 'random'; or a file of earlier weights")
    seed: int = option(0, "of data order, blocks, noise and fresh weights")

    def __post_init__(self) -> None:
        for name in ("steps", "sequences", "anchors", "accumulate", "held_out", "report_every", "validate_every"):
            check_range(name, getattr(self, name), 1, 1 << 40)
        for name in ("decay_share", "prompt_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in 0..1, got {getattr(self, name)}")
        check_choice("precision", self.precision, PRECISIONS)
        if self.initialise not in INITIALISATIONS and not Path(self.initialise).is_file():
            raise ValueError(f"initialise must be 'target', 'random' or a file, got {self.initialise!r}")


@dataclass(frozen=True)
class DraftConfig(TrainConfig):
    """Eq. 9 and its options."""

    mode: str = option(
        "jetspecpp",
        "jetspecpp: causal, noise inputs, clean prefix; jetspec: causal, mask inputs; dflash: block, mask inputs; "
        "dspark, domino: dflash and a head that reads the tokens before; ssd: autoregressive, no states; "
        "eagle3: autoregressive, one layer over the target's states and then its own",
        choices=tuple(MODES),
    )
    inputs: str = option(AUTO, "noise or mask at unknown positions; auto: the mode's", choices=(AUTO, "noise", "mask"))
    attention: str = option(
        AUTO,
        "a block position sees those before it or the whole block; auto: the mode's",
        choices=(AUTO, "causal", "block"),
    )
    loss: str = option(
        "forward_kl", "to the target's distribution (cross_entropy: to its likeliest token)", choices=LOSSES
    )
    zero_share: float = option(
        0.5,
        "share of the blocks without a clean prefix (m = 0); masked ones have none, unless --clean-prefix",
    )
    all_prefixes: bool = option(
        False, "blocks with a clean prefix learn every m at once, at the price of a second row for every position"
    )
    clean_prefix: bool = option(False, "with mask inputs: blocks with a clean prefix all the same")
    correction_rank: int = option(128, "rank of dspark's and domino's correction")
    gru_size: int = option(256, "width of domino's GRU")
    position_decay: float = option(
        0.85, "position i of a block weighs this to the power i - 1: it counts only if all before it are right"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mode", self.mode, MODES)
        check_choice("loss", self.loss, LOSSES)
        for name in ("zero_share", "position_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in 0..1, got {getattr(self, name)}")

    @property
    def causal(self) -> bool:
        """Whether a block position sees only those before it."""
        return (MODES[self.mode][1] if self.attention == AUTO else self.attention) == "causal"

    @property
    def masked(self) -> bool:
        """Whether unknown positions read the mask token instead of noise."""
        return (MODES[self.mode][0] if self.inputs == AUTO else self.inputs) == "mask"

    @property
    def has_clean_prefix(self) -> bool:
        """Whether blocks may start with known tokens."""
        return self.clean_prefix or not self.masked


@dataclass(frozen=True)
class AdapterConfig(TrainConfig):
    """The adapter's losses."""

    decoder_kl: float = option(
        0.5, "weight of the KL of the frozen decoder's output to the target's; 0 is the paper's loss"
    )
    draft_share: float = option(
        0.0,
        "share of the batches whose blocks are the draft model's instead of the sequence's own (needs WORK's draft)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.draft_share <= 1:
            raise ValueError(f"draft_share must lie in 0..1, got {self.draft_share}")


@dataclass(frozen=True)
class DecoderConfig(TrainConfig):
    """A decoder that learns, which is only measured, never served."""

    loss: str = option("cross_entropy", "to the target's likeliest token (the paper's), or a KL", choices=LOSSES)
