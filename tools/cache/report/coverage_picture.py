# SPDX-License-Identifier: Apache-2.0
"""Which samples each DP rank has, as a picture of at most a few thousand cells, pure but for SVG.

A cell shows the worst of what lies in it, so that a single sample that is missing among millions
is seen.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from html import escape

import numpy as np

from tools.cache.coverage import Span, merge, subtract
from tools.cache.inventory import Inventory
from tools.cache.report.svg import number, round_ticks

_WIDTH = 1240
_COLUMNS = 400
_MOST_CELLS = 6000
_STRIPS = 64
_MOST_RANKS_BY_NAME = 4096
_LEFT, _RIGHT = 62, 14


class State(IntEnum):
    """What a cell shows; the highest of what lies in it."""

    COMPLETE = 0
    OVERLAP = 1
    PARTLY_MISSING = 2
    MISSING = 3
    FOREIGN = 4
    DAMAGED = 5

    @property
    def words(self) -> str:
        """What it means."""
        return {
            State.COMPLETE: "complete",
            State.OVERLAP: "in two shards of one rank",
            State.PARTLY_MISSING: "partly missing",
            State.MISSING: "missing",
            State.FOREIGN: "shard of another dump",
            State.DAMAGED: "damaged shard",
        }[self]


@dataclass(frozen=True, kw_only=True)
class CoverageMap:
    """Cells by strip and column.

    Attributes:
        states: ``(strips, columns)`` values of :class:`State`.
        strips: DP ranks ``[start, end)`` of each strip.
        samples: ``(columns + 1,)`` samples that the columns lie between.
    """

    states: np.ndarray
    strips: list[tuple[int, int]]
    samples: np.ndarray

    @property
    def found(self) -> list[State]:
        """The states that there are."""
        return [state for state in State if (self.states == state).any()]


def map_coverage(inventory: Inventory) -> CoverageMap:
    """Return the cells from the first sample of any shard to the last one."""
    ranks = inventory.coverage.by_rank
    names = [shard.name for shard in inventory.files.shards]
    # The name of a damaged shard may be anything.
    count = len(ranks) or min(max(name.dp_rank for name in names) + 1, _MOST_RANKS_BY_NAME)
    begin, end = min(name.start for name in names), max(name.end for name in names)
    samples = np.unique(np.linspace(begin, end, _COLUMNS + 1).round().astype(np.int64))
    columns = len(samples) - 1
    per_strip = -(-count // _STRIPS)
    strips = [(rank, min(rank + per_strip, count)) for rank in range(0, count, per_strip)]
    states = np.zeros((len(strips), columns), np.int8)
    whole = [Span(begin, end)]
    for rank in range(count):
        states_of_rank = states[rank // per_strip]
        covered = ranks.get(rank, ())
        _raise_to(states_of_rank, samples, subtract(whole, covered), State.PARTLY_MISSING)
        _mark_missing(states_of_rank, samples, covered)
    for state, rank, span in _blemishes(inventory):
        if rank < count:
            _raise_to(states[rank // per_strip], samples, [span], state)
    return _coarser(CoverageMap(states=states, strips=strips, samples=samples))


def _coarser(found: CoverageMap) -> CoverageMap:
    """Return the map with so few columns that its picture is not too large."""
    states, samples = found.states, found.samples
    while (states[:, 1:] != states[:, :-1]).sum() + len(states) > _MOST_CELLS:
        odd = states.shape[1] % 2
        states = np.pad(states, ((0, 0), (0, odd))).reshape(len(states), -1, 2).max(axis=2)
        samples = np.append(samples[:-1:2], samples[-1])
    return CoverageMap(states=states, strips=found.strips, samples=samples)


def _blemishes(inventory: Inventory) -> Iterator[tuple[State, int, Span]]:
    """Yield what is wrong, the DP rank and the samples."""
    for first, second in inventory.overlaps:
        span = Span(second.name.start, min(first.name.end, second.name.end))
        yield State.OVERLAP, first.name.dp_rank, span
    for file in inventory.foreign:
        yield State.FOREIGN, file.name.dp_rank, Span(file.name.start, file.name.end)
    for shard in inventory.damaged:
        name = shard.file.name
        yield State.DAMAGED, name.dp_rank, Span(name.start, name.end)


def _raise_to(states: np.ndarray, samples: np.ndarray, spans: Iterable[Span], state: State) -> None:
    """Raise the cells that *spans* touch to *state*."""
    for start, end in spans:
        first = int(np.searchsorted(samples, start, side="right")) - 1
        last = int(np.searchsorted(samples, end, side="left"))
        np.maximum(states[first:last], state, out=states[first:last])


def _mark_missing(states: np.ndarray, samples: np.ndarray, covered: Iterable[Span]) -> None:
    """Raise the cells of which a rank has no sample at all."""
    touched = np.zeros(len(states), bool)
    for start, end in merge(covered):
        first = int(np.searchsorted(samples, start, side="right")) - 1
        touched[first : int(np.searchsorted(samples, end, side="left"))] = True
    np.maximum(states, np.where(touched, 0, State.MISSING), out=states, casting="unsafe")


def draw_coverage(found: CoverageMap) -> str:
    """Return the picture: one strip for each rank, or for some ranks where there are many."""
    count = len(found.strips)
    height = 16 if count <= 24 else 9
    top, bottom = 8, 44
    total = top + count * height + bottom
    first_sample, end = int(found.samples[0]), int(found.samples[-1])
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - first_sample)
    parts = []
    every = max(1, -(-count // 32)) if height >= 16 else -(-count // 16)
    for strip, (first, last) in enumerate(found.strips):
        y = top + strip * height
        name = f"DP rank {first}" if last == first + 1 else f"DP ranks {first} to {last - 1}"
        if strip % every == 0:
            parts.append(
                f'<text class="tick" x="{_LEFT - 7}" y="{y + height / 2 + 4:.1f}" '
                f'text-anchor="end">{first}</text>'
            )
        begin = 0
        for state, run in itertools.groupby(found.states[strip].tolist()):
            stop = begin + len(list(run))
            a, b = int(found.samples[begin]), int(found.samples[stop])
            tip = f"{name}, samples {a} to {b - 1}: {State(state).words}"
            parts.append(
                f'<rect class="cell {State(state).name.lower()}" '
                f'x="{_LEFT + (a - first_sample) * scale:.2f}" y="{y}" '
                f'width="{(b - a) * scale:.2f}" height="{height - 1.5}">'
                f"<title>{escape(tip)}</title></rect>"
            )
            begin = stop
    base = top + count * height
    for tick in round_ticks(first_sample, end):
        x = _LEFT + (tick - first_sample) * scale
        parts.append(
            f'<path class="axis" d="M{x:.1f} {base}v5"/><text class="tick x" x="{x:.1f}" '
            f'y="{base + 18}" text-anchor="middle" data-value="{tick:.12g}">{number(tick)}</text>'
        )
    what = "DP rank" if all(b == a + 1 for a, b in found.strips) else "DP ranks, some per strip"
    middle = top + count * height / 2
    label = "Coverage over samples and DP ranks: " + ", ".join(s.words for s in found.found)
    return (
        f'<svg id="coverage" viewBox="0 0 {_WIDTH} {total}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}'
        f'<text class="title" x="{(_WIDTH + _LEFT - _RIGHT) / 2}" y="{total - 8}" '
        f'text-anchor="middle">sample</text>'
        f'<text class="title" transform="translate(15 {middle}) rotate(-90)" '
        f'text-anchor="middle">{what if count > 7 else "DP rank"}</text></svg>'
    )
