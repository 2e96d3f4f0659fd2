# SPDX-License-Identifier: Apache-2.0
"""Looks at payloads that are evenly spread over a cache, in processes side by side."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError, TeacherDataError
from megatron.training.distillation.open_shard import MemberRows, OpenShard
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import MAX_VOCAB_SIZE
from tools.cache.inventory import Inventory
from tools.cache.processes import in_processes
from tools.cache.report.reencoding import Sizes, encoding_of, measure_sizes
from tools.cache.report.sampling import Payload, spread_payloads, spread_rows
from tools.cache.report.statistics import Statistics

READ_ERRORS = (CacheFormatError, TeacherDataError, *storage.ERRORS)
"""What a damaged shard or member raises."""

_ROWS = 8
_MEASURED = 4
_SECONDS_ALONE = 4.0
"""Other processes take about as long to begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A payload that cannot be read."""

    payload: Payload
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Looked:
    """What was found in a payload.

    Attributes:
        payload: The payload.
        start: Its first sample.
        end: The sample after its last one.
        size: Its bytes.
        rows: Rows that it has.
        rows_seen: Rows that were looked at.
        sequence_length: Positions of each.
        statistics: Of the rows that were looked at.
        sizes: Of them with fewer entries; None where that was not measured.
    """

    payload: Payload
    start: int
    end: int
    size: int
    rows: int
    rows_seen: int
    sequence_length: int
    statistics: Statistics
    sizes: Sizes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Means over the tokens of one payload."""

    payload: Payload
    start: int
    end: int
    kept: float
    tail: float
    entropy: float


@dataclass(kw_only=True, eq=False)
class Survey:
    """What was found in a sample of a cache.

    Attributes:
        total: Payloads that there are in shards that can be read.
        points: Those that were looked at.
        failed: Those that cannot be read.
        rows: Rows of the payloads that were looked at.
        rows_seen: Rows that were looked at.
        bytes_seen: Bytes of the payloads that were looked at.
        sequence_length: Positions of a sample; None if no payload could be read.
        statistics: Of what was looked at.
        sizes: With fewer entries, of a part of it; None if no payload could be read.
        stopped: Whether time was up before the wanted number of payloads.
        seconds: Time that it took.
    """

    total: int
    points: list[Point] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    rows: int = 0
    rows_seen: int = 0
    bytes_seen: int = 0
    sequence_length: int | None = None
    statistics: Statistics = field(default_factory=Statistics.nothing)
    sizes: Sizes | None = None
    stopped: bool = False
    seconds: float = 0.0

    def add(self, found: Looked) -> None:
        """Add what was found in a payload."""
        one = found.statistics
        if one.tokens:
            kept, tail, entropy = (part / one.tokens for part in (one.kept, one.tail, one.entropy))
            self.points.append(
                Point(
                    payload=found.payload,
                    start=found.start,
                    end=found.end,
                    kept=kept,
                    tail=tail,
                    entropy=entropy,
                )
            )
        self.rows += found.rows
        self.rows_seen += found.rows_seen
        self.bytes_seen += found.size
        self.sequence_length = max(self.sequence_length or 0, found.sequence_length)
        self.statistics += one
        if self.sizes is None:
            self.sizes = found.sizes
        elif found.sizes is not None:
            self.sizes += found.sizes


def survey(
    inventory: Inventory,
    *,
    payloads: int | None,
    seconds: float,
    jobs: int,
    advance: Callable[[int], None] = lambda size: None,
) -> Survey:
    """Look at evenly spread payloads of the sound shards.

    Args:
        inventory: The cache.
        payloads: How many; None for as many as there is time for.
        seconds: No payload is begun later than this; what is being read then is finished.
        jobs: Processes.
        advance: Called with the bytes of each payload when it has been looked at.
    """
    began = time.time()  # all processes have the same
    result = Survey(total=sum(shard.members for shard in inventory.sound))
    wanted = result.total if payloads is None else min(payloads, result.total)
    deadline = None if payloads is not None else began + seconds
    work = functools.partial(_look_at, deadline=deadline)
    chosen = itertools.islice(spread_payloads(inventory.sound), wanted)
    items = _until(deadline, zip(chosen, itertools.count(), strict=False))
    first = map(work, _until(began + _SECONDS_ALONE, items))
    for found in itertools.chain(first, in_processes(work, items, jobs=jobs)):
        if isinstance(found, Failed):
            result.failed.append(found)
            advance(0)
        elif found is not None:
            result.add(found)
            advance(found.size)
    result.stopped = len(result.points) + len(result.failed) < wanted
    result.points.sort(key=lambda point: (point.start, point.payload.shard.name.dp_rank))
    result.seconds = time.time() - began
    return result


def _until[Item](deadline: float | None, items: Iterator[Item]) -> Iterator[Item]:
    """Yield *items* until there is no more time; the first in any case. None is lost."""
    for item in items:
        yield item
        if deadline is not None and time.time() > deadline:
            return


def _look_at(item: tuple[Payload, int], deadline: float | None) -> Looked | Failed | None:
    """Look at a payload; None if it is too late."""
    payload, number = item
    if number and deadline is not None and time.time() > deadline:
        return None
    try:
        with payload.shard.open(whole=False) as shard:
            member = shard.members[payload.member]
            return _statistics(payload, shard, member, measured=number < _MEASURED)
    except READ_ERRORS as error:
        return Failed(payload=payload, reason=str(error))


def _statistics(
    payload: Payload, shard: OpenShard, member: MemberRows, *, measured: bool
) -> Looked:
    count = (member.end - member.start) // shard.dp_size
    rows = read_rows(shard, member, spread_rows(count, _ROWS))
    statistics = Statistics.nothing()
    statistics.add(rows)
    return Looked(
        payload=payload,
        start=member.start,
        end=member.end,
        size=member.entry.size,
        rows=count,
        rows_seen=rows.values.shape[1],
        sequence_length=rows.values.shape[0],
        statistics=statistics,
        sizes=_sizes(shard, rows) if measured else None,
    )


def _sizes(shard: OpenShard, rows: TeacherRows) -> Sizes:
    saver, manifest = shard.meta.saver, shard.meta.manifest
    vocab_size = None if manifest is None else manifest.padded_vocab_size or manifest.vocab_size
    return measure_sizes(
        rows, encoding_of(saver.format_version, saver.save_dtype), vocab_size or MAX_VOCAB_SIZE
    )


def read_rows(shard: OpenShard, member: MemberRows, rows: Sequence[int]) -> TeacherRows:
    """Return *rows* of a member; where rows decode alone, no others are read."""
    if shard.decodes_rows:
        return shard.decode(member, rows).unpack_all()
    return shard.decode(member).unpack(rows)


def sample_of(shard: OpenShard, member: MemberRows, row: int) -> int:
    """Return the sample that a row of a member is of."""
    block, inside = divmod(row, shard.mbs)
    return member.start + (block * shard.dp_size + shard.name.dp_rank) * shard.mbs + inside
