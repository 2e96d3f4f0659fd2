# SPDX-License-Identifier: Apache-2.0
"""Plays the readers of a student against the store that they share, event by event.

All readers work ahead on their own; the trainer begins a step when every one of them has its
targets. What is left out: the time of the collectives, and everything that slows a step by chance.
"""

from collections import deque
from dataclasses import dataclass

from tools.load_plan.member_needs import MemberUses, member_uses
from tools.load_plan.setting import Setting
from tools.load_plan.shared_store import Clock, SharedStore
from tools.load_plan.whole_shards import Download, Shard, WholeShards


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
        load = setting.student.batches
        self.uses = member_uses(setting.dump.batches, load, start, iterations)
        self.readers = _readers(self)
        self.unready = [load.dp] * iterations
        self.requested = -1
        self.requested_at = 0.0
        self.delivered = -1
        self.stalls: list[float] = []
        self.whole = WholeShards(setting, self.store, start)

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
        if iteration + 1 < self.iterations:
            self.clock.at(
                self.clock.now + self.setting.student.step_time, self._request, iteration + 1
            )
        if self.setting.loader.queued_iterations:
            self._wake_readers()

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
        interval = setting.dump.save_interval
        self._shards = [
            Shard(rank, member // interval)
            for rank, member in zip(
                uses.saved_rank[entries].tolist(),
                uses.teacher_iteration[entries].tolist(),
                strict=True,
            )
        ]
        self._first: list[int] = uses.first[entries].tolist()
        self._begins, self._ends = [0] * run.iterations, [0] * run.iterations
        for first, last in zip(self._first, uses.last[entries].tolist(), strict=True):
            self._begins[first] += 1
            self._ends[last] += 1
        self._undone = list(self._begins)
        self._next_entry = 0
        self._submitted = self._produced = 0
        self._opening: Shard | None = None
        self._started = False
        self._jobs: deque[int] = deque()
        self._free_threads = setting.loader.decode_threads
        self._locked: dict[Shard, deque[int]] = {}
        self._held_downloads: dict[Shard, None] = {}
        self._first_window = 0
        self._reserved = self._packed = self._raw = 0
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
            if self._undone[self._produced]:
                return
            self._produce()

    def _submit_ahead(self) -> bool:
        """Submit iterations up to the lookahead; return False where a shard must be opened."""
        last = min(self._produced + self._run.setting.loader.lookahead, self._run.iterations - 1)
        while self._submitted <= last and self._has_room(self._submitted):
            stop = self._next_entry + self._begins[self._submitted]
            for entry in range(self._next_entry, stop):
                if self._shards[entry] not in self.opened:
                    self._open(self._shards[entry])
                    return False
            self._reserved += (stop - self._next_entry) * self._run.setting.packed_member_bytes
            self._jobs.extend(range(self._next_entry, stop))
            self._next_entry = stop
            self._submitted += 1
            self._use_threads()
        return True

    def _has_room(self, iteration: int) -> bool:
        setting = self._run.setting
        more = self._begins[iteration] * setting.packed_member_bytes
        held = self._reserved + self._waiting_iterations() * setting.iteration_bytes
        return iteration == self._produced or held + more <= setting.loader.max_ahead_bytes

    def _waiting_iterations(self) -> int:
        """Return how many iterations are put together and not yet trained on to the end."""
        return self._produced - max(0, self._run.requested)

    def _produce(self) -> None:
        run, setting = self._run, self._run.setting
        passed = self._ends[self._produced] * setting.packed_member_bytes
        self._produced += 1
        self._note_memory()  # members and what was put together of them exist side by side
        self._packed -= passed
        self._reserved -= passed
        reached = run.start + self._produced * setting.student.gbs
        self._drop_downloads(before=reached // setting.dump.shard_samples)
        run.finished(self._produced - 1)

    def _drop_downloads(self, before: int) -> None:
        if before > self._first_window:
            self._first_window = before
            kept = (shard for shard in self._held_downloads if shard.number >= before)
            self._held_downloads = dict.fromkeys(kept)

    def _open(self, shard: Shard) -> None:
        self._opening = shard
        if not self._run.whole.includes(shard):
            self._run.store.request(0, self._read_metadata)
            return
        download = self._fetch(shard)
        if download.missing:
            download.waiting.append(self.opened_shard)
        else:
            self._run.clock.at(self._run.clock.now, self.opened_shard)

    def _read_metadata(self) -> None:
        self._run.store.request(self._run.setting.loader.open_bytes, self.opened_shard)

    def opened_shard(self) -> None:
        """Go on with the shard that was waited for, and have those after it fetched."""
        shard, self._opening = self._opening, None
        assert shard is not None
        self.opened.add(shard)
        if len(self.opened) == 1:  # the first is compared with a neighbour before it is used
            self._opening = shard
            self._run.store.request(0, self._read_neighbour)
            return
        self._after_open(shard)

    def _read_neighbour(self) -> None:
        self._run.store.request(self._run.setting.loader.open_bytes, self._compared)

    def _compared(self) -> None:
        shard, self._opening = self._opening, None
        assert shard is not None
        self._after_open(shard)

    def _after_open(self, shard: Shard) -> None:
        if self._run.setting.fetches_whole_shards:
            dump = self._run.setting.dump
            windows = -(-dump.train_samples // dump.shard_samples)
            ahead = shard.number + 1 + self._run.setting.loader.prefetch_depth
            for number in range(shard.number + 1, min(ahead, windows)):
                self._fetch(Shard(shard.saved_rank, number))
        self.go_on()

    def _fetch(self, shard: Shard) -> Download:
        download = self._run.whole.download(self._place, shard)
        if not self._run.setting.loader.node_cache:
            self._held_downloads[shard] = None
            self._note_memory()
        return download

    # ---- the threads that decode ---------------------------------------------------------

    def _use_threads(self) -> None:
        while self._free_threads and self._jobs:
            self._free_threads -= 1
            entry = self._jobs.popleft()
            shard = self._shards[entry]
            if self._run.whole.includes(shard):
                self._have_read(entry)
            elif shard in self._locked:
                self._locked[shard].append(entry)
            else:
                self._locked[shard] = deque()
                self._read(entry)

    def _read(self, entry: int) -> None:
        self._run.store.request(self._run.setting.member_bytes, self._release, entry)

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
        self._packed += setting.packed_member_bytes
        self._note_memory()
        seconds = setting.member_tokens * setting.loader.decode_seconds_per_token
        self._run.clock.at(self._run.clock.now + seconds, self._decoded, entry)

    def _decoded(self, entry: int) -> None:
        self._raw -= self._run.setting.member_bytes
        iteration = self._first[entry]
        self._undone[iteration] -= 1
        self._free_threads += 1
        self._use_threads()
        if self._undone[iteration] == 0:
            self.go_on()

    def _note_memory(self) -> None:
        setting = self._run.setting
        held = self._packed + self._raw + len(self._held_downloads) * setting.shard_bytes
        held += self._waiting_iterations() * setting.iteration_bytes
        self.peak_bytes = max(self.peak_bytes, held)


def _readers(run: _Simulation) -> list[_Reader]:
    """Return the readers, each with its entries of the uses, which are sorted by reader."""
    uses: MemberUses = run.uses
    dp = run.setting.student.batches.dp
    bounds = uses.reader.searchsorted(range(dp + 1)).tolist()
    return [_Reader(run, d, slice(bounds[d], bounds[d + 1])) for d in range(dp)]
