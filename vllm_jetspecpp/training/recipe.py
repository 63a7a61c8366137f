"""The plain recipe, step by step: states, draft model and adapter (side by side on two cores), checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vllm_jetspecpp.models.checkpoint import CheckpointInfo, DraftParts, build, save_checkpoint
from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.target_parts import load_target_config, resolve_folder
from vllm_jetspecpp.training.loop import LoopConfig
from vllm_jetspecpp.training.setup import Setup, default_taps, prepare, shortlist
from vllm_jetspecpp.training.target_states import StateCache, compute_states, open_cache
from vllm_jetspecpp.training.train_adapter import train_adapter
from vllm_jetspecpp.training.train_draft import train_draft

Record = list[dict[str, float]]
SHORTLIST = "token_ids.safetensors"
Trainer = Callable[[StateCache, Setup, LoopConfig, dict[str, Tensor] | None, int], tuple[nn.Module, Record]]
TRAINERS: dict[str, Trainer] = {"draft": train_draft, "adapter": train_adapter}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the networks to train."""

    block_size: int = 8
    num_draft_layers: int = 3
    num_taps: int = 5
    layers_per_module: int = 1
    draft_vocab_size: int = 8192

    def info(self, target: str, folder: Path) -> CheckpointInfo:
        """What the finished checkpoint will say of itself."""
        hf_config = load_target_config(resolve_folder(target))
        taps = default_taps(hf_config.num_hidden_layers, self.num_taps)
        return CheckpointInfo(
            folder=folder,
            target_layer_ids=tuple(taps),
            block_size=self.block_size,
            num_draft_layers=self.num_draft_layers,
            layers_per_module=(self.layers_per_module,) * len(taps),
            draft_vocab_size=self.draft_vocab_size or hf_config.vocab_size,
            max_position_embeddings=hf_config.max_position_embeddings,
        )


def states(target: str, answers: Path, work: Path, sizes: Sizes, limit: int | None) -> None:
    """Step 1: the target's states over its answers, and the shortlist of the vocabulary that both parts will use."""
    info = sizes.info(target, work)
    compute_states(target, answers, work / "states", list(info.target_layer_ids), limit)
    vocab_size = load_target_config(resolve_folder(target)).vocab_size
    token_ids = shortlist(open_cache(work / "states"), sizes.draft_vocab_size, vocab_size)
    save_file({"token_ids": token_ids}, work / SHORTLIST)


def train_part(
    part: str, target: str, work: Path, sizes: Sizes, loop: LoopConfig, go_on: bool = False, seed: int = 0
) -> None:
    """Step 2: train ``draft`` or ``adapter``; weights and record land in ``work``.

    Args:
        go_on: start from the weights an earlier run left in ``work`` and append to its record; the optimiser and the
            learning rate's schedule start anew.
    """
    cache = open_cache(work / "states")
    info = sizes.info(target, work)
    token_ids = load_file(work / SHORTLIST)["token_ids"]
    earlier = read_runs(work, part) if go_on else []
    initial = load_file(work / f"{part}.safetensors") if go_on else None
    start = time.time()
    setup = prepare(target, cache, info, token_ids, loop.held_out)
    model, record = TRAINERS[part](cache, setup, loop, initial, seed)
    save_file(model.state_dict(), work / f"{part}.safetensors")
    run = {"loop": asdict(loop), "rows": len(cache.tokens), "sequences": cache.num_sequences, "seed": seed}
    run |= {"wall_minutes": round((time.time() - start) / 60, 1), "record": record}
    (work / f"{part}.json").write_text(json.dumps([*earlier, run], indent=2))


def read_runs(work: Path, part: str) -> list[dict[str, Any]]:
    """Every run that trained a part: its settings, and under ``record`` its validations."""
    return json.loads((work / f"{part}.json").read_text())


def pack(target: str, target_name: str, work: Path, out: Path, sizes: Sizes) -> None:
    """Step 3: join the parts into a checkpoint."""
    info = sizes.info(target, out)
    hf_config = load_target_config(resolve_folder(target))
    draft_model, adapter = build(LayerConfig.from_hf(hf_config), info)
    draft_model.load_state_dict(load_file(work / "draft.safetensors"))
    adapter.load_state_dict(load_file(work / "adapter.safetensors"))
    token_ids = load_file(work / SHORTLIST)["token_ids"].long()
    training: dict[str, Any] = {"sizes": asdict(sizes)}
    for part in ("draft", "adapter"):
        training[part] = read_runs(work, part)
    parts = DraftParts(draft_model, adapter, token_ids)
    save_checkpoint(info, hf_config, parts, dtype=torch.bfloat16, training=training, target_name=target_name)
