# SPDX-License-Identifier: Apache-2.0
"""Which samples a set of shards covers, which it lacks and which it has twice, pure."""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.training.distillation.utils import ShardName


class Span(NamedTuple):
    """Samples ``[start, end)``."""

    start: int
    end: int

    def __str__(self) -> str:
        """Return it as the samples from the first to the last."""
        return f"{self.start} to {self.end - 1}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpans:
    """Samples of which a shard holds the share of one DP rank, and of how many ranks there are."""

    dp_rank: int
    dp_size: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """What a set of shards covers.

    Attributes:
        complete: Samples of which every DP rank's share is there.
        gaps: Samples between the first and the last one that are not complete.
        by_rank: Samples covered by the shards of each DP rank; none for one that has no shard.
    """

    complete: tuple[Span, ...]
    gaps: tuple[Span, ...]
    by_rank: dict[int, tuple[Span, ...]]

    @property
    def samples(self) -> int:
        """How many samples are complete."""
        return count(self.complete)

    def gaps_of(self, dp_rank: int) -> tuple[Span, ...]:
        """Return the samples between the first and the last one that *dp_rank* lacks."""
        everything = merge(itertools.chain.from_iterable(self.by_rank.values()))
        if not everything:
            return ()
        whole = Span(everything[0].start, everything[-1].end)
        return subtract([whole], self.by_rank[dp_rank])


def cover(shares: Iterable[RankSpans]) -> Coverage:
    """Return what *shares* cover together.

    A sample is complete where as many DP ranks cover it as those that do say that there are.
    """
    by_rank: dict[int, list[Span]] = defaultdict(list)
    by_size: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for share in shares:
        by_rank[share.dp_rank] += share.spans
        by_size[share.dp_size][share.dp_rank] += share.spans
    complete = merge(
        itertools.chain.from_iterable(
            intersect([ranks.get(rank, []) for rank in range(size)])
            for size, ranks in by_size.items()
        )
    )
    everything = merge(itertools.chain.from_iterable(by_rank.values()))
    whole = [Span(everything[0].start, everything[-1].end)] if everything else []
    return Coverage(
        complete=complete,
        gaps=subtract(whole, complete),
        by_rank={rank: merge(by_rank.get(rank, [])) for rank in range(max(by_size, default=0))},
    )


def overlaps(shards: Iterable[ShardName]) -> list[tuple[ShardName, ShardName]]:
    """Return the neighbours of one DP rank that both cover some samples, the earlier one first."""
    return [
        (first, second)
        for first, second in itertools.pairwise(sorted(shards))
        if first.dp_rank == second.dp_rank and second.start < first.end
    ]


def merge(spans: Iterable[Span | tuple[int, int]]) -> tuple[Span, ...]:
    """Return the same samples as disjoint spans in order, as few as can be."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(end, merged[-1].end))
        elif start < end:
            merged.append(Span(start, end))
    return tuple(merged)


def subtract(spans: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """Return the samples of *spans* that are in none of *others*."""
    left: list[Span] = []
    holes = merge(others)
    for start, end in merge(spans):
        begin = start
        first = bisect.bisect_right(holes, start, key=lambda hole: hole.end)
        for hole in itertools.islice(holes, first, None):
            if hole.start >= end:
                break
            if begin < hole.start:
                left.append(Span(begin, hole.start))
            begin = hole.end
        if begin < end:
            left.append(Span(begin, end))
    return tuple(left)


def intersect(sets: Sequence[Sequence[Span]]) -> tuple[Span, ...]:
    """Return the samples that are in all of *sets*."""
    if not sets:
        return ()
    common = merge(sets[0])
    for spans in sets[1:]:
        if common != tuple(spans):  # most often every rank has the same
            common = subtract(common, subtract(common, spans))
    return common


def count(spans: Iterable[Span]) -> int:
    """Return the number of samples of disjoint *spans*."""
    return sum(end - start for start, end in spans)
