# SPDX-License-Identifier: Apache-2.0
"""What the shards of a cache say of themselves: run, layout, samples; no payload is read.

Holds a few hundred bytes for each shard, however many members it has.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.manifest import Difference
from megatron.training.distillation.shard_meta import (
    ShardMeta,
    compare_identifiers,
    compare_neighbours,
)
from tools.cache.cache_files import CacheFiles, ShardFile
from tools.cache.coverage import Coverage, RankSpans, Span, cover, merge, overlaps

_LOCAL_THREADS = 2
"""Reading metadata from a file system is mostly Python's own work."""
_REMOTE_THREADS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSummary:
    """What a shard says of itself.

    Attributes:
        file: The shard.
        size: Bytes of the file; 0 where it could not be opened.
        meta: Its metadata without its table of contents; None where there is a problem.
        members: Payloads in it.
        spans: The samples that they cover.
        sealed: Whether it records its size, its name and its payloads' checksums.
        problem: Why it cannot be read; None if it is structurally sound.
        unreachable: Whether that is the storage's fault, which may pass, and not the shard's.
    """

    file: ShardFile
    size: int = 0
    meta: ShardMeta | None = None
    members: int = 0
    spans: tuple[Span, ...] = ()
    sealed: bool = False
    problem: str | None = None
    unreachable: bool = False


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What the shards of a cache say of themselves, in the order of :class:`CacheFiles`."""

    files: CacheFiles
    shards: tuple[ShardSummary, ...]

    @cached_property
    def meta(self) -> ShardMeta | None:
        """The metadata of the dump that most samples are of; None if no shard can be read."""
        samples: Counter[int] = Counter()
        metas: dict[int, ShardMeta] = {}
        for shard in self.shards:
            if shard.meta is not None:  # equal ones are the same object
                metas[id(shard.meta)] = shard.meta
                samples[id(shard.meta)] += sum(end - start for start, end in shard.spans)
        return metas[samples.most_common(1)[0][0]] if metas else None

    @property
    def damaged(self) -> list[ShardSummary]:
        """The shards that cannot be read."""
        return [shard for shard in self.shards if shard.problem is not None]

    @cached_property
    def foreign(self) -> dict[ShardFile, list[Difference]]:
        """The shards of another dump than :attr:`meta`, each with what tells them apart."""
        found = {}
        known: dict[int, list[Difference]] = {}
        for shard in self.shards:
            if shard.meta is None or self.meta is None:
                continue
            if id(shard.meta) not in known:
                known[id(shard.meta)] = _differences(shard.meta, self.meta)
            if differences := known[id(shard.meta)]:
                found[shard.file] = differences
        return found

    @property
    def sound(self) -> list[ShardSummary]:
        """The shards of the dump that can be read."""
        return [s for s in self.shards if s.problem is None and s.file not in self.foreign]

    @cached_property
    def coverage(self) -> Coverage:
        """What the sound shards cover."""
        return cover(
            RankSpans(
                dp_rank=shard.file.name.dp_rank,
                dp_size=shard.meta.saver.dp_size_save,
                spans=shard.spans,
            )
            for shard in self.sound
            if shard.meta is not None
        )

    @property
    def overlaps(self) -> list[tuple[ShardFile, ShardFile]]:
        """Shards of one DP rank that cover the same samples, by name."""
        by_name = {shard.name: shard for shard in self.files.shards}
        return [(by_name[a], by_name[b]) for a, b in overlaps(by_name)]


def take_inventory(
    files: CacheFiles,
    *,
    threads: int | None = None,
    advance: Callable[[int], None] = lambda size: None,
) -> Inventory:
    """Read the metadata of every live shard.

    Args:
        files: The cache.
        threads: How many shards are read at once; None for what suits the storage.
        advance: Called with the bytes of each shard when it has been read.
    """
    if threads is None:
        threads = _REMOTE_THREADS if storage.is_remote(files.directory) else _LOCAL_THREADS
    with ThreadPoolExecutor(threads, thread_name_prefix="inventory") as pool:
        shards = tuple(_collect(pool.map(summarize, files.shards), advance))
    return Inventory(files=files, shards=shards)


def summarize(file: ShardFile) -> ShardSummary:
    """Return what a shard says of itself; its seal is checked, its payloads are not read."""
    try:
        with file.open(whole=False) as shard:
            return ShardSummary(
                file=file,
                size=shard.size,
                meta=dataclasses.replace(shard.meta, content=None),
                members=len(shard.members),
                spans=merge((member.start, member.end) for member in shard.members),
                sealed=shard.meta.content is not None,
            )
    except (CacheFormatError, *storage.ERRORS) as error:
        unreachable = isinstance(error, storage.ERRORS)
        return ShardSummary(
            file=file, size=_size_of(file), problem=str(error), unreachable=unreachable
        )


def _size_of(file: ShardFile) -> int:
    try:
        with storage.open_read(file.path, whole=False) as stream:
            return stream.seek(0, os.SEEK_END)
    except storage.ERRORS:
        return 0


def _collect(
    shards: Iterable[ShardSummary], advance: Callable[[int], None]
) -> Iterator[ShardSummary]:
    """Yield the same shards; those of one dump share their metadata, which may be long."""
    known: dict[str, ShardMeta] = {}
    for shard in shards:
        advance(shard.size)
        if shard.meta is None:
            yield shard
        else:
            meta = known.setdefault(repr(shard.meta), shard.meta)
            yield dataclasses.replace(shard, meta=meta)


def _differences(meta: ShardMeta, main: ShardMeta) -> list[Difference]:
    """Return what shows that two shards are of different dumps."""
    if meta is main:
        return []
    found = compare_identifiers(meta.identifiers or {}, main.identifiers or {})
    found += compare_neighbours(meta, main)
    if meta.hash != main.hash and not (found.fatal or found.harmless):
        found.fatal.append(Difference("identity hash", meta.hash, main.hash))
    return found.fatal
