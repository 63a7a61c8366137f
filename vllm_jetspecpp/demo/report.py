"""What the demo measured: the numbers, the tables a person reads, and the JSON line a script reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_jetspecpp.demo.near_ties import MARGIN_STEPS, Difference
from vllm_jetspecpp.types import Origin


def ratio(part: float, whole: float) -> float:
    """``part / whole``, 0 for an empty whole."""
    return part / whole if whole else 0.0


def _drafted() -> dict[Origin, int]:
    return dict.fromkeys((Origin.HIT, Origin.FIRST, Origin.FALLBACK, Origin.COPIED), 0)


@dataclass(frozen=True)
class Counters:
    """Sums over verification rounds, as the worker's ``jetspecpp_stats`` counts them.

    The difference of two readings covers what happened between them.
    """

    rounds: Mapping[Origin, int] = field(default_factory=_drafted)
    """Verified blocks, by where the block came from; each round commits its accepted draft tokens and a bonus token."""
    accepted: Mapping[Origin, int] = field(default_factory=_drafted)
    """Draft tokens accepted, by where their block came from."""
    plain_tokens: int = 0
    """Tokens committed with no block under verification: the first of each answer at least."""
    hits: int = 0
    misses: int = 0
    verify_seconds: float = 0.0
    verify_steps: int = 0
    exposed_seconds: float = 0.0
    """Time the worker stood still for drafts: what drafting adds to its rounds."""

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> Counters:
        """Read the counters of one worker."""
        return cls(
            rounds={origin: stats["verified_by_origin"][origin.name.lower()] for origin in _drafted()},
            accepted={origin: stats["accepted_by_origin"][origin.name.lower()] for origin in _drafted()},
            plain_tokens=stats["plain_tokens"],
            hits=stats["hits"],
            misses=stats["misses"],
            verify_seconds=stats["verify_seconds"],
            verify_steps=stats["verify_steps"],
            exposed_seconds=stats["client"]["exposed_seconds"],
        )

    def __sub__(self, earlier: Counters) -> Counters:
        return self._combine(earlier, -1)

    def __add__(self, other: Counters) -> Counters:
        return self._combine(other, 1)

    def _combine(self, other: Counters, sign: int) -> Counters:
        return Counters(
            {origin: count + sign * other.rounds[origin] for origin, count in self.rounds.items()},
            {origin: count + sign * other.accepted[origin] for origin, count in self.accepted.items()},
            self.plain_tokens + sign * other.plain_tokens,
            self.hits + sign * other.hits,
            self.misses + sign * other.misses,
            self.verify_seconds + sign * other.verify_seconds,
            self.verify_steps + sign * other.verify_steps,
            self.exposed_seconds + sign * other.exposed_seconds,
        )

    @property
    def num_rounds(self) -> int:
        """All verified blocks."""
        return sum(self.rounds.values())

    @property
    def num_committed(self) -> int:
        """All tokens: accepted draft tokens, bonus tokens and plain ones."""
        return sum(self.accepted.values()) + self.num_rounds + self.plain_tokens

    @property
    def tau(self) -> float:
        """τ, mean tokens a round commits: the accepted draft tokens and the bonus token."""
        return ratio(sum(self.accepted.values()) + self.num_rounds, self.num_rounds)

    @property
    def hit_rate(self) -> float:
        """Hits among the blocks whose outcome could have been foreseen."""
        return ratio(self.hits, self.hits + self.misses)

    @property
    def verify_ms(self) -> float:
        """Mean time from handing over drafts to their verified outcome."""
        return 1e3 * ratio(self.verify_seconds, self.verify_steps)

    @property
    def exposed_ms(self) -> float:
        """Mean time a step stood still for its drafts."""
        return 1e3 * ratio(self.exposed_seconds, self.verify_steps)


@dataclass(frozen=True)
class Answer:
    """One streamed answer."""

    prompt_ids: list[int]
    token_ids: list[int]
    seconds: float
    """From sending the request to its last token."""
    counters: Counters = field(default_factory=Counters)

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens over the whole time of the request, prefill included."""
        return ratio(len(self.token_ids), self.seconds)


@dataclass(frozen=True)
class Row:
    """One prompt, answered both ways."""

    prompt_id: str
    ours: Answer
    plain: Answer
    difference: Difference | None
    """None for equal answers."""

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        if self.difference is None:
            return "identical"
        name = "near tie" if self.difference.is_near_tie else "DIFFERENT"
        return f"{name} at {self.difference.position} ({self.difference.margin:.1f} steps)"


