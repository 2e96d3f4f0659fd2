# SPDX-License-Identifier: Apache-2.0
"""The rows of given samples, from a cache of any format and layout.

Every shard says itself how samples were dealt, so neither side of a comparison need have the
other's batch sizes. Where shards of a DP rank overlap, the one that starts later is read, as a
student does.
"""

import bisect
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import NamedTuple

import numpy as np

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError, TeacherDataError
from megatron.training.distillation.open_shard import MemberRows, OpenShard
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.shard_directory import live_segments
from megatron.training.distillation.utils import ShardName
from tools.cache.cache_files import ShardFile
from tools.cache.entry_change import unmasked

_READ_ERRORS = (CacheFormatError, TeacherDataError, *storage.ERRORS)


class LivePart(NamedTuple):
    """Samples ``[start, end)``, whose rows of one DP rank are read from *file*."""

    start: int
    end: int
    file: ShardFile


@dataclass(frozen=True, slots=True)
class LiveParts:
    """Which shard holds each DP rank's share of each sample; picklable.

    Attributes:
        by_rank: The parts of each DP rank that has some, by ascending samples.
    """

    by_rank: tuple[tuple[LivePart, ...], ...]

    @classmethod
    def of(cls, shards: Iterable[ShardFile]) -> "LiveParts":
        """Return what is read of *shards*, which may overlap."""
        by_rank: dict[int, dict[ShardName, ShardFile]] = {}
        for shard in shards:
            by_rank.setdefault(shard.name.dp_rank, {})[shard.name] = shard
        return cls(
            tuple(
                tuple(LivePart(s.start, s.end, files[s.shard]) for s in live_segments(files))
                for _, files in sorted(by_rank.items())
            )
        )

    def within(self, start: int, end: int) -> "LiveParts":
        """Return what holds samples of ``[start, end)``."""
        found = []
        for parts in self.by_rank:
            first = bisect.bisect_right(parts, start, key=lambda part: part.end)
            stop = bisect.bisect_left(parts, end, key=lambda part: part.start)
            found.append(parts[first:stop])
        return LiveParts(tuple(filter(None, found)))

    def of_rank(self, dp_rank: int) -> "LiveParts":
        """Return what holds the share of one DP rank."""
        return LiveParts(tuple(p for p in self.by_rank if p[0].file.name.dp_rank == dp_rank))


@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows of the samples that are there and could be read.

    Attributes:
        rows: By sample, ``(S, K)`` values and ids, ``(S,)`` tails and ``(chunks,)`` fingerprints.
            A masked entry has the id -1.
        problems: What could not be read, in words that name the file.
    """

    rows: dict[int, TeacherRows] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class RowReader:
    """Reads samples of a cache; a context manager. Not to be shared by threads.

    Shards stay open until a later sample than theirs is asked for, so samples should be asked for
    in ascending order.

    Args:
        parts: The shards that are read.
        whole: Whether most of them will be read; else an object store is asked for parts.
    """

    def __init__(self, parts: LiveParts, *, whole: bool = True) -> None:
        self._parts = tuple(itertools.chain.from_iterable(parts.by_rank))
        self._whole = whole
        self._open: dict[ShardFile, tuple[OpenShard, contextlib.ExitStack]] = {}
        self._unreadable: set[ShardFile] = set()

    def __enter__(self) -> "RowReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all files."""
        self._close(list(self._open))

    def read(self, samples: Sequence[int]) -> FoundRows:
        """Return the rows of ascending *samples*; each member that holds some is decoded once."""
        found = FoundRows()
        if not samples:
            return found
        self._close([file for file in self._open if file.name.end <= samples[0]])
        wanted = np.asarray(samples, np.int64)
        sources: dict[int, ShardFile] = {}
        contradictions = set()
        for part in self._parts:
            if part.end <= samples[0] or part.start > samples[-1]:
                continue
            for sample, rows in self._read_part(part, wanted, found.problems):
                other = sources.get(sample)
                if other is not None:
                    if (other, part.file) not in contradictions:
                        contradictions.add((other, part.file))
                        found.problems.append(_contradiction(sample, other, part.file))
                    if other.name.start > part.file.name.start:
                        continue
                sources[sample] = part.file
                found.rows[sample] = rows
        return found

    def _read_part(
        self, part: LivePart, wanted: np.ndarray, problems: list[str]
    ) -> Iterator[tuple[int, TeacherRows]]:
        """Yield each of the *wanted* samples that this part's DP rank holds, with its rows."""
        shard = self._shard(part.file, problems)
        if shard is None:
            return
        for member in shard.members:
            if member.end <= wanted[0] or member.start > wanted[-1]:
                continue
            first, end = max(member.start, part.start), min(member.end, part.end)
            low, high = np.searchsorted(wanted, (first, end))
            own, rows = _own_rows(wanted[low:high], member, shard)
            if not own:
                continue
            try:
                decoded = _decode(shard, member, rows)
            except _READ_ERRORS as error:
                problems.append(str(error))
                continue
            yield from zip(own, _each_row(decoded), strict=True)

    def _shard(self, file: ShardFile, problems: list[str]) -> OpenShard | None:
        """Return an open shard; what is wrong with it is said once."""
        if file in self._unreadable:
            return None
        if file not in self._open:
            stack = contextlib.ExitStack()
            try:
                shard = stack.enter_context(file.open(whole=self._whole))
            except _READ_ERRORS as error:
                problems.append(str(error))
                self._unreadable.add(file)
                return None
            self._open[file] = shard, stack
        return self._open[file][0]

    def _close(self, files: Iterable[ShardFile]) -> None:
        for file in files:
            self._open.pop(file)[1].close()


def _own_rows(
    samples: np.ndarray, member: MemberRows, shard: OpenShard
) -> tuple[list[int], list[int]]:
    """Return those of *samples* that the shard's DP rank has, and their rows, both ascending."""
    block, inside = np.divmod(samples - member.start, shard.mbs)
    turn, rank = np.divmod(block, shard.dp_size)
    is_own = rank == shard.name.dp_rank
    return samples[is_own].tolist(), (turn * shard.mbs + inside)[is_own].tolist()


def _decode(shard: OpenShard, member: MemberRows, rows: Sequence[int]) -> TeacherRows:
    if shard.decodes_rows:
        return unmasked(shard.decode(member, rows).unpack_all())
    return unmasked(shard.decode(member).unpack(rows))


def _each_row(rows: TeacherRows) -> Iterator[TeacherRows]:
    """Yield each of n rows alone, without the dimension that numbers them."""
    for number in range(rows.values.shape[1]):
        tail, fingerprints = rows.tail_logprob, rows.label_fingerprints
        yield replace(
            rows,
            values=rows.values[:, number],
            indices=rows.indices[:, number],
            tail_logprob=None if tail is None else tail[:, number],
            label_fingerprints=None if fingerprints is None else fingerprints[:, number],
        )


def _contradiction(sample: int, one: ShardFile, two: ShardFile) -> str:
    return (
        f"{one.path} and {two.path} both hold sample {sample}: they deal samples to their DP ranks "
        "in other ways, so they come from different dumps. Rename the shards of the older one to "
        ".stale."
    )
