# SPDX-License-Identifier: Apache-2.0
"""Which samples the shards and members of another layout hold. Pure arithmetic of samples."""

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tools.cache.coverage import Span

_MOST_BLOCKS = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How samples are dealt to data parallel ranks: blocks of *mbs* in turn, by iterations.

    Attributes:
        dp_size: Data parallel size.
        mbs: Micro batch size.
        gbs: Samples of an iteration.
        phase: An iteration begins at this sample, as at each that is a multiple of *gbs* away.
    """

    dp_size: int
    mbs: int
    gbs: int
    phase: int = 0

    @property
    def round(self) -> int:
        """Samples of which every rank has a micro batch; a member holds whole rounds."""
        return self.dp_size * self.mbs

    def up(self, sample: int, step: int) -> int:
        """Return the first multiple of *step*, counted from the phase, at or after *sample*."""
        return sample + (self.phase - sample) % step

    def down(self, sample: int, step: int) -> int:
        """Return the last multiple of *step*, counted from the phase, at or before *sample*."""
        return sample - (sample - self.phase) % step

    def fitting(self, spans: Iterable[Span]) -> tuple[Span, ...]:
        """Return what of *spans* can be dealt: whole rounds."""
        whole = (Span(self.up(s, self.round), self.down(e, self.round)) for s, e in spans)
        return tuple(span for span in whole if span.start < span.end)

    def members(self, span: Span) -> Iterator[Span]:
        """Cut a span between iterations."""
        start = span.start
        while start < span.end:
            end = min(self.down(start, self.gbs) + self.gbs, span.end)
            yield Span(start, end)
            start = end

    def blocks(self, member: Span, dp_rank: int) -> Iterator[Span]:
        """Yield the micro batches of a rank in a member, in the order of its rows."""
        for start in range(member.start + dp_rank * self.mbs, member.end, self.round):
            yield Span(start, start + self.mbs)


def windows(
    spans: Sequence[Span], layout: Layout, *, bounds: Iterable[int], samples: int | None
) -> tuple[Span, ...]:
    """Cut *spans*, which *layout* can deal, into the samples of one shard of each rank.

    Args:
        spans: Disjoint and in order.
        layout: The layout of the shards.
        bounds: Where the shards of the source begin; a window begins at the iteration that
            follows.
        samples: Cut at multiples of this instead, itself a multiple of the iteration; None for
            *bounds*.
    """
    found: list[Span] = []
    begins = sorted(bounds)
    for start, end in spans:
        if samples:
            inside: Iterable[int] = range(layout.up(start + 1, samples), end, samples)
        else:
            own = begins[bisect.bisect_right(begins, start) : bisect.bisect_left(begins, end)]
            rounded = dict.fromkeys(layout.up(bound, layout.gbs) for bound in own)
            inside = [bound for bound in rounded if bound < end]
        edges = [start, *inside, end]
        found += (Span(a, b) for a, b in itertools.pairwise(edges))
    return tuple(found)


def rank_groups(source: Layout, target: Layout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return ranks of the target that are made of the same ranks of the source, and these.

    No two groups have a rank in common. All ranks are one group where it would take long to tell.
    """
    period = math.lcm(source.round, target.round)
    block = math.gcd(source.mbs, target.mbs, abs(source.phase - target.phase))
    if period // block > _MOST_BLOCKS:
        return [(tuple(range(target.dp_size)), tuple(range(source.dp_size)))]
    samples = np.arange(target.phase, target.phase + period, block)
    of_target = (samples - target.phase) // target.mbs % target.dp_size
    of_source = (samples - source.phase) // source.mbs % source.dp_size
    pairs = [
        divmod(pair, source.dp_size)
        for pair in np.unique(of_target * source.dp_size + of_source).tolist()
    ]
    # Union of what shares a rank.
    group = list(range(target.dp_size))
    first_of: dict[int, int] = {}

    def root(rank: int) -> int:
        while group[rank] != rank:
            rank = group[rank]
        return rank

    for new, old in pairs:
        group[root(new)] = root(first_of.setdefault(old, new))
    found: dict[int, tuple[set[int], set[int]]] = {}
    for new, old in pairs:
        ranks = found.setdefault(root(new), (set(), set()))
        ranks[0].add(new)
        ranks[1].add(old)
    return [(tuple(sorted(new)), tuple(sorted(old))) for new, old in found.values()]
