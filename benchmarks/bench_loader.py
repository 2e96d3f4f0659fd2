# SPDX-License-Identifier: Apache-2.0
"""The student's data path beside that of the installed megatron-core, in one run.

::

    python -m benchmarks.bench_loader [--json FILE]

Each implementation dumps caches in its own format from the same logits, and reads them back in
processes of its own; they take turns. Every row is verified to be of the right sample. What the
installed one refuses, or gets wrong, stands in place of its numbers. Shown are medians, quartiles,
ours / installed, and a floor.

Two ways in are measured. *dataset* rows iterate over the dataset of DP rank 0 in one process with
one thread, as a tool would. *loss* rows call the loss object as a student does, with the defaults
of its flags: it starts its loader processes, and every rank of the TP x CP replica is a process.
The loss itself is left out, and so is what happens in it, such as unpacking rows on a device.

* CPU time is of all threads and descendants of all ranks, by the scheduler's clocks of their
  processes; per token of the replica. Floor: decompression of the payloads alone, one copy of the
  packed rows, and for a loss, where it is counted too, the start of one process.
* *decoded / needed*: what zstd puts out, counted by a stand-in for ``ZstdDecompressor`` in shared
  memory, to the share of it that belongs to the rows needed. *read / needed*: what ``read`` returns
  (``rchar`` of ``/proc/PID/io``), to the compressed bytes of the members with those rows.
* Memory is counted in packed rows of one iteration, from processes whose allocator gives back what
  is freed: the high-water mark of the dataset's process; and of the loss object's processes the
  largest sample of their proportional set sizes. Floor of the latter: that process.
* The stall is how much longer the first microbatch of an iteration takes than the others, in a loop
  that leaves the CPU alone for ``--pause`` seconds per iteration, as one that waits for a GPU;
  *waited* is what the loss object itself reports.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.loader_cases import (
    DATASETS,
    GBS,
    REPLICAS,
    RESUME,
    SAME,
    Caches,
    Case,
    dumps,
)
from benchmarks.loader_samples import Sizes
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


def start_replica(
    root: Path, sizes: Sizes, world_size: int, allocator: Mapping[str, str]
) -> Replica:
    """Start the ranks of a student with the implementation under *root*."""
    store = tempfile.mkdtemp() + "/store"
    numbers = sizes.seq_length, sizes.vocab_size, sizes.top_k
    return Replica(
        [
            Worker("benchmarks.loader_worker", [root, store, rank, world_size, *numbers], allocator)
            for rank in range(world_size)
        ],
        longest=("stall", "waited"),
    )


@dataclass
class Bench:
    """The measurements, and what they found by row and metric."""

    sizes: Sizes
    caches: Caches
    runs: int
    pause: float
    rows: dict[str, dict[str, Samples]] = field(default_factory=dict)
    floors: dict[tuple[str, str], float] = field(default_factory=dict)
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

    def write(self, workers: Mapping[str, Replica]) -> None:
        """Write all caches; the implementations side by side, as nothing is timed."""
        for name, cache in self.caches.of.items():
            for implementation, worker in workers.items():
                place = {
                    "folder": self.caches.folder(name, implementation),
                    "length": self.caches.length(name),
                }
                worker.send(["write", place | vars(cache)])
            for worker in workers.values():
                answer = worker.receive()
                assert "error" not in answer, answer

    def floor(self, workers: Mapping[str, Replica]) -> None:
        """Measure what cannot be saved."""
        found = alternate(workers, self.requests("floor", SAME), self.runs)
        for metric in ("decompression", "copy"):
            self.keep("floor", f"{metric}, CPU us/token", found[metric], 1)
        self.raw_bytes = {
            name: statistics.median(numbers) for name, numbers in found["raw bytes"].items()
        }
        self.cpu_floor = sum(
            statistics.median(found[metric]["ours"]) for metric in ("decompression", "copy")
        )
        idle = alternate(workers, {name: ["idle_loader"] for name in workers}, self.runs)["cpu"]
        self.keep("floor", "an idle process, CPU ms", idle, 1e3)
        self.idle_cpu = statistics.median(idle["ours"])

    def dataset(self, workers: Mapping[str, Replica], case: Case) -> None:
        """Measure one rank's dataset."""
        found = alternate(workers, self.requests("dataset", case), self.runs)
        row = f"{case.title}, dataset"
        self.keep_amounts(row, case, found)

    def resume(self, workers: Mapping[str, Replica]) -> None:
        """Measure the way to the first sample in the middle of a shard."""
        middle = self.caches.of[RESUME.cache].iterations // 2
        requests = self.requests("dataset", RESUME, start=middle, limit=1)
        found = alternate(workers, requests, self.runs)
        shard = {name: self.caches.shard_bytes(RESUME.cache, name) for name in ROOTS}
        self.keep(RESUME.title, "first sample, ms", found["first seconds"], 1e3)
        self.keep(RESUME.title, "kB to it", found["first read"], 1e-3)
        self.keep(
            RESUME.title,
            "bytes to it / shard",
            found["first read"],
            {name: 1 / size for name, size in shard.items()},
        )

    def loss(self, workers: Mapping[str, Replica], case: Case) -> None:
        """Measure the loss objects of a replica."""
        found = alternate(workers, self.requests("loss", case, pause=0), self.runs)
        row = f"{case.title}, loss"
        self.keep_amounts(row, case, found, processes=1)
        self.keep(
            row,
            "of it outside the loader",
            found.get("own cpu", {}),
            1e6 / self.caches.tokens(case),
        )

    def stall(self, workers: Mapping[str, Replica]) -> None:
        """Measure what a student with slack waits for."""
        found = alternate(workers, self.requests("loss", SAME, pause=self.pause), self.runs)
        row = f"slack of {1000 * self.pause:.0f} ms"
        self.keep(row, "stall, ms/iteration", found["stall"], 1e3, floor=0)
        self.keep(row, "waited, ms/iteration", found["waited"], 1e3, floor=0)

    def memory(self, workers: Mapping[str, Replica]) -> None:
        """Measure memory, and what is handed to the device."""
        iteration = GBS * self.sizes.seq_length
        unit = iteration * self.sizes.packed_bytes
        found = alternate(workers, self.requests("dataset", SAME), 2)
        self.keep(f"{SAME.title}, dataset", "peak memory", found["peak bytes"], 1 / unit)
        requests = self.requests("loss", SAME, pause=self.pause / 2, copies=True)
        peaks: dict[str, list[float]] = {name: [] for name in workers}
        idle = []
        for run in range(3):
            for name, worker in workers.items():
                with TreeMemory(worker.ranks[0].pid) as memory:
                    worker.ask(requests[name])
                if run:  # the first imports what is used
                    peaks[name].append(memory.peak - memory.base)
        for _ in range(2):
            with TreeMemory(workers["ours"].ranks[0].pid) as memory:
                workers["ours"].ask(["idle_loader"])
            idle.append(memory.peak - memory.base)
        row = f"{SAME.title}, loss"
        self.keep(row, "peak memory", peaks, 1 / unit, floor=statistics.median(idle) / unit)
        copied = {name: [worker.ask(requests[name])["copied"]] for name, worker in workers.items()}
        self.keep(
            row,
            "host to device, B/token",
            copied,
            1 / self.caches.tokens(SAME),
            floor=self.sizes.packed_bytes,
        )

    # ---- what the numbers are divided by ----------------------------------------------------

    def keep_amounts(
        self, row: str, case: Case, found: dict[str, Samples], processes: int = 0
    ) -> None:
        """Keep what datasets and losses have in common."""
        tokens = self.caches.tokens(case)
        if "error" in found:
            if "ours" in found["error"]:
                raise RuntimeError(f"{row}: {found['error']['ours'][0]}")
            self.keep(row, "error", found["error"], 1)
        floor = self.cpu_floor + processes * self.idle_cpu * 1e6 / tokens
        self.keep(row, "CPU us/token", found.get("cpu", {}), 1e6 / tokens, floor=floor)
        needed = {name: 1 / (raw * tokens) for name, raw in self.raw_bytes.items()}
        self.keep(row, "decoded / needed", found.get("decompressed", {}), needed, floor=1)
        members = {name: 1 / self.caches.needed_bytes(case, name) for name in ROOTS}
        self.keep(row, "read / needed", found.get("read", {}), members, floor=1)

    def keep(
        self,
        row: str,
        metric: str,
        samples: Samples,
        factor: float | Mapping[str, float],
        floor: float | None = None,
    ) -> None:
        """Keep *samples* times *factor*."""
        self.rows.setdefault(row, {})[metric] = {
            name: numbers
            if metric == "error"
            else [
                number * (factor[name] if isinstance(factor, Mapping) else factor)
                for number in numbers
            ]
            for name, numbers in samples.items()
        }
        if floor is not None:
            self.floors[row, metric] = floor

    def requests(self, operation: str, case: Case, **more: Any) -> dict[str, Request]:
        """Return the request of each implementation."""
        iterations = more.get("limit") or self.caches.iterations(case)
        sizes = {"dp": case.dp, "gbs": case.gbs, "tp": case.tp, "cp": case.cp}
        length = self.caches.length(case.cache)
        tokens = iterations * case.gbs // case.dp * length
        return {
            name: [
                operation,
                {
                    "folder": self.caches.folder(case.cache, name),
                    "iterations": iterations,
                    "length": length,
                    "tokens": tokens,
                    **sizes,
                    **more,
                },
            ]
            for name in ROOTS
        }


