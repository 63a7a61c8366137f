"""One round: foresee how verification ends, draft the next block for every likely ending, refine the drafts.

Shapes: rows are requests; T = γ + 1 positions a block; B branches a row, one for each outcome; L positions of context.
Everything here has fixed shapes and no data-dependent branch (invariant 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.foresight.context_refresh import replace_anchor
from vllm_jetspecpp.foresight.masks import BranchMasks, branch_masks
from vllm_jetspecpp.foresight.noise import noise_positions
from vllm_jetspecpp.foresight.outcome_selection import OutcomeSelector, SelectedOutcomes
from vllm_jetspecpp.models.attention import KeysValues, Rope
from vllm_jetspecpp.models.networks import Networks

Segments = list[KeysValues]
"""One segment for every layer of a network."""


@dataclass(frozen=True)
class Context:
    """Keys and values that stand before a block, for each network: verified prefix first, then predictions."""

    draft_model: list[Segments]
    adapter: list[Segments]
    decoder: list[Segments]

    def extended(self, other: Context) -> Context:
        """This context followed by another."""
        return Context(self.draft_model + other.draft_model, self.adapter + other.adapter, self.decoder + other.decoder)


@dataclass(frozen=True)
class Prefix:
    """The verified context of the rows of a round."""

    context: Context
    mask: Tensor  # [rows, L] bool: positions before the anchor whose states have arrived
    anchor: Tensor  # [rows] int64, n
    tokens: Tensor  # [rows, at least L + 2T] int64, all tokens up to n, the block under verification after them


@dataclass(frozen=True)
class Simulation:
    """What adapter and decoder say of some blocks: the verification that has not happened yet."""

    hidden: Tensor  # [rows, blocks * T, hidden], the decoder's output, ready for the LM head
    states: Tensor  # [rows, blocks * T, num_taps * hidden], predicted states of the tapped layers
    rope: Rope  # of the blocks' positions
    decoder: Segments  # the decoder's own keys and values

    def draft_context(self, nets: Networks) -> Segments:
        """The predicted states as the draft model's context."""
        return nets.draft_model.context_keys_values(self.states, self.rope)

    def context(self, nets: Networks) -> Context:
        """The predicted states as context of draft model and of further foresight."""
        adapter = nets.adapter.context_keys_values(self.states, self.rope)
        return Context([self.draft_context(nets)], [adapter], [self.decoder])


class Blocks(NamedTuple):
    """A batch of blocks, anchors first."""

    tokens: Tensor  # [rows, blocks, T] int64
    confidence: Tensor  # [rows, blocks, T] float32, log of the draft model's largest probability at each position,
    # in the last pass that drafted it; 0 at the anchor

    def drafts(self) -> Blocks:
        """Without the anchors: [rows, blocks, γ]."""
        return Blocks(self.tokens[..., 1:], self.confidence[..., 1:])


@dataclass(frozen=True)
class Foresight:
    """How the verification of a block may end."""

    log_probs: Tensor  # [rows, T, draft_vocab], log p̂(· | j): the decoder's word on the token after each position
    context: Context  # the block's predicted states as context of what follows; of draft passes alone where R = 0
    outcomes: SelectedOutcomes


@dataclass(frozen=True)
class PreDrafts:
    """The outcome cache's new content."""

    outcomes: SelectedOutcomes
    bonus_tokens: Tensor  # [rows, B] int64, token ids
    drafts: Blocks  # [rows, B, γ]


def per_layer(segments: list[Segments]) -> list[list[KeysValues]]:
    """Segments of layers → for every layer, its segments."""
    return [list(layer) for layer in zip(*segments, strict=True)]


