# SPDX-License-Identifier: Apache-2.0
"""Finds and decodes the rows of any samples in some shards, each member once while it is wanted."""

import bisect
import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError, TeacherDataError
from megatron.training.distillation.open_shard import MemberRows, OpenShard
from megatron.training.distillation.packed_rows import PackedRows, TeacherRows
from megatron.training.distillation.payload import INDEX_SENTINEL, LOGPROB_SENTINEL
from megatron.training.distillation.utils import row_runs
from tools.cache.cache_files import ShardFile
from tools.cache.coverage import Span

READ_ERRORS = (CacheFormatError, TeacherDataError, *storage.ERRORS)
_WHOLE_SHARDS = 2
"""An object store sends so many shards whole, which are then held; of more, parts are asked for."""


class MissingRows(Exception):
    """Samples are not in the source as they should be; says which and where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What is read of a shard.

    Attributes:
        file: The shard.
        span: The samples; those of other shards of its DP rank are not among them.
        problem: Why it must not be read; None if it may be.
    """

    file: ShardFile
    span: Span
    problem: str | None = None


class Rows(NamedTuple):
    """Rows of a member, in the order of their samples."""

    source: Source
    member: MemberRows
    rows: tuple[int, ...]


class SourceRows:
    """The open shards behind some samples, and the members of them that are decoded.

    A member is decoded when the first of its rows are taken, and forgotten when it has been given
    up as often as it was announced.

    Args:
        sources: What may be read, disjoint within a DP rank.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources: dict[int, list[Source]] = defaultdict(list)
        for source in sorted(sources, key=lambda source: source.span):
            self._sources[source.file.name.dp_rank].append(source)
        self._whole = len(sources) <= _WHOLE_SHARDS
        self._closing = contextlib.ExitStack()
        self._open: dict[ShardFile, OpenShard | Exception] = {}
        self._decoded: dict[tuple[ShardFile, int], PackedRows | Exception] = {}
        self._wanted: Counter[tuple[ShardFile, int]] = Counter()
        self.decoded_members = 0

    def __enter__(self) -> "SourceRows":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the shards."""
        self._closing.close()

    def shard(self, source: Source) -> OpenShard:
        """Return the open shard of *source*.

        Raises:
            MissingRows: It must not be read.
            CacheFormatError: It is damaged.
            OSError: It cannot be read.
        """
        if source.problem is not None:
            raise MissingRows(source.problem)
        if source.file not in self._open:
            try:
                self._open[source.file] = self._closing.enter_context(
                    source.file.open(whole=self._whole)
                )
            except READ_ERRORS as error:
                self._open[source.file] = error
        found = self._open[source.file]
        if isinstance(found, Exception):
            raise found
        return found

    def first_shard(self) -> OpenShard:
        """Return the first shard that can be read.

        Raises:
            Exception: As :meth:`shard`, if none can.
        """
        problem: Exception = MissingRows("There is no shard to read.")
        for source in itertools.chain.from_iterable(_in_turn(self._sources)):
            try:
                return self.shard(source)
            except (MissingRows, *READ_ERRORS) as error:
                problem = error
        raise problem

    def find(self, blocks: Iterable[Span]) -> list[Rows]:
        """Return where the rows of some blocks of samples lie, in their order.

        Neighbours in the list that are of one member are joined.

        Raises:
            MissingRows: A DP rank's share is not there, or shards disagree about a sample.
            CacheFormatError: A shard is damaged.
            OSError: A shard cannot be read.
        """
        found: list[tuple[Source, MemberRows, list[int]]] = []
        for block in blocks:
            for source, member, rows in self._find_block(block):
                if found and found[-1][:2] == (source, member):
                    found[-1][2].extend(rows)
                else:
                    found.append((source, member, list(rows)))
        return [Rows(source, member, tuple(rows)) for source, member, rows in found]

    def _find_block(self, block: Span) -> Iterator[tuple[Source, MemberRows, range]]:
        sample = block.start
        while sample < block.end:
            guide, shard, member = self._guide(sample)
            stop = min(block.end, guide.span.end, member.end)
            runs = row_runs(member.start, sample, stop, mbs_save=shard.mbs, dp_save=shard.dp_size)
            for run in runs:
                owner = guide, member
                if run.d_save != guide.file.name.dp_rank:
                    owner = self._owner(run.d_save, sample, shard, member)
                yield *owner, range(run.row_start, run.row_end)
                sample += run.row_end - run.row_start

    def _guide(self, sample: int) -> tuple[Source, OpenShard, MemberRows]:
        """Return a shard that tells how *sample* was dealt: the first that can be read."""
        problem: Exception = MissingRows(f"Sample {sample} is not in the cache.")
        for rank in self._sources:
            source = self._at(rank, sample)
            if source is None:
                continue
            try:
                shard = self.shard(source)
            except (MissingRows, *READ_ERRORS) as error:
                problem = error
                continue
            member = shard.member_at(sample)
            if member is not None:
                return source, shard, member
        raise problem

    def _owner(
        self, dp_rank: int, sample: int, guide: OpenShard, member: MemberRows
    ) -> tuple[Source, MemberRows]:
        source = self._at(dp_rank, sample)
        if source is None:
            raise MissingRows(
                f"Sample {sample} was recorded by DP rank {dp_rank}, of which there is no shard: "
                f"there is {guide.path}. Complete the cache, or dump these samples again."
            )
        shard = self.shard(source)
        found = shard.member_at(sample)
        if found is None:
            raise MissingRows(
                f"{shard.path} has no member for sample {sample}, and {guide.path} has: complete "
                "the cache, or dump these samples again."
            )
        ours = found.start, found.end, shard.mbs, shard.dp_size
        theirs = member.start, member.end, guide.mbs, guide.dp_size
        if ours != theirs:
            raise MissingRows(
                f"{shard.path} and {guide.path} disagree about sample {sample}: (first sample, "
                f"end, mbs_save, dp_size_save) are {ours} and {theirs}. They come from different "
                "dumps: rename the older one to .stale, or dump these samples again."
            )
        return source, found

    def _at(self, dp_rank: int, sample: int) -> Source | None:
        sources = self._sources.get(dp_rank, [])
        place = bisect.bisect_right(sources, sample, key=lambda source: source.span.start) - 1
        if place >= 0 and sample < sources[place].span.end:
            return sources[place]
        return None

    # ---- decoding ------------------------------------------------------------------------

    def announce(self, parts: Sequence[Rows]) -> None:
        """Say that *parts* will be given up once more."""
        self._wanted.update(_keys(parts))

    def give_up(self, parts: Sequence[Rows]) -> None:
        """Forget the members of *parts* that nothing else was announced for."""
        for key in _keys(parts):
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
                self._decoded.pop(key, None)

    def take(self, parts: Sequence[Rows]) -> TeacherRows:
        """Return the rows of *parts*, one after the other.

        Tails and fingerprints are there where all have them.

        Raises:
            CacheFormatError: A member is damaged, or they do not fit together.
            OSError: A member cannot be read.
        """
        by_member: dict[tuple[ShardFile, int], list[tuple[int, int]]] = defaultdict(list)
        place = 0
        for part in parts:
            for row in part.rows:
                by_member[part.source.file, part.member.start].append((row, place))
                place += 1
        known = {(part.source.file, part.member.start): part for part in parts}
        pieces = []
        for key, pairs in by_member.items():
            packed = self._decode(known[key])
            rows, places = zip(*pairs, strict=True)
            if list(rows) == list(range(packed.values.shape[1])):
                pieces.append((packed.unpack_all(), places))
            else:
                pieces.append((packed.unpack(list(rows)), places))
        if len(pieces) == 1:
            return pieces[0][0]
        return _join(pieces, place)

    def _decode(self, part: Rows) -> PackedRows:
        key = part.source.file, part.member.start
        if key not in self._decoded:
            try:
                self._decoded[key] = self.shard(part.source).decode(part.member)
                self.decoded_members += 1
            except READ_ERRORS as error:
                self._decoded[key] = error
        found = self._decoded[key]
        if isinstance(found, Exception):
            raise found
        return found


