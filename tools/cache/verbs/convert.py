# SPDX-License-Identifier: Apache-2.0
"""``convert``: write a cache again in another format."""

import argparse
import sys

from tools.cache.command_line import Verbs, add_jobs, add_verb
from tools.cache.conversion import Converted, Target
from tools.cache.converted_cache import Failed, convert_cache, shards_of
from tools.cache.progress import Progress


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "convert",
        summary="write a cache again in another format",
        description="Write all live shards of SRC again in DST, in another format. Every payload "
        "is read back and\ncompared before its shard counts as converted. A conversion that was "
        "stopped goes on when it\nis started again; nothing is overwritten.",
        example="python -m tools.logits_cache convert dump/logits dump/logits3 --format 3",
    )
    parser.add_argument("source", metavar="SRC", help="directory of the cache")
    parser.add_argument("target", metavar="DST", help="directory of the new one; it is made")
    parser.add_argument("--format", type=int, choices=(2, 3), required=True)
    parser.add_argument(
        "--8bit",
        dest="eight_bit",
        action="store_true",
        help="store values as 8-bit codes, of format 3 only, as --logits-save-8bit does",
    )
    add_jobs(parser)
    parser.add_argument(
        "--spool-dir",
        help="where payloads wait until their shard is complete (default: memory, up to a shard "
        "per process)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    to = Target(format_version=options.format, eight_bit=options.eight_bit)
    shards = shards_of(options.source, options.target)
    done: list[Converted] = []
    failed: list[Failed] = []
    with Progress("shards", len(shards)) as progress:
        for result in convert_cache(
            options.source,
            options.target,
            shards,
            to,
            jobs=options.jobs,
            spool_dir=options.spool_dir,
        ):
            if isinstance(result, Failed):
                failed.append(result)
                progress.say(f"{result.name}: {result.reason}")
                progress.advance()
            else:
                done.append(result)
                progress.advance(result.read_bytes)
    _print_sum(len(shards), done, progress.seconds)
    if failed:
        names = ", ".join(sorted(failure.name for failure in failed))
        print(f"{len(failed)} shards were not converted: {names}", file=sys.stderr)
    return 1 if failed else 0


def _print_sum(shards: int, done: list[Converted], seconds: float) -> None:
    there = sum(one.was_there for one in done)
    read, written = sum(one.read_bytes for one in done), sum(one.written_bytes for one in done)
    share = f" ({written / read:.1%})" if read else ""
    print(
        f"{len(done)} of {shards} shards in {seconds:.0f} s, {there} of them were there already; "
        f"{read} bytes became {written}{share}"
    )
