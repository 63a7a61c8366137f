"""What a request may ask for gives what plain vLLM gives, after right, wrong and real drafts; greedy and in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams, RepetitionDetectionParams

from tests.engines import SwitchableEngine
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_text_model import SIZES, make_tiny_text_model, tokenize
from tests.vllm_plugin.conftest import running_engine

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": 64,
    "max_logprobs": -1,
}
TEXTS = ("The cat sat", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28")
"""The second one is 85 tokens: its prefill takes two steps."""
MAX_TOKENS = 24
BLOCK = 7
TOLERANCE = 1e-4
"""Of log-probabilities."""
EOS = SIZES["eos_token_id"]
Tokens = list[list[int]]


class Base:
    """What the target says to each prompt unasked."""

    def __init__(self, outputs: list[Any], tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens = [list(output.outputs[0].token_ids) for output in outputs]
        self.texts = [output.outputs[0].text for output in outputs]

    def stop_at(self, index: int) -> int:
        """The first prompt's token there; not one that came before."""
        token = self.tokens[0][index]
        assert token not in self.tokens[0][:index]
        return token

    def word(self, prompt: int, num_tokens: int) -> str:
        """The first text of that many tokens, after some others, that reads as just these tokens."""
        tokens = self.tokens[prompt]
        runs = (tokens[i : i + num_tokens] for i in range(3, len(tokens)))
        words = (self.tokenizer.decode(run) for run in runs if self.tokenizer.decode(run).startswith(" "))
        return next(word for word in words if self._follows(word, tokens))

    def _follows(self, word: str, tokens: list[int]) -> bool:
        ids = self.tokenizer.encode(word)
        return any(tokens[i : i + len(ids)] == ids for i in range(3, len(tokens)))


CASES: dict[str, Callable[[Base], dict[str, Any]]] = {
    "nothing": lambda base: {},
    "one_token": lambda base: {"max_tokens": 1},
    "presence_penalty": lambda base: {"presence_penalty": 1.5},
    "frequency_penalty": lambda base: {"frequency_penalty": -1.2},
    "repetition_penalty": lambda base: {"repetition_penalty": 1.4},
    "all_penalties": lambda base: {"presence_penalty": -1.0, "frequency_penalty": 0.7, "repetition_penalty": 0.8},
    "bad_words": lambda base: {"bad_words": [base.word(0, 1), base.word(1, 2)]},
    "allowed_token_ids": lambda base: {"allowed_token_ids": [*range(7, 49000, 10), *base.tokens[0][:3]]},
    "stop_string": lambda base: {"stop": [base.texts[0][50:59], base.texts[1][31:38]]},
    "stop_string_included": lambda base: {
        "stop": [base.texts[0][50:59], base.texts[1][31:38]],
        "include_stop_str_in_output": True,
    },
    "stop_token_ids": lambda base: {"stop_token_ids": [base.stop_at(4), base.tokens[1][10]]},
    # A block from token 1 on has 7 drafts and then token 8: the length is less than min_tokens before it only.
    "min_tokens_inside_a_block": lambda base: {"min_tokens": 5, "stop_token_ids": [base.stop_at(8)]},
    "min_tokens_after_a_block": lambda base: {"min_tokens": 9, "stop_token_ids": [base.stop_at(4), base.stop_at(9)]},
    "min_tokens_and_stop_string": lambda base: {
        "min_tokens": 9,
        "stop": [base.texts[0][10:14], base.texts[0][125:131]],
    },
    # Two allowed tokens: the end comes soon.
    "end_of_text": lambda base: {"allowed_token_ids": [EOS, base.tokens[0][0], base.tokens[1][0]]},
    "ignore_eos": lambda base: {"allowed_token_ids": [EOS, base.tokens[0][0], base.tokens[1][0]], "ignore_eos": True},
    "min_tokens_and_end_of_text": lambda base: {
        "allowed_token_ids": [EOS, base.tokens[0][0], base.tokens[1][0]],
        "min_tokens": 9,
    },
    "logprobs": lambda base: {"logprobs": 5},
    "logprobs_of_committed_tokens": lambda base: {"logprobs": 0},
    "logprobs_of_all_tokens": lambda base: {"logprobs": -1, "max_tokens": 3},
    "logprobs_with_penalties": lambda base: {"logprobs": 2, "repetition_penalty": 1.4, "bad_words": [" the"]},
    "flat_logprobs": lambda base: {"logprobs": 2, "flat_logprobs": True},
    "logprobs_of_named_tokens": lambda base: {"logprob_token_ids": [5, base.tokens[0][3], 49151]},
    "logprobs_of_named_tokens_and_their_number": lambda base: {"logprob_token_ids": [5, 9], "logprobs": 2},
    "prompt_logprobs": lambda base: {"prompt_logprobs": 3, "logprobs": 1},
    "repetition_detection": lambda base: {
        "allowed_token_ids": [base.tokens[0][0], base.tokens[1][0]],
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_count=4),
    },
    # Sampled from one token: vLLM allows several outputs at temperature 0 to nobody.
    "several_outputs": lambda base: {"n": 3, "temperature": 1.0, "top_k": 1},
    "without_text": lambda base: {"detokenize": False},
    "special_tokens_kept": lambda base: {
        "allowed_token_ids": [*range(17), base.tokens[0][0]],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    },
}
TOGETHER = [name for name in CASES if "named_tokens" not in name and "all_tokens" not in name]
"""Plain vLLM leaves out a request's log-probabilities where another one of its batch names tokens; all takes long."""


