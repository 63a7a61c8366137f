"""JetSpec++ for vLLM: foresight parallel drafting with self refinements, as an out-of-tree plugin."""

__version__ = "0.1.0"
