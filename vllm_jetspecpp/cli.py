"""The ``jetspecpp`` command."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from vllm_jetspecpp import __version__
from vllm_jetspecpp.commands.bench import add_bench
from vllm_jetspecpp.commands.common import Subcommands
from vllm_jetspecpp.commands.demo import add_demo, add_doctor, add_prepare_demo
from vllm_jetspecpp.commands.evaluation import add_acceptance, add_calibrate, add_eval
from vllm_jetspecpp.commands.planning import add_plan
from vllm_jetspecpp.commands.trace import add_trace
from vllm_jetspecpp.commands.training import add_regenerate, add_train

USER_ERROR = 2
"""Exit status when what was asked for cannot be: argparse's own."""

SUBCOMMANDS: tuple[Callable[[Subcommands], None], ...] = (
    add_prepare_demo,
    add_demo,
    add_doctor,
    add_regenerate,
    add_train,
    add_calibrate,
    add_acceptance,
    add_eval,
    add_trace,
    add_bench,
    add_plan,
)
"""In the order in which ``--help`` shows them."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="jetspecpp", description="JetSpec++ for vLLM: foresight parallel drafting.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(required=True, metavar="command")
    for add in SUBCOMMANDS:
        add(subcommands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every request of the demo
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError, ArithmeticError) as error:
        print(f"jetspecpp: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