def _in_turn(by_rank: dict[int, list[Source]]) -> Iterator[list[Source]]:
    """Yield the first source of every rank, the second of every rank, ..."""
    for sources in itertools.zip_longest(*(by_rank[rank] for rank in sorted(by_rank))):
        yield [source for source in sources if source is not None]


def _keys(parts: Sequence[Rows]) -> set[tuple[ShardFile, int]]:
    return {(part.source.file, part.member.start) for part in parts}


def _join(pieces: Sequence[tuple[TeacherRows, Sequence[int]]], count: int) -> TeacherRows:
    """Put rows at their places; narrower ones are filled up with masked entries."""
    kinds = {(rows.values.shape[0], rows.values.dtype) for rows, _ in pieces}
    if len(kinds) > 1:
        raise CacheFormatError(
            "The rows of one iteration differ in sequence length or dtype: "
            f"{sorted(map(str, kinds))}. The cache mixes dumps: dump these samples again."
        )
    ((positions, dtype),) = kinds
    width = max(rows.values.shape[2] for rows, _ in pieces)
    values = torch.full((positions, count, width), LOGPROB_SENTINEL, dtype=dtype)
    indices = torch.full((positions, count, width), INDEX_SENTINEL, dtype=torch.int32)
    for rows, places in pieces:
        at = torch.tensor(places)
        values[:, at, : rows.values.shape[2]] = rows.values
        indices[:, at, : rows.values.shape[2]] = rows.indices
    return TeacherRows(
        values=values,
        indices=indices,
        tail_logprob=_join_part([(rows.tail_logprob, places) for rows, places in pieces], count),
        label_fingerprints=_join_part(
            [(rows.label_fingerprints, places) for rows, places in pieces], count
        ),
    )


def _join_part(
    pieces: Sequence[tuple[torch.Tensor | None, Sequence[int]]], count: int
) -> torch.Tensor | None:
    """Return the columns of *pieces* at their places; None unless all have them."""
    joined = None
    for part, places in pieces:
        if part is None:
            return None
        if joined is None:
            joined = part.new_empty(part.shape[0], count)
        joined[:, torch.tensor(places)] = part
    return joined
