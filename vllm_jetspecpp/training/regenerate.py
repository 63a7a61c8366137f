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
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file

from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.target_parts import load_target_config, resolve_folder


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


@dataclass(frozen=True)
class AnswerConfig:
    """How prompts are answered."""

    target: str
    prompts: Path
    out: Path
    limit: int | None = None
    """Only the first so many prompts."""
    shard: tuple[int, int] = (0, 1)
    """(i, n): every n-th prompt from the i-th on, for processes that know nothing of each other."""
    max_tokens: int = 256
    """Longest answer."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out."""
    temperature: float = 0.0
    """0 is greedy."""
    part_size: int = 256
    """Prompts answered together and written as one file; vLLM batches as many of them as its cache holds."""

    def parts(self) -> list[list[str]]:
        """Prompts of each file."""
        index, count = self.shard
        mine = read_prompts(self.prompts)[: self.limit][index::count]
        return [mine[first : first + self.part_size] for first in range(0, len(mine), self.part_size)]

    def path(self, part: int) -> Path:
        """The file of a part."""
        index, count = self.shard
        return self.out / f"shard-{index}of{count}-{part:05d}.safetensors"


def cache_options(hf_config: Any, num_tokens: int) -> dict[str, int]:
    """On a CPU, vLLM's cache as large as ``num_tokens`` need, or half of the free memory; on a GPU vLLM knows best."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    layer = LayerConfig.from_hf(hf_config)
    per_token = 2 * 4 * hf_config.num_hidden_layers * layer.num_kv_heads * layer.head_dim  # room for float32
    return {"kv_cache_memory_bytes": min(num_tokens * per_token, psutil.virtual_memory().available // 2)}


class Answerer:
    """A target in vLLM that answers parts; one in this process, or one in each of several Ray actors."""

    def __init__(self, config: AnswerConfig) -> None:
        from vllm import LLM, SamplingParams

        self.config, self.parts = config, config.parts()
        hf_config = load_target_config(resolve_folder(config.target))
        self._max_prompt = min(config.max_prompt_tokens, hf_config.max_position_embeddings - config.max_tokens)
        longest = self._max_prompt + config.max_tokens
        self._llm = LLM(
            config.target,
            max_model_len=longest,
            max_num_seqs=config.part_size,
            enforce_eager=True,
            seed=0,
            **cache_options(hf_config, longest * config.part_size),
        )
        self._params = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens, seed=0)

    def __call__(self, row: dict[str, int]) -> dict[str, int]:
        """Answer part ``row["part"]`` and write its file; how many prompts and new tokens it holds."""
        tokenizer = self._llm.get_tokenizer()
        chats = [[{"role": "user", "content": text}] for text in self.parts[row["part"]]]
        encoded = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
        fitting = [{"prompt_token_ids": ids} for ids in encoded if len(ids) <= self._max_prompt]
        results = self._llm.generate(fitting, self._params, use_tqdm=False)  # type: ignore[arg-type]
        sequences = [
            Sequence(torch.tensor([*ids, *r.outputs[0].token_ids], dtype=torch.int32), len(ids))
            for r in results
            if (ids := r.prompt_token_ids)
        ]
        _save(self.config.path(row["part"]), sequences)
        return {"prompts": len(sequences), "tokens": sum(len(s.tokens) - s.prompt_length for s in sequences)}


def regenerate(config: AnswerConfig, workers: int = 0, seconds: float = float("inf")) -> None:
    """Answer every part that has no file yet; a second run goes on after the last finished part.

    Args:
        workers: 0 answers in this process; else so many Ray actors share the parts through Ray Data, each with a GPU
            where the cluster has some. ``out`` must then be a folder that all nodes see.
        seconds: no further part starts after this time (in this process only).
    """
    config.out.mkdir(parents=True, exist_ok=True)
    todo = [{"part": part} for part in range(len(config.parts())) if not config.path(part).is_file()]
    print(f"{len(todo)} of {len(config.parts())} parts to answer", flush=True)
    if not todo:
        return
    start, prompts, made = time.monotonic(), 0, 0
    for number, counts in enumerate(_answers(config, todo, workers), 1):
        prompts, made = prompts + counts["prompts"], made + counts["tokens"]
        spent = time.monotonic() - start
        left = min((len(todo) - number) * spent / number, seconds - spent)
        print(
            f"{prompts} prompts, {made} tokens, {made / spent:.0f} tok/s, {max(left, 0) / 60:.1f} min left", flush=True
        )
        if spent > seconds:
            break


def _answers(config: AnswerConfig, todo: list[dict[str, int]], workers: int) -> Iterator[dict[str, int]]:
    if not workers:
        answerer = Answerer(config)
        yield from map(answerer, todo)
        return
    import ray

    ray.init(ignore_reinit_error=True, include_dashboard=False)
    gpus = ray.cluster_resources().get("GPU", 0)
    rows = ray.data.from_items(todo, override_num_blocks=len(todo)).map(
        Answerer,
        fn_constructor_args=(config,),
        concurrency=workers,
        **({"num_gpus": 1} if gpus else {"num_cpus": 1}),
    )
    yield from rows.iter_rows()
