"""A checkpoint on disk: draft model, adapter, manifest; written, checked without weights, and loaded.

::

    config.json                   draft model, DFlash / JetSpec format, with a ``jetspecpp`` section of ours
    model.safetensors             its weights
    adapter/config.json           tapped layers and layers per module
    adapter/converter.safetensors modules A_ℓ: ``stacks.<module>.<layer>.…``, matrices perhaps in int8
    adapter/head.safetensors      ``token_ids`` [draft_vocab] int32: LM head rows of draft model and decoder
    calibration/thresholds.json   optional: how outcomes are scored, for each γ it was fitted for
    calibration/acceptance.json   optional: what its drafts are worth, for the planner
    manifest.json                 target, and sha256 and size of every other file
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_jetspecpp.models.adapter import Adapter
from vllm_jetspecpp.models.draft_model import DraftModel
from vllm_jetspecpp.models.json_files import read_json, require, require_int, require_ints, section
from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.weight_files import INTEGERS, check_header, load_tensors, load_weights, save_weights

FORMAT_VERSION = 1
WEIGHT_FILES = ("model.safetensors", "adapter/converter.safetensors", "adapter/head.safetensors")
CONFIG_FILES = ("config.json", "adapter/config.json")
CALIBRATION_FILE = "calibration/thresholds.json"
ACCEPTANCE_FILE = "calibration/acceptance.json"
CAUSAL_KEYS = ("causal", "causal_head", "is_causal")
MAX_LAYERS, MAX_BLOCK_SIZE, MAX_POSITIONS, MAX_VOCAB = 256, 1024, 1 << 30, 1 << 24
"""Beyond these a number in a checkpoint is a mistake, and is refused before memory is asked for."""
DIMENSIONS = (
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says of itself, read without its weights."""

    folder: Path
    target_layer_ids: tuple[int, ...]
    """Tapped layers, 0-based, ascending."""
    block_size: int
    """Longest block it was made for, anchor included."""
    num_draft_layers: int
    layers_per_module: tuple[int, ...]
    draft_vocab_size: int
    max_position_embeddings: int

    @property
    def deepest_tap(self) -> int:
        """The tapped layer the decoder starts above."""
        return self.target_layer_ids[-1]

    def cache_bytes_per_position(self, target_config: Any, element_size: int) -> int:
        """Bytes of keys and values of all three networks at one position: what a draft process keeps of a context.

        Args:
            target_config: the target's Hugging Face text config.
            element_size: bytes of an element of the caches.
        """
        layer_config = LayerConfig.from_hf(target_config)
        decoder = target_config.num_hidden_layers - self.deepest_tap - 1
        num_layers = self.num_draft_layers + sum(self.layers_per_module) + decoder
        return 2 * num_layers * layer_config.num_kv_heads * layer_config.head_dim * element_size


def _check_causality(config: dict[str, Any], path: Path) -> None:
    """All causality keys, wherever they stand, must agree and say causal."""
    own = section(config, "dflash_config", path)
    said = {f"{where}{k}": c[k] for where, c in (("", config), ("dflash_config.", own)) for k in CAUSAL_KEYS if k in c}
    if len(set(map(repr, said.values()))) > 1:
        raise ValueError(f"{path}: contradictory causality keys {said}; keep one of {', '.join(CAUSAL_KEYS)}")
    if not said or not all(said.values()):
        raise ValueError(
            f"{path}: method jetspecpp needs a causal draft model (dflash_config.causal: true), got {said or 'no key'}"
        )


