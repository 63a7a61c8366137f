"""Measuring the method and its rivals. Nothing outside this package imports it."""
