"""The target's states over training sequences: computed once and memory-mapped, or anew for every batch.

A cache folder holds ``tokens.safetensors``, ``states.bin`` and ``final.bin`` (flat bfloat16), one ``done-<i>of<n>`` a
process that computes, and, once complete, ``meta.json``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_jetspecpp.models.weight_files import load_tensors
from vllm_jetspecpp.training.regenerate import Sequence


@dataclass(frozen=True)
class Sequences:
    """All sequences one after the other; sequence s covers rows ``offsets[s]:offsets[s + 1]``."""

    tokens: Tensor  # [num_rows] int32
    offsets: Tensor  # [num_sequences + 1] int64
    prompt_lengths: Tensor  # [num_sequences] int64

    @classmethod
    def join(cls, sequences: Iterable[Sequence], max_length: int) -> Sequences:
        """Lay ``sequences`` end to end, each cut to ``max_length``; answers under four tokens are left out."""
        cut = [Sequence(s.tokens[:max_length], s.prompt_length) for s in sequences]
        kept = [s for s in cut if len(s.tokens) - s.prompt_length >= 4]
        lengths = torch.tensor([len(s.tokens) for s in kept])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return cls(torch.cat([s.tokens for s in kept]), offsets, torch.tensor([s.prompt_length for s in kept]))

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def padded_rows(self, members: list[int]) -> Tensor:
        """[N, L] int64: rows of every member, its last one repeated up to the longest."""
        starts = self.offsets[members]
        lengths = self.offsets[[m + 1 for m in members]] - starts
        return starts[:, None] + torch.minimum(torch.arange(int(lengths.max())), (lengths - 1)[:, None])


class StateSource(Protocol):
    """Where a batch's states come from."""

    @property
    def sequences(self) -> Sequences:
        """The training sequences."""

    def read(self, members: list[int]) -> tuple[Tensor, Tensor]:
        """Tapped states [N, L, num_taps * hidden] and, ready for the LM head, final states [N, L, hidden]."""


@dataclass(frozen=True)
class StateCache:
    """States on disk."""

    sequences: Sequences
    states: Tensor  # [num_rows, num_taps * hidden] bfloat16, memory-mapped
    final: Tensor  # [num_rows, hidden] bfloat16, memory-mapped: after the final norm

    def read(self, members: list[int]) -> tuple[Tensor, Tensor]:
        """See :class:`StateSource`."""
        rows = self.sequences.padded_rows(members)
        return self.states[rows], self.final[rows]


