# SPDX-License-Identifier: Apache-2.0
"""``verify``: whether a cache is whole and sound, and what has to be dumped again."""

import argparse
import contextlib
import json
import sys
import textwrap
from typing import Any

from megatron.training.distillation import storage
from tools.cache.cache_files import list_cache
from tools.cache.command_line import Verbs, add_jobs, add_verb, positive
from tools.cache.coverage import Span, merge
from tools.cache.inventory import Inventory, take_inventory
from tools.cache.payload_verification import Verified
from tools.cache.progress import Progress
from tools.cache.regeneration import flags, recipe
from tools.cache.verification import Kind, Missing, Verification, in_words
from tools.cache.verification_state import VerificationState, default_path
from tools.cache.verify_cache import Payloads, parts_to_verify, remove_state, verify_payloads

_LISTED_FILES = 5
_WITH = {kind: str(kind) for kind in Kind} | {Kind.PAYLOAD: "with damaged payloads"}


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "verify",
        summary="tell whether a cache is whole and sound, and what to dump again",
        description="Verify every shard of DIR: name, archive, seal, run, and that the shards of\n"
        "all DP ranks cover the same samples once. --full and --sample also read payloads:\n"
        "checksum, decoding, and whether the log-probabilities can be any. Nothing is changed.\n\n"
        "Exit status: 0 if the cache is sound, 1 if it is damaged or incomplete or could not be\n"
        "read, 2 if the command line is wrong.",
        example="python -m tools.logits_cache verify dump/logits --full",
    )
    parser.add_argument("directory", metavar="DIR", help="directory of the cache")
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--full", action="store_true", help="verify every payload")
    much.add_argument(
        "--sample",
        type=positive,
        metavar="N",
        help="verify N payloads, spread evenly over the cache; always the same ones",
    )
    parser.add_argument(
        "--samples",
        type=samples,
        metavar="FIRST-END",
        help="what the cache must cover, as in the names of shards (default: from the first sample "
        "that is there to the last)",
    )
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="keep what was verified in FILE, and skip what FILE has of shards that have not "
        "changed since; it may lie anywhere on a file system. By default --full goes on where an "
        "interrupted one was stopped, by a file below ~/.local/state",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON; tools/README.md has its keys"
    )
    add_jobs(parser)
    parser.set_defaults(run=_run)


