"""Shared by all tests; its presence lets every test import the helpers beside it."""
