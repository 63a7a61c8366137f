"""The soak test's clients: a seeded mix of requests, sent over HTTP from threads, some of them broken off."""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

MAX_CLIENTS = 8
PHASE = 20.0
"""Seconds after which the number of clients at work changes."""
REQUEST_TIMEOUT = 600.0
"""Seconds without a byte after which a request counts as failed."""
AFTER_FAILURE = 1.0
"""Seconds that a client waits after a failed request."""
ABORT_SHARE = 0.12
WEIGHTS = {"greedy": 8, "chat": 5, "sampled": 4, "several": 2, "structured": 3, "stop": 2}
"""How often each kind comes; the first two are compared with the reference."""
REGEX = "[a-d]{3}-[0-9]{2}"
STOPS = ["e", "\n"]


@dataclass(frozen=True)
class Reference:
    """A greedy answer recorded before the soak."""

    kind: str
    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """One request; ``expected`` is the index of the reference it is compared with."""

    kind: str
    body: dict[str, Any]
    expected: int | None = None
    abort_after: float | None = None
    """Events after which a stream is broken off, or seconds after which a whole answer is."""

    @property
    def path(self) -> str:
        """The route that serves it."""
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


@dataclass
class Answer:
    """What came back, by choice."""

    prompt_ids: list[int] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """Add one event of a stream, or a whole answer."""
        self.prompt_ids += event.get("prompt_token_ids") or []
        for choice in event["choices"]:
            index, message = choice["index"], choice.get("message") or choice.get("delta") or {}
            self.prompt_ids += choice.get("prompt_token_ids") or []
            self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
            self.text[index] = self.text.get(index, "") + (choice.get("text") or message.get("content") or "")
            if choice.get("finish_reason"):
                self.finish[index] = choice["finish_reason"]


class RequestFailed(Exception):
    """The server did not answer a request as it should."""


