"""Rivals' heads that make a parallel draft depend on the tokens drafted before: DSpark's and Domino's.

Both add to the parallel model's logits, position by position, what the tokens before say. Names of the parameters are
those of the published checkpoints.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Embed = Callable[[Tensor], Tensor]
"""Token ids [...] → the target's embeddings [..., hidden]."""


class Head(NamedTuple):
    """How a row of logits becomes a token."""

    embed: Embed
    token_ids: Tensor  # [draft_vocab] int64


class LogitCorrection(nn.Module):
    """Adds to the logits of a drafted block, left to right."""

    skipped: int = 0
    """Draft positions at the start of a block that keep the parallel model's logits."""

    @abstractmethod
    def forward(self, hidden: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        """What is added when the tokens before are known (training).

        Args:
            hidden: [N, γ, hidden] of the draft positions, ready for the LM head.
            previous: [N, γ] int64, the token before each draft position: anchor, then the true tokens.

        Returns:
            [N, γ, draft_vocab].
        """

    @abstractmethod
    def step(self, hidden: Tensor, previous: Tensor, state: Any, embed: Embed) -> tuple[Tensor, Any]:
        """What is added at one position, [N, draft_vocab], and the state for the next; ``state`` is None at first."""

    def draft(self, logits: Tensor, hidden: Tensor, anchors: Tensor, head: Head) -> Tensor:
        """Greedy tokens [N, γ] from the parallel model's ``logits`` [N, γ, draft_vocab]; ``anchors`` [N] int64."""
        tokens, state = [anchors], None
        for i in range(logits.shape[1]):
            added, state = self.step(hidden[:, i], tokens[-1], state, head.embed)
            row = logits[:, i] if i < self.skipped else logits[:, i] + added
            tokens.append(head.token_ids[row.max(-1).indices])
        return torch.stack(tokens[1:], dim=1)


class MarkovCorrection(LogitCorrection):
    """DSpark: a bigram bias of low rank, W2 W1[previous token]."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, hidden: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        """See :class:`LogitCorrection`."""
        return self.markov_w2(self.markov_w1(previous))

    def step(self, hidden: Tensor, previous: Tensor, state: Any, embed: Embed) -> tuple[Tensor, Any]:
        """See :class:`LogitCorrection`."""
        return self.markov_w2(self.markov_w1(previous)), None


class GruCorrection(LogitCorrection):
    """Domino: a GRU reads the tokens before; a bottleneck over its state and the draft model's hidden state."""

    def __init__(self, hidden_size: int, draft_vocab_size: int, gru_size: int, rank: int, skipped: int = 1) -> None:
        super().__init__()
        self.skipped = skipped
        self.prefix_gru = nn.GRU(hidden_size, gru_size, batch_first=True, bias=False)
        up = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.zeros_(up.weight)
        self.embed_proj = nn.Sequential(nn.Linear(hidden_size + gru_size, rank, bias=False), nn.SiLU(), up)

    def forward(self, hidden: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        """See :class:`LogitCorrection`."""
        states, _ = self.prefix_gru(self._inputs(previous, embed))
        added = self.embed_proj(torch.cat([hidden, states.to(hidden.dtype)], dim=-1))
        return torch.cat([torch.zeros_like(added[:, : self.skipped]), added[:, self.skipped :]], dim=1)

    def step(self, hidden: Tensor, previous: Tensor, state: Any, embed: Embed) -> tuple[Tensor, Any]:
        """See :class:`LogitCorrection`."""
        out, state = self.prefix_gru(self._inputs(previous.unsqueeze(1), embed), state)
        return self.embed_proj(torch.cat([hidden, out[:, 0].to(hidden.dtype)], dim=-1)), state

    def _inputs(self, tokens: Tensor, embed: Embed) -> Tensor:
        return embed(tokens).to(next(self.prefix_gru.parameters()).dtype)
