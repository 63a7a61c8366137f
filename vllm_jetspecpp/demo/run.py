"""`jetspecpp demo`: the same prompts through ``vllm serve`` with JetSpec++ and without, compared."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from vllm_jetspecpp.demo.near_ties import Pair, judge
from vllm_jetspecpp.demo.report import Answer, Counters, Row, Setting, Summary, print_report, ratio
from vllm_jetspecpp.demo.server import Server, ServerError

if TYPE_CHECKING:
    from openai import OpenAI

MODEL_NAME = "demo"
WARM_UP_TOKENS = 16
PLAIN_WIDTH = 140
"""Columns when the output is no terminal: no table line is broken in a log."""

SERVE_ARGUMENTS = (
    *("--served-model-name", MODEL_NAME),
    *("--max-model-len", "2048"),
    *("--max-num-seqs", "4"),
    "--enforce-eager",  # compiling takes over a minute at start and gains either run about a tenth
)
SERVE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    # glibc would give the sampler's large buffers back to the kernel and fetch them again at every step.
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "268435456",
    "MALLOC_TOP_PAD_": "67108864",
}
"""For both runs."""


@dataclass(frozen=True)
class Prompt:
    """One prompt file line."""

    id: str
    text: str


@dataclass(frozen=True)
class DemoConfig:
    """What `jetspecpp demo` was asked for."""

    target: Path
    speculative: Mapping[str, Any]
    """For ``--speculative-config``."""
    prompts: Path
    limit: int | None = None
    max_tokens: int = 200
    logs: Path = Path(".cache/demo")


def read_prompts(path: Path, limit: int | None) -> list[Prompt]:
    """First turns of the prompts in a JSON lines file with ``id`` and ``turns``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no prompt, or a line without these keys.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines()[:limit], 1):
        try:
            item = json.loads(line)
            prompts.append(Prompt(item["id"], item["turns"][0]))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path}:{number}: expected an object with 'id' and 'turns': {error!r}") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def first_sibling(core: int) -> int:
    """The first logical core of a core's physical one; itself where the kernel does not say."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return int(re.split("[,-]", path.read_text())[0])
    except (OSError, ValueError):
        return core


def split_cores(available: Iterable[int], first_of: Callable[[int], int] = first_sibling) -> Setting:
    """The last core for the draft process, all others for the target; one core must do for both.

    It is how vLLM binds its threads by itself, one to a physical core; the draft process takes what vLLM leaves.
    """
    cores = sorted({first_of(core): core for core in sorted(available)}.values())
    return Setting(tuple(cores[:-1] or cores), tuple(cores[-1:] if len(cores) > 1 else ()))


def check_folders(config: DemoConfig) -> None:
    """Raise FileNotFoundError when a model folder is missing, and say what makes it."""
    if not (config.target / "config.json").is_file():
        raise FileNotFoundError(f"no target in {config.target}; `jetspecpp prepare-demo` writes it")
    checkpoint = Path(config.speculative.get("model", config.target))
    if not (checkpoint / "config.json").is_file():
        raise FileNotFoundError(f"no draft checkpoint in {checkpoint}; --checkpoint names its folder")


@contextmanager
def waiting(console: Console, title: str) -> Iterator[Any]:
    """Yield what to call with the seconds so far: a spinner on a terminal, a line every ten seconds elsewhere."""
    if console.is_terminal:
        with console.status(title) as status:
            yield lambda seconds: status.update(f"{title} {seconds:.0f} s")
        return
    console.print(title)
    said = 0

    def say(seconds: float) -> None:
        nonlocal said
        if seconds >= said + 10:
            said = int(seconds)
            console.print(f"  ... {said} s")

    yield say


@contextmanager
def showing(console: Console, title: str) -> Iterator[Callable[[str, int, float], None]]:
    """Show an answer and its speed as it comes; where there is no terminal, when it is complete."""
    view = Group()
    live = Live(console=console, refresh_per_second=8, vertical_overflow="visible") if console.is_terminal else None

    def show(text: str, tokens: int, seconds: float) -> None:
        nonlocal view
        speed = Text(f"{title}: {tokens} tokens, {ratio(tokens, seconds):.1f} tok/s", style="bold green")
        view = Group(Text(text), speed)
        if live:
            live.update(view)

    if live:
        with live:
            yield show
    else:
        yield show
        console.print(view)


def stream_answer(client: OpenAI, prompt: Prompt, max_tokens: int, show: Callable[[str, int, float], None]) -> Answer:
    """One greedy chat completion; ``show`` gets the text, the number of tokens and the seconds so far."""
    prompt_ids: list[int] = []
    token_ids: list[int] = []
    text = ""
    seconds = 0.0
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": prompt.text}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    for chunk in stream:
        # vLLM's own fields, which the client keeps as they come.
        prompt_ids += getattr(chunk, "prompt_token_ids", None) or []
        for choice in chunk.choices:
            token_ids += getattr(choice, "token_ids", None) or []
            text += choice.delta.content or ""
            seconds = time.perf_counter() - start
        show(text, len(token_ids), seconds)
    return Answer(prompt_ids, token_ids, seconds)


def answer_all(server: Server, config: DemoConfig, prompts: list[Prompt], console: Console, name: str) -> list[Answer]:
    """All prompts, one after the other, after one that is not counted."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    counts = name == "JetSpec++"
    stream_answer(client, prompts[0], WARM_UP_TOKENS, lambda text, tokens, seconds: None)
    answers = []
    for index, prompt in enumerate(prompts, 1):
        console.rule(f"{name} {index}/{len(prompts)}: {prompt.id}")
        before = Counters.from_stats(server.stats()) if counts else Counters()
        with showing(console, name) as show:
            answer = stream_answer(client, prompt, config.max_tokens, show)
        after = Counters.from_stats(server.stats()) if counts else Counters()
        answers.append(Answer(answer.prompt_ids, answer.token_ids, answer.seconds, after - before))
    return answers


