"""What vLLM's OpenAI server offers, on a tiny target: with the method on the same answers, whole or streamed."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny_text_model import SIZES, make_tiny_text_model
from vllm_jetspecpp.demo.server import Server

ROOT = Path(__file__).parents[2]
MORE_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END_OF_THINKING = SIZES["vocab_size"] + MORE_TOKENS.index("</think>")
ARGUMENTS = (
    *("--served-model-name", "tiny"),
    *("--max-model-len", "512"),
    *("--max-num-seqs", "8"),
    *("--dtype", "float32"),
    "--enforce-eager",
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--reasoning-parser", "deepseek_r1"),
)
BLOCK = 7
TIMEOUT = 300.0
"""Seconds for one answer, on a machine with much else to do."""
TOLERANCE = 1e-4
"""Of log-probabilities."""
VOLATILE = {"id", "created", "model", "system_fingerprint", "metrics"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
UNCHECKED = WEATHER | {"function": WEATHER["function"] | {"strict": False}}
"""vLLM makes no grammar of its own for it."""
TOOL_CALL = (
    r'<tool_call>\{"name": "get_weather", "arguments": \{"city": "[A-Z][a-z]{2,5}", "days": [1-9]\}\}</tool_call>'
)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def chat(**options: Any) -> tuple[str, dict[str, Any]]:
    """Thinking begins in the prompt; a budget of 0 ends it at once, and a grammar rules what follows."""
    content = "How is the weather in Paris?<think>"
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 60, "thinking_token_budget": 0}
    return CHAT, asked | options


def completion(**options: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "The cat sat on", "max_tokens": 24} | options


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": chat(),
    "chat_logprobs": chat(logprobs=True, top_logprobs=3),
    "chat_thinking": chat(thinking_token_budget=16),
    "chat_thinking_longer": chat(thinking_token_budget=27, n=2, temperature=1.0, top_k=1),
    "chat_named_tool": chat(
        tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "get_weather"}}, thinking_token_budget=9
    ),
    # The grammar would let a random target call tools for ever.
    "chat_required_tool": chat(
        tools=[WEATHER], tool_choice="required", stop=["</tool_call>"], include_stop_str_in_output=True
    ),
    "chat_auto_tool": chat(tools=[UNCHECKED], tool_choice="auto", structured_outputs={"regex": TOOL_CALL}),
    "chat_no_tool": chat(tools=[WEATHER], tool_choice="none"),
    "chat_json_schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    ),
    "chat_regex": chat(structured_outputs={"regex": "(yes|no), [0-9]{3}"}, thinking_token_budget=9),
    "chat_several": chat(n=2, temperature=1.0, top_k=1),
    "chat_penalties": chat(frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2, bad_words=[" the"]),
    "completion": completion(),
    "completion_echo": completion(echo=True, logprobs=2),
    "completion_prompts": completion(prompt=["The cat sat on", "1 2 3 4 5 6", "def f(x):"], logprobs=0),
    "completion_several": completion(n=3, temperature=1.0, top_k=1),
    "completion_min_tokens": completion(allowed_token_ids=[2, *range(300, 340)], min_tokens=9, max_tokens=60),
    "completion_choice": completion(structured_outputs={"choice": ["a red apple", "a red pear"]}),
    "completion_beams": completion(use_beam_search=True, n=2, max_tokens=5),
    "completion_prompt_logprobs": completion(prompt_logprobs=2),
}
WHOLE_ONLY = ("completion_beams", "completion_prompt_logprobs")
"""vLLM does not stream these."""


def body(name: str) -> tuple[str, dict[str, Any]]:
    path, options = REQUESTS[name]
    return path, {"model": "tiny", "temperature": 0.0, "return_token_ids": True} | options


@dataclass
class Servers:
    plain: Server
    drafting: Server
    known: Path
    """What the draft engine reads: prompts with their continuations."""

    def expect(self, name: str) -> dict[str, Any]:
        """Plain vLLM's answer, which is drafted from now on, partly wrong."""
        path, asked = body(name)
        answer = post(self.plain, path, asked)
        self.known.write_text(json.dumps([prompt + tokens for prompt, tokens in token_ids(answer)]))
        return answer


def post(server: Server, path: str, asked: dict[str, Any], status: int = 200) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
    connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert response.status == status, text
    return json.loads(text)


