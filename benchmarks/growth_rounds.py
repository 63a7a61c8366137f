"""Rounds of the draft engine at any size, timed and counted from outside: nothing but messages goes in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from vllm_jetspecpp.config import EngineConfig, RoundConfig
from vllm_jetspecpp.foresight.outcome_cache import OutcomeCache
from vllm_jetspecpp.models.calibration import Calibration
from vllm_jetspecpp.models.networks import Networks
from vllm_jetspecpp.runtime.draft_engine import DraftEngine
from vllm_jetspecpp.transport.messages import Verified, VerifiedBatch
from vllm_jetspecpp.types import DraftBlock, Origin, Outcome


@dataclass(frozen=True)
class Point:
    """One size of a round."""

    context: int = 256
    """Positions before the anchor, about: it moves through the last of :data:`SPAN` positions."""
    batch: int = 1
    num_outcomes: int = 4
    num_draft_tokens: int = 7
    window: int | None = None

    @property
    def round(self) -> RoundConfig:
        """J1-R1 with these sizes."""
        return RoundConfig(self.num_draft_tokens, self.num_outcomes, 1, 1)


SPAN = 100
"""Rounds stay this near to the context's end: less than the step that contexts are padded to, so all cost the same."""


class OpenCache(OutcomeCache):
    """Also shows what it holds, so that a measurement can choose to hit or to miss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, dict[Outcome, DraftBlock]] = {}

    def store(self, slot: int, anchor_position: int, blocks: dict[Outcome, DraftBlock]) -> None:
        """See :class:`OutcomeCache`."""
        super().store(slot, anchor_position, blocks)
        self.blocks[slot] = blocks


class Counter(TorchDispatchMode):
    """Bytes of all tensors that operations made, views and writes in place aside; temporaries inside them unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and add what it made."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        new = {_storage(t): t.untyped_storage().nbytes() for t in tree_leaves(made) if isinstance(t, torch.Tensor)}
        self.bytes += sum(size for storage, size in new.items() if storage not in given)
        return made


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Rounds:
    """An engine at one size, its slots filled with random tokens and states; rounds go on from there.

    Args:
        nets: loaded networks.
        calibration: how outcomes are scored, as served.
        dtype: of the states.
    """

    def __init__(self, nets: Networks, point: Point, calibration: Calibration | None, dtype: torch.dtype) -> None:
        self.nets, self.point, self.dtype = nets, point, dtype
        config = EngineConfig("", "", point.round, point.batch, point.context, window=point.window)
        self.engine = DraftEngine.from_networks(config, nets, calibration)
        self.engine.cache = self.cache = OpenCache()
        self._gen, self._step = torch.Generator().manual_seed(0), 0
        self._width = nets.num_taps * nets.layer_config.hidden_size
        self._start = max(point.context - SPAN, 1)
        self._send([self._first(slot) for slot in range(point.batch)])
        self._anchors = [self._start] * point.batch

    def _states(self, count: int) -> torch.Tensor:
        return torch.randn(count, self._width, generator=self._gen).to(self.dtype)

    def _tokens(self, count: int) -> torch.Tensor:
        ids = self.nets.target.head_token_ids
        return ids[torch.randint(len(ids), (count,), generator=self._gen)].int()

    def _first(self, slot: int) -> Verified:
        count = self._start
        return Verified(slot, 0, self._tokens(count + 1), 0, self._states(count), wants_draft=True, reset=True)

    def _send(self, requests: Sequence[Verified]) -> tuple[float, float, list[Origin]]:
        """Answer and work: seconds of each, and where the drafts came from."""
        self._step += 1
        batch = VerifiedBatch(self._step, tuple(requests))
        began = time.perf_counter()
        drafts = self.engine.answer(batch)
        answered = time.perf_counter()
        self.engine.work()
        ended = time.perf_counter()
        return answered - began, ended - answered, [draft.origin for draft in drafts.drafts]

    def _rewind(self) -> None:
        """Back to where the rounds began: positions that are sent again replace what was known."""
        token, states = self._tokens(1), self._states(1)
        at = self._start
        self._send([Verified(slot, at, token, at - 1, states, wants_draft=True) for slot in range(self.point.batch)])
        self._anchors = [at] * self.point.batch

    def _outcome(self, slot: int, hit: bool) -> Outcome:
        """The shortest that is cached, or one that is not.

        Raises:
            RuntimeError: nothing is cached.
        """
        cached = self.cache.blocks.get(slot, {})
        if not cached:
            raise RuntimeError(f"the round pre-drafted nothing for slot {slot}: there is no hit to measure")
        if hit:
            return min(cached)
        taken = {token for k, token in cached if k == 0}
        return Outcome(0, next(t for t in self.nets.target.head_token_ids.tolist() if t not in taken))

    def round(self, hit: bool) -> tuple[float, float]:
        """One round whose outcome is found in the cache or is not: seconds of answer and work."""
        if max(self._anchors) + 2 * self.point.round.block_size > self._start + SPAN:
            self._rewind()
        requests = []
        for slot, anchor in enumerate(self._anchors):
            k, token = self._outcome(slot, hit)
            tokens = torch.cat([self._tokens(k), torch.tensor([token], dtype=torch.int32)])
            states, count = self._states(k + 1), self.point.num_draft_tokens
            requests.append(Verified(slot, anchor + 1, tokens, anchor, states, k, count, wants_draft=True))
            self._anchors[slot] = anchor + k + 1
        answer, work, origins = self._send(requests)
        expected = Origin.HIT if hit else Origin.FALLBACK
        assert set(origins) == {expected}, (expected, origins)
        return answer, work

    def counts(self, hit: bool = False) -> dict[str, int]:
        """``flops`` of matrix products and ``bytes`` of new tensors in a round, answer and work together.

        A round goes before it, so that nothing is made for the first time.
        """
        self.round(hit)
        flops, made = FlopCounterMode(display=False), Counter()
        with made, flops:
            self.round(hit)
        return {"flops": flops.get_total_flops(), "bytes": made.bytes}
