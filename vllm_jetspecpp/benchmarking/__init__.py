"""Serving methods compared on one machine in one run: `jetspecpp bench`."""
