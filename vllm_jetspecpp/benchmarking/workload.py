"""The prompts of a serving benchmark, as token ids of the target's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_jetspecpp.evaluation.datasets import benchmark
from vllm_jetspecpp.models.json_files import read_json

BENCHES = ("gsm8k", "humaneval", "mtbench")


@dataclass(frozen=True)
class Item:
    """One prompt."""

    id: str
    text: str
    """The user's message; of MT-Bench's two the first."""
    token_ids: list[int]


@dataclass(frozen=True)
class Workload:
    """Prompts, benchmarks taking turns, and what ends an answer."""

    items: list[Item]
    stop_token_ids: list[int]
    max_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest answer."""
        return max(len(item.token_ids) for item in self.items) + self.max_tokens

    def prompts(self, indices: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Index and token ids; indices beyond the end begin anew."""
        count = len(self.items)
        return [(index % count, self.items[index % count].token_ids) for index in indices]


def end_tokens(target: Path, tokenizer: Any) -> list[int]:
    """What ends an answer: the tokenizer's and the generation config's."""
    ends = {tokenizer.eos_token_id} - {None}
    path = target / "generation_config.json"
    said = read_json(path).get("eos_token_id") if path.is_file() else None
    return sorted(ends | set(said if isinstance(said, list) else [] if said is None else [said]))


def load_workload(target: Path, per_bench: int, max_tokens: int, benches: Sequence[str] = BENCHES) -> Workload:
    """The first ``per_bench`` prompts of every benchmark.

    Raises:
        FileNotFoundError: there is no target.
        ValueError: an unknown benchmark.
    """
    from transformers import AutoTokenizer

    if not (target / "config.json").is_file():
        raise FileNotFoundError(f"no target in {target}; `jetspecpp prepare-demo` writes the demo's")
    tokenizer = AutoTokenizer.from_pretrained(target)
    columns = [benchmark(bench, per_bench) for bench in benches]
    items = []
    for row in zip(*columns, strict=False):
        for prompt in row:
            message = [{"role": "user", "content": prompt.turns[0]}]
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
            items.append(Item(prompt.id, prompt.turns[0], list(ids)))
    return Workload(items, end_tokens(target, tokenizer), max_tokens)
