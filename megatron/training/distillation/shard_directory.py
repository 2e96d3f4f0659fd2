# SPDX-License-Identifier: Apache-2.0
"""Which shard of a cache holds a sample, and where inside it.

Everything follows from the ranges in the names and from each shard's own metadata.
"""

import bisect
import heapq
import itertools
import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

from megatron.training.distillation import storage
from megatron.training.distillation.errors import (
    CacheFormatError,
    TeacherDataError,
    TeacherDataMissingError,
    TeacherLayoutError,
)
from megatron.training.distillation.manifest import ExpectedRun
from megatron.training.distillation.payload import (
    MAX_PAYLOAD_BYTES,
    PackedRows,
    decode_packed_rows,
    max_payload_bytes,
)
from megatron.training.distillation.utils import (
    ShardMeta,
    ShardName,
    TarMember,
    check_identity,
    parse_member_name,
    read_member,
    read_shard_meta,
    walk_tar,
)

logger = logging.getLogger(__name__)

_LISTED_RANGES = 8


class _Segment(NamedTuple):
    """Samples ``[start, end)``, all read from *shard*."""

    start: int
    end: int
    shard: ShardName


def _live_segments(shards: Iterable[ShardName]) -> list[_Segment]:
    """Cut the covered samples at every boundary and give each piece to the shard that starts last.

    Of two that start together, the longer one has it; then the lower DP rank.
    """
    waiting = deque(sorted(shards, key=lambda shard: shard.start))
    bounds = sorted({bound for shard in waiting for bound in (shard.start, shard.end)})
    active: list[tuple[int, int, int, ShardName]] = []
    segments = []
    for start, end in itertools.pairwise(bounds):
        while waiting and waiting[0].start <= start:
            shard = waiting.popleft()
            heapq.heappush(active, (-shard.start, -shard.end, shard.dp_rank, shard))
        while active and active[0][-1].end <= start:
            heapq.heappop(active)
        if active:
            segments.append(_Segment(start, end, active[0][-1]))
    return segments


def _find(segments: list[_Segment], sample: int) -> _Segment | None:
    position = bisect.bisect_right(segments, sample, key=lambda segment: segment.start) - 1
    if position >= 0 and sample < segments[position].end:
        return segments[position]
    return None


