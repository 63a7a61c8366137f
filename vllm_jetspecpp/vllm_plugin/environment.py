"""Environment variables that our method gives a default while an engine uses it.

vLLM reads some choices from the environment of the process that starts the engine; its child processes inherit them.
A variable the user set is never touched, and ``release`` takes ours back. Which ones are ours is kept in the
environment too: several API servers are child processes that configure the engine once more.
"""

from __future__ import annotations

import json
import os

OURS = "JETSPECPP_ENVIRONMENT"


def _defaults() -> dict[str, str]:
    return json.loads(os.environ.get(OURS, "{}"))


def given_by_user(name: str) -> str | None:
    """The value the user set, or None; a default of ours does not count."""
    value = os.environ.get(name)
    return None if value == _defaults().get(name) else value


def set_default(name: str, value: str) -> None:
    """Set a variable unless the user has."""
    if given_by_user(name) is None:
        os.environ[OURS] = json.dumps(_defaults() | {name: value})
        os.environ[name] = value


def release() -> None:
    """Remove every default that still stands."""
    for name, value in _defaults().items():
        if os.environ.get(name) == value:
            del os.environ[name]
    os.environ.pop(OURS, None)