class TargetStates:
    """States computed by the target itself: for a cache, for training without one, and for blocks of drafts.

    Args:
        target: folder of a Hugging Face causal LM.
        taps: tapped layers, 0-based.
    """

    def __init__(self, target: str, taps: list[int], dtype: torch.dtype = torch.bfloat16, device: Any = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        # Eager attention on a GPU would hold every score; "sdpa" takes our masks as they are.
        model = AutoModelForCausalLM.from_pretrained(
            target, dtype=dtype, attn_implementation="sdpa", use_safetensors=True
        )
        self._model, self._taps = model.model.to(device).eval(), taps
        self.device = torch.device(device)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor]:
        """Tapped and final states of ``tokens`` [N, L]; what pads a sequence stands at its end, where none looks."""
        hidden = self._model(tokens.to(self.device), output_hidden_states=True, **kwargs).hidden_states
        return torch.cat([hidden[t + 1] for t in self._taps], dim=-1), hidden[-1]

    def over_blocks(self, sequence: Tensor, blocks: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """States of ``blocks`` that stand where ``sequence`` went on otherwise: one forward over both.

        Args:
            sequence: [N, L].
            blocks: [N, A * T], A blocks side by side.
            positions: [N, A * T], absolute.
            mask: [N, A * T, L + A * T] bool, what each block position sees.
        """
        n, length = sequence.shape
        causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril().expand(n, -1, -1)
        none = mask.new_zeros(n, length, blocks.shape[1])
        whole = torch.cat([torch.cat([causal, none], dim=-1), mask], dim=1).unsqueeze(1).to(self.device)
        dtype = self._model.dtype
        bias = torch.zeros(whole.shape, dtype=dtype, device=self.device).masked_fill(~whole, torch.finfo(dtype).min)
        own = torch.arange(length, device=positions.device).expand(n, -1)
        ids = torch.cat([own, positions], dim=1).to(self.device)
        states, final = self(torch.cat([sequence, blocks], dim=1), attention_mask=bias, position_ids=ids)
        return states[:, length:], final[:, length:]


@dataclass(frozen=True)
class LiveStates:
    """States computed for every batch: no disk, one more forward of the target a step."""

    sequences: Sequences
    target: TargetStates

    def read(self, members: list[int]) -> tuple[Tensor, Tensor]:
        """See :class:`StateSource`."""
        rows = self.sequences.padded_rows(members)
        states, final = self.target(self.sequences.tokens[rows].long())
        return states.cpu(), final.cpu()


def _map(path: Path, rows: int, width: int, create: bool) -> Tensor:
    return torch.from_file(str(path), shared=create, size=rows * width, dtype=torch.bfloat16).view(rows, width)


def open_sequences(folder: Path) -> Sequences:
    """The sequences of a cache folder, whether or not their states are there."""
    return Sequences(**load_tensors(folder / "tokens.safetensors"))


def open_cache(folder: Path) -> StateCache:
    """Open what :func:`compute_states` wrote.

    Raises:
        FileNotFoundError: the folder holds no finished cache.
    """
    if not (folder / "meta.json").is_file():
        raise FileNotFoundError(f"{folder} holds no finished states; run `jetspecpp train states` (again) first")
    meta = json.loads((folder / "meta.json").read_text())
    sequences = open_sequences(folder)
    rows = len(sequences.tokens)
    return StateCache(
        sequences,
        states=_map(folder / "states.bin", rows, meta["state_width"], False),
        final=_map(folder / "final.bin", rows, meta["hidden_size"], False),
    )


def prepare_cache(sequences: Sequences, out: Path) -> None:
    """Lay the sequences of a cache down; a second call must bring the same ones.

    Raises:
        ValueError: the folder was begun with other sequences.
    """
    out.mkdir(parents=True, exist_ok=True)
    if (out / "tokens.safetensors").is_file():
        if not torch.equal(open_sequences(out).tokens, sequences.tokens):
            raise ValueError(f"{out} was begun with other answers; remove it to start anew")
        return
    partial = out / "tokens.partial"
    save_file(vars(sequences), partial)
    partial.rename(out / "tokens.safetensors")


def _batches(sequences: Sequences, batch: int, shard: tuple[int, int]) -> Iterator[list[int]]:
    """Every n-th batch of sequences of like length: little padding."""
    order = sequences.offsets.diff().argsort(descending=True, stable=True).tolist()
    index, count = shard
    for first in range(index * batch, len(order), count * batch):
        yield order[first : first + batch]


def compute_states(
    target: str, out: Path, taps: list[int], *, shard: tuple[int, int] = (0, 1), batch: int = 8, device: str = "cpu"
) -> None:
    """Fill a cache that :func:`prepare_cache` began; a second run goes on where the first stopped.

    Args:
        taps: tapped layers, 0-based.
        shard: (i, n): this process does every n-th batch from the i-th on.
        batch: sequences per forward.
    """
    if (out / "meta.json").is_file():
        return
    sequences, model = open_sequences(out), TargetStates(target, taps, device=device)
    rows, hidden = len(sequences.tokens), model._model.config.hidden_size
    states = _map(out / "states.bin", rows, len(taps) * hidden, True)
    final = _map(out / "final.bin", rows, hidden, True)
    index, count = shard
    mark = out / f"done-{index}of{count}"
    finished = int(mark.read_text()) if mark.is_file() else 0
    lengths, todo = sequences.offsets.diff(), list(_batches(sequences, batch, shard))
    left = sum(int(lengths[members].sum()) for members in todo[finished:])
    start, done = time.monotonic(), 0
    for number, members in enumerate(todo[finished:], finished + 1):
        tapped, last = model(sequences.tokens[sequences.padded_rows(members)].long())
        for row, s in enumerate(members):
            span, length = slice(int(sequences.offsets[s]), int(sequences.offsets[s + 1])), int(lengths[s])
            states[span], final[span] = tapped[row, :length], last[row, :length]
            done += length
        if number % 20 == 0 or number == len(todo):
            mark.write_text(str(number))
            rate = done / (time.monotonic() - start)
            print(
                f"states: {done}/{left} tokens, {rate:.0f} tok/s, {(left - done) / rate / 60:.1f} min left", flush=True
            )
    mark.write_text(f"{len(todo)}")
    (out / f"complete-{index}of{count}").touch()
    if all((out / f"complete-{i}of{count}").is_file() for i in range(count)):
        meta = {"state_width": len(taps) * hidden, "hidden_size": hidden, "taps": taps}
        (out / "meta.json").write_text(json.dumps(meta))
