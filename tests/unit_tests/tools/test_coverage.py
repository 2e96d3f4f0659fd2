# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of sample ranges, against sets of samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.distillation.utils import ShardName
from tools.cache.coverage import (
    Coverage,
    RankSpans,
    Span,
    count,
    cover,
    intersect,
    merge,
    overlaps,
    subtract,
)
from tools.cache.strips import draw_strip, draw_strips, drawn_samples, ranges
from tools.units import bytes_text, count_text

spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: Span(*sorted(pair))),
    max_size=8,
)


def samples(spans) -> set[int]:
    return {sample for start, end in spans for sample in range(start, end)}


def is_normal(spans) -> bool:
    """Whether they are in order, not empty, and do not touch."""
    bounds = [bound for span in spans for bound in span]
    return bounds == sorted(set(bounds))


@given(spans)
def test_merged_spans_hold_the_same_samples(some):
    assert samples(merge(some)) == samples(some)
    assert is_normal(merge(some))
    assert count(merge(some)) == len(samples(some))


@given(spans, spans)
def test_difference_is_that_of_sets(some, others):
    left = subtract(some, others)
    assert samples(left) == samples(some) - samples(others)
    assert is_normal(left)


@given(st.lists(spans, min_size=1, max_size=4))
def test_intersection_is_that_of_sets(sets):
    common = intersect(sets)
    assert samples(common) == set.intersection(*map(samples, sets))
    assert is_normal(common)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 4]), spans), max_size=8))
def test_a_sample_is_complete_where_all_ranks_of_one_size_have_it(shares):
    shares = [share for share in shares if share[0] < share[1]]
    found = cover(RankSpans(dp_rank=r, dp_size=n, spans=tuple(s)) for r, n, s in shares)
    has: dict[tuple[int, int], set[int]] = {}
    for rank, size, some in shares:
        has.setdefault((rank, size), set()).update(samples(some))
    complete = {
        sample
        for size in (1, 2, 4)
        for sample in range(41)
        if all(sample in has.get((rank, size), ()) for rank in range(size))
    }
    everything = set().union(*has.values())
    assert samples(found.complete) == complete
    assert found.samples == len(complete)
    inside = set(range(min(everything), max(everything) + 1)) if everything else set()
    assert samples(found.gaps) == inside - complete
    for rank, some in found.by_rank.items():
        mine = set().union(*(has.get((rank, size), set()) for size in (1, 2, 4)))
        assert samples(some) == mine
        assert samples(found.gaps_of(rank)) == inside - mine


def test_no_shares_cover_nothing():
    assert cover([]) == Coverage(complete=(), gaps=(), by_rank={})


def test_overlaps_are_of_one_rank():
    names = [ShardName(0, 0, 8), ShardName(0, 4, 12), ShardName(0, 12, 16), ShardName(1, 6, 14)]
    assert overlaps(names) == [(names[0], names[1])]


@pytest.mark.parametrize(
    ("there", "damaged", "strip"),
    [
        ([(0, 80)], [], "########"),
        ([(0, 40)], [], "####...."),
        ([(5, 35), (60, 80)], [], "+##+..##"),
        ([(0, 40)], [(60, 70)], "####..!."),
        ([], [], "........"),
    ],
)
def test_strip(there, damaged, strip):
    assert (
        draw_strip(Span(0, 80), [Span(*s) for s in there], [Span(*s) for s in damaged], 8) == strip
    )


def test_strip_of_fewer_samples_than_characters():
    assert draw_strip(Span(8, 12), [Span(8, 10)], [], 8) == "####...."


def test_equal_strips_are_drawn_once():
    half, whole = [Span(0, 8)], [Span(0, 16)]
    by_rank = {0: whole, 1: half, 2: whole, 3: whole}
    damaged = {4: [Span(8, 20)]}
    drawn = drawn_samples(by_rank, damaged)
    assert drawn == Span(0, 20)
    assert draw_strips(drawn, by_rank, damaged, 5) == [
        ("dp0,2-3", "####."),
        ("dp1", "##..."),
        ("dp4", "..!!!"),
    ]


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (45_678, "45.7 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (2.5e13, "25 TB"),
        (12.5, "12.5 B"),
    ],
)
def test_bytes(number, text):
    assert bytes_text(number) == text


def test_count():
    assert [count_text(n) for n in (7, 409_600, 2e9)] == ["7", "410 k", "2 G"]
