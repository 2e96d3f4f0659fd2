# SPDX-License-Identifier: Apache-2.0
"""Converts all shards of a cache, in processes side by side, and goes on where it was stopped."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.utils import ShardName
from tools.cache.conversion import ConversionError, Converted, Target, convert_shard
from tools.cache.processes import in_processes


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Why a shard was not converted."""

    name: str
    reason: str


def shards_of(source: str, target: str) -> list[ShardName]:
    """Return the live shards of *source*, which can be converted into *target*.

    What is set aside (``.stale``) is not converted.

    Raises:
        ValueError: The directories are the same, or there is no shard.
        OSError: *source* cannot be listed.
    """
    if source.rstrip("/") == target.rstrip("/"):
        raise ValueError(f"{source} cannot be converted into itself: name another directory.")
    shards = sorted(filter(None, map(ShardName.parse, storage.list_names(source))))
    if not shards:
        raise ValueError(f"There is no shard in {source} (dpN__FIRST-END.tar).")
    return shards


def convert_cache(
    source: str,
    target: str,
    shards: Sequence[ShardName],
    to: Target,
    *,
    jobs: int,
    spool_dir: str | None,
) -> Iterator[Converted | Failed]:
    """Convert *shards* of *source* into *target* and yield what became of each.

    Shards that are in *target* already are left alone.

    Args:
        source: Directory of the cache.
        target: Another directory; it is made.
        shards: What :func:`shards_of` returns.
        to: What they are converted to.
        jobs: Processes; 1 works in this one.
        spool_dir: See :func:`convert_shard`.

    Raises:
        OSError: *target* cannot be made.
    """
    storage.makedirs(target)
    work = functools.partial(_attempt, source, target, to=to, spool_dir=spool_dir)
    yield from in_processes(work, shards, jobs=jobs)


def _attempt(
    source: str, target: str, name: ShardName, *, to: Target, spool_dir: str | None
) -> Converted | Failed:
    """Convert one shard; what is wrong with it does not keep the others from being converted."""
    try:
        return convert_shard(source, target, name, to, spool_dir)
    except (ConversionError, CacheFormatError, *storage.ERRORS) as error:
        return Failed(name=str(name), reason=str(error))
