"""Answers of the target to training prompts, as token ids: what the draft model learns to foresee.

Output: ``<out>/shard-<i>of<n>-<part>.safetensors``, each with ``tokens`` [total] int32 (prompt and answer of
every sequence, one after the other), ``lengths`` [num_sequences] int32 and ``prompt_lengths`` [num_sequences] int32.
A part is written as soon as its prompts are answered, and a second run goes on after the last part.
"""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Sequence:
    """Token ids of one prompt (chat template applied) and the target's answer."""

    tokens: torch.Tensor  # [length] int32
    prompt_length: int


def read_prompts(path: Path) -> list[str]:
    """The ``prompt`` of every line of a JSON lines file, gzip or plain."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


def read_sequences(folder: Path, limit: int | None = None) -> Iterator[Sequence]:
    """Every sequence below ``folder``, or the first ``limit``, in the order of the file names.

    Raises:
        FileNotFoundError: the folder holds no shard.
    """
    files = sorted(folder.glob("shard-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no shard-*.safetensors; run `jetspecpp regenerate` first")
    yield from itertools.islice((sequence for file in files for sequence in _load(file)), limit)


def _load(file: Path) -> Iterator[Sequence]:
    data = load_file(file)
    tokens = data["tokens"].split(data["lengths"].tolist())
    for ids, prompt_length in zip(tokens, data["prompt_lengths"].tolist(), strict=True):
        yield Sequence(ids, prompt_length)


def _save(path: Path, sequences: list[Sequence]) -> None:
    partial = path.with_suffix(".partial")
    save_file(
        {
            "tokens": torch.cat([s.tokens for s in sequences]),
            "lengths": torch.tensor([len(s.tokens) for s in sequences], dtype=torch.int32),
            "prompt_lengths": torch.tensor([s.prompt_length for s in sequences], dtype=torch.int32),
        },
        partial,
    )
    partial.rename(path)


def regenerate(
    target: str,
    prompts: Path,
    out: Path,
    *,
    limit: int,
    shard: tuple[int, int] = (0, 1),
    max_tokens: int = 256,
    temperature: float = 0.0,
    part_size: int = 64,
    seconds: float = float("inf"),
) -> None:
    """Answer ``prompts[:limit]``, every n-th from the i-th for ``shard = (i, n)``, until done or out of time.

    Args:
        max_tokens: longest answer, in tokens.
        part_size: prompts answered together and written as one file.
        seconds: no further part starts after this time.
    """
    from vllm import LLM, SamplingParams

    index, count = shard
    mine = read_prompts(prompts)[:limit][index::count]
    out.mkdir(parents=True, exist_ok=True)
    llm = LLM(target, max_model_len=1024 + max_tokens, max_num_seqs=part_size, enforce_eager=True)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    start, answered, made = time.monotonic(), 0, 0
    for part, first in enumerate(range(0, len(mine), part_size)):
        path = out / f"shard-{index}of{count}-{part:05d}.safetensors"
        if path.is_file():
            continue
        if time.monotonic() - start > seconds:
            break
        chats = [[{"role": "user", "content": text}] for text in mine[first : first + part_size]]
        results = llm.chat(chats, params, use_tqdm=False)  # type: ignore[arg-type]
        sequences = [
            Sequence(
                torch.tensor([*r.prompt_token_ids, *r.outputs[0].token_ids], dtype=torch.int32), len(r.prompt_token_ids)
            )
            for r in results
            if r.prompt_token_ids
        ]
        _save(path, sequences)
        answered += len(sequences)
        made += sum(len(s.tokens) - s.prompt_length for s in sequences)
        spent = time.monotonic() - start
        left = min((len(mine) - first - part_size) * spent / answered, seconds - spent)
        print(
            f"{answered} prompts, {made} tokens, {made / spent:.0f} tok/s, {max(left, 0) / 60:.1f} min left", flush=True
        )
