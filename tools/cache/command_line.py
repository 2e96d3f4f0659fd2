# SPDX-License-Identifier: Apache-2.0
"""What the command lines of the verbs share."""

import argparse
import os
from typing import Any

Verbs = Any
"""What ``ArgumentParser.add_subparsers`` returns; argparse has no public name for it."""


def add_verb(
    verbs: Verbs, name: str, *, summary: str, description: str, example: str
) -> argparse.ArgumentParser:
    """Add a verb whose help ends with an *example* that works as it stands."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add ``--jobs``, of processes that work side by side."""
    parser.add_argument(
        "--jobs",
        type=positive,
        default=os.cpu_count() or 1,
        help="processes (default: one per core)",
    )


def positive(text: str) -> int:
    """Return the positive integer that *text* is, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number
