"""The round again, written as slowly and plainly as possible: one branch, one query at a time, no masks, no batches.

What the fixed-shape programs of ``foresight`` must equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.foresight.noise import noise_positions
from vllm_jetspecpp.models.networks import Networks
from vllm_jetspecpp.models.target_layers import TransformerLayer

KV = tuple[Tensor, Tensor]  # keys, values: [positions, num_kv_heads, head_dim]


def rms(x: Tensor, norm: torch.nn.Module) -> Tensor:
    if isinstance(norm, torch.nn.Identity):
        return x
    return norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()


def rotated(x: Tensor, position: int, nets: Networks) -> Tensor:
    cos, sin = nets.target.rotary.cos[position], nets.target.rotary.sin[position]
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def key_value(layer: TransformerLayer, normed: Tensor, position: int, nets: Networks) -> KV:
    attention = layer.self_attn
    key = attention.k_proj(normed).view(attention.num_kv_heads, attention.head_dim)
    value = attention.v_proj(normed).view(attention.num_kv_heads, attention.head_dim)
    return rotated(rms(key, attention.k_norm), position, nets)[None], value[None]


def append(a: KV | None, b: KV) -> KV:
    return b if a is None else (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]]))


def run_layer(
    layer: TransformerLayer,
    x: Tensor,
    positions: list[int],
    context: KV | None,
    nets: Networks,
    beside: KV | None = None,
) -> tuple[Tensor, KV]:
    """``x`` [length, hidden]; a position sees the context, the block up to itself, and what stands beside before it."""
    attention, seen, own, out = layer.self_attn, context, None, []
    group = attention.num_heads // attention.num_kv_heads
    for index, (row, position) in enumerate(zip(x, positions, strict=True)):
        normed = rms(row, layer.input_layernorm)
        new = key_value(layer, normed, position, nets)
        seen, own = append(seen, new), append(own, new)
        query = rotated(rms(attention.q_proj(normed).view(attention.num_heads, -1), attention.q_norm), position, nets)
        visible = seen if beside is None else append(seen, (beside[0][:index], beside[1][:index]))
        heads = []
        for head in range(attention.num_heads):
            keys, values = visible[0][:, head // group], visible[1][:, head // group]
            heads.append((keys @ query[head] / attention.head_dim**0.5).softmax(0) @ values)
        hidden = row + attention.o_proj(torch.cat(heads))
        normed = rms(hidden, layer.post_attention_layernorm)
        mlp = layer.mlp
        out.append(hidden + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed)))
    return torch.stack(out), own


@dataclass
class NaiveContext:
    """Keys and values before a block, one entry a layer of each network."""

    draft: list[KV | None]
    adapter: list[KV | None]
    decoder: list[KV | None]

    def plus(self, other: NaiveContext, count: int) -> NaiveContext:
        """Followed by the first ``count`` positions of another context."""

        def join(mine: list[KV | None], theirs: list[KV | None]) -> list[KV | None]:
            return [
                m if not count else append(m, (t[0][:count], t[1][:count])) for m, t in zip(mine, theirs, strict=True)
            ]

        return NaiveContext(
            join(self.draft, other.draft), join(self.adapter, other.adapter), join(self.decoder, other.decoder)
        )


def states_context(nets: Networks, states: Tensor, positions: list[int]) -> tuple[list[KV | None], list[KV | None]]:
    """Draft-model and adapter context of tapped states [length, taps * hidden]."""
    draft: list[KV | None] = [None] * len(nets.draft_model.layers)
    adapter: list[KV | None] = [None] * nets.adapter.num_layers
    for row, position in zip(states, positions, strict=True):
        fused = rms(nets.draft_model.fc(row), nets.draft_model.hidden_norm)
        for i, layer in enumerate(nets.draft_model.layers):
            draft[i] = append(draft[i], key_value(layer, fused, position, nets))
        i = 0
        for stack, tap in zip(nets.adapter.stacks, row.chunk(nets.num_taps), strict=True):
            for layer in stack:
                adapter[i] = append(adapter[i], key_value(layer, rms(tap, layer.input_layernorm), position, nets))
                i += 1
    return draft, adapter


def true_context(nets: Networks, states: Tensor, positions: list[int]) -> NaiveContext:
    """Context of true states, the decoder's layers run over them."""
    draft, adapter = states_context(nets, states, positions)
    x, decoder = nets.deepest(states), []
    for layer in nets.target.decoder.layers:
        x, own = run_layer(layer, x, positions, None, nets)
        decoder.append(own)
    return NaiveContext(draft, adapter, decoder)


def simulate(
    nets: Networks, tokens: list[int], positions: list[int], context: NaiveContext
) -> tuple[Tensor, NaiveContext]:
    """Adapter and decoder over one block: log p̂ [length, draft vocab], and the predictions as context."""
    x, taps, i = nets.target.embedding[tokens], [], 0
    for stack in nets.adapter.stacks:
        for layer in stack:
            x, _ = run_layer(layer, x, positions, context.adapter[i], nets)
            i += 1
        taps.append(x)
    states = torch.cat(taps, -1)
    decoder = []
    for layer, seen in zip(nets.target.decoder.layers, context.decoder, strict=True):
        x, own = run_layer(layer, x, positions, seen, nets)
        decoder.append(own)
    logits = rms(x, nets.target.decoder.norm) @ nets.target.head.T
    return logits.log_softmax(-1), NaiveContext(*states_context(nets, states, positions), decoder)


