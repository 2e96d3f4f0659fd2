# SPDX-License-Identifier: Apache-2.0
"""Plans the conversion of a cache, and does it in processes that go on where it was stopped."""

import dataclasses
import functools
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.training.distillation import storage
from megatron.training.distillation.payload import FORMAT_VERSION, MAX_VOCAB_SIZE
from megatron.training.distillation.shard_directory import Segment, live_segments
from megatron.training.distillation.utils import SaverSettings, ShardMeta, ShardName
from tools.cache.cache_files import CacheFiles, ShardFile, list_cache
from tools.cache.conversion import Converted, Failed, Work, convert
from tools.cache.conversion_target import Target
from tools.cache.coverage import Span, intersect, merge, subtract
from tools.cache.inventory import Inventory, take_inventory
from tools.cache.processes import in_processes
from tools.cache.regrouping import Layout, rank_groups, windows
from tools.cache.source_rows import Source


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a conversion will do.

    Attributes:
        inventory: The source.
        directory: The target.
        to: What the source becomes.
        before: What the metadata of the source say; None if no shard can be read.
        after: What those of the target will say; None likewise.
        work: What is to be written, in parts.
        gaps: Samples that the source lacks between its first and its last.
        left_out: Samples of the source that the target's layout cannot deal.
    """

    inventory: Inventory
    directory: str
    to: Target
    before: SaverSettings | None
    after: SaverSettings | None
    work: Sequence[Work]
    gaps: tuple[Span, ...]
    left_out: tuple[Span, ...]

    @property
    def shards(self) -> int:
        """How many shards are to be written."""
        return sum(len(part.names) for part in self.work)


def plan_conversion(source: str, target: str, to: Target) -> Plan:
    """Plan what becomes of the live shards of *source*; what is set aside is not converted.

    Raises:
        ValueError: There is nothing to convert, the source does not hold what is asked for, or
            *target* holds shards that are not of this conversion.
        CacheFormatError: The shards are of format v1, and damaged so that samples cannot be told.
        OSError: A directory cannot be listed.
    """
    if _real(source) == _real(target):
        raise ValueError(f"{source} cannot be converted into itself: name another directory.")
    files = list_cache(source)
    inventory = take_inventory(files)
    before = after = None
    if inventory.meta is not None:
        before = inventory.meta.saver
        after = to.settings_for(before)
        _check_vocabulary(inventory.meta, after)
    left_out: tuple[Span, ...] = ()
    if to.regroups or files.is_legacy:
        if before is None or after is None:
            raise ValueError(
                f"No shard of {source} can be read, such as {files.shards[0].path}: "
                f"{inventory.shards[0].problem}"
            )
        to = dataclasses.replace(
            to, dp_size=after.dp_size_save, mbs=after.mbs_save, gbs=after.gbs_save
        )
        work, left_out = _Regrouping(inventory, before, after).work(to.samples_per_shard)
    else:
        work = [_as_it_is(file) for file in files.shards]
    covered = _covered(inventory)
    _check_target(target, work)
    return Plan(
        inventory=inventory,
        directory=target,
        to=to,
        before=before,
        after=after,
        work=work,
        gaps=subtract([Span(covered[0].start, covered[-1].end)], covered) if covered else (),
        left_out=left_out,
    )


def convert_cache(plan: Plan, *, jobs: int, spool_dir: str | None) -> Iterator[Converted | Failed]:
    """Convert what is planned and yield what became of each shard.

    Shards that are in the target already are left alone.

    Args:
        plan: What :func:`plan_conversion` returns.
        jobs: Processes; 1 works in this one.
        spool_dir: See :func:`convert`.

    Raises:
        OSError: The target cannot be made.
    """
    storage.makedirs(plan.directory)
    work = functools.partial(convert, directory=plan.directory, to=plan.to, spool_dir=spool_dir)
    for results in in_processes(work, plan.work, jobs=jobs):
        yield from results


def _as_it_is(file: ShardFile) -> Work:
    source = Source(file=file, span=Span(file.name.start, file.name.end))
    return Work(names=(file.name,), sources=(source,))


class _Regrouping:
    """Plans shards of other samples, or of members with other rows, than those of the source."""

    def __init__(self, inventory: Inventory, before: SaverSettings, after: SaverSettings) -> None:
        self._inventory = inventory
        self._covered = _covered(inventory)
        begin = self._covered[0].start
        # The iterations of a dump whose batches stay; else those of a student that starts at 0.
        phase = begin % after.gbs_save if before.gbs_save == after.gbs_save else 0
        self._layout = Layout(
            dp_size=after.dp_size_save, mbs=after.mbs_save, gbs=after.gbs_save, phase=phase
        )
        self._before = Layout(
            dp_size=before.dp_size_save,
            mbs=before.mbs_save,
            gbs=before.gbs_save,
            phase=begin % (before.mbs_save * before.dp_size_save),
        )

    def work(self, samples_per_shard: int | None) -> tuple[list[Work], tuple[Span, ...]]:
        """Return what is to be written, and the samples that are left out."""
        fitting = self._layout.fitting(self._covered)
        segments = _segments(self._inventory.files)
        cut = windows(
            fitting,
            self._layout,
            bounds={segment.start for rank in segments.values() for segment in rank},
            samples=samples_per_shard,
        )
        groups = self._groups()
        found = []
        for window, sources in zip(cut, self._sources_of(cut, segments), strict=True):
            for new_ranks, old_ranks in groups:
                own = tuple(source for source in sources if source.file.name.dp_rank in old_ranks)
                names = tuple(ShardName(rank, *window) for rank in new_ranks)
                found.append(
                    Work(names=names, sources=own, layout=self._layout, old_ranks=old_ranks)
                )
        return found, subtract(self._covered, fitting)

    def _groups(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return target ranks to be written together, and the ranks that they are made of."""
        if self._is_regular():
            return rank_groups(self._before, self._layout)
        everyone = max(shard.file.name.dp_rank for shard in self._inventory.shards) + 1
        return [(tuple(range(self._layout.dp_size)), tuple(range(everyone)))]

    def _is_regular(self) -> bool:
        """Whether all members of the source begin with a round, so that ranks follow of samples."""
        before = self._before
        for shard in self._inventory.shards:
            starts = [span.start for span in shard.spans] or [shard.file.name.start]
            if any((start - before.phase) % before.round for start in starts):
                return False
            if shard.meta is not None:
                saver = shard.meta.saver
                if (saver.dp_size_save, saver.mbs_save) != (before.dp_size, before.mbs):
                    return False
        return True

    def _sources_of(
        self, cut: Sequence[Span], segments: dict[int, list[Segment]]
    ) -> Iterator[tuple[Source, ...]]:
        """Yield what holds the samples of each window."""
        by_name = {file.name: file for file in self._inventory.files.shards}
        foreign = {
            file: f"{file.path} is of another dump than most of the cache: "
            f"{'; '.join(map(str, differences))}. Set it aside, or dump its samples again."
            for file, differences in self._inventory.foreign.items()
        }
        places = dict.fromkeys(segments, 0)
        for window in cut:
            found = []
            for rank, own in segments.items():
                while places[rank] < len(own) and own[places[rank]].end <= window.start:
                    places[rank] += 1
                for segment in own[places[rank] :]:
                    if segment.start >= window.end:
                        break
                    file = by_name[segment.shard]
                    span = Span(segment.start, segment.end)
                    found.append(Source(file=file, span=span, problem=foreign.get(file)))
            yield tuple(found)


