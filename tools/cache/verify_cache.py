# SPDX-License-Identifier: Apache-2.0
"""Verifies a cache: its structure, and its payloads as far as is asked for, resumable."""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron.training.distillation import storage
from tools.cache.cache_files import ShardFile
from tools.cache.inventory import Inventory
from tools.cache.payload_verification import (
    Part,
    Verified,
    all_parts,
    revision_of,
    sample_parts,
    verify_parts,
)
from tools.cache.verification_state import VerificationState

_REMOTE_THREADS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Payloads:
    """What came of the payloads that were asked for.

    Attributes:
        verified: Of each part, now or before.
        done: Payloads that were verified now.
        skipped: Payloads that had been verified before, by the state.
        size: Bytes of those verified now, about.
    """

    verified: list[Verified]
    done: int
    skipped: int
    size: int


def parts_to_verify(inventory: Inventory, sample: int | None) -> list[Part]:
    """Return the payloads of all sound shards, or a *sample* of that many of them."""
    if sample is not None:
        return sample_parts(inventory.sound, sample)
    return all_parts(inventory.sound)


def verify_payloads(
    parts: Sequence[Part],
    *,
    jobs: int,
    state: VerificationState | None = None,
    advance: Callable[[Verified, bool], None] = lambda verified, was_known: None,
) -> Payloads:
    """Verify *parts*, but for what *state* has of shards that are still the same.

    Args:
        parts: What to verify.
        jobs: Processes; 1 works in this one.
        state: Keeps what was verified.
        advance: Called with each result, and whether it was known.
    """
    known = {} if state is None else _known(parts, state)
    left = [part for part in parts if part not in known]
    verified = list(known.values())
    for one in verified:
        advance(one, True)
    done = size = 0
    for one in verify_parts(left, jobs=min(jobs, max(len(left), 1))):
        if state is not None:
            state.add(one)
        verified.append(one)
        if one.unreachable is None:
            done += one.end - one.first
            size += one.size
        advance(one, False)
    skipped = sum(one.end - one.first for one in known.values())
    return Payloads(verified=verified, done=done, skipped=skipped, size=size)


def _known(parts: Sequence[Part], state: VerificationState) -> dict[Part, Verified]:
    """Return what *state* has of *parts*; each shard that it has is looked at, not read."""
    names = {name for name, _, _ in state.known}
    files = list(dict.fromkeys(part.file for part in parts if part.file.base_name in names))
    threads = _REMOTE_THREADS if any(storage.is_remote(file.path) for file in files) else 1
    with ThreadPoolExecutor(threads, thread_name_prefix="revisions") as pool:
        revisions = dict(zip(files, pool.map(_revision, files), strict=True))
    found = {part: state.still_holds(part, revisions.get(part.file, "")) for part in parts}
    return {part: verified for part, verified in found.items() if verified is not None}


def _revision(file: ShardFile) -> str:
    try:
        return revision_of(file)
    except storage.ERRORS:  # told when it is verified
        return ""


def remove_state(state: VerificationState) -> None:
    """Remove the state of a verification that has come to its end."""
    with contextlib.suppress(FileNotFoundError):  # one beside this one has ended first
        os.unlink(state.path)
