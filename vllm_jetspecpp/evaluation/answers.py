"""The target's own answers to benchmark prompts, once for all methods: what drafts are measured along."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_jetspecpp.evaluation.datasets import Prompt
from vllm_jetspecpp.evaluation.repetition import RepetitionLoop, repetition_onset

TAIL = 64
"""Tokens generated beyond the counted ones, so that the last round ends as it would."""


@dataclass(frozen=True)
class Answer:
    """One turn of a conversation."""

    id: str
    tokens: list[int]
    """Prompt with the chat template and all turns before, then the answer and its tail."""
    prompt_length: int
    counted: int
    """Tokens of the answer, up to its end, a repetition loop or the limit."""


@dataclass(frozen=True)
class AnswerConfig:
    """How prompts are answered."""

    max_new_tokens: int = 2048
    temperature: float = 0.0
    """0 is greedy; otherwise plain sampling, no top-p or top-k."""
    seed: int = 0
    batch_size: int = 8


def count_tokens(answer: Sequence[int], max_new_tokens: int, eos_token_id: int | None) -> int:
    """Tokens of ``answer`` that count."""
    kept = list(answer[:max_new_tokens])
    if eos_token_id in kept:
        kept = kept[: kept.index(eos_token_id) + 1]
    onset = repetition_onset(kept)
    return len(kept) if onset is None else onset


class LoopsEnd:
    """A stopping criterion of the library: a row is done once a repetition loop and its tail are there."""

    def __init__(self, rows: int, start: int) -> None:
        self._start, self._loops = start, [RepetitionLoop() for _ in range(rows)]
        self._onsets: list[int | None] = [None] * rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each row of ``input_ids`` [rows, length] is done, [rows] bool."""
        length = input_ids.shape[1] - self._start
        for row, loop in enumerate(self._loops):
            if self._onsets[row] is None:
                self._onsets[row] = loop(input_ids[row, self._start :].tolist())
        done = [onset is not None and length >= onset + TAIL for onset in self._onsets]
        return torch.tensor(done, device=input_ids.device)


class Answerer:
    """A target that answers in batches, by the library's own ``generate``."""

    def __init__(self, model: Any, tokenizer: Any, max_length: int, eos_token_id: int | None) -> None:
        self.model, self.tokenizer, self.max_length, self.eos = model, tokenizer, max_length, eos_token_id

    def encode(self, turns: Sequence[str], replies: Sequence[str], room: int) -> list[int]:
        """Token ids of a conversation that awaits its next reply, cut to leave ``room`` tokens."""
        chat = [{"role": "user", "content": turns[0]}]
        for reply, turn in zip(replies, turns[1:], strict=False):
            chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": turn}]
        ids = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids[: self.max_length - room]

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], config: AnswerConfig) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        sampling = {"do_sample": True, "temperature": config.temperature, "top_k": 0, "top_p": 1.0}
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=config.max_new_tokens + TAIL,
            pad_token_id=0 if self.eos is None else self.eos,
            stopping_criteria=[LoopsEnd(len(prompts), longest)],
            **(sampling if config.temperature else {"do_sample": False}),
        )
        return out[:, longest:].tolist()

    def __call__(self, prompts: Sequence[Prompt], config: AnswerConfig) -> list[Answer]:
        """Answer every turn of every prompt."""
        torch.manual_seed(config.seed)
        answers: list[Answer] = []
        replies: list[list[str]] = [[] for _ in prompts]
        for turn in range(max(len(p.turns) for p in prompts)):
            members = [i for i, p in enumerate(prompts) if len(p.turns) > turn]
            for first in range(0, len(members), config.batch_size):
                group = members[first : first + config.batch_size]
                room = config.max_new_tokens + 2 * TAIL
                encoded = [self.encode(prompts[i].turns[: turn + 1], replies[i], room) for i in group]
                for i, ids, answer in zip(group, encoded, self._generate(encoded, config), strict=True):
                    if self.eos in answer:
                        answer = answer[: answer.index(self.eos) + 1]
                    counted = count_tokens(answer, config.max_new_tokens, self.eos)
                    kept = answer[: counted + TAIL]
                    replies[i].append(self.tokenizer.decode(answer[:counted], skip_special_tokens=True))
                    answers.append(Answer(f"{prompts[i].id}/{turn}", [*ids, *kept], len(ids), counted))
        return answers


def stored_answers(path: Path, make: Callable[[], list[Answer]]) -> list[Answer]:
    """Answers from a JSON file, made and written where there is none."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps([asdict(answer) for answer in make()]))
        partial.rename(path)
    return [Answer(**row) for row in json.loads(path.read_text())]
