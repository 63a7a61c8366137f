"""Checkpoints of the rivals, ours and published ones: DFlash, JetSpec, Domino and DSpark formats.

All are a ``config.json`` and safetensors of one parallel draft model. What differs: whether a block position sees the
whole block (DFlash, Domino, DSpark) or those before it (JetSpec), and a head that corrects the logits left to right
(Domino: ``dflash_config.projector_type``; DSpark: ``architectures: ["Qwen3DSparkModel"]``). A JetSpec++ checkpoint
reads as one too: its draft model alone, with noise inputs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_jetspecpp.models.checkpoint import (
    CAUSAL_KEYS,
    DIMENSIONS,
    MAX_BLOCK_SIZE,
    MAX_LAYERS,
    WEIGHT_FILES,
    CheckpointInfo,
    draft_config,
    read_draft_vocab_size,
    read_json,
    require,
    require_int,
    write_json,
)
from vllm_jetspecpp.models.draft_model import DraftModel
from vllm_jetspecpp.models.logit_correction import GruCorrection, LogitCorrection, MarkovCorrection
from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.target_parts import TargetWeights
from vllm_jetspecpp.models.weight_delta import decode_deltas, encode_deltas
from vllm_jetspecpp.models.weight_files import load_tensors, merge_scales

DFLASH, DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"
IGNORED = ("t2d", "confidence_head.", "mask_embedding")
"""Tensors of published checkpoints that greedy drafting of whole blocks does not use."""


@dataclass(frozen=True)
class RivalInfo:
    """What a rival's checkpoint says of itself."""

    folder: Path
    method: str
    """``dflash``, ``jetspec``, ``domino``, ``dspark``, or ``jetspecpp`` for the draft model of one of ours."""
    target_layer_ids: tuple[int, ...]
    block_size: int
    num_draft_layers: int
    draft_vocab_size: int
    causal: bool
    mask_token_id: int | None
    """What unknown positions read; None: noise tokens."""
    shifted: bool
    """Every position predicts the token after it, so that the anchor's row gives the first draft."""
    markov_rank: int = 0
    gru_size: int = 0
    rank: int = 0
    skipped: int = 0

    def correction(self, config: LayerConfig, vocab_size: int) -> LogitCorrection | None:
        """Its head, with fresh weights."""
        if self.method == "dspark":
            return MarkovCorrection(vocab_size, self.draft_vocab_size, self.markov_rank)
        if self.method == "domino":
            return GruCorrection(config.hidden_size, self.draft_vocab_size, self.gru_size, self.rank, self.skipped)
        return None


@dataclass
class RivalParts:
    """The networks of a rival's checkpoint."""

    draft_model: DraftModel
    head: Tensor  # [draft_vocab, hidden]
    head_token_ids: Tensor  # [draft_vocab] int64
    embedding: Tensor  # [vocab, hidden]