def simulate_verification(
    nets: Networks, tokens: Tensor, positions: Tensor, context: Context, mask: Tensor
) -> Simulation:
    """Adapter, then decoder, over blocks of known tokens (Eq. 5).

    Args:
        tokens: [rows, blocks * T] int64.
        positions: same shape, absolute.
        context: what stands before the blocks.
        mask: [rows, blocks * T, keys] over ``context`` and the blocks themselves.
    """
    rope, mask = nets.target.rotary(positions), nets.bias(mask)
    states = nets.adapter(nets.target.embed(tokens), rope, per_layer(context.adapter), mask)
    hidden, decoder = nets.target.decoder(nets.deepest(states), rope, per_layer(context.decoder), mask)
    return Simulation(hidden, states, rope, decoder)


def draft_pass(
    nets: Networks, blocks: Blocks, positions: Tensor, fixed: Tensor, context: list[Segments], mask: Tensor
) -> Blocks:
    """One forward of the draft model over a batch of blocks (Eqs. 1 and 8): every token after the last fixed one anew.

    Args:
        positions: [rows, blocks * T] int64, absolute.
        fixed: [rows, blocks] int64, last fixed position.
        context: the draft model's.
    """
    shape, device = blocks.tokens.shape, blocks.tokens.device
    rope, mask = nets.target.rotary(positions), nets.bias(mask)
    hidden = nets.draft_model(nets.target.embed(blocks.tokens.flatten(1)), rope, per_layer(context), mask)
    tokens, log_prob = nets.likeliest_with_log_prob(hidden)
    free = torch.arange(shape[-1], device=device) > fixed.unsqueeze(-1)
    return Blocks(
        torch.where(free, tokens.view(shape), blocks.tokens), torch.where(free, log_prob.view(shape), blocks.confidence)
    )


def noised_blocks(prefix: Prefix, anchors: Tensor, anchor_positions: Tensor, num_draft_tokens: int) -> Blocks:
    """Blocks of an anchor token and γ noise tokens.

    Args:
        anchors: [rows, blocks] int64.
        anchor_positions: [rows, blocks] int64; noise comes from the positions before.
    """
    source = noise_positions(anchor_positions, num_draft_tokens)
    noise = prefix.tokens.gather(1, source.flatten(1)).view(source.shape)
    tokens = torch.cat([anchors.unsqueeze(-1), noise], dim=-1)
    return Blocks(tokens, torch.zeros(tokens.shape, device=tokens.device))


def draft_refined(
    nets: Networks,
    blocks: Blocks,
    anchor: Tensor,
    context: Context,
    before: list[Tensor],
    passes: int,
    refreshes: int,
    replacement: bool = True,
    num_refined: int | None = None,
) -> Blocks:
    """Initial draft, then ``passes`` Jacobi passes (Eq. 8), a context refresh before each of the first ``refreshes``.

    With one refresh more than passes the first one comes before the initial draft, see :func:`_draft_after_refresh`.

    Args:
        blocks: anchor and noise.
        anchor: [rows, blocks] int64, absolute positions.
        context: what stands before the blocks.
        before: mask pieces over ``context``, each [rows, blocks * T, keys].
        replacement: whether a refresh also writes and fixes tokens.
        num_refined: so many blocks of each row, the first ones, are refined; None: all.
    """
    if refreshes > passes:
        return _draft_after_refresh(nets, blocks, anchor, context, before, passes, num_refined)
    _, count, size = blocks.tokens.shape
    _, positions, fixed, whole = _layout(blocks, anchor, before)
    blocks = draft_pass(nets, blocks, positions, fixed, context.draft_model, whole)
    if not passes:
        return blocks
    if num_refined is None or num_refined >= count:
        return _refine(nets, blocks, anchor, context, before, passes, refreshes, replacement)
    first = Blocks(*(values[:, :num_refined] for values in blocks))
    rest = Blocks(*(values[:, num_refined:] for values in blocks))
    before = [piece[:, : num_refined * size] for piece in before]
    first = _refine(nets, first, anchor[:, :num_refined], context, before, passes, refreshes, replacement)
    return Blocks(*(torch.cat(pair, dim=1) for pair in zip(first, rest, strict=True)))


