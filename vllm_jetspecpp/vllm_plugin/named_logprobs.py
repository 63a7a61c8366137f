"""Log-probabilities of token ids that a request names (``logprob_token_ids``), at every token that a step commits.

vLLM's sampler gives them for plain steps. Its rejection sampler mixes their rows with those of the whole vocabulary,
which ends the engine, or leaves them out. So we let it gather the likeliest tokens alone, and add what each request
named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def gathering(sampler: Any, named: Mapping[int, Sequence[int]], num_requests: int) -> Iterator[None]:
    """Have ``sampler.gather_logprobs`` return the named tokens; the rejection sampler calls it once a step.

    Args:
        sampler: vLLM's.
        named: token ids by the request's index in the batch.
        num_requests: of the batch; rows are as many for each.
    """
    sampler.gather_logprobs = partial(gather, sampler.gather_logprobs, named, num_requests)
    try:
        yield
    finally:
        del sampler.gather_logprobs  # the class has its own


def gather(
    gather_likeliest: Any,
    named: Mapping[int, Sequence[int]],
    num_requests: int,
    logprobs: torch.Tensor,  # [num_requests * rows_per_request, vocab_size]
    num_logprobs: int,
    token_ids: torch.Tensor,  # [num_requests * rows_per_request] int64
) -> Any:
    """What ``Sampler.gather_logprobs`` returns: each row's own token, then the named tokens or the likeliest ones.

    Args:
        gather_likeliest: the original.
        named: token ids by the request's index in the batch.
        num_requests: of the batch.
        logprobs: of every token.
        num_logprobs: columns after the own token; at least as many as any request names.
        token_ids: each row's own token.
    """
    tensors = gather_likeliest(logprobs, num_logprobs, token_ids)
    num_rows = logprobs.shape[0] // num_requests
    for index, ids in named.items():
        rows, columns = slice(index * num_rows, (index + 1) * num_rows), slice(1, len(ids) + 1)
        wanted = torch.tensor(ids, dtype=torch.long, device=logprobs.device)
        tensors.logprob_token_ids[rows, columns] = wanted.to(tensors.logprob_token_ids.dtype)
        tensors.logprobs[rows, columns] = logprobs[rows].index_select(1, wanted)
    return tensors