def file_digest(path: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of a file, as the manifest keeps them."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def check_manifest(folder: Path) -> dict[str, Any]:
    """Compare every file with the manifest and return it.

    Raises:
        ValueError: a file is missing, or its size or hash differs; one line that names the file.
    """
    manifest = read_json(folder / "manifest.json")
    files = section(manifest, "files", folder / "manifest.json")
    for name in (*CONFIG_FILES, *WEIGHT_FILES):
        if name not in files:
            raise ValueError(f"{folder / 'manifest.json'} does not list {name}; it lists: {', '.join(sorted(files))}")
    for name, expected in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{folder / 'manifest.json'} names a file outside the checkpoint: {name}")
        if not path.is_file():
            raise ValueError(f"checkpoint file {path} is missing (the manifest lists it)")
        if not isinstance(expected, dict) or set(expected) != {"size", "sha256"}:
            raise ValueError(f"{folder / 'manifest.json'}: {name} must have 'size' and 'sha256', got {expected}")
        if path.stat().st_size != expected["size"]:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, the manifest says {expected['size']}")
        if file_digest(path) != expected:
            raise ValueError(f"{path} differs from the manifest (sha256); download or train the checkpoint again")
    return manifest


def check_checkpoint(folder: Path | str, target_config: Any) -> CheckpointInfo:
    """Check a checkpoint against the target's Hugging Face text config, without loading weights.

    Raises:
        ValueError: one line that says what does not fit and what would.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"checkpoint folder {folder} does not exist")
    check_manifest(folder)
    layer_config = LayerConfig.from_hf(target_config)
    path = folder / "config.json"
    config, adapter = read_json(path), read_json(folder / "adapter/config.json")
    if config.get("architectures") != ["DFlashDraftModel"]:
        raise ValueError(f"{path}: architectures must be ['DFlashDraftModel'], got {config.get('architectures')}")
    for key in DIMENSIONS:
        expected = layer_config.head_dim if key == "head_dim" else getattr(target_config, key)
        if require(config, key, path) != expected:
            raise ValueError(
                f"{path}: {key} is {config[key]}, the target's is {expected}: this checkpoint is for another target"
            )
    num_layers = target_config.num_hidden_layers
    if require(config, "num_target_layers", path) != num_layers:
        raise ValueError(
            f"{path}: num_target_layers is {config['num_target_layers']}, the target has {num_layers} layers"
        )
    require(config, "dflash_config", path)
    taps = require_ints(section(config, "dflash_config", path), "target_layer_ids", path, 0, MAX_POSITIONS)
    if taps != sorted(set(taps)) or taps[-1] >= num_layers:
        raise ValueError(f"{path}: target_layer_ids must rise strictly within 0..{num_layers - 1}, got {taps}")
    _check_causality(config, path)
    if adapter.get("target_layer_ids") != taps:
        raise ValueError(
            f"adapter/config.json taps layers {adapter.get('target_layer_ids')}, config.json {taps}: they must agree"
        )
    layers_per_module = require_ints(adapter, "layers_per_module", folder / "adapter/config.json", 1, MAX_LAYERS)
    if len(layers_per_module) != len(taps):
        raise ValueError(
            f"adapter/config.json: layers_per_module has {len(layers_per_module)} entries for {len(taps)} tapped layers"
        )
    version = section(config, "jetspecpp", path).get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version {version} is not supported, this version reads {FORMAT_VERSION}")
    return CheckpointInfo(
        folder=folder,
        target_layer_ids=tuple(taps),
        block_size=require_int(config, "block_size", path, 2, MAX_BLOCK_SIZE),
        num_draft_layers=require_int(config, "num_hidden_layers", path, 1, MAX_LAYERS),
        layers_per_module=tuple(layers_per_module),
        draft_vocab_size=read_draft_vocab_size(config, path),
        max_position_embeddings=require_int(config, "max_position_embeddings", path, 1, MAX_POSITIONS),
    )


def read_draft_vocab_size(config: dict[str, Any], path: Path) -> int:
    """Tokens of the shortened LM head; the target's vocabulary where the key is missing or null."""
    vocab_size = require_int(config, "vocab_size", path, 1, MAX_VOCAB)
    if config.get("draft_vocab_size") is None:
        return vocab_size
    return require_int(config, "draft_vocab_size", path, 1, vocab_size)


@dataclass
class DraftParts:
    """The trained networks of a checkpoint."""

    draft_model: DraftModel
    adapter: Adapter
    head_token_ids: Tensor  # [draft_vocab] int64


def build(layer_config: LayerConfig, info: CheckpointInfo) -> tuple[DraftModel, Adapter]:
    """Draft model and adapter of the given sizes, with fresh weights."""
    return (
        DraftModel(layer_config, info.num_draft_layers, len(info.target_layer_ids)),
        Adapter(layer_config, list(info.layers_per_module)),
    )


def load_checkpoint(
    info: CheckpointInfo, layer_config: LayerConfig, dtype: torch.dtype, device: torch.device | str
) -> DraftParts:
    """Load the weights of a checkpoint that :func:`check_checkpoint` has accepted.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape; the message lists them.
    """
    with torch.device("meta"):
        draft_model, adapter = build(layer_config, info)
    for module, name in ((draft_model, WEIGHT_FILES[0]), (adapter, WEIGHT_FILES[1])):
        load_weights(module, info.folder / name)
        module.to(device, dtype).requires_grad_(False).eval()
    return DraftParts(draft_model, adapter, _load_token_ids(info))


def _load_token_ids(info: CheckpointInfo) -> Tensor:
    """[draft_vocab] int64, the target's token of each row of the shortened head."""
    path = info.folder / WEIGHT_FILES[2]
    check_header(path, {"token_ids": (info.draft_vocab_size,)}, INTEGERS)
    return load_tensors(path)["token_ids"].long()


def draft_config(
    info: CheckpointInfo, target_config: Any, *, causal: bool, mask_token_id: int | None, section: dict[str, Any]
) -> dict[str, Any]:
    """config.json in the DFlash / JetSpec format."""
    layer_config = LayerConfig.from_hf(target_config)
    taps = list(info.target_layer_ids)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": info.block_size,
        "num_target_layers": target_config.num_hidden_layers,
        "num_hidden_layers": info.num_draft_layers,
        "draft_vocab_size": info.draft_vocab_size,
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": mask_token_id, "causal": causal},
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": layer_config.rms_norm_eps,
        "attention_bias": layer_config.attention_bias,
        "rope_parameters": target_config.rope_parameters,
        "max_position_embeddings": info.max_position_embeddings,
        "tie_word_embeddings": False,
        "jetspecpp": {"format_version": FORMAT_VERSION, **section},
    }
    return config | {k: layer_config.head_dim if k == "head_dim" else getattr(target_config, k) for k in DIMENSIONS}


