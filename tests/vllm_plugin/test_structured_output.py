"""Structured output with drafts: valid, plain vLLM's when greedy, and blocks that the grammar cuts count as cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engines import SwitchableEngine
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_text_model import SIZES, make_tiny_text_model, tokenize
from tests.vllm_plugin.conftest import running_engine

BLOCK = 7
MAX_TOKENS = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,8}$"},
        "size": {"enum": ["small", "medium", "large"]},
        "known": {"type": "boolean"},
        "digits": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "size", "known", "digits"],
    "additionalProperties": False,
}
REGEX = r"(one|two|three) (apples|pears), [0-9]{4}-[0-9]{2}"
GRAMMAR = """root ::= "SELECT " column " FROM " table
column ::= "name" | "price" | "colour"
table ::= "fruits" | "vegetables"
"""
CHOICES = ["a red apple and a green pear", "a red apple and a yellow plum", "nothing at all"]


def is_json(text: str) -> bool:
    value = json.loads(text)
    assert value.keys() == SCHEMA["properties"].keys()
    assert re.fullmatch("[a-z]{3,8}", value["name"]) and value["size"] in ("small", "medium", "large")
    return isinstance(value["known"], bool) and all(0 <= digit <= 9 for digit in value["digits"])


GUIDES: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, is_json),
    "regex": ({"regex": REGEX}, re.compile(REGEX).fullmatch),
    "grammar": ({"grammar": GRAMMAR}, re.compile("SELECT (name|price|colour) FROM (fruits|vegetables)").fullmatch),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
}
"""What is asked for, and whether a text fits."""
PROMPTS = ("Tell me", "What is it? It is")


def parameters(guide: str, **options: Any) -> SamplingParams:
    asked = StructuredOutputsParams(**GUIDES[guide][0])
    return SamplingParams(**({"temperature": 0.0, "max_tokens": MAX_TOKENS, "structured_outputs": asked} | options))


def ask(llm: Any, prompts: list[list[int]], params: Any) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


class Plain:
    """What plain vLLM answers, greedily."""

    def __init__(self, model: Path) -> None:
        self.prompts = [tokenize(model, text) for text in PROMPTS]
        with running_engine(model, **OPTIONS) as llm:
            self.unguided = ask(llm, self.prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
            self.guided = {guide: ask(llm, self.prompts, parameters(guide)) for guide in GUIDES}

    def known(self, outputs: list[Any]) -> list[list[int]]:
        return [p + list(o.token_ids) for p, o in zip(self.prompts, outputs, strict=True)]


OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_text_model(tmp_path_factory.mktemp("text_model"))


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    return Plain(model)


@pytest.fixture(scope="module", params=["known", "real"])
def drafts(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(drafts: str, model: Path, plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp(drafts)
    options: dict[str, Any] = {"method": "jetspecpp", "transport": "local", "num_speculative_tokens": BLOCK}
    if drafts == "real":
        checkpoint = make_tiny_checkpoint(model, folder, taps=(0, 1), draft_vocab_size=512, copy_adapter=True)
        options |= {"model": str(checkpoint.folder), "num_outcomes": 1}
    else:
        (folder / "nothing.json").write_text("[]")
        options |= {"model": str(folder / "nothing.json"), "draft_engine": "tests.engines.SwitchableEngine"}
    with pytest.MonkeyPatch.context() as patch, running_engine(model, speculative_config=options, **OPTIONS) as llm:
        patch.setattr(SwitchableEngine, "vocab_size", SIZES["vocab_size"])
        yield llm


def take_stats(llm: Any) -> dict[str, Any]:
    return llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})[0]


@pytest.fixture
def draft_known(drafts: str, llm: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[list[int]], str], None]:
    def draft(known: list[list[int]], mode: str = "echo") -> None:
        take_stats(llm)
        if drafts == "known":
            monkeypatch.setattr(SwitchableEngine, "mode", mode)
            monkeypatch.setattr(SwitchableEngine.last, "sequences", known)

    return draft


def check(outputs: list[Any], guide: str, stats: dict[str, Any]) -> None:
    for output in outputs:
        assert output.finish_reason == "stop" and GUIDES[guide][1](output.text), output.text
    check_counts(stats, sum(len(output.token_ids) for output in outputs))


def check_counts(stats: dict[str, Any], num_tokens: int) -> None:
    """The last block of a request may hold tokens beyond its end."""
    assert stats["invalid_blocks"] == 0
    assert num_tokens <= sum(stats["committed"].values()) <= num_tokens + BLOCK * stats["rounds"]
    assert sum(stats["accepted_lengths"]) == stats["rounds"] == sum(stats["verified_by_origin"].values())


Draft = Callable[..., None]


@pytest.mark.parametrize("guide", GUIDES)
def test_greedy(guide: str, llm: Any, drafts: str, plain: Plain, draft_known: Draft) -> None:
    for mode in ("real",) if drafts == "real" else ("echo", "mixed"):
        draft_known(plain.known(plain.guided[guide]), mode)
        outputs = ask(llm, plain.prompts, parameters(guide))
        stats = take_stats(llm)
        check(outputs, guide, stats)
        assert [(o.token_ids, o.text) for o in outputs] == [(o.token_ids, o.text) for o in plain.guided[guide]]
        if mode == "echo":
            assert stats["accepted"] == stats["drafted"] > 0


def test_blocks_that_the_grammar_cuts(llm: Any, drafts: str, plain: Plain, draft_known: Draft) -> None:
    """Drafts that hold two right tokens and then what no grammar allows are verified as blocks of two."""
    known = plain.known(plain.guided["regex"])
    draft_known(known)
    if drafts == "known":
        SwitchableEngine.last.sequences = [
            sequence[: len(prompt) + 3] + [7] * BLOCK for sequence, prompt in zip(known, plain.prompts, strict=True)
        ]
    outputs = ask(llm, plain.prompts, parameters("regex"))
    stats = take_stats(llm)
    check(outputs, "regex", stats)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain.guided["regex"]]
    blocks = sum(stats["blocks_by_origin"].values())
    if drafts == "known":
        assert blocks == stats["rounds"] == len(PROMPTS)
        assert stats["accepted"] == stats["drafted"] == 2 * len(PROMPTS)
    else:
        assert stats["drafted"] < BLOCK * blocks


@pytest.mark.parametrize("guide", GUIDES)
def test_sampled(guide: str, llm: Any, plain: Plain, draft_known: Draft) -> None:
    """At temperature 1 the output fits what was asked for, whatever is drafted."""
    draft_known(plain.known(plain.guided[guide]))
    outputs = ask(llm, plain.prompts * 2, parameters(guide, temperature=1.0, seed=1, top_p=0.9))
    check(outputs, guide, take_stats(llm))


def test_all_kinds_and_none_in_one_batch(llm: Any, plain: Plain, draft_known: Draft) -> None:
    answers = {**plain.guided, "": plain.unguided}
    draft_known([sequence for outputs in answers.values() for sequence in plain.known(outputs)], "mixed")
    params = {guide: parameters(guide) for guide in GUIDES}
    params[""] = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = ask(llm, plain.prompts * len(answers), [params[guide] for guide in answers for _ in PROMPTS])
    assert [o.token_ids for o in outputs] == [o.token_ids for expected in answers.values() for o in expected]
    check_counts(take_stats(llm), sum(len(o.token_ids) for o in outputs))
