# SPDX-License-Identifier: Apache-2.0
"""``report``: one HTML page with what there is to see of a cache."""

import argparse
import contextlib
import shlex
import sys
from typing import BinaryIO

from megatron.training.distillation import storage
from tools.cache.cache_files import list_cache
from tools.cache.command_line import Verbs, add_jobs, add_verb, positive
from tools.cache.inventory import take_inventory
from tools.cache.progress import Progress
from tools.cache.report.contents import report
from tools.cache.report.sequences import load_tokenizer
from tools.cache.report.survey import survey

_BEGINNING = b"<!doctype html>"


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "report",
        summary="draw what there is to see of a cache, on one HTML page",
        description="Write one HTML page, which needs nothing else, on a cache: what it is and "
        "covers, what a smaller K\nor a top-P would keep and save, the teacher's entropy, bytes "
        "and mass along the run, and a few\nsequences. Coverage and bytes are of all shards, the "
        "rest of payloads that are evenly spread;\nthe page says how many. What is damaged is "
        "named on the page, and no error: `verify` judges.",
        example="python -m tools.logits_cache report dump/logits --out report.html "
        "--tokenizer corpus/tokenizer",
    )
    parser.add_argument("directory", metavar="DIR", help="directory of the cache")
    parser.add_argument("--out", metavar="FILE", required=True, help="the page")
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="Hugging Face tokenizer of the teacher, to show sequences as text",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        help="time to look at payloads for (default: %(default)s)",
    )
    parser.add_argument(
        "--payloads",
        type=positive,
        help="look at this many payloads instead, however long it takes: always the same ones",
    )
    add_jobs(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    _check_out(options.out)
    text_of = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    files = list_cache(options.directory)
    with Progress("shards", len(files.shards)) as progress:
        inventory = take_inventory(files, advance=progress.advance)
    total = sum(shard.members for shard in inventory.sound)
    with Progress("payloads", min(total, options.payloads or total)) as progress:
        found = survey(
            inventory,
            payloads=options.payloads,
            seconds=options.seconds,
            jobs=options.jobs,
            advance=progress.advance,
        )
    seen = len(found.points) + len(found.failed)
    content = report(inventory, found, text_of=text_of, command=_command(options, seen))
    data = content.encode()

    def write(stream: BinaryIO) -> None:
        stream.write(data)

    storage.publish(options.out, write)
    print(
        f"{options.out}: {len(data) / 1e3:.0f} kB, of {seen} of {found.total} payloads and "
        f"{len(files.shards)} shards"
    )
    _tell_damage(len(inventory.damaged), "shards")
    _tell_damage(len(found.failed), "of these payloads")
    return 0


def _command(options: argparse.Namespace, seen: int) -> str:
    """Return the words that make the same page again."""
    words = ["python", "-m", "tools.logits_cache", "report", options.directory, "--out"]
    words += [options.out, "--payloads", str(max(seen, 1))]
    if options.tokenizer is not None:
        words += ["--tokenizer", options.tokenizer]
    return shlex.join(words)


def _check_out(path: str) -> None:
    """Refuse to overwrite what is no page.

    Raises:
        ValueError: It is something else.
    """
    if not storage.exists(path):
        return
    with contextlib.closing(storage.open_read(path, whole=False)) as stream:
        found = stream.read(len(_BEGINNING))
    if found.lower() != _BEGINNING:
        raise ValueError(f"{path} is there already and is no HTML page: give --out another name.")


def _tell_damage(count: int, what: str) -> None:
    if count:
        print(f"{count} {what} cannot be read; the page names them", file=sys.stderr)
