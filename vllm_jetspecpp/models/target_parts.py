"""What the draft process needs of the target's weights: embedding, LM head, last layers. Nothing else is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from vllm_jetspecpp.models.attention import RotaryTable
from vllm_jetspecpp.models.decoder import Decoder
from vllm_jetspecpp.models.json_files import read_json, require
from vllm_jetspecpp.models.packed_linear import PackedLinear
from vllm_jetspecpp.models.target_layers import LayerConfig, TransformerLayer

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of tensors, as safetensors names them."""


def resolve_folder(target: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Folder of the target's files: ``target`` itself, or what the Hugging Face hub's cache or server gives for it."""
    path = Path(target)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors"]
    return Path(snapshot_download(target, revision=revision, cache_dir=download_dir, allow_patterns=patterns))


class TargetWeights:
    """Named tensors of a folder of safetensors files, read one by one.

    Raises:
        FileNotFoundError: the folder holds no safetensors weights.
        ValueError: a tensor that is asked for is not there.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = require(read_json(index), "weight_map", index)
            for file in sorted(set(map(str, weight_map.values()))):
                if file != Path(file).name or not file.endswith(".safetensors"):
                    raise ValueError(f"{index} names {file!r}, which is not a safetensors file of its folder")
            self._files = {name: folder / file for name, file in weight_map.items()}
        elif (folder / "model.safetensors").is_file():
            with safe_open(folder / "model.safetensors", "pt") as file:
                self._files = dict.fromkeys(file.keys(), folder / "model.safetensors")
        else:
            raise FileNotFoundError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        if name not in self:
            raise ValueError(f"the target has no tensor {name!r}")
        with safe_open(self._files[name], "pt") as file:
            return file.get_tensor(name)

    def dtype(self, name: str) -> str:
        """Type of one tensor, by its file's header."""
        with safe_open(self._files[name], "pt") as file:
            return str(file.get_slice(name).get_dtype())

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """State dict of decoder layer ``layer``, names as in :class:`TransformerLayer`."""
        prefix = f"model.layers.{layer}."
        return {n.removeprefix(prefix): self.tensor(n) for n in self._files if n.startswith(prefix)}

    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        return self.tensor("model.embed_tokens.weight")

    def lm_head(self) -> Tensor:
        """[vocab, hidden]; the embedding where the two are tied."""
        return self.tensor("lm_head.weight") if "lm_head.weight" in self else self.embedding()


@dataclass
class TargetParts:
    """Frozen pieces of the target, on the draft device."""

    embedding: Tensor  # [vocab, hidden]
    head: Tensor  # [draft_vocab, hidden], rows of the LM head the draft process works with
    head_token_ids: Tensor  # [draft_vocab] int64, token of each row
    decoder: Decoder
    rotary: RotaryTable
    packed_head: PackedLinear | None = None
    """``head`` over packed weights."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of ``tokens`` [...] int64 → [..., hidden]; float32 before packed weights."""
        rows = F.embedding(tokens, self.embedding)
        return rows if self.packed_head is None else rows.float()

    def logits(self, states: Tensor) -> Tensor:
        """[..., hidden] → [..., draft_vocab]."""
        if self.packed_head is not None:
            return self.packed_head(states)
        # Two dimensions only: the gradient of a strided batch would copy the head once for every row of it.
        return F.linear(states.reshape(-1, states.shape[-1]), self.head).view(*states.shape[:-1], len(self.head))


def load_target_config(folder: Path) -> Any:
    """The target's text config, as Hugging Face reads it."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()


def check_target_weights(folder: Path, deepest_tap: int, hf_config: Any) -> None:
    """Check that the draft process can read all it needs of the target, by names and types alone.

    Raises:
        ValueError: one line: the target is quantized, or a tensor is not where it should be.
    """
    quantization = getattr(hf_config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ValueError(f"the draft process can't read the weights of a quantized target ({method}): {folder}")
    try:
        weights = TargetWeights(folder)
    except FileNotFoundError as error:
        raise ValueError(f"the draft process reads the target from safetensors files: {error}") from None
    text_config = hf_config.get_text_config()
    with torch.device("meta"):
        layer_names = list(TransformerLayer(LayerConfig.from_hf(text_config)).state_dict())
    layers = range(deepest_tap + 1, text_config.num_hidden_layers)
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [f"model.layers.{layer}.{name}" for layer in layers for name in layer_names]
    names += [] if text_config.tie_word_embeddings else ["lm_head.weight"]
    for name in names:
        if name not in weights:
            raise ValueError(f"the target in {folder} has no tensor {name!r}, which the draft process needs")
        if weights.dtype(name) not in FLOATS:
            kinds = ", ".join(FLOATS)
            raise ValueError(f"{name!r} of the target in {folder} is {weights.dtype(name)}; it must be one of {kinds}")


@torch.no_grad()
def load_target_parts(
    folder: Path,
    deepest_tap: int,
    head_token_ids: Tensor | None,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> TargetParts:
    """Cut the parts out of the target's files.

    Args:
        deepest_tap: the decoder starts at the layer above it.
        head_token_ids: [draft_vocab] int64 for a shortened LM head; None keeps the whole vocabulary.
        max_positions: positions of the rotary table.
    """
    hf_config = load_target_config(folder)
    check_target_weights(folder, deepest_tap, hf_config)
    config = LayerConfig.from_hf(hf_config)
    weights = TargetWeights(folder)
    with torch.device("meta"):
        decoder = Decoder(config, hf_config.num_hidden_layers - deepest_tap - 1)
    for offset, layer in enumerate(decoder.layers):
        _assign(layer, weights.layer_state(deepest_tap + 1 + offset), f"target layer {deepest_tap + 1 + offset}")
    _assign(decoder.norm, {"weight": weights.tensor("model.norm.weight")}, "the target's last norm")
    head = weights.embedding() if hf_config.tie_word_embeddings else weights.lm_head()
    ids = torch.arange(head.shape[0]) if head_token_ids is None else head_token_ids.long()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= head.shape[0]:
        raise ValueError(f"token_ids of the shortened head must lie in 0..{head.shape[0] - 1}, got {low}..{high}")
    return TargetParts(
        embedding=weights.embedding().to(device, dtype),
        head=head[ids].to(device, dtype),
        head_token_ids=ids.to(device),
        decoder=decoder.to(device, dtype).requires_grad_(False).eval(),
        rotary=RotaryTable(hf_config, max_positions, dtype).to(device),
    )


def _assign(module: nn.Module, state: dict[str, Tensor], what: str) -> None:
    """Give ``module``, on the meta device, the tensors of ``state``; ValueError where they do not fit it."""
    wanted, found = ({n: tuple(t.shape) for n, t in tensors.items()} for tensors in (module.state_dict(), state))
    if wanted != found:
        differing = sorted(n for n in {*wanted, *found} if wanted.get(n) != found.get(n))
        raise ValueError(f"{what} does not fit the target's config: names or shapes of {differing}")
    module.load_state_dict(state, assign=True)


def copy_layer(weights: TargetWeights, source: int, layer: TransformerLayer) -> None:
    """Initialise ``layer`` from target layer ``source``; norms the target lacks keep their values."""
    missing, unexpected = layer.load_state_dict(weights.layer_state(source), strict=False)
    if unexpected or any("_norm" not in name for name in missing):
        raise ValueError(f"target layer {source} does not fit: missing {missing}, unexpected {unexpected}")
