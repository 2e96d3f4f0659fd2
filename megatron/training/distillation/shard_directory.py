# SPDX-License-Identifier: Apache-2.0
"""Which shard of a cache holds a sample, and where inside it.

Everything follows from the ranges in the names.
"""

import bisect
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO, NamedTuple

from megatron.training.distillation import storage
from megatron.training.distillation.manifest import ExpectedRun
from megatron.training.distillation.open_shard import MemberRows as MemberRows
from megatron.training.distillation.open_shard import OpenShard
from megatron.training.distillation.utils import ShardName

logger = logging.getLogger(__name__)

_LISTED_RANGES = 8


class Segment(NamedTuple):
    """Samples ``[start, end)``, all read from *shard*."""

    start: int
    end: int
    shard: ShardName


def live_segments(shards: Iterable[ShardName]) -> list[Segment]:
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
            segments.append(Segment(start, end, active[0][-1]))
    return segments


def _find(segments: list[Segment], sample: int) -> Segment | None:
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
        self._by_rank = {rank: live_segments(shards) for rank, shards in by_rank.items()}
        self._ranks_with_range = by_range
        # All DP ranks flush together, so this is as short as one rank's list.
        self._any_rank = live_segments(ShardName(d[0], *span) for span, d in by_range.items())

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
        self,
        shard: ShardName,
        stream: BinaryIO,
        identity: ExpectedRun | None,
        *,
        with_members: bool = True,
    ) -> "OpenShard":
        """Verify *shard*, whose content is *stream*, and find its members if they are wanted."""
        return OpenShard(self.path_of(shard), shard, stream, identity, with_members=with_members)

    @property
    def end(self) -> int:
        """The sample after the last one in the cache."""
        return self._any_rank[-1].end if self._any_rank else 0

    def locate(self, sample: int, preferred_rank: int = 0) -> Segment | None:
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
