# SPDX-License-Identifier: Apache-2.0
"""Look after a cache of teacher log-probabilities, local or ``msc://``.

``convert`` writes it again in another format::

    python -m tools.logits_cache convert dump/logits dump/logits3 --format 3

Every payload is read back and compared before its shard counts as converted. A conversion that was
stopped goes on when it is started again; nothing is overwritten. Ends with status 1 if a shard
could not be converted, and names it.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from megatron.training.distillation import storage
from tools.cache.conversion import Converted, Target
from tools.cache.converted_cache import Failed, convert_cache


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _convert(options)
    except (ValueError, *storage.ERRORS) as error:
        print(f"logits_cache: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.logits_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    convert = verbs.add_parser(
        "convert",
        help="write a cache again in another format",
        description="Write all live shards of SRC again in DST, in another format.",
        epilog="example: python -m tools.logits_cache convert dump/logits dump/logits3 --format 3",
    )
    convert.add_argument("source", metavar="SRC", help="directory of the cache")
    convert.add_argument("target", metavar="DST", help="directory of the new one; it is made")
    convert.add_argument("--format", type=int, choices=(2, 3), required=True)
    convert.add_argument(
        "--8bit",
        dest="eight_bit",
        action="store_true",
        help="store values as 8-bit codes, of format 3 only, as --logits-save-8bit does",
    )
    convert.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)"
    )
    convert.add_argument(
        "--spool-dir",
        help="where payloads wait until their shard is complete (default: memory, up to a shard "
        "per process)",
    )
    return parser


def _convert(options: argparse.Namespace) -> int:
    to = Target(format_version=options.format, eight_bit=options.eight_bit)
    progress = _Progress()
    for result in convert_cache(
        options.source,
        options.target,
        to,
        jobs=max(1, options.jobs),
        spool_dir=options.spool_dir,
        begin=progress.begin,
    ):
        progress.add(result)
    return progress.end()


class _Progress:
    """Tells how far a conversion has come: on a terminal in one line, else now and then."""

    def __init__(self) -> None:
        self._shards = 0
        self._done: list[Converted] = []
        self._failed: list[Failed] = []
        self._began = self._told = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def begin(self, shards: int) -> None:
        self._shards = shards

    def add(self, result: Converted | Failed) -> None:
        if isinstance(result, Failed):
            self._failed.append(result)
            self._line(f"{result.name}: {result.reason}\n")
        else:
            self._done.append(result)
        now = time.monotonic()
        if self._is_terminal or now - self._told > 10:
            self._told = now
            self._line(self._state(now) + ("" if self._is_terminal else "\n"))

    def end(self) -> int:
        """Say what has been done; return the exit status."""
        self._line("")
        there = sum(one.was_there for one in self._done)
        read, written = self._bytes()
        share = f" ({written / read:.1%})" if read else ""
        print(
            f"{len(self._done)} of {self._shards} shards in {time.monotonic() - self._began:.0f} s"
            f", {there} of them were there already; {read} bytes became {written}{share}"
        )
        if self._failed:
            names = ", ".join(sorted(failure.name for failure in self._failed))
            print(f"{len(self._failed)} shards were not converted: {names}", file=sys.stderr)
        return 1 if self._failed else 0

    def _bytes(self) -> tuple[int, int]:
        return sum(one.read_bytes for one in self._done), sum(
            one.written_bytes for one in self._done
        )

    def _state(self, now: float) -> str:
        finished = len(self._done) + len(self._failed)
        left = (now - self._began) / finished * (self._shards - finished)
        read, _ = self._bytes()
        rate = read / 1e6 / max(now - self._began, 1e-9)
        return f"{finished}/{self._shards} shards, {rate:.0f} MB/s, {left:.0f} s left"

    def _line(self, text: str) -> None:
        """Write *text* over the line of the terminal."""
        clear = "\r\x1b[K" if self._is_terminal else ""
        sys.stderr.write(clear + text)
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
