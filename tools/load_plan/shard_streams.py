# SPDX-License-Identifier: Apache-2.0
"""How one reader gets at what is in a shard: request by request, whole, or from a place on.

A file system is asked for the head of a shard and for members. An object store sends a shard whole
where reading begins at its start and there is room for it, members where there is none, and where
reading begins inside, the head, the first member and then pieces of what follows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tools.load_plan.setting import OBJECT_STORE, Setting
from tools.load_plan.shared_store import Clock, SharedStore

Action = Callable[[], Any]


class Shard(NamedTuple):
    """The shard of *saved_rank* with the cache's *number*-th window."""

    saved_rank: int
    number: int


class _Download:
    """What is still missing of something that comes part by part, and who waits for it."""

    def __init__(self, sizes: list[int]) -> None:
        self.unasked = sizes[::-1]
        self.missing = len(sizes)
        self.waiting: list[Action] = []


class Transport:
    """The requests of all readers, and what the nodes have in the cache of their disk."""

    def __init__(self, setting: Setting, store: SharedStore, clock: Clock) -> None:
        self.setting = setting
        self.store = store
        self._clock = clock
        self._downloads: dict[tuple[int, Shard, int | None], _Download] = {}

    def soon(self, action: Action) -> None:
        """Have *action* called at once, but not from within the caller."""
        self._clock.at(self._clock.now, action)

    def whole(self, place: int, shard: Shard, action: Action) -> None:
        """Fetch *shard* to *place*, unless that has begun, and call *action* when it is there."""
        key = (place, shard, None)
        if key in self._downloads:
            self._wait(self._downloads[key], action)
            return
        download = self._downloads[key] = _Download(self.setting.download_parts)
        download.waiting.append(action)
        self._begin(download)

    def part(self, place: int, shard: Shard, start: int, size: int, action: Action) -> None:
        """Fetch *size* bytes at *start*; into a cache, all lines that they lie in, in turn."""
        if not self.setting.loader.node_cache:
            self.store.request(size, action)
            return
        line = self.setting.loader.cache_line_bytes
        last = max(start, start + size - 1) // line

        def go_on(number: int) -> None:
            if number > last:
                action()
            else:
                self._line(place, shard, number, lambda: go_on(number + 1))

        whole = self._downloads.get((place, shard, None))
        is_there = whole is not None and whole.missing == 0
        # The version is asked for before the cache is trusted.
        self.store.request(0, go_on, last + 1 if is_there else start // line)

    def _line(self, place: int, shard: Shard, number: int, action: Action) -> None:
        line = self.setting.loader.cache_line_bytes
        # A line with all of a shard counts as the whole of it.
        key = (place, shard, None if self.setting.shard_bytes < line else number)
        if key in self._downloads:
            self._wait(self._downloads[key], action)
            return
        size = min(line, self.setting.shard_bytes - number * line)
        download = self._downloads[key] = _Download([size])
        download.waiting.append(action)
        self._begin(download)

    def _wait(self, download: _Download, action: Action) -> None:
        if download.missing:
            download.waiting.append(action)
        else:
            self.soon(action)

    def _begin(self, download: _Download) -> None:
        for _ in range(min(self.setting.loader.parts_at_once, len(download.unasked))):
            self._next_part(download)

    def _next_part(self, download: _Download) -> None:
        self.store.request(download.unasked.pop(), self._part_done, download)

    def _part_done(self, download: _Download) -> None:
        download.missing -= 1
        if download.unasked:
            self._next_part(download)
        if download.missing == 0:
            waiting, download.waiting = download.waiting, []
            for action in waiting:
                action()


class ShardStream:
    """A shard that a reader has opened, or begun to fetch.

    Args:
        transport: What carries it.
        place: The reader, or its node where that has a cache.
        shard: Which one.
        whole: Whether an object store is to send all of it.
    """

    def __init__(self, transport: Transport, place: int, shard: Shard, *, whole: bool) -> None:
        self._transport = transport
        self._setting = transport.setting
        self._place = place
        self._shard = shard
        self._is_whole = whole
        self._ahead: _Ahead | None = None
        self._has_opened = False
        self._waiting: list[Action] = []
        self._open()

    @property
    def held_bytes(self) -> int:
        """What it takes in memory."""
        if self._ahead is not None:
            return self._ahead.held_bytes
        in_memory = self._comes_whole and not self._setting.loader.node_cache
        return self._setting.shard_bytes if in_memory else 0

    @property
    def _comes_whole(self) -> bool:
        return self._is_whole and self._setting.fetches_whole_shards

    @property
    def is_free_to_read(self) -> bool:
        """Whether a member that is asked for is there at once."""
        return self._comes_whole and self._has_opened

    def fetch_whole(self) -> None:
        """Fetch all of it from an object store, unless that has begun."""
        if not self._is_whole:
            self._is_whole = True
            if self._setting.store.kind == OBJECT_STORE:
                self._open()

    def read_head(self, action: Action) -> None:
        """Read the metadata, then call *action*."""
        self._when_open(lambda: self._read_next(self._head_reads(), action))

    def read_member(self, number: int, action: Action) -> None:
        """Read the shard's *number*-th member with its header, then call *action*."""
        size = self._setting.member_read_bytes
        start = self._setting.head_bytes + number * size
        if self.is_free_to_read:
            self._transport.soon(action)
        elif self._is_whole or self._setting.store.kind != OBJECT_STORE:
            self._part(start, size, action)
        else:
            if self._ahead is None:
                self._ahead = _Ahead(self._transport, self._part, start, size)
            self._ahead.read(start, size, action)

    def _open(self) -> None:
        """Ask for the size; what is fetched whole begins to come then."""
        self._has_opened = False
        self._transport.store.request(0, self._have_size, self._is_whole)

    def _have_size(self, was_whole: bool) -> None:
        if was_whole != self._is_whole:
            return  # it is opened again
        if self._comes_whole:
            self._transport.whole(self._place, self._shard, self._opened)
        else:
            self._opened()

    def _opened(self) -> None:
        self._has_opened = True
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    def _when_open(self, action: Action) -> None:
        if self._has_opened:
            self._transport.soon(action)
        else:
            self._waiting.append(action)

    def _head_reads(self) -> list[tuple[int, int]]:
        """Return start and size of the reads that the metadata takes."""
        if self._comes_whole:
            return []
        return self._setting.head_reads(is_begun_inside=not self._is_whole)

    def _read_next(self, reads: list[tuple[int, int]], action: Action) -> None:
        if not reads:
            action()
            return
        (start, size), *rest = reads
        self._part(start, size, lambda: self._read_next(rest, action))

    def _part(self, start: int, size: int, action: Action) -> None:
        if self._setting.store.kind == OBJECT_STORE:
            self._transport.part(self._place, self._shard, start, size, action)
        else:
            self._transport.store.request(size, action)


class _Ahead:
    """What follows the first member that is read, piece by piece and only so far ahead."""

    def __init__(
        self,
        transport: Transport,
        fetch: Callable[[int, int, Action], None],
        start: int,
        first: int,
    ) -> None:
        self._soon = transport.soon
        self._fetch = fetch
        self._loader = transport.setting.loader
        self._next_size = first
        self._end = transport.setting.shard_bytes
        self._fetched_to = self._read_from = start
        self._wanted_to = start + first
        self._pieces: list[tuple[int, int]] = []
        self._waiting: list[tuple[int, Action]] = []
        self._is_fetching = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the pieces that are kept."""
        return sum(size for _, size in self._pieces)

    def read(self, start: int, size: int, action: Action) -> None:
        """Call *action* when *size* bytes at *start* are there."""
        loader = self._loader
        ahead = start + size + loader.pieces_ahead * loader.piece_bytes
        self._wanted_to = max(self._wanted_to, min(ahead, self._end))
        self._read_from = start
        self._waiting.append((start + size, action))
        self._hand_out()
        kept = start - loader.piece_bytes
        self._pieces = [piece for piece in self._pieces if sum(piece) > kept]
        self._go_on()

    def _go_on(self) -> None:
        if self._is_fetching or self._fetched_to >= min(self._wanted_to, self._end):
            return
        if self._read_from > self._fetched_to + self._loader.piece_bytes:
            self._fetched_to = self._read_from
        self._is_fetching = True
        size = min(self._next_size, self._end - self._fetched_to)
        self._next_size = self._loader.piece_bytes
        self._fetch(self._fetched_to, size, lambda: self._have(size))

    def _have(self, size: int) -> None:
        self._is_fetching = False
        self._pieces.append((self._fetched_to, size))
        self._fetched_to += size
        self._hand_out()
        self._go_on()

    def _hand_out(self) -> None:
        ready = [action for stop, action in self._waiting if stop <= self._fetched_to]
        self._waiting = [wait for wait in self._waiting if wait[0] > self._fetched_to]
        for action in ready:
            self._soon(action)
