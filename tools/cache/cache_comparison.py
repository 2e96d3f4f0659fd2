# SPDX-License-Identifier: Apache-2.0
"""Compares two caches sample by sample, whatever formats and layouts they have, in processes."""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from megatron.training.distillation.manifest import (
    Difference,
    Differences,
    compare,
    compare_identifiers,
)
from megatron.training.distillation.shard_meta import SaverSettings, ShardMeta
from tools.cache.coverage import Span, count, intersect, merge, subtract
from tools.cache.inventory import Inventory
from tools.cache.processes import in_processes
from tools.cache.row_comparison import Comparison, SampleList
from tools.cache.sample_rows import LiveParts, RowReader

_WINDOW_BYTES = 256 << 20
"""What the rows that a process compares at once may take, both sides and the work on them."""
_ENTRY_BYTES = 64
"""Of an entry of either side: as it is decoded, and in the float64 arrays of the comparison."""
_UNKNOWN_ENTRIES = 8192 * 128
"""Of a row, where neither metadata nor a row tell."""
_TASKS_PER_SHARD = 4
_TASKS_PER_PROCESS = 8


_UNKNOWN_WITHOUT_VALUE = ("k", "min_k", "save_dtype")
"""Settings that metadata may leave out; of P no value means that there was none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """How what two caches say of themselves differs; of each difference A is *ours*, B *theirs*.

    Attributes:
        fatal: What makes them caches of other samples, tokens or ids.
        harmless: What does not.
        settings: What was recorded how; other entries may be all that comes of it.
        unknown: What one side does not say, in words.
    """

    fatal: list[Difference] = field(default_factory=list)
    harmless: list[Difference] = field(default_factory=list)
    settings: list[Difference] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def compare_identity(a: ShardMeta, b: ShardMeta) -> Identity:
    """Return how the runs differ that recorded two caches."""
    found = Differences()
    unknown = []
    if a.identifiers is None or b.identifiers is None:
        unknown.append(f"{_lacking(a.identifiers, b.identifiers)} the run's identifiers")
    else:
        manifests = a.manifest, b.manifest
        found += compare_identifiers(
            b.identifiers,
            a.identifiers,
            weights_are_given=all(known and known.blend_weighted for known in manifests),
        )
    if a.manifest is None or b.manifest is None:
        unknown.append(
            f"{_lacking(a.manifest, b.manifest)} a manifest: sequence length, vocabulary, "
            "tokenizer, split, sampler"
        )
    else:
        found += compare(b.manifest, a.manifest, may_trim=False)
    if a.hash != b.hash and not (found.fatal or found.harmless):
        found.fatal.append(Difference("identity hash", b.hash, a.hash))
    ours, theirs = asdict(a.saver), asdict(b.saver)
    return Identity(
        fatal=found.fatal,
        harmless=found.harmless,
        settings=[
            Difference(name, theirs[name], ours[name])
            for name in SaverSettings.__dataclass_fields__
            if theirs[name] != ours[name]
            and not (name in _UNKNOWN_WITHOUT_VALUE and None in (theirs[name], ours[name]))
        ],
        unknown=unknown,
    )


def _lacking(a: object, b: object) -> str:
    if a is None and b is None:
        return "neither has"
    return f"{'A' if a is None else 'B'} does not have"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Samples by which of two caches has them, as far as the spans of their members tell.

    Where a DP rank's share is missing, a sample of a span may still have no row.
    """

    both: tuple[Span, ...]
    only_a: tuple[Span, ...]
    only_b: tuple[Span, ...]


def overlap(a: Inventory, b: Inventory, within: Span | None = None) -> Overlap:
    """Return which samples two caches have, of those *within* a span; None for all."""
    spans_a, spans_b = (_spans(inventory, within) for inventory in (a, b))
    return Overlap(
        both=intersect([spans_a, spans_b]),
        only_a=subtract(spans_a, spans_b),
        only_b=subtract(spans_b, spans_a),
    )


def _spans(inventory: Inventory, within: Span | None) -> tuple[Span, ...]:
    spans = merge(itertools.chain.from_iterable(inventory.coverage.by_rank.values()))
    return spans if within is None else intersect([spans, [within]])


@dataclass(slots=True, kw_only=True)
class RowResult:
    """What came of the comparison of some samples.

    Attributes:
        comparison: Of those that both caches have.
        missing_a: Samples of which A has no row.
        missing_b: Samples of which B has no row.
        problems: What could not be read.
    """

    comparison: Comparison = field(default_factory=Comparison)
    missing_a: SampleList = field(default_factory=SampleList)
    missing_b: SampleList = field(default_factory=SampleList)
    problems: list[str] = field(default_factory=list)

    def merge(self, other: "RowResult") -> None:
        """Add what came of others."""
        self.comparison.merge(other.comparison)
        self.missing_a.merge(other.missing_a)
        self.missing_b.merge(other.missing_b)
        self.problems += [each for each in other.problems if each not in self.problems]


@dataclass(frozen=True, slots=True)
class Task:
    """Samples for a process: sets that are read one after the other, and where they lie."""

    sets: tuple[Sequence[int], ...]
    a: LiveParts
    b: LiveParts
    whole: bool

    @property
    def samples(self) -> int:
        """How many there are."""
        return sum(map(len, self.sets))


def compare_samples(task: Task) -> RowResult:
    """Compare the samples of a task."""
    result = RowResult()
    with RowReader(task.a, whole=task.whole) as a, RowReader(task.b, whole=task.whole) as b:
        for samples in task.sets:
            left, right = a.read(samples), b.read(samples)
            result.problems += left.problems + right.problems
            for sample in samples:
                rows_a, rows_b = left.rows.get(sample), right.rows.get(sample)
                if rows_a is not None and rows_b is not None:
                    result.comparison.add(sample, rows_a, rows_b)
                    continue
                if rows_a is None:
                    result.missing_a.add(sample)
                if rows_b is None:
                    result.missing_b.add(sample)
    return result