@dataclass(frozen=True)
class Setting:
    """Which cores did what; a comparison means nothing without it."""

    target_cores: tuple[int, ...]
    draft_cores: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """For the title of the table."""
        cores = ",".join(map(str, self.target_cores))
        drafts = ",".join(map(str, self.draft_cores)) or "the same"
        return f"target on core {cores} in both runs; the draft process of JetSpec++ on core {drafts}"


@dataclass(frozen=True)
class Summary:
    """The JSON line: sums over all prompts."""

    prompts: int
    identical: int
    near_ties: int
    tau: float
    hit_rate: float
    jetspecpp_tok_s: float
    vllm_tok_s: float
    speedup: float
    exposed_ms: float
    verify_ms: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Summary:
        """Summarise; speeds are all tokens over all seconds."""
        counters = total_counters(rows)
        ours = ratio(sum(len(r.ours.token_ids) for r in rows), sum(r.ours.seconds for r in rows))
        plain = ratio(sum(len(r.plain.token_ids) for r in rows), sum(r.plain.seconds for r in rows))
        return cls(
            prompts=len(rows),
            identical=sum(r.difference is None for r in rows),
            near_ties=sum(r.difference is not None and r.difference.is_near_tie for r in rows),
            tau=counters.tau,
            hit_rate=counters.hit_rate,
            jetspecpp_tok_s=ours,
            vllm_tok_s=plain,
            speedup=ratio(ours, plain),
            exposed_ms=counters.exposed_ms,
            verify_ms=counters.verify_ms,
        )

    def as_dict(self) -> dict[str, float]:
        """Rounded for reading; counts stay whole."""
        return {f.name: round(getattr(self, f.name), 3) for f in fields(self)}


def total_counters(rows: Sequence[Row]) -> Counters:
    """Sum over the prompts."""
    return sum((row.ours.counters for row in rows), Counters())


def prompt_table(rows: Sequence[Row], setting: Setting) -> Table:
    """One line a prompt."""
    table = Table(title=f"Greedy answers, one request at a time; {setting.sentence}")
    table.add_column("prompt")
    for name in ("tokens", "JetSpec++ tok/s", "vLLM tok/s", "speed-up", "τ", "hit rate"):
        table.add_column(name, justify="right")
    table.add_column("against plain vLLM")
    for row in rows:
        counters = row.ours.counters
        table.add_row(
            row.prompt_id,
            str(len(row.ours.token_ids)),
            f"{row.ours.tokens_per_second:.1f}",
            f"{row.plain.tokens_per_second:.1f}",
            f"{ratio(row.ours.tokens_per_second, row.plain.tokens_per_second):.2f}",
            f"{counters.tau:.2f}",
            f"{counters.hit_rate:.0%}",
            row.verdict,
        )
    return table


ORIGIN_NAMES = {
    Origin.HIT: "block foreseen for the outcome that came true (hit)",
    Origin.FIRST: "first block of a request",
    Origin.FALLBACK: "block drafted after a miss (fallback)",
    Origin.COPIED: "block copied from the request itself",
}


def origin_table(counters: Counters) -> Table:
    """Where the committed tokens came from."""
    table = Table(title="Where the tokens came from")
    table.add_column("origin")
    for name in ("rounds", "tokens", "share"):
        table.add_column(name, justify="right")

    def add(name: str, rounds: str, tokens: int) -> None:
        table.add_row(name, rounds, str(tokens), f"{ratio(tokens, counters.num_committed):.0%}")

    for origin, name in ORIGIN_NAMES.items():
        add(name, str(counters.rounds[origin]), counters.accepted[origin])
    add("the target's bonus token of each round", str(counters.num_rounds), counters.num_rounds)
    add("the target alone, without a draft", "", counters.plain_tokens)
    return table


def print_report(console: Console, rows: Sequence[Row], setting: Setting) -> None:
    """Both tables and the summary in words."""
    summary = Summary.of(rows)
    console.print(prompt_table(rows, setting))
    console.print(origin_table(total_counters(rows)))
    console.print(
        f"JetSpec++ {summary.jetspecpp_tok_s:.1f} tok/s, plain vLLM {summary.vllm_tok_s:.1f} tok/s: "
        f"{summary.speedup:.2f} times as fast. τ {summary.tau:.2f}, hit rate {summary.hit_rate:.0%}. "
        f"A step verifies for {summary.verify_ms:.1f} ms and stands still {summary.exposed_ms:.2f} ms for its drafts."
    )
    console.print(
        f"{summary.identical} of {summary.prompts} answers are identical token by token; {summary.near_ties} part at a "
        f"near tie: both tokens within {MARGIN_STEPS:g} bfloat16 steps of the target's best, judged in float32."
    )