def read_rival(folder: Path | str, target_config: Any) -> RivalInfo:
    """Read a rival's ``config.json`` and compare it with the target's text config.

    Raises:
        ValueError: one line that says what does not fit and what would.
    """
    folder = Path(folder)
    path = folder / "config.json"
    config = read_json(path)
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in (DFLASH, DSPARK):
        raise ValueError(
            f"{path}: architectures must be [{DFLASH!r}] or [{DSPARK!r}], got {config.get('architectures')}"
        )
    section = {**config, **config.get("dflash_config", {})}
    for key in DIMENSIONS:
        expected = LayerConfig.from_hf(target_config).head_dim if key == "head_dim" else getattr(target_config, key)
        # Published drafts choose their own widths inside; states and tokens are the target's.
        if key in ("hidden_size", "vocab_size") and require(config, key, path) != expected:
            raise ValueError(f"{path}: {key} is {config[key]}, the target's is {expected}: it is for another target")
    taps = require(section, "target_layer_ids", path)
    if not all(0 <= tap < target_config.num_hidden_layers for tap in taps):
        raise ValueError(f"{path}: target_layer_ids must lie in 0..{target_config.num_hidden_layers - 1}, got {taps}")
    causal = any(bool(section.get(key)) for key in CAUSAL_KEYS)
    noise = config.get("jetspecpp", {}).get("inputs") == "noise"
    mask = None if noise else require(section, "mask_token_id", path)
    method = "jetspecpp" if noise else "jetspec" if causal else "dflash"
    more: dict[str, Any] = {}
    if architecture == DSPARK:
        method, more = "dspark", {"markov_rank": require(config, "markov_rank", path)}
    elif (projector := section.get("projector_type", "dflash")) == "domino":
        sizes = {"gru_size": "gru_hidden_dim", "rank": "emb_dim"}
        method, more = "domino", {name: require(section, key, path) for name, key in sizes.items()}
        more["skipped"] = section.get("pure_draft_prefix_len", 0)
    elif projector != "dflash":
        raise ValueError(f"{path}: projector_type must be 'dflash' or 'domino', got {projector!r}")
    return RivalInfo(
        folder=folder,
        method=method,
        target_layer_ids=tuple(taps),
        block_size=require_int(section, "block_size", path, 2, MAX_BLOCK_SIZE),
        num_draft_layers=require_int(config, "num_hidden_layers", path, 1, MAX_LAYERS),
        draft_vocab_size=read_draft_vocab_size(config, path),
        causal=causal,
        mask_token_id=mask,
        shifted=bool(section.get("sample_from_anchor", architecture == DSPARK) or section.get("shift_label", False)),
        **more,
    )


