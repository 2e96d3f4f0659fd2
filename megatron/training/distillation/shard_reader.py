# SPDX-License-Identifier: Apache-2.0
"""Serves the teacher's rows by global sample, whatever batch sizes the teacher had.

A position is a sample number and nothing else: which shard, member and row hold it follows from
the ranges in the names and from each shard's own metadata, never from counting iterations. Nothing
here communicates; one reader serves one data-parallel rank of the student.
"""

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

from megatron.training.distillation import storage
from megatron.training.distillation.errors import (
    CacheFormatError,
    CacheIdentityError,
    MixedCacheError,
    TeacherDataError,
    TeacherDataExhaustedError,
    TeacherDataMissingError,
    TeacherLayoutError,
)
from megatron.training.distillation.legacy import open_directory
from megatron.training.distillation.manifest import ExpectedRun
from megatron.training.distillation.packed_rows import PackedRows
from megatron.training.distillation.row_assembly import RowAssembler, RowSource
from megatron.training.distillation.shard_company import ShardCompany
from megatron.training.distillation.shard_directory import (
    MemberRows,
    OpenShard,
    Segment,
    ShardDirectory,
)
from megatron.training.distillation.targets import (
    DEFAULT_MAX_AHEAD_BYTES,
    IterationFailure,
    IterationTargets,
    LoadLayout,
)
from megatron.training.distillation.utils import ShardName, row_runs

logger = logging.getLogger(__name__)


_BATCH_ERRORS = (TeacherDataError, CacheFormatError, CacheIdentityError)
_FATAL_ERRORS = (CacheIdentityError, TeacherLayoutError)


class TeacherRowReader:
    """Reads a cache for one load DP rank. Holds no open file and no thread; picklable.

    Args:
        logprobs_dir: Directory of the cache, a local path or ``msc://`` URL.
        layout: The student's batches and this rank's share.
        expected_identifiers: The run whose data every shard must have been recorded over, or its
            data identifiers alone; None accepts any shard.
        decode_threads: Threads that read and decode members.
        decode_lookahead: Iterations decoded ahead of the one handed out; None means as many as
            there are threads, and none with a single thread.
        max_ahead_bytes: Bytes that decoded rows may take: members, and the iterations made of them.
            Fewer iterations are decoded ahead where they would take more, down to none.
        held_iterations: Iterations that the caller keeps, which count as well.
        msc_prefetch_depth: Following shards of an object store that start to download ahead, per
            saved DP rank. Without an MSC cache they are held in memory.
        names: The directory's listing, which is then never renewed; None lists it at the start of a
            pass, and again before a batch is reported missing.
    """

    def __init__(
        self,
        logprobs_dir: str,
        layout: LoadLayout,
        *,
        expected_identifiers: ExpectedRun | Mapping[str, Any] | None,
        decode_threads: int = 4,
        decode_lookahead: int | None = None,
        msc_prefetch_depth: int = 2,
        max_ahead_bytes: int = DEFAULT_MAX_AHEAD_BYTES,
        held_iterations: int = 1,
        names: Sequence[str] | None = None,
    ) -> None:
        self.logprobs_dir = logprobs_dir
        self.layout = layout
        self.expected_run = ExpectedRun.of(expected_identifiers)
        self.decode_threads = max(1, decode_threads)
        if decode_lookahead is None:
            decode_lookahead = self.decode_threads if self.decode_threads > 1 else 0
        self.decode_lookahead = max(0, decode_lookahead)
        self.msc_prefetch_depth = max(0, msc_prefetch_depth)
        self.max_ahead_bytes = max_ahead_bytes
        self.held_iterations = held_iterations
        self.names = names

    def lookahead(self, iteration_bytes: int, member_bytes: int) -> int:
        """Return how many iterations to decode ahead of the next one.

        Args:
            iteration_bytes: Size of an iteration's rows; 0 if it is not known yet.
            member_bytes: Size of the decoded members that it is made of.
        """
        if iteration_bytes == 0:
            return 0
        left = self.max_ahead_bytes - self.held_iterations * iteration_bytes
        # The next one itself is being decoded as well.
        fitting = left // (iteration_bytes + member_bytes) - 1
        return max(0, min(self.decode_lookahead, fitting))

    def iterations(self, start_sample: int) -> Iterator[IterationTargets | IterationFailure]:
        """Yield one item per iteration of the student, from the one that starts at *start_sample*.

        An iteration that cannot be served is an :class:`IterationFailure`, and the next item is the
        next iteration. The last item is a fatal failure, a :class:`TeacherDataExhaustedError`, or
        the failure of a cache without shards. Closing the generator closes all files and threads.
        """
        if start_sample < 0:
            raise ValueError(f"start_sample is {start_sample}, expected a sample number from 0 on.")
        try:
            directory = open_directory(self.logprobs_dir, self.layout, start_sample, self.names)
        except (CacheFormatError, *storage.ERRORS) as error:
            yield IterationFailure(start=start_sample, error=_portable(error), fatal=True)
            return
        with contextlib.closing(_RowStream(self, directory)) as stream:
            yield from stream.run(start_sample)


