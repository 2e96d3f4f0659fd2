# SPDX-License-Identifier: Apache-2.0
"""Verifies payloads: checksum, decoding, values; parts of shards in processes side by side."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError, TeacherDataError
from megatron.training.distillation.open_shard import MemberRows, OpenShard
from tools.cache.cache_files import ShardFile
from tools.cache.coverage import Span, merge
from tools.cache.inventory import ShardSummary
from tools.cache.processes import in_processes
from tools.cache.value_checks import Promise, find_fault

_PART_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Some payloads of a shard: those from number *first* to before *end*, of *size* bytes."""

    file: ShardFile
    first: int
    end: int
    size: int
    is_whole: bool


class Fault(NamedTuple):
    """A payload that is damaged."""

    span: Span
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What came of a part of a shard.

    Attributes:
        name: Base name of the shard.
        revision: What it was when it was opened; another one has to be verified again.
        first: Number of its first payload.
        end: Number after its last payload.
        size: Bytes of them, about.
        faults: The payloads that are damaged.
        lengths: Sequence lengths of the others, each with the samples that have it.
        unreachable: Why the storage did not give the payloads; None if it did.
    """

    name: str
    revision: str
    first: int
    end: int
    size: int
    faults: tuple[Fault, ...] = ()
    lengths: tuple[tuple[int, tuple[Span, ...]], ...] = ()
    unreachable: str | None = None


def all_parts(shards: Iterable[ShardSummary]) -> list[Part]:
    """Return all payloads of *shards*; of a large one in several parts, so that none waits long."""
    parts = []
    for shard in shards:
        number = min(shard.members, -(-shard.size // _PART_BYTES))
        bounds = [shard.members * part // number for part in range(number + 1)] if number else []
        parts += [
            Part(
                file=shard.file,
                first=first,
                end=end,
                size=shard.size * (end - first) // shard.members,
                is_whole=number == 1,
            )
            for first, end in itertools.pairwise(bounds)
        ]
    return parts


def sample_parts(shards: Sequence[ShardSummary], count: int) -> list[Part]:
    """Return *count* payloads, or all there are, spread evenly over *shards*; always the same."""
    total = sum(shard.members for shard in shards)
    count = min(count, total)
    wanted = [(2 * number + 1) * total // (2 * count) for number in range(count)]
    parts, before = [], 0
    places = iter(wanted)
    place = next(places, None)
    for shard in shards:
        while place is not None and place < before + shard.members:
            first = place - before
            size = shard.size // shard.members
            part = Part(file=shard.file, first=first, end=first + 1, size=size, is_whole=False)
            parts.append(part)
            place = next(places, None)
        before += shard.members
    return parts


def verify_parts(parts: Iterable[Part], *, jobs: int) -> Iterator[Verified]:
    """Yield what came of each of *parts*, in the order in which they are finished.

    A damaged payload keeps nothing else from being verified. One payload is held at a time by each
    of the *jobs* processes.
    """
    yield from in_processes(verify_part, parts, jobs=jobs)


def verify_part(part: Part) -> Verified:
    """Verify every payload of a part of a shard."""
    revision = ""
    faults: list[Fault] = []
    lengths: dict[int, list[Span]] = {}
    unreachable = None
    try:
        revision = revision_of(part.file)
        with part.file.open(whole=part.is_whole) as shard:
            promise = Promise.of(shard.meta)
            for member in shard.members[part.first : part.end]:
                span = Span(member.start, member.end)
                length, reason = _verify_member(shard, member, promise)
                if reason is not None:
                    faults.append(Fault(span, reason))
                else:
                    lengths.setdefault(length, []).append(span)
    except CacheFormatError as error:  # it was changed since its metadata were read
        faults.append(Fault(Span(part.file.name.start, part.file.name.end), str(error)))
    except (TeacherDataError, *storage.ERRORS) as error:
        unreachable = str(error)
    return Verified(
        name=part.file.base_name,
        revision=revision,
        first=part.first,
        end=part.end,
        size=part.size,
        faults=tuple(faults),
        lengths=tuple((length, merge(spans)) for length, spans in lengths.items()),
        unreachable=unreachable,
    )


def _verify_member(
    shard: OpenShard, member: MemberRows, promise: Promise
) -> tuple[int, str | None]:
    """Return the sequence length of a payload and what is wrong with it."""
    try:
        rows = shard.decode_proven(member)
    except CacheFormatError as error:
        return 0, str(error)
    fault = find_fault(rows, promise)
    where = f"The member {member.entry.name} of teacher shard {shard.path} is wrong: "
    return rows.values.shape[0], None if fault is None else where + fault


def revision_of(file: ShardFile) -> str:
    """Return what changes when the shard is written again.

    Raises:
        OSError: The shard cannot be reached.
    """
    found = storage.revision(file.path)
    return f"{found.size}-{found.tag}"