def parameters(case: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": MAX_TOKENS} | case))


def ask(llm: Any, prompts: Tokens, params: Any) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


class Plain:
    """Every case with what plain vLLM answers."""

    def __init__(self, model: Path) -> None:
        self.prompts = [tokenize(model, text) for text in TEXTS]
        with running_engine(model, **OPTIONS) as llm:
            base = Base(ask(llm, self.prompts, parameters({})), llm.get_tokenizer())
            self.params = {name: parameters(case(base)) for name, case in CASES.items()}
            self.outputs = {name: ask(llm, self.prompts, params) for name, params in self.params.items()}
            self.beams = search(llm, self.prompts)

    def known(self, *names: str) -> Tokens:
        """Prompts with their continuations, for an engine that drafts these."""
        return [
            prompt + list(completion.token_ids)
            for name in names
            for prompt, output in zip(self.prompts, self.outputs[name], strict=True)
            for completion in output.outputs
        ]


def search(llm: Any, prompts: Tokens) -> list[list[tuple[list[int], str]]]:
    outputs = llm.beam_search(
        [{"prompt_token_ids": prompt} for prompt in prompts], BeamSearchParams(beam_width=3, max_tokens=6)
    )
    return [[(beam.tokens, beam.text) for beam in output.sequences] for output in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_text_model(tmp_path_factory.mktemp("text_model"))


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    return Plain(model)


class Drafting:
    """An engine with the method on, and the kinds of drafts it can be given."""

    def __init__(self, llm: Any, modes: tuple[str, ...]) -> None:
        self.llm = llm
        self.modes = modes

    def runs(self, known: Tokens, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, str]]:
        """The engine, set to each kind of drafts in turn, with its counts at 0."""
        for mode in self.modes:
            if mode != "real":
                monkeypatch.setattr(SwitchableEngine, "mode", mode)
                monkeypatch.setattr(SwitchableEngine.last, "sequences", known)
            self.stats(reset=True)
            yield self.llm, mode

    def stats(self, reset: bool = False) -> dict[str, Any]:
        return self.llm.collective_rpc("jetspecpp_stats", kwargs={"reset": reset})[0]


@pytest.fixture(scope="module", params=["known", "real"])
def drafting(
    request: pytest.FixtureRequest, model: Path, plain: Plain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drafting]:
    folder = tmp_path_factory.mktemp(request.param)
    options: dict[str, Any] = {"method": "jetspecpp", "transport": "local", "num_speculative_tokens": BLOCK}
    if request.param == "real":
        checkpoint = make_tiny_checkpoint(model, folder, taps=(0, 1), draft_vocab_size=512, copy_adapter=True)
        options |= {"model": str(checkpoint.folder), "num_outcomes": 1}
        modes: tuple[str, ...] = ("real",)
    else:
        (folder / "nothing.json").write_text("[]")
        options |= {"model": str(folder / "nothing.json"), "draft_engine": "tests.engines.SwitchableEngine"}
        modes = ("echo", "mixed")
    with pytest.MonkeyPatch.context() as patch, running_engine(model, speculative_config=options, **OPTIONS) as llm:
        patch.setattr(SwitchableEngine, "vocab_size", SIZES["vocab_size"])
        yield Drafting(llm, modes)


def check_equal(actual: list[Any], expected: list[Any]) -> None:
    for output, right in zip(actual, expected, strict=True):
        check_logprobs(output.prompt_logprobs, right.prompt_logprobs)
        for completion, wanted in zip(output.outputs, right.outputs, strict=True):
            assert list(completion.token_ids) == list(wanted.token_ids)
            assert completion.text == wanted.text
            assert (completion.finish_reason, completion.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
            check_logprobs(completion.logprobs, wanted.logprobs)
            assert completion.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=MAX_TOKENS * TOLERANCE)


def check_logprobs(actual: Any, expected: Any) -> None:
    """The same tokens with the same values, ranks and texts at each position."""
    assert (actual is None) == (expected is None)
    for here, there in zip(actual or (), expected or (), strict=True):
        if there is None:  # the first token of a prompt
            assert here is None
            continue
        assert here.keys() == there.keys()
        assert {t: e.logprob for t, e in here.items()} == pytest.approx(
            {t: e.logprob for t, e in there.items()}, abs=TOLERANCE
        )
        assert [(e.rank, e.decoded_token) for e in here.values()] == [(e.rank, e.decoded_token) for e in there.values()]


def test_the_cases_differ(plain: Plain) -> None:
    """An option that changes nothing would prove nothing."""
    unasked = [list(output.outputs[0].token_ids) for output in plain.outputs["nothing"]]
    alike = [
        name
        for name, outputs in plain.outputs.items()
        if [list(output.outputs[0].token_ids) for output in outputs] == unasked and "logprobs" not in name
    ]
    assert alike == ["nothing", "several_outputs", "without_text"]


@pytest.mark.parametrize("drafting", ["known"], indirect=True, scope="module")
@pytest.mark.parametrize("case", CASES)
def test_option(case: str, drafting: Drafting, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    for llm, mode in drafting.runs(plain.known(case), monkeypatch):
        outputs = ask(llm, plain.prompts, plain.params[case])
        check_equal(outputs, plain.outputs[case])
        stats = drafting.stats()
        assert stats["invalid_blocks"] == 0
        assert sum(stats["committed"].values()) >= sum(len(c.token_ids) for o in outputs for c in o.outputs)
        if mode == "echo":
            assert stats["accepted"] == stats["drafted"] and (stats["drafted"] > 0 or case == "one_token")


def test_all_options_in_one_batch(drafting: Drafting, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    for llm, _ in drafting.runs(plain.known(*CASES), monkeypatch):
        outputs = iter(ask(llm, plain.prompts * len(TOGETHER), [plain.params[n] for n in TOGETHER for _ in TEXTS]))
        for name in TOGETHER:
            check_equal([next(outputs) for _ in TEXTS], plain.outputs[name])


def test_named_tokens_beside_other_logprobs(drafting: Drafting, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the steps without drafts: there plain vLLM has its way."""
    names = ("logprobs_of_named_tokens", "logprobs_with_penalties", "nothing")
    for llm, mode in drafting.runs(plain.known(*names), monkeypatch):
        if mode == "echo":
            continue
        outputs = ask(llm, plain.prompts[:1] * 3, [plain.params[name] for name in names])
        for output, name in zip(outputs, names, strict=True):
            completion, expected = output.outputs[0], plain.outputs[name][0].outputs[0]
            assert completion.token_ids == expected.token_ids
            if name != "nothing":
                check_logprobs(completion.logprobs[1:-2], expected.logprobs[1:-2])


def test_beam_search(drafting: Drafting, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    for llm, _ in drafting.runs(plain.known("nothing"), monkeypatch):
        assert search(llm, plain.prompts) == plain.beams


@pytest.mark.parametrize(
    "sampled",
    [{"n": 3}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9, "temperature": 0.7, "frequency_penalty": 0.4}],
    ids=["several_outputs", "top_p", "top_k_and_penalty"],
)
def test_seed_repeats(
    sampled: dict[str, Any], drafting: Drafting, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and beside others; another seed says something else."""
    for llm, _ in drafting.runs(plain.known("nothing"), monkeypatch):
        params = [parameters({"temperature": 1.0, "seed": seed, "max_tokens": 12} | sampled) for seed in (1, 1, 2)]
        prompt = plain.prompts[1:]
        first = texts(ask(llm, prompt, params[0]))
        (again, other) = texts(ask(llm, prompt * 2, params[1:]))
        assert again == first[0] and other != first[0]
        assert len(set(again)) == len(again)


def texts(outputs: list[Any]) -> list[list[str]]:
    return [[completion.text for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    "refused", [{"min_p": 0.1, "temperature": 1.0}, {"logit_bias": {5: 2.0}}], ids=["min_p", "logit_bias"]
)
def test_refused_request(
    refused: dict[str, Any], drafting: Drafting, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself refuses them with any speculative method of its V1 runner; the next request is served."""
    for llm, _ in drafting.runs(plain.known("nothing"), monkeypatch):
        with pytest.raises(VLLMValidationError, match=r"min_p and logit_bias .* not yet supported with speculative"):
            ask(llm, plain.prompts, parameters(refused))
        check_equal(ask(llm, plain.prompts, plain.params["nothing"]), plain.outputs["nothing"])