def serve_and_answer(
    config: DemoConfig, prompts: list[Prompt], setting: Setting, console: Console, name: str, arguments: list[str]
) -> list[Answer]:
    """One run: start the server, answer all prompts, stop it."""
    env = SERVE_ENV | {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, setting.target_cores))}
    log = config.logs / f"{name}.log"
    with Server(str(config.target), [*SERVE_ARGUMENTS, *arguments], env, log) as server:
        with waiting(console, f"starting vllm serve ({name}), log in {log}") as on_wait:
            seconds = server.wait_ready(on_wait)
        console.print(f"{name} serves after {seconds:.0f} s")
        return answer_all(server, config, prompts, console, name)


def run_demo(config: DemoConfig) -> int:
    """Run both servers, print the comparison and, last, one JSON object; 0 unless a server fails.

    Raises:
        FileNotFoundError: a model or the prompts are missing.
        ValueError: the prompts are unreadable.
    """
    # A demo that is told to end must end its server too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    check_folders(config)
    prompts = read_prompts(config.prompts, config.limit)
    setting = split_cores(os.sched_getaffinity(0))
    method = ["--speculative-config", json.dumps(dict(config.speculative))]
    try:
        ours = serve_and_answer(config, prompts, setting, console, "JetSpec++", method)
        plain = serve_and_answer(config, prompts, setting, console, "vLLM", [])
    except ServerError as error:
        print(f"jetspecpp demo: {error}", file=sys.stderr)
        return 1
    pairs = [Pair(a.prompt_ids, a.token_ids, b.token_ids) for a, b in zip(ours, plain, strict=True)]
    differences = judge(config.target, pairs)
    rows = [Row(p.id, a, b, d) for p, a, b, d in zip(prompts, ours, plain, differences, strict=True)]
    print_report(console, rows, setting)
    print(json.dumps(Summary.of(rows).as_dict()), flush=True)
    return 0
