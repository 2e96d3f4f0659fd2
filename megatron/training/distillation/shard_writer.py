# SPDX-License-Identifier: Apache-2.0
"""Writes the finished iterations of a window as one shard.

:func:`write_batched_tar` runs in the checkpoint worker, so it is a plain function of picklable
arguments.
"""

import logging
import os

from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.member_content import Content
from megatron.training.distillation.publication import (
    Extract,
    Publish,
    SetAside,
    plan_publication,
)
from megatron.training.distillation.shard_content import seal_meta
from megatron.training.distillation.shard_extraction import extract
from megatron.training.distillation.storage_retry import retry
from megatron.training.distillation.utils import ShardName, write_shard_tar

logger = logging.getLogger(__name__)


def write_batched_tar(
    path: str, meta_bytes: bytes, members: list[tuple[str, Content]], msc_enabled: bool = False
) -> None:
    """Write one shard, durably and at once; do nothing if there are no members.

    Live shards of the same DP rank end up disjoint: one whose samples all lie inside the new shard
    is set aside (``.stale``) before it appears, and one that sticks out keeps, under a new name,
    what it alone owns. A shard of the same name is replaced. A writer killed at any moment loses
    nothing; the next one finishes what it had begun. So does the next attempt, where a file system
    fails with what may pass: it is told and tried again for a few minutes.

    Args:
        path: Where the shard goes; its basename is a :class:`ShardName`.
        meta_bytes: Content of ``_meta.json``, to which the shard's own content is added.
        members: ``(name, zstd frame)`` by ascending start sample; the frames may lie in a spool.
        msc_enabled: Whether the training process had the multi-storage client enabled; a worker
            process does not inherit that.

    Raises:
        OSError: The shard could not be written, or its directory is gone; the error names it. The
            directory is never made here: where a file system was unmounted, shards would fill the
            disk below.
        ValueError: An old shard would have to be cut inside an iteration.
    """
    if not members:
        return
    if msc_enabled:
        MultiStorageClientFeature.enable()
    directory, basename = os.path.split(path)
    name = ShardName.parse(basename)
    assert name is not None, path
    sealed = seal_meta(meta_bytes, str(name), members)

    def attempt() -> None:
        _write_once(directory, name, sealed, members)

    retry(
        attempt,
        what=f"write {path}",
        errors=(OSError,),
        is_transient=lambda error: isinstance(error, OSError) and storage.is_transient(error, path),
    )


def _write_once(
    directory: str, name: ShardName, meta_bytes: bytes, members: list[tuple[str, Content]]
) -> None:
    """Take the steps that publish shard *name*, from what *directory* holds now."""
    path = storage.join(directory, str(name))
    # Of an object store with the shards of a thousand ranks, each writer lists its own.
    names = storage.list_names(directory, f"dp{name.dp_rank}__")
    live = [old for old in map(ShardName.parse, names) if old is not None]
    for step in plan_publication(name, live):
        match step:
            case Publish():
                storage.publish(path, lambda stream: write_shard_tar(stream, meta_bytes, members))
            case Extract():
                _extract_if_sound(directory, step)
            case SetAside(old):
                stale = storage.set_aside(storage.join(directory, str(old)))
                logger.info("Shard %s makes room for %s and is now %s.", old, name, stale)


def _extract_if_sound(directory: str, step: Extract) -> None:
    """Extract from a shard that is about to be set aside; a damaged one has nothing to keep."""
    try:
        extract(directory, step)
    except CacheFormatError as error:
        logger.warning(
            "Samples %d to %d were recorded in %s alone, which is damaged (%s): they have to be "
            "dumped again.",
            step.target.start,
            step.target.end - 1,
            storage.join(directory, str(step.source)),
            error,
        )