def _segments(files: CacheFiles) -> dict[int, list[Segment]]:
    """Return which shard each DP rank's samples are read from: of two, the later to start."""
    by_rank: dict[int, list[ShardName]] = defaultdict(list)
    for file in files.shards:
        by_rank[file.name.dp_rank].append(file.name)
    return {rank: live_segments(names) for rank, names in sorted(by_rank.items())}


def _covered(inventory: Inventory) -> tuple[Span, ...]:
    """Return the samples of which any DP rank has its share; a damaged shard counts by its name."""
    spans = {
        shard.file.name: shard.spans
        if shard.meta is not None
        else (Span(shard.file.name.start, shard.file.name.end),)
        for shard in inventory.shards
    }
    found: list[Span] = []
    for segments in _segments(inventory.files).values():
        for segment in segments:
            found += intersect([[Span(segment.start, segment.end)], spans[segment.shard]])
    return merge(found)


def _check_vocabulary(meta: ShardMeta, after: SaverSettings) -> None:
    size = None if meta.manifest is None else meta.manifest.vocab_size
    if size is not None and size > MAX_VOCAB_SIZE and after.format_version == FORMAT_VERSION:
        raise ValueError(
            f"The vocabulary has {size} entries, and format 2 stores ids below {MAX_VOCAB_SIZE} "
            "(17 bits): give --format 3."
        )


def _check_target(target: str, work: Sequence[Work]) -> None:
    """Refuse a directory with shards that this conversion does not write."""
    try:
        names = storage.list_names(target)
    except FileNotFoundError:
        return
    planned = {name for part in work for name in part.names}
    others = [name for name in map(ShardName.parse, names) if name and name not in planned]
    if others:
        raise ValueError(
            f"{target} holds shards that are not of this conversion, such as {others[0]}, and "
            "students would read both. Convert to an empty directory."
        )


def _real(directory: str) -> str:
    return directory.rstrip("/") if storage.is_remote(directory) else os.path.realpath(directory)
