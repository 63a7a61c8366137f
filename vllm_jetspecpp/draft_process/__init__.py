"""The process that drafts: its loop, where it runs, and the worker's end of it."""
