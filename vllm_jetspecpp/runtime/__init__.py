"""Drives the rounds: the draft engine, its caches, and the plain loop without vLLM."""
