# SPDX-License-Identifier: Apache-2.0
"""Draws which samples each DP rank has, a line of characters a rank, pure."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from tools.cache.coverage import Span, merge

FULL, PART, NONE, DAMAGED = "#+.!"
LEGEND = f"{FULL} all, {PART} part, {NONE} none, {DAMAGED} damaged"


def draw_strip(whole: Span, spans: Sequence[Span], damaged: Sequence[Span], width: int) -> str:
    """Return *width* characters that stand for the samples of *whole*, in equal parts.

    Args:
        whole: The samples that are drawn.
        spans: What is there, disjoint and in order.
        damaged: What was to be there and cannot be read.
        width: Characters.
    """
    return "".join(
        _mark(_covered(part, spans), part, bool(_covered(part, damaged)))
        for part in _parts(whole, width)
    )


def drawn_samples(
    by_rank: Mapping[int, Sequence[Span]], damaged: Mapping[int, Sequence[Span]]
) -> Span | None:
    """Return the samples from the first to the last one that a rank has, or has damaged."""
    everything = merge(itertools.chain(*by_rank.values(), *damaged.values()))
    return Span(everything[0].start, everything[-1].end) if everything else None


def draw_strips(
    whole: Span,
    by_rank: Mapping[int, Sequence[Span]],
    damaged: Mapping[int, Sequence[Span]],
    width: int,
) -> list[tuple[str, str]]:
    """Return a label such as ``dp0-63`` and a strip for each group of ranks whose strips are equal.

    Args:
        whole: The samples that are drawn.
        by_rank: What each DP rank has.
        damaged: What each was to have and cannot be read.
        width: Characters of a strip.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted({*by_rank, *damaged}):
        spans = by_rank.get(rank, ())
        strip = draw_strip(whole, spans, merge(damaged.get(rank, ())), width)
        ranks_of.setdefault(strip, []).append(rank)
    return [(f"dp{ranges(ranks)}", strip) for strip, ranks in ranks_of.items()]


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as ``0-3,5,7-8``."""
    spans = merge((number, number + 1) for number in numbers)
    return ",".join(
        str(start) if end == start + 1 else f"{start}-{end - 1}" for start, end in spans
    )


def _parts(whole: Span, width: int) -> Iterable[Span]:
    start, end = whole
    bounds = [start + (end - start) * part // width for part in range(width + 1)]
    # Fewer samples than characters: some stand for the sample of their neighbour.
    return [Span(a, max(b, a + 1)) for a, b in itertools.pairwise(bounds)]


def _covered(part: Span, spans: Sequence[Span]) -> int:
    return sum(max(0, min(part.end, end) - max(part.start, start)) for start, end in spans)


def _mark(covered: int, part: Span, is_damaged: bool) -> str:
    if is_damaged:
        return DAMAGED
    if covered == part.end - part.start:
        return FULL
    return PART if covered else NONE