def _draft_after_refresh(
    nets: Networks,
    blocks: Blocks,
    anchor: Tensor,
    context: Context,
    before: list[Tensor],
    passes: int,
    num_refined: int | None,
) -> Blocks:
    """Refresh the anchors before anything is drafted: their states, and the token after each, need no draft.

    That token is the decoder's, as in anchor replacement, and with it as anchor the rest of the block is drafted and
    refined as usual. Ours, not the paper's: one row a block where a refresh of the draft reads γ + 1, and no further
    pass. Arguments as of :func:`draft_refined`.
    """
    _, count, size = blocks.tokens.shape
    own = branch_masks(count, 1, anchor.device).own(torch.zeros_like(anchor))
    mask = torch.cat([*(piece[:, ::size] for piece in before), own], dim=-1)
    refresh = simulate_verification(nets, blocks.tokens[..., 0], anchor, context, mask)
    found = nets.likeliest_with_log_prob(refresh.hidden)
    first = Blocks(*(values.unsqueeze(-1) for values in found))
    if size > 2:
        rest = Blocks(*(torch.cat([new, old[..., 2:]], dim=-1) for new, old in zip(first, blocks, strict=True)))
        states = refresh.context(nets) if passes else Context([refresh.draft_context(nets)], [], [])
        later = [piece.unflatten(1, (count, size))[:, :, 1:].flatten(1, 2) for piece in before]
        later.append(own.repeat_interleave(size - 1, dim=1))
        first = draft_refined(
            nets, rest, anchor + 1, context.extended(states), later, passes, passes, num_refined=num_refined
        )
    return Blocks(*(torch.cat([old[..., :1], new], dim=-1) for old, new in zip(blocks, first, strict=True)))


def _layout(blocks: Blocks, anchor: Tensor, before: list[Tensor]) -> tuple[BranchMasks, Tensor, Tensor, Tensor]:
    """Masks of blocks side by side, their positions, nothing fixed yet, and who sees what of context and blocks."""
    _, count, size = blocks.tokens.shape
    masks = branch_masks(count, size, blocks.tokens.device)
    positions = (anchor.unsqueeze(-1) + masks.position[:size]).flatten(1)
    fixed = torch.zeros_like(anchor)
    return masks, positions, fixed, torch.cat([*before, masks.own(fixed)], dim=-1)


def _refine(
    nets: Networks,
    blocks: Blocks,
    anchor: Tensor,
    context: Context,
    before: list[Tensor],
    passes: int,
    refreshes: int,
    replacement: bool,
) -> Blocks:
    """The passes after the first; arguments as of :func:`draft_refined`, ``blocks`` drafted once."""
    masks, positions, fixed, whole = _layout(blocks, anchor, before)
    reads, seen = context.draft_model, before
    for iteration in range(1, passes + 1):
        if iteration <= refreshes:
            refresh = simulate_verification(nets, blocks.tokens.flatten(1), positions, context, whole)
            if replacement:
                likeliest = nets.likeliest(refresh.hidden).view(blocks.tokens.shape)
                tokens, fixed = replace_anchor(blocks.tokens, likeliest, fixed)
                blocks = blocks._replace(tokens=tokens)
            own_states = masks.refreshed(fixed) if replacement else masks.refreshed_before(len(anchor))
            reads, seen = [*context.draft_model, refresh.draft_context(nets)], [*before, own_states]
        mask = torch.cat([*seen, masks.own(fixed)], dim=-1)
        blocks = draft_pass(nets, blocks, positions, fixed, reads, mask)
    return blocks


