"""Lets vLLM's CPU build run Triton kernels, in Triton's interpreter (``TRITON_INTERPRET=1``)."""

from __future__ import annotations


def pretend_cpu_backend() -> None:
    """Show vLLM a CPU backend of Triton; the interpreter needs none. To be called before vLLM is imported."""
    from triton.backends import backends

    backends.setdefault("cpu", backends["nvidia"])
