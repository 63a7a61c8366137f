"""The reference of verification (Eq. 11): rejection sampling with point-mass proposals. vLLM's own sampler serves."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_jetspecpp.types import Outcome


def verify(probabilities: Tensor, drafts: list[int], generator: torch.Generator | None = None) -> Outcome:
    """Accept d_i with probability p_i(d_i); at the first rejection draw from p_i with d_i removed, renormalised.

    The same as: draw v ~ p_i, accept when v = d_i, else commit v. So every committed token is the target's own draw,
    whatever proposed the drafts. One-hot rows give greedy decoding.

    Args:
        probabilities: [len(drafts) + 1, vocab], the target's distribution at every block position.

    Returns:
        How many drafts were accepted, and the token committed after them.
    """
    for k, draft in enumerate(drafts):
        token = int(torch.multinomial(probabilities[k], 1, generator=generator))
        if token != draft:
            return Outcome(k, token)
    return Outcome(len(drafts), int(torch.multinomial(probabilities[-1], 1, generator=generator)))
