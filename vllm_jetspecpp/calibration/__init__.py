"""Fitting how outcomes are scored on held-out rounds (Eq. 12). Nothing outside this package and the CLI imports it."""