class ShardDirectory:
    """The live shards of a cache, by DP rank and sample.

    Quarantined (``.stale``), unfinished (``.tmp``) and foreign files are ignored. Where shards of
    one DP rank overlap, as an interrupted dump can leave them, the one that starts later is read:
    it comes from the run that was resumed there.

    Args:
        path: The directory, a local path or ``msc://`` URL.
        names: Its listing, where the caller has one; None lists it here.

    Raises:
        OSError: The directory cannot be listed.
    """

    def __init__(self, path: str, names: Sequence[str] | None = None) -> None:
        self.path = path
        self._warned = False
        self._arrange(storage.list_names(path) if names is None else names)

    def refresh(self) -> None:
        """List the directory again."""
        self._arrange(storage.list_names(self.path))

    def _arrange(self, names: Sequence[str]) -> None:
        self.shards = self._parse_names(names)
        by_rank: dict[int, list[ShardName]] = {}
        by_range: dict[tuple[int, int], list[int]] = {}
        for shard in sorted(self.shards):
            by_rank.setdefault(shard.dp_rank, []).append(shard)
            by_range.setdefault((shard.start, shard.end), []).append(shard.dp_rank)
        self._warn_of_overlap(by_rank)
        self._by_rank = {rank: _live_segments(shards) for rank, shards in by_rank.items()}
        self._ranks_with_range = by_range
        # All DP ranks flush together, so this is as short as one rank's list.
        self._any_rank = _live_segments(ShardName(d[0], *span) for span, d in by_range.items())

    def _parse_names(self, names: Sequence[str]) -> list[ShardName]:
        """Return the live shards among *names*."""
        return [shard for shard in map(ShardName.parse, names) if shard is not None]

    def file_name(self, shard: ShardName) -> str:
        """Return the basename of the file of *shard*."""
        return str(shard)

    def path_of(self, shard: ShardName) -> str:
        """Return the path of the file of *shard*."""
        return storage.join(self.path, self.file_name(shard))

    def open_shard(
        self, shard: ShardName, stream: BinaryIO, identity: ExpectedRun | None
    ) -> "OpenShard":
        """Walk and verify *shard*, whose content is *stream*."""
        return OpenShard(self.path_of(shard), shard, stream, identity)

    @property
    def end(self) -> int:
        """The sample after the last one in the cache."""
        return self._any_rank[-1].end if self._any_rank else 0

    def locate(self, sample: int, preferred_rank: int = 0) -> _Segment | None:
        """Return a shard whose range covers *sample*, and the samples for which that is so.

        It tells the geometry of the run that recorded the sample; the sample's own row may be in
        the shard of another DP rank. Ranks with different preferences spread over equal shards.
        """
        segment = _find(self._any_rank, sample)
        if segment is None:
            return None
        ranks = self._ranks_with_range[segment.shard.start, segment.shard.end]
        rank = ranks[preferred_rank % len(ranks)]
        return segment._replace(shard=ShardName(rank, segment.shard.start, segment.shard.end))

    def shard_of(self, dp_rank: int, sample: int) -> ShardName | None:
        """Return the shard of saved DP rank *dp_rank* that covers *sample*."""
        segment = _find(self._by_rank.get(dp_rank, []), sample)
        return segment and segment.shard

    def following(self, shard: ShardName, count: int) -> list[ShardName]:
        """Return the next *count* shards of the same DP rank."""
        segments = self._by_rank.get(shard.dp_rank, [])
        begin = bisect.bisect_left(segments, shard.end, key=lambda segment: segment.start)
        later = (segment.shard for segment in segments[begin : begin + 4 * count])
        return list(dict.fromkeys(later))[:count]

    def neighbour(self, shard: ShardName) -> ShardName | None:
        """Return another shard: the next of the same DP rank, the one before, or any."""
        same = [other.shard for other in self._by_rank.get(shard.dp_rank, [])]
        position = same.index(shard) if shard in same else 0
        candidates = itertools.chain(same[position + 1 :], reversed(same[:position]), self.shards)
        return next((other for other in candidates if other != shard), None)

    def describe(self) -> str:
        """Return the covered samples in words."""
        spans: list[list[int]] = []
        for segment in self._any_rank:
            if spans and spans[-1][1] == segment.start:
                spans[-1][1] = segment.end
            else:
                spans.append([segment.start, segment.end])
        if not spans:
            return "no shard named like dp0__0-1024.tar"
        more = (
            f" and {len(spans) - _LISTED_RANGES} more ranges" if len(spans) > _LISTED_RANGES else ""
        )
        return "samples " + ", ".join(f"{a} to {b - 1}" for a, b in spans[:_LISTED_RANGES]) + more

    def _warn_of_overlap(self, by_rank: Mapping[int, list[ShardName]]) -> None:
        if self._warned:
            return
        overlaps = [
            (first, second)
            for shards in by_rank.values()
            for first, second in itertools.pairwise(shards)
            if second.start < first.end
        ]
        if overlaps:
            self._warned = True
            logger.warning(
                "%d pairs of teacher shards in %s overlap, such as %s and %s: samples that both "
                "hold are read from the one that starts later. Interrupted dumps leave such pairs.",
                len(overlaps),
                self.path,
                *overlaps[0],
            )


# ------------------------------------------------------------------------------------------
#  One shard
# ------------------------------------------------------------------------------------------


class MemberRows(NamedTuple):
    """The rows of global samples ``[start, end)`` that one saved DP rank recorded."""

    start: int
    end: int
    entry: TarMember


