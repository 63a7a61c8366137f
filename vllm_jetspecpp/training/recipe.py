"""The recipe, step by step: states, draft model and adapter (side by side where there is room), checkpoint.

A work folder holds ``states/``, ``token_ids.safetensors``, and for each part ``<part>/`` (state of its run, events for
TensorBoard) and, once it is trained, ``<part>.safetensors`` and ``<part>.json``.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_jetspecpp.config import check_choice
from vllm_jetspecpp.models.checkpoint import CheckpointInfo, DraftParts, build, save_checkpoint
from vllm_jetspecpp.models.draft_model import DraftModel
from vllm_jetspecpp.models.eagle3 import Eagle3Head, eagle3_taps, save_head
from vllm_jetspecpp.models.rival_checkpoint import RivalParts, save_rival
from vllm_jetspecpp.models.small_model import save_small_model
from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.target_parts import TargetWeights, load_target_config, resolve_folder
from vllm_jetspecpp.training.config import AdapterConfig, DecoderConfig, DraftConfig, TrainConfig
from vllm_jetspecpp.training.regenerate import read_sequences
from vllm_jetspecpp.training.setup import Setup, default_taps, prepare, shortlist
from vllm_jetspecpp.training.target_states import (
    LiveStates,
    Sequences,
    StateSource,
    TargetStates,
    compute_states,
    open_cache,
    open_sequences,
    prepare_cache,
)
from vllm_jetspecpp.training.train_adapter import AdapterObjective, Drafter
from vllm_jetspecpp.training.train_autoregressive import AutoregressiveObjective
from vllm_jetspecpp.training.train_decoder import DecoderObjective
from vllm_jetspecpp.training.train_draft import DraftObjective, make_correction, mask_token_id
from vllm_jetspecpp.training.train_eagle3 import Eagle3Objective
from vllm_jetspecpp.training.trainer import Trainer, make_accelerator

SHORTLIST = "token_ids.safetensors"
WEIGHTS = {"bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the networks to train."""

    block_size: int = 16
    num_draft_layers: int = 3
    num_taps: int = 5
    layers_per_module: tuple[int, ...] = (1,)
    """One number for every module, or one each."""
    draft_vocab_size: int = 8192

    def info(self, target: str, folder: Path) -> CheckpointInfo:
        """What the finished checkpoint will say of itself.

        Raises:
            ValueError: ``layers_per_module`` does not fit the tapped layers.
        """
        hf_config = load_target_config(resolve_folder(target))
        taps = default_taps(hf_config.num_hidden_layers, self.num_taps)
        layers = self.layers_per_module * len(taps) if len(self.layers_per_module) == 1 else self.layers_per_module
        if len(layers) != len(taps):
            raise ValueError(f"layers_per_module must name 1 or {len(taps)} numbers (taps {taps}), got {list(layers)}")
        return CheckpointInfo(
            folder=folder,
            target_layer_ids=tuple(taps),
            block_size=self.block_size,
            num_draft_layers=self.num_draft_layers,
            layers_per_module=tuple(layers),
            draft_vocab_size=self.draft_vocab_size or hf_config.vocab_size,
            max_position_embeddings=hf_config.max_position_embeddings,
        )


def begin(
    target: str, answers: Path, work: Path, sizes: Sizes, limit: int | None = None, max_length: int = 640
) -> None:
    """Step 1a: lay the answers down, and the shortlist of the vocabulary that both parts will use.

    Args:
        limit: use the first so many answers.
        max_length: longer sequences are cut.
    """
    sequences = Sequences.join(read_sequences(answers, limit), max_length)
    prepare_cache(sequences, work / "states")
    if not (work / SHORTLIST).is_file():
        vocab_size = load_target_config(resolve_folder(target)).vocab_size
        save_file({"token_ids": shortlist(sequences, sizes.draft_vocab_size, vocab_size)}, work / SHORTLIST)


def states(target: str, work: Path, sizes: Sizes, shard: tuple[int, int] = (0, 1), device: str = "cpu") -> None:
    """Step 1b: the target's states over the answers; several processes may share the work."""
    compute_states(target, work / "states", list(sizes.info(target, work).target_layer_ids), shard=shard, device=device)


def train_part(part: str, target: str, work: Path, sizes: Sizes, config: TrainConfig) -> None:
    """Step 2: train a part, or go on with it; weights and record land in ``work`` when it is done."""
    accelerator = make_accelerator(config, work / part)
    sequences = open_sequences(work / "states")
    info = sizes.info(target, work)
    token_ids = load_file(work / SHORTLIST)["token_ids"].long()
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    setup = prepare(target, sequences, info, token_ids, config.held_out, accelerator.device, dtype)
    source = _source(target, work, setup, config)
    objective = _objective(part, target, work, setup, source, config)
    trainer = Trainer(objective, setup, source, config, work / part, accelerator)
    record = trainer.train()
    weights = accelerator.get_state_dict(trainer.wrapped)
    if accelerator.is_main_process:
        own = {name.removeprefix("model."): value.contiguous() for name, value in weights.items()}
        save_file(own, work / f"{part}.safetensors")
        run = {
            "config": asdict(config) | {"initialise": Path(config.initialise).name},
            "sizes": asdict(sizes),
            "rows": len(sequences.tokens),
            "sequences": len(sequences),
            "processes": accelerator.num_processes,
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "date": time.strftime("%Y-%m-%d"),
            "step": trainer.progress.step,
            "record": record,
        }
        (work / f"{part}.json").write_text(json.dumps(run, indent=2))
    accelerator.end_training()


