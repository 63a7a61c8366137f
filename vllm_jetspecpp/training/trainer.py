"""The loop both trainers share, on Accelerate: one process, several, or several nodes run the same code.

Accelerate and not Ray Train: it is a dependency already, leaves the loop ours, brings DDP, FSDP2, bf16 and gradient
accumulation by ``accelerate launch``'s options alone, and runs without a cluster; where there is one, Ray starts the
same command on its nodes.

Everything random is a function of seed, step and rank, and the state on disk holds weights, optimiser, step and record:
a run that is killed and resumed ends with the same weights, bit for bit, as one that was not.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vllm_jetspecpp.training.blocks import BlockBatch, Shuffle, derive_seed, make_batch
from vllm_jetspecpp.training.config import TrainConfig
from vllm_jetspecpp.training.setup import Setup
from vllm_jetspecpp.training.target_states import StateSource

Record = list[dict[str, float]]
MAX_BAD_STEPS = 10
WARN_RATIO = 1.3
"""Warn when the smoothed loss stands so far above its lowest value."""


class TrainingDivergedError(ArithmeticError):
    """The loss stopped being a number."""


class Objective(Protocol):
    """A network with its loss; also an ``nn.Module`` whose only parameters are the network's."""

    model: nn.Module
    progress: float
    """Share of the run that is done; the trainer keeps it."""

    def make(self, batch: BlockBatch, gen: torch.Generator) -> Any:
        """Add what is random to a batch, on the CPU."""

    def __call__(self, made: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch that :meth:`make` made, and its parts by name."""

    def validate(self) -> dict[str, float]:
        """Figures over the held-out sequences."""


class Progress:
    """What else a run must remember."""

    def __init__(self) -> None:
        self.step, self.seconds = 0, 0.0
        self.record: Record = []
        self.smoothed: dict[str, float] = {}
        self.lowest = math.inf

    def state_dict(self) -> dict[str, Any]:
        """For Accelerate's checkpoints."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The other way round."""
        vars(self).update(state)

    def see(self, parts: dict[str, float]) -> str | None:
        """Smooth the loss's parts; a warning when the loss climbs."""
        for name, value in parts.items():
            self.smoothed[name] = 0.98 * self.smoothed.get(name, value) + 0.02 * value
        loss = self.smoothed["loss"]
        self.lowest = min(self.lowest, loss)
        if loss <= WARN_RATIO * self.lowest:
            return None
        self.lowest = loss  # say it once
        return f"warning: the loss climbs ({loss:.3f}); a lower --learning-rate may be needed"


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Warm-up, plateau, linear fall to 0: the plateau lets a run be prolonged without having planned it."""
    decay = max(1, round(config.steps * config.decay_share))
    return min((step + 1) / config.warmup_steps if config.warmup_steps else 1.0, (config.steps - step) / decay, 1.0)


class Trainer:
    """One run of an objective in a folder of its own.

    Args:
        objective: what is trained.
        setup: its surroundings.
        source: states of the training sequences.
        config: how.
        folder: ``state-<step>`` folders and TensorBoard's events go here.
        accelerator: made by :func:`make_accelerator`.
    """

    def __init__(
        self,
        objective: Any,
        setup: Setup,
        source: StateSource,
        config: TrainConfig,
        folder: Path,
        accelerator: Accelerator,
    ) -> None:
        self.config, self.folder, self.accelerator, self.source = config, folder, accelerator, source
        self.block_size = setup.info.block_size
        self.objective = objective  # unwrapped, for what is not the loss
        optimizer = torch.optim.AdamW(
            objective.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.wrapped, self.optimizer = accelerator.prepare(objective, optimizer)
        self.progress, self.bad_steps = Progress(), 0
        accelerator.register_for_checkpointing(self.progress)
        self.shuffle = Shuffle(source.sequences, setup.train, config.sequences, config.seed)
        if saved := self._saved_states():
            accelerator.load_state(str(saved[-1]))
            accelerator.print(f"resumed at step {self.progress.step}")

    def _saved_states(self) -> list[Path]:
        return sorted(self.folder.glob("state-*[0-9]"), key=lambda path: int(path.name.split("-")[1]))

    def train(self) -> Record:
        """Train until done or out of time; the validation record, one dict each time with ``step`` and ``minutes``."""
        config, progress = self.config, self.progress
        began, first, earlier = time.monotonic(), progress.step, progress.seconds
        while progress.step < config.steps:
            if progress.step % config.validate_every == 0:
                self._validate()
            parts = self._step(progress.step)
            progress.step += 1
            progress.seconds = earlier + time.monotonic() - began
            if parts and (warning := progress.see(parts)):
                self.accelerator.print(warning)
            if progress.step % config.report_every == 0:
                self._report((time.monotonic() - began) / (progress.step - first))
            out_of_time = config.minutes is not None and time.monotonic() - began > config.minutes * 60
            if out_of_time or (progress.step % config.save_every == 0 and progress.step < config.steps):
                self._save_state()
            if out_of_time:
                self.accelerator.print(f"stopped at step {progress.step} of {config.steps}: out of time, state saved")
                break
        if progress.step >= config.steps and (not progress.record or progress.record[-1]["step"] < progress.step):
            self._validate()
            self._save_state()
        return progress.record

    def _batch(self, number: int) -> Any:
        gen = torch.Generator().manual_seed(derive_seed(self.config.seed, number))
        config, members = self.config, self.shuffle(number)
        batch = make_batch(self.source, members, config.anchors, self.block_size, gen, config.prompt_share)
        return self.objective.make(batch, gen)

    def _step(self, step: int) -> dict[str, float] | None:
        """One optimiser step; None when its gradient was no number and it was left out."""
        config, accelerator = self.config, self.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * learning_rate_factor(step, config)
        self.objective.progress = step / config.steps
        seen: dict[str, float] = {}
        good = True
        for micro in range(config.accumulate):
            number = (step * config.accumulate + micro) * accelerator.num_processes + accelerator.process_index
            with accelerator.accumulate(self.wrapped):
                loss, parts = self.wrapped(self._batch(number))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.wrapped.parameters(), config.max_grad_norm)
                    good = math.isfinite(float(norm))
                if good:
                    self.optimizer.step()
                self.optimizer.zero_grad()
            for name, value in {"loss": loss.detach(), **parts}.items():
                seen[name] = seen.get(name, 0.0) + float(value) / config.accumulate
        self._count_bad(good)
        return seen if good else None

    def _count_bad(self, good: bool) -> None:
        self.bad_steps = 0 if good else self.bad_steps + 1
        if self.bad_steps > MAX_BAD_STEPS:
            raise TrainingDivergedError(
                f"{self.bad_steps} steps in a row had a gradient that is no number, at step {self.progress.step}: "
                "start again from an earlier state with a lower --learning-rate or with --precision no"
            )

    def _report(self, pace: float) -> None:
        progress, config = self.progress, self.config
        values = " ".join(f"{k} {v:.4f}" for k, v in progress.smoothed.items())
        left = pace * (config.steps - progress.step) / 60
        self.accelerator.print(f"step {progress.step}/{config.steps}: {values}; {pace:.2f} s/step, {left:.1f} min left")
        rate = config.learning_rate * learning_rate_factor(progress.step, config)
        self.accelerator.log({**progress.smoothed, "learning_rate": rate}, step=progress.step)

    def _validate(self) -> None:
        progress = self.progress
        with self.accelerator.autocast(), unsharded(self.wrapped):
            figures = self.objective.validate()
        progress.record.append({"step": progress.step, "minutes": round(progress.seconds / 60, 2), **figures})
        self.accelerator.print("validation:", " ".join(f"{k} {v:.4f}" for k, v in figures.items()))
        self.accelerator.log({f"validation/{k}": v for k, v in figures.items()}, step=progress.step)

    def _save_state(self) -> None:
        """Write weights and state; the folder takes its name once it is whole, and older ones go."""
        accelerator, final = self.accelerator, self.folder / f"state-{self.progress.step}"
        partial = self.folder / "state-partial"
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in self._saved_states()[:-1]:
                shutil.rmtree(old)
            (self.folder / "record.json").write_text(json.dumps(self.progress.record, indent=2))
        accelerator.wait_for_everyone()


@contextmanager
def unsharded(module: Any) -> Iterator[None]:
    """Under FSDP2, whose one unit is the whole objective, its parameters in full on every process."""
    sharded = hasattr(module, "unshard")
    if sharded:
        module.unshard()
    try:
        yield
    finally:
        if sharded:
            module.reshard()


def make_accelerator(config: TrainConfig, folder: Path) -> Accelerator:
    """The engine for this process: device, precision, loggers. TensorBoard's events go below ``folder``."""
    logging.getLogger("accelerate").setLevel(logging.WARNING)  # it tells of every file it saves
    has_tensorboard = find_spec("tensorboard") is not None
    accelerator = Accelerator(
        mixed_precision=config.precision,
        gradient_accumulation_steps=config.accumulate,
        cpu=not torch.cuda.is_available(),
        log_with="tensorboard" if has_tensorboard else None,
        project_dir=str(folder),
    )
    folder.mkdir(parents=True, exist_ok=True)
    if has_tensorboard:
        accelerator.init_trackers("tensorboard")
    else:
        accelerator.print("TensorBoard is not installed: metrics go to the console only")
    return accelerator