def save_checkpoint(
    info: CheckpointInfo,
    target_config: Any,
    parts: DraftParts,
    *,
    dtype: torch.dtype,
    training: dict[str, Any],
    target_name: str,
) -> None:
    """Write a checkpoint to ``info.folder``: weights, configs and, last, the manifest.

    Args:
        dtype: of the stored weights; int8 stores matrices in eight bits, which only this package reads.
        training: how the weights came to be; kept in the ``jetspecpp`` section of config.json.
        target_name: name of the target for people; the sizes in config.json are what is checked.
    """
    (info.folder / "adapter").mkdir(parents=True, exist_ok=True)
    save_weights(parts.draft_model, info.folder / WEIGHT_FILES[0], dtype)
    save_weights(parts.adapter, info.folder / WEIGHT_FILES[1], dtype)
    save_file({"token_ids": parts.head_token_ids.int()}, info.folder / WEIGHT_FILES[2])
    section = {"inputs": "noise", "target": target_name, **training}
    config = draft_config(info, target_config, causal=True, mask_token_id=None, section=section)
    adapter_config = {
        "target_layer_ids": list(info.target_layer_ids),
        "layers_per_module": list(info.layers_per_module),
    }
    write_json(info.folder / "config.json", config)
    write_json(info.folder / "adapter/config.json", adapter_config)
    write_manifest(info.folder, target_name)


def write_manifest(folder: Path, target_name: str) -> None:
    """Write ``manifest.json`` over the files that are there."""
    optional = [name for name in (CALIBRATION_FILE, ACCEPTANCE_FILE) if (folder / name).is_file()]
    names = [*CONFIG_FILES, *WEIGHT_FILES, *optional]
    files = {name: file_digest(folder / name) for name in names}
    write_json(folder / "manifest.json", {"format_version": FORMAT_VERSION, "target": target_name, "files": files})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file for people: indented, keys sorted."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
