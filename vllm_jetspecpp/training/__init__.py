"""Training of the draft model and the adapter. Nothing outside this package imports it."""
