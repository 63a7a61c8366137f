"""vLLM's side of the system: the only package that imports vLLM, and the only place where it is patched."""
