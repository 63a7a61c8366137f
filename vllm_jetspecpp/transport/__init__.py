"""How the vLLM worker and the draft process talk. ``messages`` alone says what crosses."""
