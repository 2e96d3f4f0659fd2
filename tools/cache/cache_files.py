# SPDX-License-Identifier: Apache-2.0
"""The files of a cache by kind, whatever format they are in; each shard opens alone."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.training.distillation import storage
from megatron.training.distillation.legacy import (
    LegacyDirectory,
    LegacyShard,
    is_shard_name,
    recorded_layout,
)
from megatron.training.distillation.open_shard import OpenShard
from megatron.training.distillation.shard_directory import ShardDirectory
from megatron.training.distillation.targets import LoadLayout
from megatron.training.distillation.utils import ShardName


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """A live shard of a cache.

    Attributes:
        path: Where it lies, local or ``msc://``.
        base_name: The name of the file.
        name: Its DP rank and samples.
        legacy: The batches that it was recorded with, of format v1; None for the later formats,
            whose shards say that themselves.
    """

    path: str
    base_name: str
    name: ShardName
    legacy: LoadLayout | None = None

    @contextlib.contextmanager
    def open(self, *, with_members: bool = True, whole: bool = True) -> Iterator[OpenShard]:
        """Open it, whatever run it is of.

        Args:
            with_members: Whether its members are wanted; its metadata costs less without them.
            whole: Whether much of it will be read; else an object store is asked for parts.

        Raises:
            CacheFormatError: It is damaged.
            OSError: It cannot be read.
        """
        with contextlib.closing(storage.open_read(self.path, whole=whole)) as stream:
            if self.legacy is None:
                yield OpenShard(self.path, self.name, stream, None, with_members=with_members)
                return
            yield LegacyShard(
                self.path,
                self.name,
                stream,
                None,
                layout=self.legacy,
                dp_size=self.legacy.dp_size,
                with_members=with_members,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFiles:
    """What lies in the directory of a cache, by base name.

    Attributes:
        directory: The directory, local or ``msc://``.
        shards: The live shards by DP rank and samples. Those of format v1 are live where there are
            none of a later format.
        stale: Files that were set aside (``.stale``).
        unfinished: Files that a writer has not finished (``.tmp``).
        foreign: Whatever else there is, shards of v1 beside later ones included.
    """

    directory: str
    shards: tuple[ShardFile, ...]
    stale: tuple[str, ...]
    unfinished: tuple[str, ...]
    foreign: tuple[str, ...]

    @property
    def is_legacy(self) -> bool:
        """Whether the shards are of format v1."""
        return any(shard.legacy is not None for shard in self.shards)


def list_cache(directory: str) -> CacheFiles:
    """List a cache, once.

    Raises:
        ValueError: There is no shard.
        CacheFormatError: The shards are of format v1, and damaged so that samples cannot be told.
        OSError: The directory cannot be listed, or a shard of format v1 not be read.
    """
    names = storage.list_names(directory)
    shards = _shards(directory, names)
    if not shards:
        raise ValueError(
            f"There is no shard in {directory}, expected names like dp0__0-1024.tar. Give the "
            "directory of --logits-save-dir."
        )
    live = {shard.base_name for shard in shards}
    others = [name for name in names if name not in live]
    stale, rest = _part(others, storage.STALE_SUFFIX)
    unfinished, foreign = _part(rest, storage.TMP_SUFFIX)
    return CacheFiles(
        directory=directory, shards=shards, stale=stale, unfinished=unfinished, foreign=foreign
    )


def _shards(directory: str, names: list[str]) -> tuple[ShardFile, ...]:
    legacy = None
    found = [shard for shard in map(ShardName.parse, names) if shard is not None]
    if not found and any(map(is_shard_name, names)):
        legacy = recorded_layout(directory, names)
        by_name: ShardDirectory = LegacyDirectory(directory, legacy, names)
        files = {shard: by_name.file_name(shard) for shard in by_name.shards}
    else:
        files = {shard: str(shard) for shard in found}
    return tuple(
        ShardFile(path=storage.join(directory, name), base_name=name, name=shard, legacy=legacy)
        for shard, name in sorted(files.items())
    )


def _part(names: Sequence[str], suffix: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names with *suffix*, and the others."""
    with_suffix = tuple(name for name in names if name.endswith(suffix))
    return with_suffix, tuple(name for name in names if not name.endswith(suffix))