def draft_verified(
    nets: Networks, prefix: Prefix, num_draft_tokens: int, passes: int, refreshes: int, replacement: bool = True
) -> Blocks:
    """A block from the verified context: after a miss, or a request's first. → drafts [rows, 1, γ].

    The paper drafts it in one pass (J_0); refining it too is an option of ours, paid for on the critical path.
    """
    anchor = prefix.anchor.unsqueeze(-1)
    blocks = noised_blocks(prefix, prefix.tokens.gather(1, anchor), anchor, num_draft_tokens)
    before = [branch_masks(1, num_draft_tokens + 1, anchor.device).prefix(prefix.mask)]
    return draft_refined(nets, blocks, anchor, prefix.context, before, passes, refreshes, replacement).drafts()


def foresee(
    nets: Networks,
    selector: OutcomeSelector,
    prefix: Prefix,
    block: Tensor,
    confidence: Tensor,
    num_verified: Tensor | None = None,
    refreshes: bool = True,
) -> Foresight:
    """Predict the states of the block under verification, score its outcomes, choose B (Eqs. 5 to 7 and 12).

    Args:
        block: [rows, T] int64, anchor and draft tokens under verification.
        confidence: [rows, γ], see :class:`Blocks`.
        num_verified: [rows] int64, draft tokens that are really verified where a block was cut; None: all γ.
        refreshes: whether what follows has context refreshes.
    """
    masks = branch_masks(1, block.shape[1], block.device)
    start = torch.zeros_like(block[:, :1])
    mask = torch.cat([masks.prefix(prefix.mask), masks.own(start)], dim=-1)
    positions = prefix.anchor.unsqueeze(-1) + masks.position
    simulation = simulate_verification(nets, block, positions, prefix.context, mask)
    log_probs = nets.target.logits(simulation.hidden).float().log_softmax(-1)
    drafts = nets.token_rows[block[:, 1:]]
    if num_verified is not None:
        # After a cut block's last draft token the target says a token of its own, any token: as after γ.
        drafts = drafts.masked_fill(masks.position[:-1] >= num_verified.unsqueeze(-1), -1)
    context = simulation.context(nets) if refreshes else Context([simulation.draft_context(nets)], [], [])
    return Foresight(log_probs, context, selector(log_probs, drafts, confidence))


def draft_outcomes(
    nets: Networks, config: RoundConfig, prefix: Prefix, foresight: Foresight, outcomes: SelectedOutcomes
) -> Blocks:
    """The next block for each of ``outcomes``, from predicted states; branches never see each other.

    The block foreseen may be longer than those drafted, whose length ``config`` says.

    Returns:
        Drafts [rows, outcomes, γ].
    """
    anchor = prefix.anchor.unsqueeze(-1) + outcomes.num_accepted + 1
    bonus_tokens = nets.target.head_token_ids[outcomes.bonus]
    context = prefix.context.extended(foresight.context)
    masks = branch_masks(anchor.shape[1], config.block_size, anchor.device)
    before = [masks.prefix(prefix.mask), masks.predicted(outcomes.num_accepted, foresight.log_probs.shape[1])]
    blocks = noised_blocks(prefix, bonus_tokens, anchor, config.num_draft_tokens)
    passes, refreshes = config.jacobi_passes, config.context_refreshes
    refined = draft_refined(
        nets, blocks, anchor, context, before, passes, refreshes, config.anchor_replacement, config.num_refined
    )
    return refined.drafts()


def predraft(
    nets: Networks,
    config: RoundConfig,
    selector: OutcomeSelector,
    prefix: Prefix,
    block: Tensor,
    confidence: Tensor,
    num_verified: Tensor | None = None,
) -> PreDrafts:
    """The whole round while ``block`` [rows, T] is under verification; arguments as in :func:`foresee`."""
    refreshes = config.context_refreshes > 0
    foresight = foresee(nets, selector, prefix, block, confidence, num_verified, refreshes)
    outcomes = foresight.outcomes
    drafts = draft_outcomes(nets, config, prefix, foresight, outcomes)
    return PreDrafts(outcomes, nets.target.head_token_ids[outcomes.bonus], drafts)