def samples(text: str) -> Span:
    """Return the samples ``FIRST-END``, for argparse."""
    first, separator, end = text.partition("-")
    if not (separator and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range like 0-3200")
    return Span(int(first), int(end))


def _run(options: argparse.Namespace) -> int:
    files = list_cache(options.directory)
    with Progress("shards", len(files.shards)) as progress:
        inventory = take_inventory(files, advance=progress.advance)
    payloads, seconds = None, 0.0
    if options.full or options.sample:
        payloads, seconds = _verify_payloads(inventory, options)
    verification = Verification(
        inventory=inventory,
        verified=payloads.verified if payloads else (),
        wanted=options.samples,
    )
    if options.json:
        print(json.dumps(as_json(verification, payloads), indent=2))
    else:
        _print(verification, payloads, seconds)
    return 0 if verification.is_sound else 1


def _verify_payloads(inventory: Inventory, options: argparse.Namespace) -> tuple[Payloads, float]:
    parts = parts_to_verify(inventory, options.sample)
    is_ours = options.state is None and options.full
    with contextlib.ExitStack() as stack:
        state = _open_state(options)
        if state is not None:
            stack.callback(state.close)
        progress = stack.enter_context(Progress("parts of shards", len(parts)))

        def advance(verified: Verified, was_known: bool) -> None:
            if not options.json:
                for fault in verified.faults[:1]:
                    progress.say(wrapped(f"damaged: {fault.reason}"))
            progress.advance(0 if was_known else verified.size)

        payloads = verify_payloads(parts, jobs=options.jobs, state=state, advance=advance)
        if is_ours and state is not None:
            remove_state(state)
        return payloads, progress.seconds


def _open_state(options: argparse.Namespace) -> VerificationState | None:
    """Return what keeps what is verified; without one of the user's, none if that fails."""
    if options.state is not None:
        return VerificationState(options.state, options.directory)
    if not options.full:
        return None
    try:
        return VerificationState(default_path(options.directory), options.directory)
    except (ValueError, *storage.ERRORS) as error:
        text = f"WARNING: this verification cannot be gone on with if it is stopped: {error}"
        print(wrapped(text), file=sys.stderr)
        return None


def as_json(verification: Verification, payloads: Payloads | None) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    inventory = verification.inventory
    files = inventory.files
    return {
        "directory": files.directory,
        "sound": verification.is_sound,
        "shards": len(files.shards),
        "bytes": sum(shard.size for shard in inventory.shards),
        "unsealed_shards": _unsealed(inventory),
        "samples": list(map(list, inventory.coverage.complete)),
        "payloads": sum(shard.members for shard in inventory.shards),
        "verified_payloads": payloads.done if payloads else 0,
        "skipped_payloads": payloads.skipped if payloads else 0,
        "findings": [
            {
                "shard": finding.file.base_name,
                "kind": str(finding.kind),
                "reason": finding.reason,
                "samples": list(map(list, finding.spans)),
            }
            for finding in verification.findings
        ],
        "regenerate": [
            {
                "samples": list(one.samples),
                "iterations": [one.first, one.end],
                "dp_ranks": list(one.dp_ranks),
                "flags": flags(one),
            }
            for one in verification.missing
        ],
        "stale_files": list(files.stale),
        "unfinished_files": list(files.unfinished),
        "other_files": list(files.foreign),
    }


def _unsealed(inventory: Inventory) -> int:
    return sum(shard.problem is None and not shard.sealed for shard in inventory.shards)


def _print(verification: Verification, payloads: Payloads | None, seconds: float) -> None:
    inventory = verification.inventory
    print(_summary(inventory))
    for line in [*_remarks(verification), *_payload_lines(payloads, seconds)]:
        print(wrapped(line))
    for finding in verification.findings:
        print(wrapped(f"{finding.file.base_name}: {finding.kind}: {finding.reason}"))
    if verification.missing:
        print_missing(verification.missing)
    print(_verdict(verification, payloads))


def wrapped(text: str) -> str:
    """Return *text* in lines for a terminal of 100 columns; further ones are indented."""
    return textwrap.fill(
        text, 98, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def counted(number: int, what: str) -> str:
    """Return a number of things in words; *what* is one of them."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def print_missing(missing: list[Missing]) -> None:
    """Print which iterations have to be dumped again, and how."""
    total = sum(one.end - one.first for one in missing)
    print(f"To be dumped again: {counted(total, 'iteration')} in {counted(len(missing), 'range')}")
    for one in missing:
        ranks = ", ".join(map(str, one.dp_ranks))
        last = f" to {one.end}" if one.end > one.first + 1 else ""
        print(
            wrapped(
                f"  samples {one.samples}, iteration {one.first + 1}{last}: lost of DP rank {ranks}"
            )
        )
    for line in recipe(missing):
        print(line)


def _summary(inventory: Inventory) -> str:
    shards = inventory.shards
    size = sum(shard.size for shard in shards)
    covered = in_words(inventory.coverage.complete) or "none"
    ranks = len(inventory.coverage.by_rank)
    formats = sorted({s.meta.saver.format_version for s in shards if s.meta is not None})
    version = " and ".join(map(str, formats)) or "unknown"
    return (
        f"{counted(len(shards), 'shard')}, {size / 1e6:.1f} MB, format {version}, "
        f"{counted(ranks, 'DP rank')}; "
        f"samples {covered}"
    )


def _remarks(verification: Verification) -> list[str]:
    """Return what is worth knowing and no damage."""
    inventory = verification.inventory
    files = inventory.files
    lines = [
        f"no data, left alone: {len(names)} {what} ({', '.join(names[:_LISTED_FILES])}"
        f"{', ...' if len(names) > _LISTED_FILES else ''})"
        for what, names in (
            ("set aside", files.stale),
            ("unfinished, by a writer that was killed or is at work", files.unfinished),
            ("of another kind", files.foreign),
        )
        if names
    ]
    if unsealed := _unsealed(inventory):
        lines.append(
            f"{unsealed} of the shards record neither checksums nor their size and name: an "
            "exchange of shards or payloads of equal shape cannot be found in them, and a flipped "
            "bit only where it does not decode or gives values that cannot be"
        )
    covered = merge(inventory.coverage.complete)
    total = verification.train_samples
    if verification.wanted is None and covered:
        if covered[0].start > 0:
            lines.append(
                f"the cache begins at sample {covered[0].start}; --samples 0-{covered[-1].end} "
                "takes what is before it for missing"
            )
        expected = verification.expected
        if expected is not None and total is not None and expected.end < total:
            lines.append(f"the dump has not got to its end: {expected.end} of {total} samples")
    return lines


def _payload_lines(payloads: Payloads | None, seconds: float) -> list[str]:
    if payloads is None:
        return []
    before = f", {payloads.skipped} were verified before" if payloads.skipped else ""
    speed = payloads.size / 1e6 / max(seconds, 1e-9)
    return [f"{payloads.done} payloads verified in {seconds:.0f} s ({speed:.0f} MB/s){before}"]


def _verdict(verification: Verification, payloads: Payloads | None) -> str:
    if verification.is_sound:
        seen = "payloads not looked at" if payloads is None else "payloads that were verified too"
        return f"sound: all shards, {seen}"
    kinds: dict[Kind, set[str]] = {}
    for finding in verification.findings:
        kinds.setdefault(finding.kind, set()).add(finding.file.base_name)
    parts = [f"{counted(len(names), 'shard')} {_WITH[kind]}" for kind, names in kinds.items()]
    if verification.missing:
        parts.append("samples missing")
    return f"NOT sound: {', '.join(parts)}"
