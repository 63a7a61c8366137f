"""`vllm serve` with the shipped checkpoint, seen by its clients: what a user gets, and what is left afterwards."""

import http.client
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.demo_model import CHECKPOINT, ROOT, TARGET, require_demo_model
from tests.scraping import Samples, parse
from vllm_jetspecpp.demo.near_ties import Pair, judge
from vllm_jetspecpp.demo.run import SERVE_ARGUMENTS, SERVE_ENV
from vllm_jetspecpp.demo.server import STOP_TIMEOUT, Server
from vllm_jetspecpp.types import Origin

MODEL = SERVE_ARGUMENTS[SERVE_ARGUMENTS.index("--served-model-name") + 1]
SHARED_MEMORY = Path("/dev/shm")
QUESTION = "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?"
OTHER_QUESTION = "Write a Python function that returns the sum of the squares of a list."
MAX_TOKENS = 64
LABELS = {"model_name": MODEL, "engine": "0"}
DASHBOARD = ROOT / "examples/grafana/jetspecpp.json"
METRICS_TIMEOUT = 60.0
"""Seconds; the worker's counts are on the page within one or two."""


@pytest.fixture(scope="module")
def shared_memory_before() -> set[str]:
    return set(os.listdir(SHARED_MEMORY))


def start_server(log: Path) -> Server:
    # A busy machine may take long to answer; the default would replace the draft process, and nothing be drafted.
    method = {"method": "jetspecpp", "model": str(CHECKPOINT), "num_speculative_tokens": 7, "reply_timeout": 60}
    env = SERVE_ENV | {"VLLM_LOG_STATS_INTERVAL": "2"}
    return Server(str(TARGET), [*SERVE_ARGUMENTS, "--speculative-config", json.dumps(method)], env, log)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shared_memory_before: set[str]) -> Iterator[Server]:
    require_demo_model()
    with start_server(tmp_path_factory.mktemp("serve") / "serve.log") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: OpenAI, question: str) -> tuple[list[int], list[int]]:
    """Prompt and answer of a greedy, streamed chat, as token ids."""
    prompt: list[int] = []
    answer: list[int] = []
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    for chunk in stream:
        prompt += getattr(chunk, "prompt_token_ids", None) or []
        for choice in chunk.choices:
            answer += getattr(choice, "token_ids", None) or []
    return prompt, answer


@pytest.fixture(scope="module")
def target() -> Iterator[PreTrainedModel]:
    """The target outside vLLM, on one thread: the server is using the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16)
    torch.set_num_threads(threads)


def assert_follows_target(target: PreTrainedModel, answers: list[tuple[list[int], list[int]]]) -> None:
    """Every answer is the target's own greedy one, near ties of bfloat16 aside."""
    pairs = []
    for prompt, answer in answers:
        with torch.inference_mode():
            output = target.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False)
        pairs.append(Pair(prompt, answer, output[0, len(prompt) :].tolist()))
    for difference in judge(TARGET, pairs):
        assert difference is None or difference.is_near_tie, difference


def test_streamed_chat_is_the_targets_own_answer(client: OpenAI, target: PreTrainedModel) -> None:
    prompt, answer = chat(client, QUESTION)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    messages = [{"role": "user", "content": QUESTION}]
    assert prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert_follows_target(target, [(prompt, answer)])


def test_streamed_completion_equals_the_whole_one(client: OpenAI) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "prompt": "1 2 3 4 5", "temperature": 0, "max_tokens": MAX_TOKENS}
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage and whole.usage.completion_tokens == MAX_TOKENS


def test_two_requests_at_once(client: OpenAI, target: PreTrainedModel) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda question: chat(client, question), (QUESTION, OTHER_QUESTION)))
    assert_follows_target(target, answers)


def test_raw_http(server: Server) -> None:
    body = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    events = [line.removeprefix("data: ") for line in response.read().decode().splitlines() if line]
    connection.close()
    assert events[-1] == "[DONE]"
    assert "Paris" in "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_a_bad_request_harms_no_later_one(server: Server, client: OpenAI) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/completions", "{", {"Content-Type": "application/json"})
    assert connection.getresponse().status == 400
    connection.close()
    assert chat(client, QUESTION)[1]


def test_drafts_are_accepted_and_foreseen(server: Server, client: OpenAI) -> None:
    chat(client, QUESTION)
    stats = server.stats()
    assert stats["acceptance_length"] > 1.5, stats
    assert stats["hits"] > 0, stats


def scrape(server: Server) -> Samples:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        return parse(response.read().decode())


def read(samples: Samples, name: str, **labels: str) -> float:
    return samples["vllm:" + name, frozenset((LABELS | labels).items())]


def by_origin(samples: Samples, name: str) -> dict[str, float]:
    """The counter of every kind of block there is, drafted or copied."""
    origins = [origin.name.lower() for origin in Origin if origin != Origin.NONE]
    return {origin: read(samples, f"jetspecpp_{name}_total", origin=origin) for origin in origins}