def stream(server: Server, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks up to ``[DONE]``."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
    asked = asked | {"stream": True, "stream_options": {"include_usage": True}}
    connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
    events = [line[6:] for line in connection.getresponse().read().decode().splitlines() if line.startswith("data: ")]
    connection.close()
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def token_ids(answer: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    for choice in answer["choices"]:
        prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids") or []
        yield prompt, choice.get("token_ids") or []


def check_same(actual: Any, expected: Any, where: str = "") -> None:
    """Equal but for what differs from one answer to the next, and log-probabilities to 1e-4."""
    if isinstance(expected, dict):
        for key in expected.keys() - VOLATILE:
            check_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for index, (here, there) in enumerate(zip(actual, expected, strict=True)):
            check_same(here, there, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=TOLERANCE), where
    else:
        assert actual == expected, where


def avoid_white_space(model: Path) -> None:
    """A random target may go on with white space for ever where a grammar lets it: give such tokens low logits.

    The first number of every hidden state is kept constant for them to be read off.
    """
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    white = [index for token, index in vocabulary.items() if set(token) <= set("\u0120\u010a\u0109\u010d")]
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
    weights["model.embed_tokens.weight"][:, 0] = 1.5
    weights["lm_head.weight"][:, 0] = 0
    weights["lm_head.weight"][white] = 0
    weights["lm_head.weight"][white, 0] = -20
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Both start at once."""
    folder = tmp_path_factory.mktemp("openai")
    model = make_tiny_text_model(folder / "model", MORE_TOKENS)
    avoid_white_space(model)
    known = folder / "known.json"
    known.write_text("[]")
    method = {
        "method": "jetspecpp",
        "model": str(known),
        "draft_engine": "tests.engines.RereadingEngine",
        "transport": "local",
        "num_speculative_tokens": BLOCK,
    }
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    drafting = ["--speculative-config", json.dumps(method)]
    with (
        Server(str(model), ARGUMENTS, env, folder / "plain.log") as plain_server,
        Server(str(model), [*ARGUMENTS, *drafting], env, folder / "drafting.log") as drafting_server,
    ):
        for server in (plain_server, drafting_server):
            server.wait_ready()
        yield Servers(plain_server, drafting_server, known)


@pytest.mark.parametrize("name", REQUESTS)
def test_answer_is_plain_vllms(name: str, servers: Servers) -> None:
    expected = servers.expect(name)
    path, asked = body(name)
    before = servers.drafting.stats()
    answer = post(servers.drafting, path, asked)
    check_same(answer, expected)
    assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    if name not in WHOLE_ONLY:
        chunks = stream(servers.drafting, path, asked)
        (check_streamed_chat if path == CHAT else check_streamed_text)(chunks, expected)
        check_end(chunks, expected)
        assert servers.drafting.stats()["rounds"] > before["rounds"]


def check_end(chunks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """One end for each choice, after which nothing of it comes; then the usage."""
    ended: dict[int, str] = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            assert choice["index"] not in ended
            if choice["finish_reason"]:
                ended[choice["index"]] = choice["finish_reason"]
    assert ended == {choice["index"]: choice["finish_reason"] for choice in expected["choices"]}
    assert chunks[-1]["choices"] == []
    usage = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-1]["usage"][name] for name in usage] == [expected["usage"][name] for name in usage]


def check_streamed_text(chunks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for right in expected["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == right["index"]]
        assert "".join(part["text"] for part in parts) == right["text"]
        assert [t for part in parts for t in part["token_ids"] or ()] == right["token_ids"]
        if right["logprobs"]:
            values = [v for part in parts if part["logprobs"] for v in part["logprobs"]["token_logprobs"]]
            check_same(values, right["logprobs"]["token_logprobs"])


def check_streamed_chat(chunks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for right in expected["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == right["index"]]
        assert parts[0]["delta"]["role"] == "assistant"
        message = right["message"]
        for field in ("content", "reasoning"):
            streamed = "".join(part["delta"].get(field) or "" for part in parts)
            assert streamed == (message.get(field) or ""), field
        assert [t for part in parts for t in part.get("token_ids") or ()] == right["token_ids"]
        calls = [call["function"] for part in parts for call in part["delta"].get("tool_calls") or ()]
        wanted = [call["function"] for call in message.get("tool_calls") or ()]
        assert [call["name"] for call in calls if call.get("name")] == [call["name"] for call in wanted]
        arguments = "".join(call.get("arguments") or "" for call in calls)
        # The same JSON: as the target wrote it when streamed, else written anew.
        assert (json.loads(arguments) if calls else None) == (json.loads(wanted[0]["arguments"]) if wanted else None)
        if right["logprobs"]:
            values = [v for part in parts if part["logprobs"] for v in part["logprobs"]["content"]]
            check_same(values, right["logprobs"]["content"])


def test_the_answers_have_what_was_asked_for(servers: Servers) -> None:
    """Plain vLLM's; the others are equal to them."""
    answers = {name: servers.expect(name)["choices"] for name in REQUESTS if name.startswith("chat")}
    for name in ("chat_named_tool", "chat_required_tool", "chat_auto_tool"):
        (call,) = answers[name][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]).keys() == {"city", "days"}
    thinking = answers["chat_thinking"][0]["message"]
    assert thinking["reasoning"] and thinking["content"]
    assert "ok" in json.loads(answers["chat_json_schema"][0]["message"]["content"])
    assert answers["chat_regex"][0]["message"]["content"][:2] in ("ye", "no")


def test_refused_requests_harm_nobody(servers: Servers) -> None:
    for refused in ({"min_p": 0.2}, {"logit_bias": {"5": 3}}):
        path, asked = completion(**refused)
        answer = post(servers.drafting, path, {"model": "tiny", "temperature": 1.0} | asked, status=400)
        assert "not yet supported with speculative decoding" in answer["error"]["message"]
    check_same(post(servers.drafting, *body("completion")), servers.expect("completion"))


def test_named_logprobs_beside_others(servers: Servers) -> None:
    """vLLM's rejection sampler would end the engine. Each gets what it asked for, where both are drafted for."""
    path, asked = body("chat_logprobs")
    named = asked | {"logprob_token_ids": [5, 17]}
    del named["top_logprobs"]
    expected, expected_named = servers.expect("chat_logprobs"), post(servers.plain, path, named)
    servers.expect("chat_logprobs")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda request: post(servers.drafting, path, request), [asked, named] * 2))
    for answer, right in zip(answers, [expected, expected_named] * 2, strict=True):
        (choice,), (wanted,) = answer["choices"], right["choices"]
        assert choice["message"] == wanted["message"]
        if right is expected_named:
            check_same(choice["logprobs"], wanted["logprobs"])
    check_same(post(servers.drafting, path, asked), expected)


def test_right_and_wrong_drafts_were_verified(servers: Servers) -> None:
    stats = servers.drafting.stats()
    assert 0 < stats["accepted"] < stats["drafted"] and stats["invalid_blocks"] == 0
