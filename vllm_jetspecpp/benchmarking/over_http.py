"""The same methods behind ``vllm serve``, measured with vLLM's own client: what a user of the HTTP server sees.

Servers stay alive and take turns, as the engines of `bench serve` do. The client is ``vllm bench serve`` with our
prompts as its "custom" dataset; it shares the two cores with the server. What only an engine in this process can tell
(phases of a step) is missing here.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vllm_jetspecpp.benchmarking.measures import Figures, measure
from vllm_jetspecpp.benchmarking.methods import Method
from vllm_jetspecpp.benchmarking.ratios import Table
from vllm_jetspecpp.benchmarking.runner import BenchConfig, Outcome, Report, engine_options, prepare, turns
from vllm_jetspecpp.benchmarking.workload import Workload
from vllm_jetspecpp.demo.run import SERVE_ENV
from vllm_jetspecpp.demo.server import Server, ServerError, vllm_command

NAME = "bench"
CLIENT_TIMEOUT = 1800.0
KEYS = {
    "total_tok_s": "output_throughput",
    "ttft_ms": "median_ttft_ms",
    "tpot_ms": "mean_tpot_ms",
    "itl_p50_ms": "p50_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
    "tau": "spec_decode_acceptance_length",
}
"""Ours and the client's. Its acceptance length counts rounds with drafts alone."""


def server_arguments(method: Method, config: BenchConfig, workload: Workload) -> list[str]:
    """Of ``vllm serve``, the same for all methods but for drafting."""
    options = engine_options(config, workload)
    arguments = ["--served-model-name", NAME, "--no-enable-prefix-caching"]
    for key in ("dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes"):
        arguments += [f"--{key.replace('_', '-')}", str(options[key])]
    arguments += [] if config.compiled else ["--enforce-eager"]
    return arguments + (["--speculative-config", json.dumps(dict(method.speculative))] if method.speculative else [])


def server_environment(method: Method, config: BenchConfig) -> dict[str, str]:
    """Binds the target's threads to the method's cores."""
    cores = method.cores or config.choice.cores[:1]
    malloc = {name: value for name, value in SERVE_ENV.items() if name.startswith("MALLOC")}
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "NUMBA_NUM_THREADS": "1", **malloc}


def client_command(
    url: str, target: Path, dataset: Path, count: int, concurrency: int, max_tokens: int, out: Path
) -> list[str]:
    """``vllm bench serve`` that writes its result to ``out``."""
    options = {
        "backend": "openai-chat",
        "endpoint": "/v1/chat/completions",
        "base-url": url,
        "model": NAME,
        "tokenizer": target,
        "dataset-name": "custom",
        "dataset-path": dataset,
        "custom-output-len": max_tokens,
        "num-prompts": count,
        "max-concurrency": concurrency,
        "num-warmups": 1,
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl",
        "metric-percentiles": "50,99",
        "result-dir": out.parent,
        "result-filename": out.name,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    # The chat route applies the template itself.
    flags = ["--save-result", "--disable-tqdm", "--disable-shuffle", "--skip-chat-template"]
    return [str(vllm_command()), "bench", "serve", *words, *flags]


def as_figures(said: dict[str, Any], method: Method) -> Figures:
    """The client's result under the names of ``measures.py``; None for what it does not know."""
    figures: Figures = dict.fromkeys(measure([]))
    figures |= {ours: said.get(theirs) for ours, theirs in KEYS.items()}
    if said.get("mean_tpot_ms"):
        figures["tok_s"] = 1e3 / said["mean_tpot_ms"]
    if not method.speculative:
        figures["tau"] = 1.0
    return figures


def write_dataset(workload: Workload, path: Path) -> Path:
    """Prompts as the client's "custom" dataset."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": item.text}) + "\n" for item in workload.items))
    return path


def ask(server: Server, method: Method, config: BenchConfig, dataset: Path, count: int, concurrency: int) -> Figures:
    """One run of the client.

    Raises:
        ServerError: it failed.
    """
    out = (config.work / "client.json").absolute()
    out.unlink(missing_ok=True)
    command = client_command(server.url, config.target, dataset, count, concurrency, config.max_tokens, out)
    run = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_TIMEOUT)
    if run.returncode or not out.is_file():
        raise ServerError(f"vllm bench serve ended with status {run.returncode}: {run.stderr.strip()[-300:]}")
    said = json.loads(out.read_text())
    if said["completed"] != count:
        raise ServerError(f"{said['completed']} of {count} requests were answered; log in {server.log}")
    return as_figures(said, method)


@contextmanager
def serving(outcome: Outcome, config: BenchConfig, say: Report) -> Iterator[dict[str, Server]]:
    """Method → its server; all stopped on the way out."""
    servers: dict[str, Server] = {}
    with ExitStack() as stack:
        for method in outcome.methods.values():
            say(f"starting vllm serve ({method.name})")
            log = config.work / f"http-{method.name}.log"
            arguments = server_arguments(method, config, outcome.workload)
            server = stack.enter_context(Server(str(config.target), arguments, server_environment(method, config), log))
            try:
                server.wait_ready()
                servers[method.name] = server
            except ServerError as error:
                outcome.skipped[method.name] = str(error).splitlines()[0]
                server.stop()
        yield servers


def run_http(config: BenchConfig, say: Report) -> tuple[Outcome, Table]:
    """Start every server, let the client measure them in turn, stop.

    Raises:
        ValueError: an unknown method, or none that runs.
        FileNotFoundError: there is no target, or no ``vllm`` command.
        ServerError: a run failed.
    """
    outcome = prepare(config)
    dataset = write_dataset(outcome.workload, (config.work / "prompts.jsonl").absolute())
    table: dict[tuple[str, int], list[Figures]] = defaultdict(list)
    count = len(outcome.workload.items)
    levels: Sequence[int] = [1, *config.concurrency]
    with serving(outcome, config, say) as servers:
        for repeat in range(config.repeats if servers else 0):
            for index, level in enumerate(levels):
                for name in turns(list(servers), repeat * len(levels) + index):
                    say(f"repeat {repeat + 1}, {level} at a time: {name}")
                    figures = ask(servers[name], outcome.methods[name], config, dataset, max(count, level), level)
                    table[name, level].append(figures)
            outcome.repeats += 1
    if not table:
        raise ValueError(f"no method runs: {outcome.skipped}")
    return outcome, table