def lines(bench: Bench) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{'':24}{'':27}{'installed':>28}{'ours':>28}{'ratio':>8}{'floor':>9}"
    for row, metrics in bench.rows.items():
        for name, errors in metrics.get("error", {}).items():
            yield f"{row:24}{name}: {errors[0][:100]}"
        for metric, found in metrics.items():
            if metric == "error" or not found:
                continue
            line = f"{row:24}{metric:27}"
            line += "".join(f"{_spread(found.get(name)):>28}" for name in ROOTS)
            medians = {name: statistics.median(numbers) for name, numbers in found.items()}
            ratio = ""
            if len(medians) == len(ROOTS) and medians["installed"] > 0:
                ratio = f"{medians['ours'] / medians['installed']:.3f}"
            floor = bench.floors.get((row, metric))
            yield line + f"{ratio:>8}" + ("" if floor is None else f"{floor:9.3g}")


def _spread(numbers: list[float] | None) -> str:
    """Return the median and the quartiles."""
    if not numbers:
        return "-"
    if len(numbers) == 1:
        return f"{numbers[0]:.4g}"
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return f"{middle:.4g} ({low:.3g} - {high:.3g})"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument(
        "--iterations", type=int, default=8, help=f"of {GBS} samples, a multiple of 4"
    )
    parser.add_argument("--pause", type=float, default=0.1, help="seconds per iteration")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scratch", help="a directory for the caches")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    began = time.monotonic()
    sizes = Sizes(args.seq_length, args.vocab_size, args.top_k)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        caches = Caches(Path(scratch), sizes.seq_length, dumps(args.iterations))
        bench = Bench(sizes, caches, args.runs, args.pause)
        with bench.replicas(1, KEEP_FREED) as workers:
            bench.write(workers)
            bench.floor(workers)
            for case in DATASETS:
                bench.dataset(workers, case)
            bench.resume(workers)
            bench.loss(workers, SAME)
            bench.stall(workers)
        with bench.replicas(2, KEEP_FREED) as workers:
            for case in REPLICAS:
                bench.loss(workers, case)
        with bench.replicas(1, RETURN_FREED) as workers:
            bench.memory(workers)
    print(
        f"S {sizes.seq_length}, V {sizes.vocab_size}, K {sizes.top_k}, fp16; megatron-core "
        f"{metadata.version('megatron-core')}, medians and quartiles of {args.runs}"
    )
    print("\n".join(lines(bench)))
    print(f"{time.monotonic() - began:.0f} s")
    if args.json is not None:
        results = {"sizes": vars(sizes), "results": bench.rows}
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