def compare_in_processes(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[int, RowResult]]:
    """Yield the samples and the result of each task, as they are finished."""
    yield from in_processes(_numbered, tasks, jobs=min(jobs, len(tasks)))


def _numbered(task: Task) -> tuple[int, RowResult]:
    return task.samples, compare_samples(task)


def tasks(a: Inventory, b: Inventory, common: Sequence[Span]) -> list[Task]:
    """Return what compares all samples of *common*.

    Iterations are read whole where they fit into memory, so that every member is decoded once; else
    one DP rank's share of A after the other.
    """
    split = _Split.of(a, b, common[0].start)
    mbs, dp = _meta(a).saver.mbs_save, _meta(a).saver.dp_size_save
    # Who is known to deal as A does has the samples of a rank in shards of the same rank.
    deal_alike = [_dealing(each) == (mbs, dp) for each in (a, b)]
    parts_a, parts_b = map(_parts, (a, b))
    found = []
    for start, end in _pieces(common, split.task):
        of_a, of_b = parts_a.within(start, end), parts_b.within(start, end)
        windows = [range(*window) for window in _pieces([Span(start, end)], split.window)]
        if not split.by_rank:
            found.append(Task(tuple(windows), of_a, of_b, whole=True))
            continue
        for rank in range(dp):
            sets = [[s for s in window if s // mbs % dp == rank] for window in windows]
            own_a, own_b = (
                each.of_rank(rank) if is_alike else each
                for each, is_alike in zip((of_a, of_b), deal_alike, strict=True)
            )
            found.append(Task(tuple(filter(None, sets)), own_a, own_b, whole=True))
    return [task for task in found if task.sets]


def spread_tasks(
    a: Inventory, b: Inventory, common: Sequence[Span], samples: int, jobs: int
) -> list[Task]:
    """Return what compares that many samples, evenly spread over *common*."""
    chosen = spread(common, samples)
    parts_a, parts_b = map(_parts, (a, b))
    size = math.ceil(len(chosen) / (jobs * _TASKS_PER_PROCESS))
    return [
        Task(
            tuple((sample,) for sample in batch),
            parts_a.within(batch[0], batch[-1] + 1),
            parts_b.within(batch[0], batch[-1] + 1),
            whole=False,
        )
        for batch in itertools.batched(chosen, size)
    ]


def spread(spans: Sequence[Span], samples: int) -> list[int]:
    """Return *samples* of *spans*, evenly spread; all of them where there are no more."""
    total = count(spans)
    firsts = list(itertools.accumulate((end - start for start, end in spans), initial=0))
    chosen = []
    for number in range(min(samples, total)):
        place = (2 * number + 1) * total // (2 * min(samples, total))
        span = bisect.bisect_right(firsts, place) - 1
        chosen.append(spans[span].start + place - firsts[span])
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class _Split:
    """How samples are cut.

    Attributes:
        window: Samples that are read together; where they are read by rank, of all ranks.
        task: Samples that a process takes, of all ranks.
        by_rank: Whether one DP rank's share of A is read after the other.
    """

    window: int
    task: int
    by_rank: bool

    @classmethod
    def of(cls, a: Inventory, b: Inventory, sample: int) -> "_Split":
        fitting = max(1, _WINDOW_BYTES // (_row_bytes(a, sample) + _row_bytes(b, sample)))
        iterations = [_meta(each).saver.gbs_save for each in (a, b)]
        shard = max(shard.file.name.end - shard.file.name.start for shard in a.sound)
        least = math.ceil(shard / _TASKS_PER_SHARD)
        window = math.lcm(*iterations)
        if window > fitting:
            window = max(iterations)
        by_rank = window > fitting
        if by_rank:
            window = iterations[0]
        else:
            window *= max(1, min(fitting, least) // window)
        return cls(
            window=window,
            task=math.ceil(least / window) * window,
            by_rank=by_rank,
        )


def _meta(inventory: Inventory) -> ShardMeta:
    assert inventory.meta is not None
    return inventory.meta


def _parts(inventory: Inventory) -> LiveParts:
    return LiveParts.of(shard.file for shard in inventory.sound)


def _dealing(inventory: Inventory) -> tuple[int, int] | None:
    """Return the micro batch size and the DP size of a cache; None where they change."""
    savers = {shard.meta.saver for shard in inventory.sound if shard.meta is not None}
    found = {(saver.mbs_save, saver.dp_size_save) for saver in savers}
    return found.pop() if len(found) == 1 else None


def _row_bytes(inventory: Inventory, sample: int) -> int:
    """Return what a row takes while it is compared."""
    meta = _meta(inventory)
    length = None if meta.manifest is None else meta.manifest.sequence_length
    if length is not None and meta.saver.k is not None:
        return length * meta.saver.k * _ENTRY_BYTES
    with RowReader(_parts(inventory).within(sample, sample + 1), whole=False) as reader:
        rows = reader.read([sample]).rows
    entries = rows[sample].values.numel() if rows else _UNKNOWN_ENTRIES
    return entries * _ENTRY_BYTES


def _pieces(spans: Sequence[Span], size: int) -> Iterator[Span]:
    """Cut *spans* at the multiples of *size*."""
    for start, end in spans:
        bounds = [start, *range(start // size * size + size, end, size), end]
        yield from map(Span, bounds[:-1], bounds[1:])