def draft(
    nets: Networks, block: list[int], position: int, context: NaiveContext, beside: NaiveContext | None = None
) -> list[int]:
    """One pass: the anchor and a new token for every other position; each also sees ``beside`` before its own place."""
    x = nets.target.embedding[block]
    positions = list(range(position, position + len(block)))
    own_states = beside.draft if beside else [None] * len(context.draft)
    for layer, seen, refreshed in zip(nets.draft_model.layers, context.draft, own_states, strict=True):
        x, _ = run_layer(layer, x, positions, seen, nets, refreshed)
    rows = (rms(x, nets.draft_model.norm) @ nets.target.head.T).argmax(-1)
    return [block[0], *nets.target.head_token_ids[rows][1:].tolist()]


def outcomes(log_probs: Tensor, drafts: list[int], token_ids: list[int]) -> dict[tuple[int, int], float]:
    """Eq. 6 by enumeration: log P of every possible (k, a), a as a token id."""
    result, reached = {}, 0.0
    for k, row in enumerate(log_probs.tolist()):
        for index, token in enumerate(token_ids):
            if k == len(drafts) or token != drafts[k]:
                result[k, token] = reached + row[index]
        if k < len(drafts):
            if drafts[k] not in token_ids:
                break
            reached += row[token_ids.index(drafts[k])]
    return result


@dataclass
class NaiveRound:
    """All of one round for one request."""

    nets: Networks
    config: RoundConfig
    tokens: list[int]  # the sequence, anchor last
    states: Tensor  # [len(tokens) - 1, taps * hidden], true
    missing: tuple[int, ...] = ()
    """Positions whose states never arrived."""
    blocks: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def context(self) -> NaiveContext:
        kept = [p for p in range(len(self.states)) if p not in self.missing]
        return true_context(self.nets, self.states[kept], kept)

    def noised(self, sequence: list[int]) -> list[int]:
        """The anchor, which ends ``sequence``, and its noise tokens."""
        source = noise_positions(torch.tensor(len(sequence) - 1), self.config.num_draft_tokens)
        return [sequence[-1], *(sequence[p] for p in source.tolist())]

    def fallback(self) -> list[int]:
        passes, refreshes = self.config.fallback_passes, self.config.fallback_refreshes
        return self.refined(self.tokens, self.context(), passes, refreshes)

    def predraft(self, drafts: list[int], num_verified: int | None = None) -> dict[tuple[int, int], list[int]]:
        """Blocks for the B likeliest outcomes of ``drafts``, of which the first ``num_verified`` are verified."""
        n, context = len(self.tokens) - 1, self.context()
        positions = list(range(n, n + self.config.block_size))
        log_probs, predicted = simulate(self.nets, [self.tokens[-1], *drafts], positions, context)
        cut = len(drafts) if num_verified is None else num_verified
        scores = outcomes(log_probs[: cut + 1], drafts[:cut], self.nets.target.head_token_ids.tolist())
        chosen = sorted(scores, key=lambda o: -scores[o])[: self.config.num_outcomes]
        return {(k, a): self.branch(drafts, k, a, context.plus(predicted, k + 1)) for k, a in chosen}

    def branch(self, drafts: list[int], k: int, a: int, context: NaiveContext) -> list[int]:
        passes, refreshes = self.config.jacobi_passes, self.config.context_refreshes
        return self.refined([*self.tokens, *drafts[:k], a], context, passes, refreshes)

    def refined(self, sequence: list[int], context: NaiveContext, passes: int, refreshes: int) -> list[int]:
        """Draft and refinement of the block whose anchor ends ``sequence``."""
        return self._refined(self.noised(sequence), len(sequence) - 1, context, passes, refreshes)[1:]

    def _refined(self, block: list[int], start: int, context: NaiveContext, passes: int, refreshes: int) -> list[int]:
        """``block`` [anchor, noise], drafted and refined, its anchor at position ``start``."""
        if refreshes > passes:
            log_probs, refreshed = simulate(self.nets, block[:1], [start], context)
            second = int(self.nets.target.head_token_ids[log_probs[0].argmax()])
            rest = [second, *block[2:]]
            return [block[0], *self._refined(rest, start + 1, context.plus(refreshed, 1), passes, passes)]
        fixed = 0
        block = draft(self.nets, block, start, context)
        reads, beside = context, None
        for iteration in range(1, passes + 1):
            if iteration <= refreshes:
                positions = list(range(start, start + len(block)))
                log_probs, refreshed = simulate(self.nets, block, positions, context)
                if not self.config.anchor_replacement:
                    beside = refreshed
                    block = draft(self.nets, block, start, context, beside)
                    continue
                likeliest = self.nets.target.head_token_ids[log_probs.argmax(-1)].tolist()
                first = next((i for i in range(fixed + 1, len(block)) if likeliest[i - 1] != block[i]), len(block) - 1)
                if first > fixed:
                    block, fixed = [*block[:first], likeliest[first - 1], *block[first + 1 :]], first
                reads = context.plus(refreshed, fixed)
            block[fixed:] = draft(self.nets, block[fixed:], start + fixed, reads, beside)
        return block
