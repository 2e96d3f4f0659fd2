# SPDX-License-Identifier: Apache-2.0
"""Converts all shards of a cache, in processes side by side, and goes on where it was stopped."""

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.utils import ShardName
from tools.cache.conversion import ConversionError, Converted, Target, convert_shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Why a shard was not converted."""

    name: str
    reason: str


def convert_cache(
    source: str,
    target: str,
    to: Target,
    *,
    jobs: int,
    spool_dir: str | None,
    begin: Callable[[int], None],
) -> Iterator[Converted | Failed]:
    """Convert every live shard of *source* into *target* and yield what became of each.

    Shards that are in *target* already are left alone. What is set aside (``.stale``) is not
    converted.

    Args:
        source: Directory of the cache.
        target: Another directory; it is made.
        to: What it is converted to.
        jobs: Processes; 1 works in this one.
        spool_dir: See :func:`convert_shard`.
        begin: Called with the number of shards before the first of them.

    Raises:
        ValueError: The directories are the same, or there is no shard.
        OSError: *source* cannot be listed, or *target* not be made.
    """
    if source.rstrip("/") == target.rstrip("/"):
        raise ValueError(f"{source} cannot be converted into itself: name another directory.")
    shards = sorted(filter(None, map(ShardName.parse, storage.list_names(source))))
    if not shards:
        raise ValueError(f"There is no shard in {source} (dpN__FIRST-END.tar).")
    storage.makedirs(target)
    begin(len(shards))
    work = functools.partial(_attempt, source, target, to=to, spool_dir=spool_dir)
    if jobs == 1:
        yield from map(work, shards)
        return
    # A forked process would have locks of the threads of this one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        for future in as_completed([pool.submit(work, shard) for shard in shards]):
            yield future.result()


def _attempt(
    source: str, target: str, name: ShardName, *, to: Target, spool_dir: str | None
) -> Converted | Failed:
    """Convert one shard; what is wrong with it does not keep the others from being converted."""
    try:
        return convert_shard(source, target, name, to, spool_dir)
    except (ConversionError, CacheFormatError, *storage.ERRORS) as error:
        return Failed(name=str(name), reason=str(error))
