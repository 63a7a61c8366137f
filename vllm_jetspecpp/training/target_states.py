"""The target's states over training sequences, computed once and kept on disk as flat memory-mapped tensors."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm_jetspecpp.training.regenerate import Sequence, read_sequences


@dataclass(frozen=True)
class StateCache:
    """All sequences one after the other; sequence s covers rows ``offsets[s]:offsets[s + 1]``."""

    tokens: Tensor  # [num_rows] int32
    offsets: Tensor  # [num_sequences + 1] int64
    prompt_lengths: Tensor  # [num_sequences] int64
    states: Tensor  # [num_rows, num_taps * hidden] bfloat16, memory-mapped
    final: Tensor  # [num_rows, hidden] bfloat16, memory-mapped: after the final norm, ready for the LM head

    @property
    def num_sequences(self) -> int:
        """How many sequences there are."""
        return len(self.prompt_lengths)


def _map(path: Path, rows: int, width: int, create: bool) -> Tensor:
    return torch.from_file(str(path), shared=create, size=rows * width, dtype=torch.bfloat16).view(rows, width)


def open_cache(folder: Path) -> StateCache:
    """Open what :func:`compute_states` wrote."""
    meta = json.loads((folder / "meta.json").read_text())
    flat = torch.load(folder / "tokens.pt", weights_only=True)
    rows = len(flat["tokens"])
    return StateCache(
        **flat,
        states=_map(folder / "states.bin", rows, meta["state_width"], False),
        final=_map(folder / "final.bin", rows, meta["hidden_size"], False),
    )


@torch.no_grad()
def compute_states(
    target: str,
    answers: Path,
    out: Path,
    taps: list[int],
    limit: int | None = None,
    max_length: int = 640,
    batch: int = 8,
) -> None:
    """Run the target (Hugging Face, bfloat16) over every sequence below ``answers`` and keep the tapped states.

    Args:
        taps: tapped layers, 0-based.
        limit: use the first so many sequences.
        max_length: longer sequences are cut.
        batch: sequences per forward.
    """
    from transformers import AutoModelForCausalLM

    if (out / "meta.json").is_file():
        return
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).model.eval()
    sequences = [
        Sequence(s.tokens[:max_length], s.prompt_length) for s in itertools.islice(read_sequences(answers), limit)
    ]
    sequences = [s for s in sequences if len(s.tokens) - s.prompt_length >= 4]
    lengths = torch.tensor([len(s.tokens) for s in sequences])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows, hidden = int(offsets[-1]), model.config.hidden_size
    out.mkdir(parents=True, exist_ok=True)
    flat = {
        "tokens": torch.cat([s.tokens for s in sequences]),
        "offsets": offsets,
        "prompt_lengths": torch.tensor([s.prompt_length for s in sequences]),
    }
    torch.save(flat, out / "tokens.pt")
    states = _map(out / "states.bin", rows, len(taps) * hidden, True)
    final = _map(out / "final.bin", rows, hidden, True)
    order = lengths.argsort().tolist()  # like lengths together: little padding
    start, done = time.monotonic(), 0
    for first in range(0, len(order), batch):
        members = order[first : first + batch]
        padded = torch.nn.utils.rnn.pad_sequence([sequences[s].tokens.long() for s in members], batch_first=True)
        hidden_states = model(padded, output_hidden_states=True).hidden_states
        for row, s in enumerate(members):  # padding stands at the end, causal attention never sees it
            span, length = slice(int(offsets[s]), int(offsets[s + 1])), int(lengths[s])
            states[span] = torch.cat([hidden_states[t + 1][row, :length] for t in taps], dim=-1)
            final[span] = hidden_states[-1][row, :length]
            done += length
        if first // batch % 20 == 0:
            rate = done / (time.monotonic() - start)
            print(
                f"states: {done}/{rows} tokens, {rate:.0f} tok/s, {(rows - done) / rate / 60:.1f} min left", flush=True
            )
    (out / "meta.json").write_text(json.dumps({"state_width": len(taps) * hidden, "hidden_size": hidden, "taps": taps}))
