# SPDX-License-Identifier: Apache-2.0
"""Shards that are fetched whole from an object store, part by part."""

from collections.abc import Callable
from typing import NamedTuple

from tools.load_plan.setting import Setting
from tools.load_plan.shared_store import SharedStore


class Shard(NamedTuple):
    """The shard of *saved_rank* with the cache's *number*-th window."""

    saved_rank: int
    number: int


class Download:
    """What is still missing of a shard, and who waits for it."""

    def __init__(self, parts: int) -> None:
        self.unasked = self.missing = parts
        self.waiting: list[Callable[[], None]] = []


class WholeShards:
    """The downloads of a simulation.

    Args:
        setting: How large shards and parts are.
        store: Where they come from.
        start: Sample with which reading begins.
    """

    def __init__(self, setting: Setting, store: SharedStore, start: int) -> None:
        self._setting = setting
        self._store = store
        self._start = start
        self._downloads: dict[tuple[int, Shard], Download] = {}

    def includes(self, shard: Shard) -> bool:
        """Return whether *shard* is fetched whole: not where reading begins in its middle."""
        begins = shard.number * self._setting.dump.shard_samples
        return self._setting.fetches_whole_shards and begins >= self._start

    def download(self, place: int, shard: Shard) -> Download:
        """Return the download of *shard* to *place*, which begins when it is first asked for.

        It asks for the size, and then for the parts.
        """
        known = self._downloads.get((place, shard))
        if known is not None:
            return known
        download = Download(self._setting.shard_parts)
        self._downloads[place, shard] = download
        self._store.request(0, self._have_size, download)
        return download

    def _have_size(self, download: Download) -> None:
        for _ in range(min(self._setting.loader.parts_at_once, download.unasked)):
            self._next_part(download)

    def _next_part(self, download: Download) -> None:
        download.unasked -= 1
        size = self._setting.loader.part_bytes
        if download.unasked == 0:
            size = self._setting.shard_bytes - size * (self._setting.shard_parts - 1)
        self._store.request(size, self._part_done, download)

    def _part_done(self, download: Download) -> None:
        download.missing -= 1
        if download.unasked:
            self._next_part(download)
        if download.missing == 0:
            waiting, download.waiting = download.waiting, []
            for go_on in waiting:
                go_on()