def layer_config(folder: Path, target_config: Any) -> LayerConfig:
    """Sizes of the draft model's own layers, which may differ from the target's."""
    target, own = LayerConfig.from_hf(target_config), read_json(folder / "config.json")
    return LayerConfig(
        hidden_size=target.hidden_size,
        intermediate_size=own["intermediate_size"],
        num_heads=own["num_attention_heads"],
        num_kv_heads=own["num_key_value_heads"],
        head_dim=own.get("head_dim") or own["hidden_size"] // own["num_attention_heads"],
        rms_norm_eps=own.get("rms_norm_eps", target.rms_norm_eps),
        qk_norm=True,
        attention_bias=bool(own.get("attention_bias", False)),
    )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors under our names: ``model.`` off, heads below ``correction.``; differences added to their base."""
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_tensors(file)
    base = read_json(folder / "config.json").get("jetspecpp", {}).get("delta_of")
    if base is not None:
        if "delta_of" in read_json(folder / base / "config.json").get("jetspecpp", {}):
            raise ValueError(f"{folder}/config.json: delta_of names {base!r}, which is made of differences itself")
        stored = decode_deltas(stored, _read_tensors(folder / base))
    tensors = {}
    for name, value in merge_scales(stored, folder).items():
        name = name.removeprefix("model.").replace("markov_head.", "correction.")
        if name.startswith(("prefix_gru.", "embed_proj.")):
            name = f"correction.{name}"
        if not name.startswith(IGNORED):
            tensors[name] = value
    return tensors


def load_rival(
    info: RivalInfo, target: Path, target_config: Any, dtype: torch.dtype, device: Any = "cpu"
) -> RivalParts:
    """Load a rival's weights; embedding and LM head are the target's where the checkpoint has none.

    Raises:
        ValueError: tensors are missing or unexpected, or a shortened head has no map to the target's tokens.
    """
    tensors = _read_tensors(info.folder)
    config = layer_config(info.folder, target_config)
    with torch.device("meta"):
        correction = info.correction(config, target_config.vocab_size)
        model = DraftModel(config, info.num_draft_layers, len(info.target_layer_ids), correction)
    offsets = tensors.pop("d2t", tensors.pop("draft_id_to_target_id", None))
    head, embedding = tensors.pop("lm_head.weight", None), tensors.pop("embed_tokens.weight", None)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if missing or unexpected:
        raise ValueError(f"{info.folder}: missing tensors {missing}, unexpected tensors {unexpected}")
    token_ids = torch.arange(info.draft_vocab_size)
    if offsets is not None:
        token_ids = token_ids + offsets.long()
    elif info.draft_vocab_size < target_config.vocab_size:
        path = info.folder / WEIGHT_FILES[2]
        if not path.is_file():
            raise ValueError(f"{info.folder}: draft_vocab_size is {info.draft_vocab_size}, but there is no d2t map")
        token_ids = load_tensors(path)["token_ids"].long()
    weights = TargetWeights(target)
    return RivalParts(
        draft_model=model.to(device, dtype).requires_grad_(False).eval(),
        head=(weights.lm_head()[token_ids] if head is None else head).to(device, dtype),
        head_token_ids=token_ids.to(device),
        embedding=(weights.embedding() if embedding is None else embedding).to(device, dtype),
    )


def save_rival(
    info: CheckpointInfo,
    target_config: Any,
    parts: RivalParts,
    *,
    method: str,
    causal: bool,
    mask_token_id: int | None,
    training: dict[str, Any],
    base: Path | None = None,
) -> None:
    """Write a draft model in its method's own format, bfloat16; vLLM's ``dflash`` and ``dspark`` load it.

    Args:
        mask_token_id: None for noise inputs, which only this package drafts with.
        base: write small differences from this checkpoint instead, which only this package reads.
    """
    info.folder.mkdir(parents=True, exist_ok=True)
    inputs = "noise" if mask_token_id is None else "mask"
    config = draft_config(
        info, target_config, causal=causal, mask_token_id=mask_token_id, section={"inputs": inputs, **training}
    )
    tensors = {name: value.detach() for name, value in parts.draft_model.state_dict().items()}
    correction = parts.draft_model.correction
    if isinstance(correction, MarkovCorrection):
        config |= config["dflash_config"] | {
            "architectures": [DSPARK],
            "markov_rank": correction.markov_w1.embedding_dim,
            "markov_head_type": "vanilla",
            "sample_from_anchor": False,
            "enable_confidence_head": False,
        }
        tensors = {name.replace("correction.", "markov_head."): value for name, value in tensors.items()}
    elif isinstance(correction, GruCorrection):
        config["dflash_config"] |= {
            "projector_type": method,
            "emb_dim": correction.embed_proj[0].out_features,
            "gru_hidden_dim": correction.prefix_gru.hidden_size,
            "pure_draft_prefix_len": correction.skipped,
        }
        tensors = {name.removeprefix("correction."): value for name, value in tensors.items()}
    if info.draft_vocab_size < target_config.vocab_size:
        tensors["d2t"] = parts.head_token_ids - torch.arange(info.draft_vocab_size)
    if base is not None:
        config["jetspecpp"]["delta_of"] = os.path.relpath(base, info.folder)
        tensors = encode_deltas(tensors, _read_tensors(base))
    else:
        if "d2t" in tensors:
            tensors["lm_head.weight"] = parts.head
        tensors = {n: v.bfloat16().contiguous() if v.is_floating_point() else v for n, v in tensors.items()}
    save_file(tensors, info.folder / WEIGHT_FILES[0])
    write_json(info.folder / "config.json", config)


def unpack_rival(folder: Path, target: Path, target_config: Any, out: Path) -> None:
    """Write a draft model stored as differences in full, bfloat16, with its LM head: as vLLM loads it.

    Raises:
        ValueError: it does not fit the target, or reads noise, which vLLM's drafters do not.
    """
    info = read_rival(folder, target_config)
    if info.mask_token_id is None:
        raise ValueError(f"{folder}/config.json: a draft model with noise inputs is for this package alone")
    config = read_json(folder / "config.json")
    written = CheckpointInfo(
        out,
        info.target_layer_ids,
        info.block_size,
        info.num_draft_layers,
        (1,),
        info.draft_vocab_size,
        config["max_position_embeddings"],
    )
    parts = load_rival(info, target, target_config, torch.float32)
    save_rival(
        written,
        target_config,
        parts,
        method=info.method,
        causal=info.causal,
        mask_token_id=info.mask_token_id,
        training={"unpacked_from": folder.name},
    )
