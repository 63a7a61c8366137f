"""Choosing γ, B, J and R by measured costs: plain arithmetic, no torch, no vLLM."""
