# SPDX-License-Identifier: Apache-2.0
"""Reading ahead of the reads: in which order, how far, and what happens when it cannot go on."""

import contextlib
import os
import threading
import time

import pytest

from megatron.training.distillation import read_ahead
from megatron.training.distillation.read_ahead import ReadAhead

CONTENT = os.urandom(1000)
PIECE, AHEAD = 50, 4


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(read_ahead, "PIECES_AHEAD", AHEAD)


class Source:
    """Gives ranges of the content and remembers them; waits before each one while it is held."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()

    def fetch(self, position: int, size: int) -> bytes:
        self.go_on.wait(10)
        self.ranges.append((position, position + size))
        if self.error is not None:
            raise self.error
        return CONTENT[position : position + size]

    def settles_at(self, ranges: list[tuple[int, int]]) -> bool:
        """Return whether these ranges come, and no more of them for a moment."""
        deadline = time.monotonic() + 20
        while self.ranges != ranges and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        return self.ranges == ranges


def pieces(start: int, end: int) -> list[tuple[int, int]]:
    return [(first, min(first + PIECE, len(CONTENT))) for first in range(start, end, PIECE)]


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def begin(source):
    """Begins to read ahead from byte 300 on, and closes it after the test."""
    with contextlib.ExitStack() as stack:

        def begin() -> ReadAhead:
            ahead = ReadAhead(source.fetch, 300, 30, len(CONTENT))
            return stack.enter_context(contextlib.closing(ahead))

        yield begin


def test_the_first_range_is_what_is_needed_first(source, begin):
    ahead = begin()
    assert source.settles_at([(300, 330)])
    assert ahead.read(300, 30) == CONTENT[300:330]
    # Nothing before it, and no more than the pieces ahead.
    assert source.settles_at([(300, 330), *pieces(330, 530)])


def test_what_is_held_is_bounded_and_the_end_is_reached(source, begin):
    ahead = begin()
    most = 0
    for start in range(300, 1000, 35):
        assert ahead.read(start, 35) == CONTENT[start : start + 35]
        time.sleep(0.02)
        most = max(most, sum(len(piece) for _, piece in ahead._pieces))
    assert most <= PIECE * (AHEAD + 1) + 2 * PIECE + 35
    assert source.ranges[-1] == (980, 1000)
    assert [a for a, _ in source.ranges[1:]] == [b for _, b in source.ranges[:-1]]
    assert ahead.read(995, 100) == CONTENT[995:]


def test_what_is_larger_than_the_pieces_ahead_is_read(source, begin):
    ahead = begin()
    assert ahead.read(300, 600) == CONTENT[300:900]


def test_a_neighbour_that_was_overtaken_is_held(source, begin):
    ahead = begin()
    assert ahead.read(380, 40) == CONTENT[380:420]
    assert ahead.read(340, 40) == CONTENT[340:380]
    assert ahead.read(700, 40) == CONTENT[700:740]
    # These are not: the caller reads them itself.
    assert ahead.read(340, 40) is None
    assert ahead.read(0, 40) is None


def test_what_is_passed_over_is_not_fetched(source, begin):
    ahead = begin()
    assert source.settles_at([(300, 330)])
    assert ahead.read(900, 40) == CONTENT[900:940]
    assert source.settles_at([(300, 330), *pieces(900, 1000)])


def test_an_error_ends_it_in_the_reads_that_need_what_is_missing(source, begin):
    ahead = begin()
    assert ahead.read(300, 30) == CONTENT[300:330]
    assert source.settles_at([(300, 330), *pieces(330, 530)])
    source.error = OSError(5, "gone")
    assert ahead.read(400, 40) == CONTENT[400:440]  # was fetched before
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            ahead.read(500, 80)


def test_an_object_that_ends_early_is_an_error():
    ahead = ReadAhead(lambda position, size: b"", 0, 10, 100)
    with pytest.raises(OSError, match="ends at byte 0"):
        ahead.read(0, 10)


def test_closing_waits_for_nothing(source, begin):
    source.go_on.clear()
    others = set(threading.enumerate())
    ahead = begin()
    (thread,) = set(threading.enumerate()) - others
    began = time.monotonic()
    ahead.close()
    with pytest.raises(OSError, match="no longer fetched"):
        ahead.read(300, 30)
    assert time.monotonic() - began < 5
    source.go_on.set()
    thread.join(10)
    assert not thread.is_alive()
    assert len(source.ranges) <= 1
    assert not ahead._pieces
