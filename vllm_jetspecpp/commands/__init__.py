"""The subcommands of ``jetspecpp``; each adds its parser and imports what it runs when it runs."""