def _source(target: str, work: Path, setup: Setup, config: TrainConfig) -> StateSource:
    if not config.live_states:
        return open_cache(work / "states")
    taps = list(setup.info.target_layer_ids)
    return LiveStates(open_sequences(work / "states"), TargetStates(target, taps, setup.dtype, setup.device))


def _objective(part: str, target: str, work: Path, setup: Setup, source: StateSource, config: TrainConfig) -> Any:
    if isinstance(config, DraftConfig):
        objective = {"ssd": AutoregressiveObjective, "eagle3": Eagle3Objective}.get(config.mode, DraftObjective)
        return objective(setup, source, config)
    if isinstance(config, DecoderConfig):
        return DecoderObjective(setup, source, config, work / "adapter.safetensors")
    assert isinstance(config, AdapterConfig)
    drafter = None
    if config.draft_share:
        drafter = Drafter(
            load_draft(work, setup, source),
            TargetStates(target, list(setup.info.target_layer_ids), setup.dtype, setup.device),
        )
    return AdapterObjective(setup, source, config, drafter)


def load_draft(work: Path, setup: Setup, source: StateSource) -> DraftObjective:
    """The draft model that ``work`` holds, to draft with.

    Raises:
        FileNotFoundError: none is trained yet.
    """
    path = work / "draft.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: train the draft model before an adapter with draft_share")
    draft = DraftObjective(setup, source, DraftConfig())
    draft.model.load_state_dict(load_file(path))
    return draft.requires_grad_(False).eval()


def read_run(work: Path, part: str) -> dict[str, Any]:
    """How a part was trained: its settings, and under ``record`` its validations."""
    return json.loads((work / f"{part}.json").read_text())


def pack(
    target: str,
    target_name: str,
    work: Path,
    out: Path,
    sizes: Sizes,
    weights: str = "bf16",
    delta_of: Path | None = None,
) -> None:
    """Step 3: join the parts into a checkpoint; a rival's draft model is one by itself, in its own format.

    Args:
        weights: ``bf16``, or ``int8`` for half the size.
        delta_of: for a rival: small differences from this checkpoint (``ssd``: from the target; ``eagle3``: int8
            without what is the target's) instead.
    """
    check_choice("weights", weights, WEIGHTS)
    run = read_run(work, "draft")
    if run["config"]["mode"] != "jetspecpp" or not (work / "adapter.safetensors").is_file():
        pack_rival(target, work, out, sizes, delta_of)
        return
    info = sizes.info(target, out)
    hf_config = load_target_config(resolve_folder(target))
    draft_model, adapter = build(LayerConfig.from_hf(hf_config), info)
    draft_model.load_state_dict(load_file(work / "draft.safetensors"))
    adapter.load_state_dict(load_file(work / "adapter.safetensors"))
    token_ids = load_file(work / SHORTLIST)["token_ids"].long()
    training: dict[str, Any] = {"draft": run, "adapter": read_run(work, "adapter")}
    parts = DraftParts(draft_model, adapter, token_ids)
    save_checkpoint(info, hf_config, parts, dtype=WEIGHTS[weights], training=training, target_name=target_name)


def pack_rival(target: str, work: Path, out: Path, sizes: Sizes, delta_of: Path | None = None) -> None:
    """Step 3 for a draft model that stands alone."""
    folder, run = resolve_folder(target), read_run(work, "draft")
    hf_config, tensors = load_target_config(folder), load_file(work / "draft.safetensors")
    config = DraftConfig(**run["config"] | {"initialise": "random"})
    if config.mode == "ssd":
        save_small_model(tensors, folder, hf_config, out, delta=delta_of is not None)
        return
    info = sizes.info(target, out)
    token_ids = load_file(work / SHORTLIST)["token_ids"].long()
    if config.mode == "eagle3":
        pack_eagle3(tensors, folder, out, info, token_ids, run, small=delta_of is not None)
        return
    correction = make_correction(config, hf_config, len(token_ids))
    model = DraftModel(LayerConfig.from_hf(hf_config), info.num_draft_layers, len(info.target_layer_ids), correction)
    model.load_state_dict(tensors)
    target_weights = TargetWeights(folder)
    save_rival(
        info,
        hf_config,
        RivalParts(model, target_weights.lm_head()[token_ids], token_ids, target_weights.embedding()),
        method=config.mode,
        causal=config.causal,
        mask_token_id=mask_token_id(hf_config) if config.masked else None,
        training={"draft": run},
        base=delta_of,
    )


def pack_eagle3(
    tensors: dict[str, Tensor],
    target: Path,
    out: Path,
    info: CheckpointInfo,
    token_ids: Tensor,
    run: dict[str, Any],
    small: bool,
) -> None:
    """An EAGLE-3 head: small, or as vLLM loads it."""
    hf_config = load_target_config(target)
    head = Eagle3Head(LayerConfig.from_hf(hf_config))
    head.load_state_dict(tensors)
    taps = [info.target_layer_ids[i] for i in eagle3_taps(info.target_layer_ids)]
    save_head(head, hf_config, taps, token_ids, out, {"draft": run}, TargetWeights(target) if not small else None)
