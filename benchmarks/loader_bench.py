# SPDX-License-Identifier: Apache-2.0
"""The measurements of ``bench_loader``, which says what they mean."""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.loader_cases import SAME, Caches, Case
from benchmarks.loader_samples import Sizes
from benchmarks.loader_table import Table
from benchmarks.rank_usage import TreeMemory
from benchmarks.worker_processes import (
    KEEP_FREED,
    RETURN_FREED,
    ROOT,
    Replica,
    Request,
    Samples,
    Worker,
    alternate,
    closing_all,
    installed_root,
)

ROOTS = {"installed": installed_root(), "ours": ROOT}
SLOW_RUNS = 3
"""Runs at most of what measures memory."""
MB = 1e-6


def start_replica(
    root: Path, sizes: Sizes, world_size: int, allocator: Mapping[str, str]
) -> Replica:
    """Start the ranks of a student with the implementation under *root*."""
    store = tempfile.mkdtemp() + "/store"
    numbers = sizes.seq_length, sizes.vocab_size, sizes.top_k, sizes.save_format
    return Replica(
        [
            Worker("benchmarks.loader_worker", [root, store, rank, world_size, *numbers], allocator)
            for rank in range(world_size)
        ],
        longest=("stall", "waited", "first seconds"),
    )


@dataclass
class Bench:
    """The measurements.

    Attributes:
        sizes: Of tokens and samples.
        caches: What is read.
        runs: How often; memory at most ``SLOW_RUNS`` times.
        slack: Seconds of pause per sample that has to be decoded.
        table: What they found.
    """

    sizes: Sizes
    caches: Caches
    runs: int
    slack: float
    table: Table = field(default_factory=lambda: Table(list(ROOTS)))
    cpu_floor: float = 0.0
    idle_cpu: float = 0.0
    raw_bytes: dict[str, float] = field(default_factory=dict)

    def replicas(self, world_size: int, allocator: Mapping[str, str]) -> Any:
        """Start *world_size* ranks of each implementation, for a ``with`` statement."""
        return closing_all(
            {
                name: start_replica(root, self.sizes, world_size, allocator)
                for name, root in ROOTS.items()
            }
        )

    def run(self, cases: Sequence[Case]) -> None:
        """Write the caches and measure all *cases*."""
        for ranks in sorted({1, *(case.ranks for case in cases)}):
            chosen = [case for case in cases if case.ranks == ranks]
            with self.replicas(ranks, KEEP_FREED) as workers:
                if ranks == 1:
                    self.write(workers, cases)
                    self.floor(workers)
                for case in chosen:
                    for way in self.ways(case):
                        self.amounts(workers, way, case)
                        self.first_sample(workers, way, case)
            if chosen:
                with self.replicas(ranks, RETURN_FREED) as workers:
                    for case in chosen:
                        self.memory(workers, case)

    @staticmethod
    def ways(case: Case) -> tuple[str, ...]:
        """Return the operations that read: a replica of several ranks has no dataset."""
        return ("dataset", "loss") if case.ranks == 1 else ("loss",)

    def write(self, workers: Mapping[str, Replica], cases: Sequence[Case]) -> None:
        """Write the caches of *cases*; the implementations side by side, as nothing is timed."""
        names = {SAME.cache, *(case.cache for case in cases), *(case.long for case in cases)}
        for name in sorted(names):
            for implementation, worker in workers.items():
                place = {
                    "folder": self.caches.folder(name, implementation),
                    "length": self.caches.length(name),
                }
                worker.send(["write", place | vars(self.caches.of[name])])
            for worker in workers.values():
                answer = worker.receive()
                assert "error" not in answer, answer

    def floor(self, workers: Mapping[str, Replica]) -> None:
        """Measure what cannot be saved."""
        found = alternate(workers, self.requests("floor", SAME), self.runs)
        for metric in ("decompression", "copy"):
            self.table.keep("floor", f"{metric}, CPU us/token", found[metric], 1)
        self.raw_bytes = {
            name: statistics.median(numbers) for name, numbers in found["raw bytes"].items()
        }
        self.cpu_floor = sum(
            statistics.median(found[metric]["ours"]) for metric in ("decompression", "copy")
        )
        idle = alternate(workers, {name: ["idle_loader"] for name in workers}, self.runs)["cpu"]
        self.table.keep("floor", "an idle process, CPU ms", idle, 1e3)
        self.idle_cpu = statistics.median(idle["ours"])

    def amounts(self, workers: Mapping[str, Replica], way: str, case: Case) -> None:
        """Measure CPU time, the bytes that are read and decoded, and what a student waits for."""
        row, pause = _row(case, way), self.pause(case)
        found = self.ask(workers, row, self.requests(way, case, pause=pause))
        tokens = self.caches.tokens(case)
        processes = 1 if way == "loss" else 0
        floor = self.cpu_floor + processes * self.idle_cpu * 1e6 / tokens
        self.table.keep(row, "CPU us/token", found.get("cpu", {}), 1e6 / tokens, floor=floor)
        outside = found.get("own cpu", {})
        self.table.keep(row, "of it outside the loader", outside, 1e6 / tokens)
        needed = {name: 1 / (raw * tokens) for name, raw in self.raw_bytes.items()}
        decoded = found.get("decompressed", {})
        self.table.keep(row, "decoded / needed", decoded, needed, floor=1)
        members = {name: 1 / self.caches.needed_bytes(case, name) for name in ROOTS}
        self.table.keep(row, "read / needed", found.get("read", {}), members, floor=1)
        stall, waited = found.get("stall", {}), found.get("waited", {})
        self.table.keep(row, f"stall, ms (pause {1000 * pause:.0f} ms)", stall, 1e3, floor=0)
        self.table.keep(row, "waited, ms/iteration", waited, 1e3, floor=0)

    def first_sample(self, workers: Mapping[str, Replica], way: str, case: Case) -> None:
        """Measure the way to the first sample in the middle of shards."""
        row, resumed = _row(case, way), case.resumed()
        middle = self.caches.iterations(resumed) // 2
        operation = "first_call" if way == "loss" else way
        requests = self.requests(operation, resumed, start=middle, limit=1)
        found = self.ask(workers, row, requests)
        self.table.keep(row, "first sample, ms", found.get("first seconds", {}), 1e3)
        read = found.get("first read", {})
        members = self.caches.needed_bytes(resumed, "ours", range(middle, middle + 1))
        self.table.keep(row, "kB to it", read, 1e-3, floor=members * 1e-3)
        shards = {name: self.caches.needed_shards(resumed, name, middle) for name in ROOTS}
        count = len(shards["ours"])
        title = "its shard" if count == 1 else f"its {count} shards"
        share = {name: 1 / sum(sizes) for name, sizes in shards.items()}
        self.table.keep(row, f"bytes to it / {title}", read, share, floor=members * share["ours"])
        if count > 1:
            of_one = {name: count * factor for name, factor in share.items()}
            floor = members * of_one["ours"]
            self.table.keep(row, "bytes to it / one of them", read, of_one, floor=floor)

    def memory(self, workers: Mapping[str, Replica], case: Case) -> None:
        """Measure memory, and what is handed to the device."""
        packed = self.caches.iteration_tokens(case) * self.sizes.packed_bytes
        runs = min(self.runs, SLOW_RUNS)
        for way in self.ways(case):
            # The first run imports what is used.
            row, requests = _row(case, way), self.requests(way, case, pause=self.pause(case))
            self.ask(workers, row, requests, 1)
            if way == "dataset":
                peaks = self.ask(workers, row, requests, runs).get("peak bytes", {})
                self.table.keep(row, "peak memory, MB", peaks, MB, floor=packed * MB)
                continue
            together, largest = self.growth(workers, row, requests, runs)
            floor = (packed + self.idle_memory(workers["ours"])) / case.ranks * MB
            self.table.keep(row, "peak memory, MB/rank", together, MB / case.ranks, floor=floor)
            if case.ranks > 1:
                self.table.keep(row, "peak of the largest, MB", largest, MB)
        if case is SAME:
            self.device_copies(workers)

    def growth(
        self, workers: Mapping[str, Replica], row: str, requests: Mapping[str, Request], runs: int
    ) -> tuple[Samples, Samples]:
        """Return by how much all ranks grow together, and how much the one that grows most."""
        together: Samples = {}
        largest: Samples = {}
        for _ in range(runs):
            for name, request in requests.items():
                with TreeMemory([rank.pid for rank in workers[name].ranks]) as memory:
                    found = self.ask(workers, row, {name: request}, 1)
                if found:
                    together.setdefault(name, []).append(memory.together)
                    largest.setdefault(name, []).append(memory.largest)
        return together, largest

    def idle_memory(self, worker: Replica) -> float:
        """Return by how much one rank grows with a process that loads nothing."""
        idle = []
        for _ in range(2):
            with TreeMemory([rank.pid for rank in worker.ranks]) as memory:
                worker.ask(["idle_loader"])
            idle.append(memory.largest)
        return statistics.median(idle)

    def device_copies(self, workers: Mapping[str, Replica]) -> None:
        """Count what one rank hands to its device."""
        row = _row(SAME, "loss")
        copied = self.ask(workers, row, self.requests("loss", SAME, copies=True), 1)["copied"]
        per_token, floor = 1 / self.caches.tokens(SAME), self.sizes.packed_bytes
        self.table.keep(row, "host to device, B/token", copied, per_token, floor=floor)

    # ---- asking the workers ------------------------------------------------------------------

    def pause(self, case: Case) -> float:
        """Return the seconds of an iteration in which a student leaves the CPU alone."""
        return self.slack * self.caches.stored_samples(case)

    def ask(
        self,
        workers: Mapping[str, Replica],
        row: str,
        requests: Mapping[str, Request],
        runs: int | None = None,
    ) -> dict[str, Samples]:
        """Return what those implementations find in turn that have not refused *row* before."""
        asked = {
            name: request
            for name, request in requests.items()
            if not self.table.has_refused(row, name)
        }
        found = alternate(workers, asked, runs or self.runs)
        self.table.refuse(row, found.pop("error", {}))
        return found

    def requests(self, operation: str, case: Case, **more: Any) -> dict[str, Request]:
        """Return the request of each implementation."""
        iterations = more.get("limit") or self.caches.iterations(case)
        request = {
            "iterations": iterations,
            "length": self.caches.length(case.cache),
            "tokens": iterations * self.caches.iteration_tokens(case),
            "dp": case.dp,
            "gbs": case.gbs,
            "tp": case.tp,
            "cp": case.cp,
            "start": 0,
            "limit": None,
            "pause": 0,
            "copies": False,
            **more,
        }
        return {
            name: [operation, {"folder": self.caches.folder(case.cache, name), **request}]
            for name in ROOTS
        }


def _row(case: Case, way: str) -> str:
    return f"{case.title}, {way}"