def send(port: int, job: Job) -> Answer | None:
    """The answer; None when the job broke it off.

    Raises:
        RequestFailed: a status other than 200, or an answer that is not whole.
        OSError: the connection failed.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT)
    try:
        connection.request("POST", job.path, json.dumps(job.body), {"Content-Type": "application/json"})
        if job.abort_after is not None and not job.body.get("stream"):
            time.sleep(job.abort_after)
            return None
        response = connection.getresponse()
        if response.status != 200:
            raise RequestFailed(f"status {response.status}: {response.read()[:300].decode(errors='replace')}")
        answer = Answer()
        if not job.body.get("stream"):
            answer.take(json.loads(response.read()))
        elif not _read_stream(response, answer, job.abort_after):
            return None
    finally:
        connection.close()
    if set(answer.finish) != set(range(job.body.get("n", 1))):
        raise RequestFailed(f"the answer ended without a finish reason: {answer.finish}")
    return answer


def _read_stream(response: http.client.HTTPResponse, answer: Answer, abort_after: float | None) -> bool:
    """Read events to the end; False when the job broke off before."""
    events = 0
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return True
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise RequestFailed(f"error in the stream: {event['error']}")
        answer.take(event)
        events += 1
        if abort_after is not None and events > abort_after:
            return False
    raise RequestFailed("the stream ended without [DONE]")


def greedy_body(kind: str, text: str, max_tokens: int) -> dict[str, Any]:
    """A greedy request that never ends early; its answer is given as token ids too."""
    prompt = {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
    return {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True} | prompt


def record_references(
    port: int, model: str, texts: Sequence[str], max_tokens: int, on_done: Callable[[int], None]
) -> list[Reference]:
    """Greedy answers to every text, as completions and as chats in turn, several at a time."""

    def ask(number: int) -> Reference:
        kind, text = ("greedy", "chat")[number % 2], texts[number]
        answer = send(port, Job(kind, {"model": model} | greedy_body(kind, text, max_tokens)))
        assert answer is not None
        return Reference(kind, text, tuple(answer.prompt_ids), tuple(answer.token_ids[0]))

    references = []
    with ThreadPoolExecutor(MAX_CLIENTS) as pool:
        for reference in pool.map(ask, range(len(texts))):
            references.append(reference)
            on_done(len(references))
    return references


class Mix:
    """Draws jobs; the same seed gives the same sequence."""

    def __init__(self, model: str, references: Sequence[Reference], seed: int) -> None:
        self._model = model
        self._references = references
        self._random = random.Random(seed)

    def draw(self) -> Job:
        """The next job."""
        rng = self._random
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        body: dict[str, Any] = {"model": self._model, "stream": rng.random() < 0.6}
        expected = None
        if kind in ("greedy", "chat"):
            expected = rng.choice([i for i, r in enumerate(self._references) if r.kind == kind])
            reference = self._references[expected]
            body |= greedy_body(kind, reference.text, rng.randint(1, len(reference.token_ids)))
        else:
            body |= {"prompt": rng.choice(self._references).text} | self._options(kind)
        abort = rng.random() < ABORT_SHARE
        after = (rng.randint(0, 12) if body["stream"] else rng.uniform(0.0, 1.0)) if abort else None
        return Job(kind, body, expected, after)

    def _options(self, kind: str) -> dict[str, Any]:
        rng, length = self._random, len(self._references[0].token_ids)
        if kind == "sampled":
            return {
                "temperature": rng.choice([0.3, 0.7, 1.0]),
                "top_p": rng.choice([0.9, 1.0]),
                "top_k": rng.choice([-1, 20]),
                "max_tokens": rng.randint(1, length),
            }
        if kind == "several":
            return {"temperature": 1.0, "n": rng.randint(2, 3), "max_tokens": rng.randint(1, length // 2)}
        if kind == "structured":
            return {"temperature": rng.choice([0.0, 1.0]), "structured_outputs": {"regex": REGEX}, "max_tokens": 24}
        return {"temperature": rng.choice([0.0, 0.8]), "stop": STOPS, "max_tokens": length}


def wrong_form(job: Job, answer: Answer) -> str | None:
    """What is wrong with an answer whose text is not known but whose form is; None when it is right."""
    for text in answer.text.values():
        if job.kind == "structured" and not re.fullmatch(REGEX, text):
            return f"{text!r} does not match {REGEX}"
        if job.kind == "stop" and any(stop in text for stop in STOPS):
            return f"{text!r} holds a stop string"
    return None


@dataclass
class Tally:
    """What the clients saw. Shared by their threads under ``lock``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sent: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    tokens: int = 0
    compared: int = 0
    failures: list[str] = field(default_factory=list)
    differences: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Index of the reference and the tokens that came instead."""
    finished: list[tuple[float, float, str]] = field(default_factory=list)
    """When a request ended (seconds from the start), how long it took, and its kind."""


class Load:
    """Client threads; from phase to phase another number of them is at work."""

    def __init__(self, port: int, mix: Mix, references: Sequence[Reference], seed: int) -> None:
        self.tally = Tally()
        self._port, self._mix, self._references = port, mix, references
        self._random = random.Random(seed)
        self._active = MAX_CLIENTS
        self._stop = threading.Event()
        self._began = time.monotonic()
        names = [f"client-{index}" for index in range(MAX_CLIENTS)]
        self._threads = [threading.Thread(target=self._run, args=(i,), name=n) for i, n in enumerate(names)]

    def start(self) -> None:
        """Begin to send."""
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def look(self) -> None:
        """Change the number of clients when a phase is over; to be called often."""
        phase = int((time.monotonic() - self._began) / PHASE)
        self._active = random.Random(phase).randint(1, MAX_CLIENTS) if phase else MAX_CLIENTS

    def finish(self) -> None:
        """Send no more and wait for the answers that are under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_TIMEOUT)
            if thread.is_alive():
                self.tally.failures.append(f"{thread.name} still waits for an answer at the end")

    def _run(self, index: int) -> None:
        while not self._stop.is_set():
            if index >= self._active:
                self._stop.wait(0.2)
                continue
            with self.tally.lock:
                job = self._mix.draw()
            if not self._do(job):
                self._stop.wait(AFTER_FAILURE)

    def _do(self, job: Job) -> bool:
        """Send one request and judge its answer; False when it failed."""
        began = time.monotonic()
        answer, failure = None, None
        try:
            answer = send(self._port, job)
        except (RequestFailed, OSError, http.client.HTTPException, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
        ended = time.monotonic()
        with self.tally.lock:
            tally = self.tally
            tally.sent[job.kind] += 1
            tally.finished.append((ended - self._began, ended - began, "aborted" if answer is None else job.kind))
            if failure is None and answer is not None:
                tally.tokens += sum(map(len, answer.token_ids.values()))
                failure = wrong_form(job, answer)
                self._compare(job, answer)
            elif failure is None:
                tally.aborted += 1
            if failure is not None:
                tally.failures.append(f"{ended - self._began:.0f} s, {job.kind}: {failure}")
        return failure is None

    def _compare(self, job: Job, answer: Answer) -> None:
        if job.expected is None:
            return
        self.tally.compared += 1
        tokens = tuple(answer.token_ids[0])
        if tokens != self._references[job.expected].token_ids[: job.body["max_tokens"]]:
            self.tally.differences.append((job.expected, tokens))