def as_stats(samples: Samples) -> dict[str, Any]:
    """The page in the terms of ``jetspecpp_stats``."""
    totals = [read(samples, "jetspecpp_accepted_tokens_per_round_bucket", le=f"{k}.0") for k in range(8)]
    return {
        "verified_by_origin": by_origin(samples, "rounds"),
        "accepted_by_origin": by_origin(samples, "accepted_tokens"),
        "blocks_by_origin": by_origin(samples, "drafts"),
        "accepted_lengths": [total - former for total, former in zip(totals, [0.0, *totals], strict=False)],
        "plain_tokens": read(samples, "jetspecpp_plain_tokens_total"),
        "drafted": read(samples, "jetspecpp_draft_tokens_total"),
        "verify_steps": read(samples, "jetspecpp_verify_steps_total"),
        "hits": read(samples, "jetspecpp_hits_total"),
        "misses": read(samples, "jetspecpp_misses_total"),
    }


def settled_page(server: Server) -> Samples:
    """``/metrics`` once it has what the worker itself counts; no request runs meanwhile."""
    stats = server.stats()
    deadline = time.monotonic() + METRICS_TIMEOUT
    while True:
        samples = scrape(server)
        shown = as_stats(samples)
        if shown == {name: stats[name] for name in shown}:
            return samples
        assert time.monotonic() < deadline, (shown, stats)
        time.sleep(0.2)


def test_metrics_are_those_of_the_outputs(server: Server, client: OpenAI) -> None:
    before = settled_page(server)
    usage = client.completions.create(
        model=MODEL, prompt=QUESTION, temperature=0, max_tokens=MAX_TOKENS, extra_body={"ignore_eos": True}
    ).usage
    after = settled_page(server)
    rounds, accepted = (
        sum(by_origin(after, name).values()) - sum(by_origin(before, name).values())
        for name in ("rounds", "accepted_tokens")
    )
    grown = {key: after[key] - before.get(key, 0.0) for key in after}
    assert usage and usage.completion_tokens == MAX_TOKENS == read(grown, "generation_tokens_total")
    assert rounds + accepted + read(grown, "jetspecpp_plain_tokens_total") == MAX_TOKENS
    assert read(grown, "spec_decode_num_drafts_total") == rounds > 0
    assert read(grown, "spec_decode_num_accepted_tokens_total") == accepted > 0
    assert read(grown, "spec_decode_num_draft_tokens_total") == read(grown, "jetspecpp_draft_tokens_total")
    assert read(grown, "jetspecpp_verify_seconds_total") > 0
    assert read(grown, "jetspecpp_exposed_drafting_seconds_total") > 0
    assert read(after, "jetspecpp_draft_process_alive") == 1


def test_log_line_of_the_engine_is_right(server: Server) -> None:
    """What vLLM logs every few seconds adds up to its counters."""
    samples = settled_page(server)
    wanted = [read(samples, f"spec_decode_num_{name}_tokens_total") for name in ("accepted", "draft")]
    deadline = time.monotonic() + METRICS_TIMEOUT
    while True:
        lines = [line for line in server.log.read_text().splitlines() if "SpecDecoding metrics" in line]
        pairs = [re.findall(r"(?:Accepted|Drafted): (\d+) tokens", line) for line in lines]
        if [sum(int(pair[i]) for pair in pairs) for i in range(2)] == wanted:
            break
        assert time.monotonic() < deadline, (lines, wanted)
        time.sleep(0.5)
    rates = re.search(r"Per-position acceptance rate: ([\d., ]+), Avg", lines[-1])
    assert rates and len(rates[1].split(", ")) == 7


def test_dashboard_asks_for_what_there_is(server: Server) -> None:
    samples = settled_page(server)
    labels: dict[str, set[str]] = {}
    for name, pairs in samples:
        labels.setdefault(name, set()).update(dict(pairs))
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= 20
    for query in queries:
        selected = re.findall(r"(vllm:\w+){([^}]*)}", query)
        assert selected and len(selected) == query.count("vllm:"), query
        for name, matchers in selected:
            assert name in labels and set(re.findall(r'(\w+)=~?"', matchers)) <= labels[name], query
        assert set(re.findall(r"by \((\w+)\)", query)) <= set().union(*(labels[name] for name, _ in selected)), query
    variables = [v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    for name, label in (re.findall(r"label_values\((vllm:\w+), (\w+)\)", v)[0] for v in variables):
        assert label in labels[name]
    assert "vllm:jetspecpp_" in "".join(queries) and "vllm:spec_decode_" in "".join(queries)


def unused_shared_memory(before: set[str]) -> list[str]:
    """New segments that no living process maps: other programs of this machine may have made some meanwhile."""
    mapped = ""
    for process in psutil.process_iter():
        try:
            mapped += Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
    return sorted(name for name in set(os.listdir(SHARED_MEMORY)) - before if name not in mapped)


def test_an_interrupt_ends_everything(server: Server, shared_memory_before: set[str]) -> None:
    started = psutil.Process(server.process.pid).children(recursive=True)
    assert started
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(STOP_TIMEOUT) == 0, server.log.read_text()[-3000:]
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []
    assert unused_shared_memory(shared_memory_before) == []


def test_a_second_server_starts_and_a_kill_leaves_nothing(tmp_path: Path, shared_memory_before: set[str]) -> None:
    """After SIGKILL of the server: no engine, worker, draft process or Ray, and no shared memory."""
    with start_server(tmp_path / "serve.log") as server:
        server.wait_ready()
        started = psutil.Process(server.process.pid).children(recursive=True)
        assert any("keeper" in " ".join(process.cmdline()) for process in started)
        server.process.kill()
        server.process.wait()
        _, alive = psutil.wait_procs(started, timeout=40)
        assert alive == []
    assert unused_shared_memory(shared_memory_before) == []
