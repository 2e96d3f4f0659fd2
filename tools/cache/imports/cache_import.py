# SPDX-License-Identifier: Apache-2.0
"""Imports a cache: plans its shards and writes them, in processes side by side."""

import functools
from collections.abc import Iterator

import numpy as np

from megatron.training.distillation import storage
from megatron.training.distillation.continuation import check_continues
from megatron.training.distillation.shard_meta import ShardMeta
from megatron.training.distillation.utils import ShardName
from tools.cache.imports.line_index import LineIndex
from tools.cache.imports.shard_import import Recipe, ShardWork, Written, import_shard
from tools.cache.imports.shard_plan import ShardLayout, check_target
from tools.cache.processes import in_processes


def open_target(target: str, meta: ShardMeta, planned: list[ShardName]) -> None:
    """Make the directory, and refuse one whose shards do not belong to this import.

    Raises:
        CacheIdentityError: They are of another run.
        ValueError: They hold samples that are to be imported.
        OSError: It cannot be made or listed.
    """
    storage.makedirs(target)
    check_continues(target, meta)
    there = filter(None, map(ShardName.parse, storage.list_names(target)))
    check_target(planned, there, target)


def import_shards(
    planned: list[ShardName],
    layout: ShardLayout,
    samples: range,
    index: LineIndex,
    line_of: np.ndarray,
    recipe: Recipe,
    *,
    jobs: int,
) -> Iterator[Written]:
    """Write the planned shards and yield what became of each; see :func:`import_shard`.

    Args:
        planned: The shards.
        layout: How samples are dealt.
        samples: All samples that are imported.
        index: The lines.
        line_of: The line of each of *samples*.
        recipe: What the shards share.
        jobs: Processes; 1 works in this one.
    """
    lines = index.lines

    def works() -> Iterator[ShardWork]:
        for name in planned:
            members = layout.members(name)
            yield ShardWork(
                name=name,
                members=members,
                lines=[
                    lines[line_of[np.array(layout.samples_of(name.dp_rank, start)) - samples.start]]
                    for start, _ in members
                ],
            )

    yield from in_processes(functools.partial(import_shard, recipe=recipe), works(), jobs=jobs)