class OpenShard:
    """An open shard whose headers have been walked and whose metadata has been verified."""

    def __init__(
        self, path: str, name: ShardName, stream: BinaryIO, identity: ExpectedRun | None
    ) -> None:
        self.path = path
        self.name = name
        self._stream = stream
        self._lock = threading.Lock()
        walk = self._walk()
        index = list(itertools.islice(walk, 1))
        self.meta = self._read_meta(index)
        self._check_size()
        index += walk
        self._checksums = self._check_seal(index)
        self.differences = [] if identity is None else check_identity(self.meta, identity, path)
        self.mbs, self.dp_size = self.meta.saver.mbs_save, self.meta.saver.dp_size_save
        if name.dp_rank >= self.dp_size:
            raise CacheFormatError(
                f"Teacher shard {path} is of DP rank {name.dp_rank}, but its metadata says "
                f"dp_size_save {self.dp_size}. It was renamed, or belongs to another cache."
            )
        self._members = self._check_members(index)

    def _walk(self) -> Iterator[TarMember]:
        try:
            yield from walk_tar(self._stream)
        except CacheFormatError as error:
            raise CacheFormatError(
                f"Teacher shard {self.path} is damaged: {error}. {REPAIR_HINT}"
            ) from error

    def _read_meta(self, index: list[TarMember]) -> ShardMeta:
        return read_shard_meta(self._stream, index, self.path)

    def _check_size(self) -> None:
        """Compare the file with the size that was recorded; a cut may fall between two members."""
        content = self.meta.content
        if content is None:
            return
        size = self._stream.seek(0, os.SEEK_END)
        if size != content.size:
            raise CacheFormatError(
                f"Teacher shard {self.path} is damaged: it has {size} bytes, and was written with "
                f"{content.size} bytes and {content.members} members. {REPAIR_HINT}"
            )

    def _check_seal(self, index: list[TarMember]) -> dict[TarMember, int]:
        """Return the recorded checksum of each member; none where the cache records none."""
        content = self.meta.content
        if content is None:
            return {}
        if content.name != str(self.name):
            raise CacheFormatError(
                f"Teacher shard {self.path} was written as {content.name}. It was renamed, or "
                "belongs to another cache: give it its name back, or dump these samples again."
            )
        members = index[1:]
        if len(members) != content.members:
            raise CacheFormatError(
                f"Teacher shard {self.path} is damaged: it has {len(members)} members, and was "
                f"written with {content.members}. {REPAIR_HINT}"
            )
        return dict(zip(members, content.checksums, strict=True))

    def _check_members(self, index: list[TarMember]) -> list[MemberRows]:
        members = []
        reached = self.name.start
        for entry in index:
            span = parse_member_name(entry.name)
            if span is None:
                continue
            start, end = span
            if start < reached or end > self.name.end or (end - start) % (self.mbs * self.dp_size):
                raise CacheFormatError(
                    f"Teacher shard {self.path} is damaged: member {entry.name} does not fit, "
                    f"expected ascending ranges inside {self.name.start}-{self.name.end}, each a "
                    f"multiple of mbs_save * dp_size_save = {self.mbs} * {self.dp_size} samples. "
                    f"{REPAIR_HINT}"
                )
            members.append(MemberRows(start, end, entry))
            reached = end
        return members

    def member_at(self, sample: int) -> MemberRows | None:
        """Return the member whose range covers *sample*."""
        position = bisect.bisect_right(self._members, sample, key=lambda member: member.start) - 1
        if position >= 0 and sample < self._members[position].end:
            return self._members[position]
        return None

    def decode(self, member: MemberRows) -> PackedRows:
        """Read and decode one member; errors say where."""
        where = f"member {member.entry.name} of teacher shard {self.path}"
        try:
            with self._lock:
                data = read_member(self._stream, member.entry)
            self._check_checksum(member.entry, data)
            rows = self._parse(data, self._max_bytes(member))
        except TeacherLayoutError:
            raise
        except CacheFormatError as error:
            raise CacheFormatError(f"The {where} is damaged: {error}. {REPAIR_HINT}") from error
        except FileNotFoundError as error:
            raise TeacherDataMissingError(f"The {where} is no longer there: {error}") from error
        except storage.ERRORS as error:
            raise TeacherDataError(f"Cannot read {where}: {error}") from error
        expected = (member.end - member.start) // self.dp_size
        if rows.values.shape[1] != expected:
            raise CacheFormatError(
                f"The {where} has {rows.values.shape[1]} rows, expected {expected}: "
                f"{member.end - member.start} samples over {self.dp_size} DP ranks. {REPAIR_HINT}"
            )
        return rows

    def _check_checksum(self, entry: TarMember, data: bytes) -> None:
        """Compare what was read with what was recorded: it may be another shard's member."""
        recorded = self._checksums.get(entry)
        if recorded is not None and (found := zlib.crc32(data)) != recorded:
            raise CacheFormatError(
                f"its checksum is {found}, it was written with {recorded}: it was changed or "
                "exchanged since"
            )

    def _max_bytes(self, member: MemberRows) -> int:
        """Return what a member may decompress to, by the shape that the metadata promises."""
        manifest, k = self.meta.manifest, self.meta.saver.k
        length = None if manifest is None else manifest.sequence_length
        if type(length) is not int or type(k) is not int:
            return MAX_PAYLOAD_BYTES
        return max_payload_bytes(length, (member.end - member.start) // self.dp_size, k)

    def _parse(self, data: bytes, max_bytes: int) -> PackedRows:
        return decode_packed_rows(data, max_bytes)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._stream.close()


REPAIR_HINT = "Restore the file from a copy, or dump these samples again"
