# SPDX-License-Identifier: Apache-2.0
"""Which file operations make a new shard appear without losing a sample or keeping one twice.

A dump that crashes is resumed from a checkpoint, perhaps an older one and with another save
interval, so a new shard may overlap shards that are there. The plans here are pure: shard names in,
steps out. They hold for a writer that is killed between any two steps, because each is made from
what the directory holds then, and because

* samples that only an old shard owns are published under a name of their own before that shard is
  set aside, so they stay readable at every moment;
* an old shard is set aside before the new one appears, so what the new one holds is never there
  twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.training.distillation.utils import ShardName


@dataclass(frozen=True, slots=True)
class Extract:
    """Publish as *target* those members of the live shard *source* that lie in *target*'s range."""

    source: ShardName
    target: ShardName


@dataclass(frozen=True, slots=True)
class SetAside:
    """Rename the live shard to ``.stale``."""

    shard: ShardName


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish the new shard; one of the same name is replaced in place."""

    shard: ShardName


Step = Extract | SetAside | Publish


def plan_publication(new: ShardName, live: Iterable[ShardName]) -> list[Step]:
    """Return the steps after which *new* is live and no live shard of its DP rank overlaps another.

    Args:
        new: The shard to publish.
        live: The live shards of the directory, of any DP rank.
    """
    steps, remaining = _plan_repair(shard for shard in live if shard.dp_rank == new.dp_rank)
    for old in remaining:
        if old != new and old.start < new.end and new.start < old.end:
            steps += _make_room(old, new.start, new.end)
    return [*steps, Publish(new)]


def plan_disjoint(live: Iterable[ShardName]) -> list[Step]:
    """Return the steps after which no two *live* shards of a DP rank overlap, as a resume takes.

    Args:
        live: The live shards of the directory, of any DP rank.
    """
    by_rank: dict[int, list[ShardName]] = {}
    for shard in live:
        by_rank.setdefault(shard.dp_rank, []).append(shard)
    return [step for _, shards in sorted(by_rank.items()) for step in _plan_repair(shards)[0]]


def _plan_repair(live: Iterable[ShardName]) -> tuple[list[Step], list[ShardName]]:
    """Return the steps that make *live* shards of one DP rank disjoint, and what is live then.

    Of two shards that overlap, one inside the other is set aside: it is what a killed writer had
    extracted. Otherwise the one that starts later comes from the run that was resumed there, and
    the earlier one keeps what lies before it.
    """
    steps: list[Step] = []
    kept: list[ShardName] = []
    # A shard that starts with another comes after the longer one, which contains it.
    for shard in sorted(live, key=lambda shard: (shard.start, -shard.end)):
        previous = kept[-1] if kept else None
        if previous is None or previous.end <= shard.start:
            kept.append(shard)
        elif shard.end <= previous.end:
            steps.append(SetAside(shard))
        else:
            steps += _make_room(previous, shard.start, previous.end)
            kept[-1] = ShardName(previous.dp_rank, previous.start, shard.start)
            kept.append(shard)
    return steps, kept


def _make_room(old: ShardName, start: int, end: int) -> list[Step]:
    """Return the steps that leave of *old* only what lies outside of samples ``[start, end)``."""
    steps: list[Step] = []
    if old.start < start:
        steps.append(Extract(old, ShardName(old.dp_rank, old.start, start)))
    if end < old.end:
        steps.append(Extract(old, ShardName(old.dp_rank, end, old.end)))
    return [*steps, SetAside(old)]
