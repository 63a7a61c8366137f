"""The three networks of the draft process and the target's pieces, together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_jetspecpp.config import AUTO, INT8, EngineConfig
from vllm_jetspecpp.models.adapter import Adapter
from vllm_jetspecpp.models.attention import additive
from vllm_jetspecpp.models.checkpoint import CheckpointInfo, check_checkpoint, load_checkpoint
from vllm_jetspecpp.models.draft_model import DraftModel
from vllm_jetspecpp.models.packed_layers import FloatNorm, PackedContext, PackedLayer, PackedTaps
from vllm_jetspecpp.models.packed_linear import PackedLinear, ReorderedLinear, has_int8_products
from vllm_jetspecpp.models.smoothing import LargestInputs, smoothing
from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.target_parts import TargetParts, load_target_config, load_target_parts, resolve_folder

PART = 128
"""Values of a row that are searched at once, see :func:`largest`."""


@dataclass
class Networks:
    """Draft model, adapter, decoder, and the target's embedding and (shortened) LM head."""

    draft_model: DraftModel
    adapter: Adapter
    target: TargetParts
    layer_config: LayerConfig
    num_taps: int
    token_rows: Tensor  # [vocab] int64, row of each token in the shortened head, -1 where it has none

    @classmethod
    def assemble(cls, draft_model: DraftModel, adapter: Adapter, target: TargetParts, config: LayerConfig) -> Networks:
        """Join networks that are loaded already."""
        rows = torch.full((target.embedding.shape[0],), -1, dtype=torch.int64, device=target.embedding.device)
        rows[target.head_token_ids] = torch.arange(len(target.head_token_ids), device=rows.device)
        num_taps = draft_model.fc.in_features // config.hidden_size
        return cls(draft_model, adapter, target, config, num_taps, rows)

    def deepest(self, states: Tensor) -> Tensor:
        """The deepest tapped layer's part of ``states`` [..., num_taps * hidden] → [..., hidden]."""
        return states.chunk(self.num_taps, dim=-1)[-1]

    def bias(self, mask: Tensor) -> Tensor:
        """``mask`` [rows, length, keys] bool as the layers of all networks read it, see ``attention.additive``."""
        config = self.layer_config
        return additive(mask, self.target.embedding.dtype, config.num_heads // config.num_kv_heads)

    def likeliest(self, hidden: Tensor) -> Tensor:
        """Most probable token of every row: [..., hidden] → [...] int64."""
        return self.target.head_token_ids[largest(self.target.logits(hidden)).indices]

    def likeliest_with_log_prob(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`likeliest`, and the log of its probability, [...] float32."""
        logits = self.target.logits(hidden)
        best = largest(logits)
        return self.target.head_token_ids[best.indices], best.values.float() - logits.float().logsumexp(-1)


class Largest(NamedTuple):
    """The largest value of every row and where it first stands."""

    values: Tensor
    indices: Tensor


def largest(values: Tensor) -> Largest:
    """Of ``values`` [..., size] along the last dimension.

    On a CPU PyTorch finds a largest value ten times as fast as its place: so the place is looked for in the part of the
    row that holds it.
    """
    size = values.shape[-1]
    if values.is_cuda or size % PART:
        return Largest(*values.max(-1))
    parts = values.unflatten(-1, (size // PART, PART))
    best = parts.amax(-1).max(-1)
    index = best.indices[..., None, None].expand(*best.indices.shape, 1, PART)
    inside = parts.gather(-2, index).squeeze(-2).max(-1).indices
    return Largest(best.values, best.indices * PART + inside)


def load_networks(config: EngineConfig) -> tuple[Networks, CheckpointInfo]:
    """Load everything a draft process needs onto its device.

    Raises:
        ValueError: the checkpoint does not fit the target.
    """
    folder = resolve_folder(config.target, config.target_revision, config.download_dir)
    hf_config = load_target_config(folder)
    info = check_checkpoint(config.checkpoint, hf_config)
    dtype, layer_config = getattr(torch, config.dtype), LayerConfig.from_hf(hf_config)
    parts = load_checkpoint(info, layer_config, dtype, config.device)
    # A pre-drafted block starts up to a block past the end of the one under verification.
    max_positions = config.max_model_len + 2 * config.round.block_size
    target = load_target_parts(folder, info.deepest_tap, parts.head_token_ids, max_positions, dtype, config.device)
    nets = Networks.assemble(parts.draft_model, parts.adapter, target, layer_config)
    if packs(config):
        pack_networks(nets)
    return nets, info


def packs(config: EngineConfig) -> bool:
    """Whether the weights of the draft process are packed as int8."""
    if config.weights != AUTO:
        return config.weights == INT8
    return config.device == "cpu" and config.dtype == "bfloat16" and has_int8_products()


NUM_TRIALS = 16
"""Blocks of random tokens that show what the products of a network read."""


@torch.no_grad()
def pack_networks(nets: Networks) -> None:
    """Replace the layers and the LM head of ``nets`` by packed ones, for inference on the CPU.

    ``fc`` keeps its dtype: it reads states that no norm comes before, and int8 would cost it a twentieth of its output.
    """
    draft_model, decoder = nets.draft_model, nets.target.decoder
    blocks, contexts = _trial(nets)
    layers = list(draft_model.layers)
    products = [p for layer in layers for p in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    fused = smoothing(contexts[products[0]], *(p.weight for p in products))
    draft_model.packed_context = PackedContext(layers, fused)
    nets.adapter.packed_context = PackedTaps([list(stack) for stack in nets.adapter], blocks)
    for stack in (draft_model.layers, *nets.adapter, decoder.layers):
        for index, layer in enumerate(stack):
            stack[index] = PackedLayer(layer, blocks)
    for module, name, packed in (
        (draft_model, "fc", ReorderedLinear(draft_model.fc)),
        (draft_model, "hidden_norm", FloatNorm(draft_model.hidden_norm, fused)),
        (draft_model, "norm", FloatNorm(draft_model.norm)),
        (decoder, "norm", FloatNorm(decoder.norm)),
    ):
        module.register_module(name, packed)
    nets.target.packed_head = PackedLinear([nets.target.head])


def _trial(nets: Networks) -> tuple[LargestInputs, LargestInputs]:
    """What all products read when the networks run over random tokens: in blocks, and for the draft model's context."""
    generator = torch.Generator().manual_seed(0)
    size = min(PART, len(nets.target.rotary.cos))
    tokens = nets.target.head_token_ids[
        torch.randint(len(nets.target.head_token_ids), (NUM_TRIALS, size), generator=generator)
    ]
    rope = nets.target.rotary(torch.arange(size).expand(NUM_TRIALS, -1))
    mask = nets.bias(torch.ones(size, size, dtype=torch.bool).tril().expand(NUM_TRIALS, -1, -1))
    embeddings = nets.target.embed(tokens)
    blocks, contexts = LargestInputs(), LargestInputs()
    with blocks.watching(nets.adapter), blocks.watching(nets.target.decoder):
        states = nets.adapter(embeddings, rope, [[] for _ in range(nets.adapter.num_layers)], mask)
        nets.target.decoder(nets.deepest(states), rope, [[] for _ in nets.target.decoder.layers], mask)
    with contexts.watching(nets.draft_model):
        context = nets.draft_model.context_keys_values(states, rope)
    with blocks.watching(nets.draft_model.layers):
        whole = torch.cat([mask, mask], dim=-1)
        nets.draft_model(embeddings, rope, [[segment] for segment in context], whole)
    return blocks, contexts
