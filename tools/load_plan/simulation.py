# SPDX-License-Identifier: Apache-2.0
"""Plays the readers of a student against the store that they share, event by event.

All readers work ahead on their own; the trainer begins a step when every one of them has its
targets. What is left out: the time of the collectives, and everything that slows a step by chance.
"""

from collections import deque
from dataclasses import dataclass

from tools.load_plan.member_needs import MemberUses, member_uses
from tools.load_plan.setting import OBJECT_STORE, Setting
from tools.load_plan.shard_streams import Shard, ShardStream, Transport
from tools.load_plan.shared_store import Clock, SharedStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What happened.

    Attributes:
        stalls: Seconds that each iteration waited for its targets.
        elapsed: Seconds until the last iteration had them.
        members: Members decoded, by all readers.
        needed_rows: Samples that the readers needed of them.
        opened: Shards opened, by all readers.
        store_requests: Requests to the store, listings left out.
        store_bytes: Bytes that the store sent.
        peak_requests_per_second: The most requests that began within one second.
        peak_reader_bytes: The most memory that one reader held.
    """

    stalls: tuple[float, ...]
    elapsed: float
    members: int
    needed_rows: int
    opened: int
    store_requests: int
    store_bytes: int
    peak_requests_per_second: int
    peak_reader_bytes: int


def simulate(setting: Setting, *, start: int, iterations: int, ready_at: float = 0.0) -> Trace:
    """Return what *iterations* from sample *start* on go like.

    Args:
        setting: Who reads what from where.
        start: First sample, a multiple of the student's turn of ranks.
        iterations: How many to play.
        ready_at: Seconds after which the readers have the listing.

    Raises:
        ValueError: The cache ends before, or *start* is none.
    """
    end = start + iterations * setting.student.gbs
    if iterations < 1 or end > setting.dump.train_samples:
        raise ValueError(
            f"{iterations} iterations from sample {start} on end at sample {end}, the cache at "
            f"{setting.dump.train_samples}."
        )
    return _Simulation(setting, start, iterations).run(ready_at)


class _Simulation:
    def __init__(self, setting: Setting, start: int, iterations: int) -> None:
        self.setting = setting
        self.start = start
        self.iterations = iterations
        self.clock = Clock()
        self.store = SharedStore(setting.store, self.clock)
        self.transport = Transport(setting, self.store, self.clock)
        load = setting.student.batches
        self.uses = member_uses(setting.dump.batches, load, start, iterations)
        self.readers = _readers(self)
        self.unready = [load.dp] * iterations
        self.requested = -1
        self.requested_at = 0.0
        self.delivered = -1
        self.in_use = 0
        self.stalls: list[float] = []

    def run(self, ready_at: float) -> Trace:
        self.clock.at(0.0, self._request, 0)
        for reader in self.readers:
            self.clock.at(ready_at, reader.begin)
        self.clock.run()
        assert self.delivered == self.iterations - 1, (self.delivered, self.iterations)
        return Trace(
            stalls=tuple(self.stalls),
            elapsed=sum(self.stalls) + self.setting.student.step_time * (self.iterations - 1),
            members=len(self.uses),
            needed_rows=int(self.uses.rows.sum()),
            opened=sum(len(reader.opened) for reader in self.readers),
            store_requests=self.store.requests,
            store_bytes=self.store.bytes,
            peak_requests_per_second=self.store.peak_requests_per_second,
            peak_reader_bytes=max(reader.peak_bytes for reader in self.readers),
        )

    # ---- the trainer ---------------------------------------------------------------------

    def _request(self, iteration: int) -> None:
        self.requested, self.requested_at = iteration, self.clock.now
        self._deliver_if_ready()
        if self.setting.loader.queued_iterations == 0:
            self._wake_readers()

    def finished(self, iteration: int) -> None:
        """Take note that one more reader has *iteration* ready."""
        self.unready[iteration] -= 1
        self._deliver_if_ready()

    def _deliver_if_ready(self) -> None:
        iteration = self.requested
        if self.delivered == iteration or self.unready[iteration]:
            return
        self.delivered = iteration
        self.stalls.append(self.clock.now - self.requested_at)
        begin = self.clock.now + (self.setting.taken_ahead if iteration else 0)
        self.clock.at(begin, self._begin, iteration)
        if self.setting.loader.queued_iterations:
            self._wake_readers()

    def _begin(self, iteration: int) -> None:
        """Begin the step of *iteration*; near its end the next one is asked for."""
        self.in_use = iteration
        if iteration + 1 < self.iterations:
            ahead = self.setting.student.step_time - self.setting.taken_ahead
            self.clock.at(self.clock.now + ahead, self._request, iteration + 1)

    def _wake_readers(self) -> None:
        # Not at once: this may be called from within a reader.
        for reader in self.readers:
            self.clock.at(self.clock.now, reader.go_on)

    def may_produce(self, iteration: int) -> bool:
        """Return whether a reader may work at *iteration*: someone waits, or the queue has room."""
        queued = self.setting.loader.queued_iterations
        if queued == 0:
            return iteration <= self.requested
        return iteration <= self.delivered + queued


class _Reader:
    """One replica's reader: a thread that opens shards and hands out, and those that decode."""

    def __init__(self, run: _Simulation, index: int, entries: slice) -> None:
        uses, setting = run.uses, run.setting
        self._run = run
        self._place = setting.student.reader_nodes[index] if setting.loader.node_cache else index
        self._guide = index % setting.dump.batches.dp
        interval = setting.dump.save_interval
        members = uses.teacher_iteration[entries]
        ranks = uses.saved_rank[entries].tolist()
        windows = (members // interval).tolist()
        self._shards = [Shard(*shard) for shard in zip(ranks, windows, strict=True)]
        self._numbers: list[int] = (members % interval).tolist()
        self._first: list[int] = uses.first[entries].tolist()
        self._begins, self._ends = [0] * run.iterations, [0] * run.iterations
        for first, last in zip(self._first, uses.last[entries].tolist(), strict=True):
            self._begins[first] += 1
            self._ends[last] += 1
        self._undone = list(self._begins)
        self._next_entry = 0
        self._submitted = self._decoded_to = self._assembled = self._produced = 0
        self._opening: Shard | None = None
        self._started = False
        self._jobs: deque[int] = deque()
        self._free_threads = setting.loader.decode_threads
        self._locked: dict[Shard, deque[int]] = {}
        self._streams: dict[Shard, ShardStream] = {}
        self._prefetched: dict[Shard, ShardStream] = {}
        self._members = self._raw = 0
        self._members_of_last = self._kept = 0
        self.opened: set[Shard] = set()
        self.peak_bytes = 0

    def begin(self) -> None:
        """Start: the listing is there."""
        self._started = True
        self.go_on()

    # ---- the thread that opens and hands out ---------------------------------------------

    def go_on(self) -> None:
        """Do what can be done now, in the order of the samples."""
        run = self._run
        while self._started and self._opening is None and self._produced < run.iterations:
            if not run.may_produce(self._produced) or not self._submit_ahead():
                return
            if self._assembled <= self._produced:
                return
            self._produce()

    def _submit_ahead(self) -> bool:
        """Submit iterations up to the lookahead; return False where a shard must be opened."""
        setting = self._run.setting
        count = setting.loader.lookahead(
            setting.iteration_bytes if self._produced else 0,
            self._members_of_last * setting.packed_member_bytes,
        )
        last = min(self._produced + count, self._run.iterations - 1)
        while self._submitted <= last:
            stop = self._next_entry + self._begins[self._submitted]
            for shard in self._shards[self._next_entry : stop]:
                # The first shard tells how samples were dealt, also if it has no row to use.
                guides = [] if self.opened else [Shard(self._guide, shard.number)]
                for wanted in (*guides, shard):
                    if wanted not in self.opened:
                        self._open(wanted)
                        return False
            self._jobs.extend(range(self._next_entry, stop))
            self._next_entry = stop
            self._submitted += 1
            self._assemble()  # its members may be there from the iteration before
            self._use_threads()
        return True

    def _produce(self) -> None:
        run = self._run
        self._members_of_last = self._kept + self._begins[self._produced]
        self._kept = self._members_of_last - self._ends[self._produced]
        self._members -= self._ends[self._produced]
        self._produced += 1
        self._forget_before(run.start + self._produced * run.setting.student.gbs)
        run.finished(self._produced - 1)

    def _forget_before(self, sample: int) -> None:
        size = self._run.setting.dump.shard_samples
        for held in (self._streams, self._prefetched):
            for shard in [shard for shard in held if (shard.number + 1) * size <= sample]:
                del held[shard]

    def _open(self, shard: Shard) -> None:
        self._opening = shard
        run = self._run
        begins = shard.number * run.setting.dump.shard_samples
        searched = run.start + self._submitted * run.setting.student.gbs
        self._streams[shard] = self._take_stream(shard, whole=searched <= begins)
        self._note_memory()
        self._streams[shard].read_head(self._have_opened)

    def _take_stream(self, shard: Shard, *, whole: bool) -> ShardStream:
        stream = self._prefetched.pop(shard, None)
        if stream is None:
            return ShardStream(self._run.transport, self._place, shard, whole=whole)
        if whole:
            stream.fetch_whole()
        return stream

    def _have_opened(self) -> None:
        assert self._opening is not None
        self.opened.add(self._opening)
        neighbour = self._neighbour_of(self._opening) if len(self.opened) == 1 else None
        if neighbour is None:
            self._after_open()
            return
        # The first one is compared with another before it is used.
        self._prefetched[neighbour] = self._take_stream(neighbour, whole=False)
        self._prefetched[neighbour].read_head(self._after_open)

    def _neighbour_of(self, shard: Shard) -> Shard | None:
        dump = self._run.setting.dump
        rank, number = shard
        if number + 1 < dump.windows:
            return Shard(rank, number + 1)
        if number:
            return Shard(rank, number - 1)
        return Shard(0 if rank else 1, number) if dump.batches.dp > 1 else None

    def _after_open(self) -> None:
        """Go on with the shard that was waited for, and have those after it fetched."""
        shard, self._opening = self._opening, None
        assert shard is not None
        setting = self._run.setting
        if setting.store.kind == OBJECT_STORE:
            stop = min(shard.number + 1 + setting.loader.prefetch_depth, setting.dump.windows)
            for number in range(shard.number + 1, stop):
                following = Shard(shard.saved_rank, number)
                if following not in self._streams:
                    self._prefetched[following] = self._take_stream(following, whole=True)
            self._note_memory()
        self.go_on()

    # ---- the threads that decode ---------------------------------------------------------

    def _use_threads(self) -> None:
        while self._free_threads and self._jobs:
            job = self._jobs.popleft()
            self._free_threads -= 1
            shard = self._shards[job]
            if self._streams[shard].is_free_to_read:
                self._have_read(job)
            elif shard in self._locked:
                self._locked[shard].append(job)
            else:
                self._locked[shard] = deque()
                self._read(job)

    def _read(self, entry: int) -> None:
        stream = self._streams[self._shards[entry]]
        stream.read_member(self._numbers[entry], lambda: self._release(entry))

    def _release(self, entry: int) -> None:
        """Let the next thread at the shard: its stream is read by one at a time."""
        waiting = self._locked[self._shards[entry]]
        if waiting:
            self._read(waiting.popleft())
        else:
            del self._locked[self._shards[entry]]
        self._have_read(entry)

    def _have_read(self, entry: int) -> None:
        setting = self._run.setting
        self._raw += setting.member_bytes
        self._members += 1
        self._note_memory()
        seconds = setting.member_tokens * setting.loader.decode_seconds_per_token
        self._run.clock.at(self._run.clock.now + seconds, self._decoded, entry)

    def _decoded(self, entry: int) -> None:
        self._raw -= self._run.setting.member_bytes
        self._undone[self._first[entry]] -= 1
        self._free_threads += 1
        self._assemble()
        self._use_threads()

    def _assemble(self) -> None:
        """Put together what is decoded, in order; another thread does, and takes no time for it."""
        while self._decoded_to < self._submitted and not self._undone[self._decoded_to]:
            self._decoded_to += 1
        before = self._assembled
        while self._assembled < self._decoded_to:
            self._assembled += 1
            self._note_memory()  # members and what was put together of them exist side by side
        if before < self._assembled:
            self._run.transport.soon(self.go_on)

    def _note_memory(self) -> None:
        setting = self._run.setting
        held = self._raw + self._members * setting.packed_member_bytes
        held += (self._assembled - self._run.in_use) * setting.iteration_bytes
        for streams in (self._streams, self._prefetched):
            held += sum(stream.held_bytes for stream in streams.values())
        self.peak_bytes = max(self.peak_bytes, held)


def _readers(run: _Simulation) -> list[_Reader]:
    """Return the readers, each with its entries of the uses, which are sorted by reader."""
    uses: MemberUses = run.uses
    dp = run.setting.student.batches.dp
    bounds = uses.reader.searchsorted(range(dp + 1)).tolist()
    return [_Reader(run, d, slice(bounds[d], bounds[d + 1])) for d in range(dp)]
