# SPDX-License-Identifier: Apache-2.0
"""``repair``: set aside what is broken, and tell what to dump again."""

import argparse
import sys

from tools.cache.cache_files import list_cache
from tools.cache.command_line import Verbs, add_jobs, add_verb
from tools.cache.inventory import Inventory, take_inventory
from tools.cache.payload_verification import Verified, all_parts
from tools.cache.progress import Progress
from tools.cache.repair import (
    apply_moves,
    renamed_shards,
    seconds_since_write,
    shards_with_damaged_payloads,
)
from tools.cache.repair_plan import Move, plan_repair
from tools.cache.verbs.verify import counted, print_missing, samples, wrapped
from tools.cache.verification import Kind, Verification
from tools.cache.verify_cache import verify_payloads

_QUIET_SECONDS = 600


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "repair",
        summary="set aside what is broken in a cache, and tell what to dump again",
        description="Rename shards of DIR that are damaged, of another dump, or overlapping, and\n"
        "files that a writer left unfinished, to .stale; what they alone hold is kept under a\n"
        "name of its own. Without --apply nothing is changed and each move is only told. Nothing\n"
        "is deleted. The last lines tell how to dump the missing samples again.\n\n"
        "Exit status: 0 if nothing is left to do, 1 if moves or samples are left, 2 if the\n"
        "command line is wrong.",
        example="python -m tools.logits_cache repair dump/logits --apply",
    )
    parser.add_argument("directory", metavar="DIR", help="directory of the cache")
    parser.add_argument("--apply", action="store_true", help="do it")
    much = parser.add_mutually_exclusive_group()
    much.add_argument(
        "--full", action="store_true", help="verify all payloads first, as verify does"
    )
    much.add_argument(
        "--from",
        dest="found",
        metavar="FILE",
        help="verify only the payloads of shards in which verify has found damaged ones, by its "
        "--state FILE or by what it printed with --json",
    )
    parser.add_argument(
        "--samples", type=samples, metavar="FIRST-END", help="what the cache must cover"
    )
    parser.add_argument(
        "--no-writer",
        action="store_true",
        help="no dump is writing into DIR, even if an unfinished file is new",
    )
    add_jobs(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    files = list_cache(options.directory)
    if _is_being_written(*seconds_since_write(files), options):
        return 1
    with Progress("shards", len(files.shards)) as progress:
        inventory = take_inventory(files, advance=progress.advance)
    verification = Verification(
        inventory=inventory,
        verified=_verified(inventory, options),
        wanted=options.samples,
    )
    moves = plan_repair(verification, renamed_shards(inventory.damaged))
    left = _print_moves(options, moves)
    if options.apply and any(move.renamed for move in moves):  # samples came back
        now = take_inventory(list_cache(options.directory))
        live = {shard.base_name for shard in now.files.shards}
        verification = Verification(
            inventory=now,
            verified=[one for one in verification.verified if one.name in live],
            wanted=verification.expected,
        )
    stays = [f for f in verification.findings if f.kind is Kind.UNREACHABLE]
    for finding in stays:
        name = finding.file.base_name
        print(wrapped(f"{name} stays, the storage did not give it: {finding.reason}"))
    if files.is_legacy and verification.findings:
        print("Shards of format v1 stay as they are: dump the teacher again into a new directory.")
    elif verification.missing:
        print_missing(verification.missing)
    nothing_left = not (left or stays or verification.missing)
    if nothing_left:
        print("nothing is left to do")
    return 0 if nothing_left else 1


def _is_being_written(unfinished: float, newest: float, options: argparse.Namespace) -> bool:
    """Say so where a dump may be writing; return whether that forbids to change anything."""
    if options.no_writer:
        return False
    if unfinished < _QUIET_SECONDS:
        print(
            f"A file in {options.directory} was begun {unfinished:.0f} s ago: a dump or a "
            "conversion is writing\nthere. Wait until it has ended, or, if you know that none is "
            "running, add --no-writer.",
            file=sys.stderr,
        )
        return bool(options.apply)
    if newest < _QUIET_SECONDS:
        print(
            f"WARNING: a shard of {options.directory} was written {newest:.0f} s ago. Repair only "
            "while no dump is\nrunning: its next shard would be planned without these moves.",
            file=sys.stderr,
        )
    return False


def _verified(inventory: Inventory, options: argparse.Namespace) -> list[Verified]:
    """Return what came of the payloads that are to be looked at."""
    if not (options.full or options.found):
        return []
    shards = inventory.sound
    if options.found:
        names = shards_with_damaged_payloads(options.found)
        shards = [shard for shard in shards if shard.file.base_name in names]
    parts = all_parts(shards)
    with Progress("parts of shards", len(parts)) as progress:
        return verify_payloads(
            parts,
            jobs=options.jobs,
            advance=lambda verified, was_known: progress.advance(verified.size),
        ).verified


def _print_moves(options: argparse.Namespace, moves: list[Move]) -> int:
    """Print and, if asked to, take the moves; return how many are left."""
    for move in moves:
        print(wrapped(f"{move.name} -> .stale: {move.reason}"))
        if move.renamed is not None:
            print(f"  it is whole and gets its name {move.renamed} back if no shard has it")
        if move.pieces:
            pieces = ", ".join(map(str, move.pieces))
            print(wrapped(f"  what it alone holds and is sound stays as {pieces}"))
    if not moves:
        print("no file has to be set aside")
        return 0
    if options.apply:
        return apply_moves(options.directory, moves, print)
    print(f"{counted(len(moves), 'file')} would be set aside; --apply does it")
    return len(moves)