class _Pending(NamedTuple):
    """An iteration that is being decoded, and the members that it is made of."""

    start: int
    job: Future[IterationTargets]
    members: Sequence[Future[PackedRows]]


class _RowStream:
    """The open files, threads and decoded members behind one pass over a cache."""

    def __init__(self, reader: TeacherRowReader, directory: ShardDirectory) -> None:
        self._reader = reader
        self._layout = reader.layout
        self._directory = directory
        self._pool = ThreadPoolExecutor(reader.decode_threads, thread_name_prefix="teacher-decode")
        # Not in the pool, where waiting for members would keep a thread from decoding them.
        self._assembly = ThreadPoolExecutor(1, thread_name_prefix="teacher-assemble")
        self._shards: dict[ShardName, OpenShard] = {}
        self._prefetched: dict[ShardName, BinaryIO] = {}
        self._payloads: dict[tuple[ShardName, int], tuple[int, Future[PackedRows]]] = {}
        self._pending: deque[_Pending] = deque()
        self._next = 0
        self._iteration_bytes = self._member_bytes = 0
        self._dealing: tuple[int, int] | None = None
        self._assembler = RowAssembler(reader.layout, directory.path)
        self._company = ShardCompany(reader.expected_run)

    def run(self, start: int) -> Iterator[IterationTargets | IterationFailure]:
        """Yield the iterations from sample *start* on."""
        gbs = self._layout.gbs
        self._next = start
        while True:
            count = self._reader.lookahead(self._iteration_bytes, self._member_bytes)
            error = self._work_ahead(count)
            if error is not None and not self._pending and self._reader.names is None:
                # Its turn has come, and a running teacher may have written it since.
                error = self._relist() or self._work_ahead(0)
            item: IterationTargets | IterationFailure
            if error is not None and not self._pending:
                fatal = isinstance(error, _FATAL_ERRORS)
                item = IterationFailure(start=self._next, error=error, fatal=fatal)
                self._next += gbs
            else:
                item = self._finish(self._pending.popleft())
            self._forget_before(item.start + gbs)
            yield item
            if isinstance(item, IterationFailure) and (
                item.fatal
                or isinstance(item.error, TeacherDataExhaustedError)
                or not self._directory.shards
            ):
                return

    def _work_ahead(self, count: int) -> Exception | None:
        """Submit iterations until *count* wait behind the next one; return what stopped it."""
        while len(self._pending) <= count:
            try:
                self._pending.append(self._submit(self._next))
            except _BATCH_ERRORS as error:
                return error
            self._next += self._layout.gbs
        return None

    def _finish(self, pending: _Pending) -> IterationTargets | IterationFailure:
        try:
            targets = pending.job.result()
        except _BATCH_ERRORS as error:
            fatal = isinstance(error, _FATAL_ERRORS)
            return IterationFailure(start=pending.start, error=error, fatal=fatal)
        self._iteration_bytes = targets.blocks.nbytes
        self._member_bytes = sum(member.result().nbytes for member in pending.members)
        return targets

    def close(self) -> None:
        """Wait for running decodes and close all files."""
        self._assembly.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._assembly.shutdown(wait=True)
        self._forget_before(sys.maxsize)

    # ---- finding rows --------------------------------------------------------------------

    def _submit(self, start: int) -> _Pending:
        """Find all rows of an iteration, then start their decoding."""
        by_member: dict[tuple[ShardName, int], list[RowSource]] = {}
        for source in list(self._find_rows(start)):
            by_member.setdefault((source.shard.name, source.member.start), []).append(source)
        groups = dict(self._decoding(sources) for sources in by_member.values())
        job = self._assembly.submit(self._assembler.assemble, start, groups)
        return _Pending(start, job, list(groups))

    def _find_rows(self, start: int) -> Iterator[RowSource]:
        layout, directory = self._layout, self._directory
        end = start + layout.gbs
        if directory.shards and end > directory.end:
            raise TeacherDataExhaustedError(
                f"The teacher data in {directory.path} is exhausted: its last sample is "
                f"{directory.end - 1}, and the batch from sample {start} on ends with sample "
                f"{end - 1}. Dump more samples, or train on fewer."
            )
        for microbatch in range(layout.num_microbatches):
            sample = start + (microbatch * layout.dp_size + layout.dp_rank) * layout.mbs
            stop = sample + layout.mbs
            row = microbatch * layout.mbs
            while sample < stop:
                for source in self._find_run(sample, stop, row):
                    count = source.row_end - source.row_start
                    yield source
                    sample, row = sample + count, row + count

    def _find_run(self, sample: int, stop: int, row: int) -> Iterator[RowSource]:
        """Yield the sources of at least the first of samples ``[sample, stop)``."""
        segment = self._locate(sample)
        if segment is None:
            raise self._missing(sample, "the cache does not hold it")
        guide = self._open(segment.shard)
        self._dealing = guide.mbs, guide.dp_size
        member = guide.member_at(sample)
        if member is None:
            raise self._missing(sample, f"{guide.path} has no member for it")
        stop = min(stop, segment.end, member.end)
        for run in row_runs(member.start, sample, stop, mbs_save=guide.mbs, dp_save=guide.dp_size):
            shard, entry = guide, member
            if run.d_save != guide.name.dp_rank:
                shard, entry = self._find_owner(sample, run.d_save, guide, member)
            yield RowSource(shard, entry, run.row_start, run.row_end, row)
            sample += run.row_end - run.row_start
            row += run.row_end - run.row_start

    def _locate(self, sample: int) -> Segment | None:
        """Return a shard with *sample* in its range: the one that has its row, as far as is known.

        How samples are dealt stands in a shard; most often it is as in the one before.
        """
        segment = self._directory.locate(sample, self._layout.dp_rank)
        if segment is None or self._dealing is None:
            return segment
        mbs, dp_size = self._dealing
        owner = (sample - segment.shard.start) // mbs % dp_size
        return self._directory.locate(sample, owner)

    def _find_owner(
        self, sample: int, dp_rank: int, guide: OpenShard, member: MemberRows
    ) -> tuple[OpenShard, MemberRows]:
        """Return DP rank *dp_rank*'s counterpart of *member* in the shard *guide*."""
        name = self._directory.shard_of(dp_rank, sample)
        if name is None:
            wanted = ShardName(dp_rank, guide.name.start, guide.name.end)
            absent, beside = map(self._directory.file_name, (wanted, guide.name))
            raise self._missing(sample, f"there is no {absent} beside {beside}")
        shard = self._open(name)
        found = shard.member_at(sample)
        if found is None:
            raise self._missing(sample, f"{shard.path} has no member for it")
        ours = (found.start, found.end, shard.mbs, shard.dp_size)
        theirs = (member.start, member.end, guide.mbs, guide.dp_size)
        if ours != theirs:
            raise CacheFormatError(
                f"Teacher shards {shard.path} and {guide.path} disagree about sample {sample}: "
                f"(first sample, end, mbs_save, dp_size_save) are {ours} and {theirs}. They come "
                "from different dumps: rename the older one to .stale, or dump these samples again."
            )
        return shard, found

    def _missing(self, sample: int, reason: str) -> TeacherDataMissingError:
        return TeacherDataMissingError(
            f"The teacher data in {self._directory.path} is misaligned with training: sample "
            f"{sample} is needed, and {reason}. Found {self._directory.describe()}. Complete the "
            "cache, or start the student where it begins."
        )

    def _decoding(self, sources: list[RowSource]) -> tuple[Future[PackedRows], list[RowSource]]:
        """Return the decoding of the member of *sources*, and where in it their rows are.

        Of rows that decode alone it has only these: no other iteration wants the same. Any other
        member is decoded once for all iterations that need it.
        """
        shard, member = sources[0].shard, sources[0].member
        if shard.decodes_rows:
            rows = sorted(row for s in sources for row in range(s.row_start, s.row_end))
            job = self._pool.submit(shard.decode, member, rows)
            return job, [source.within(rows) for source in sources]
        key = (shard.name, member.start)
        if key not in self._payloads:
            self._payloads[key] = (member.end, self._pool.submit(shard.decode, member))
        return self._payloads[key][1], sources

    def _open(self, name: ShardName) -> OpenShard:
        shard = self._shards.get(name)
        if shard is None:
            is_alone = self._company.wants_neighbour
            path = self._directory.path_of(name)
            try:
                # No iteration before the one that is being searched will be asked for again.
                stream = self._take_stream(name, whole=self._next <= name.start)
                try:
                    shard = self._directory.open_shard(name, stream, self._reader.expected_run)
                    self._company.admit(shard)
                except BaseException:
                    stream.close()
                    raise
            except FileNotFoundError as error:
                raise TeacherDataMissingError(
                    f"Teacher shard {path} is no longer there: {error}"
                ) from error
            except storage.ERRORS as error:
                raise TeacherDataError(f"Cannot read teacher shard {path}: {error}") from error
            self._shards[name] = shard
            if is_alone:
                self._meet_neighbour_of(name)
            self._prefetch_after(name)
        return shard

    def _take_stream(self, name: ShardName, *, whole: bool) -> BinaryIO:
        """Return the stream of a shard; if *whole*, an object store begins to fetch all of it."""
        stream = self._prefetched.pop(name, None)
        if stream is None:
            return storage.open_read(self._directory.path_of(name), whole=whole)
        if whole:
            storage.fetch_whole(stream)
        return stream

    def _meet_neighbour_of(self, name: ShardName) -> None:
        """Compare one more shard with the first one; two that do not fit are an error of both."""
        neighbour = self._directory.neighbour(name)
        if neighbour is None:
            return
        run = self._reader.expected_run
        try:
            stream = self._take_stream(neighbour, whole=False)
            try:
                found = self._directory.open_shard(neighbour, stream, run, with_members=False)
                self._company.admit(found)
            except BaseException:
                stream.close()
                raise
            self._prefetched[neighbour] = stream
        except MixedCacheError:
            raise
        except (*_BATCH_ERRORS, *storage.ERRORS) as error:  # its samples may not be needed
            logger.debug("Teacher shard %s cannot be compared: %s", neighbour, error)

    def _prefetch_after(self, name: ShardName) -> None:
        if not storage.is_remote(self._directory.path):
            return
        for following in self._directory.following(name, self._reader.msc_prefetch_depth):
            if following not in self._shards:
                with contextlib.suppress(*storage.ERRORS):  # reported when its turn comes
                    self._prefetched[following] = self._take_stream(following, whole=True)

    def _relist(self) -> Exception | None:
        """Forget what is open, as it may have been replaced, and list the directory again."""
        self._forget_before(sys.maxsize)
        self._company.dissolve()
        try:
            self._directory.refresh()
        except CacheFormatError as error:
            return error
        except storage.ERRORS as error:
            return TeacherDataError(f"Cannot list the teacher data: {error}")
        return None

    def _forget_before(self, sample: int) -> None:
        """Drop decoded members and shards that end at or before *sample*: no one comes back."""
        self._payloads = {k: entry for k, entry in self._payloads.items() if entry[0] > sample}
        for passed in [name for name in self._shards if name.end <= sample]:
            self._shards.pop(passed).close()
        for passed in [name for name in self._prefetched if name.end <= sample]:
            self._prefetched.pop(passed).close()


def _portable(error: Exception) -> Exception:
    """Return an error that survives the way out of a loader process: storage errors may not."""
    if isinstance(error, CacheFormatError):
        return error
    return TeacherDataError(f"Cannot list the teacher data: {error}")
