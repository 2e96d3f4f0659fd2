# SPDX-License-Identifier: Apache-2.0
"""One implementation's student data path in processes of its own, for ``bench_loader``.

Each process is a rank of the student.
"""

import contextlib
import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.implementation_worker import (
    Memory,
    answer_requests,
    cpu_seconds,
    load_implementation,
    return_freed,
)
from benchmarks.loader_counts import Decompression, DeviceCopies, FrameDecoding
from benchmarks.loader_implementations import Installed, Ours
from benchmarks.loader_samples import (
    QUARTERS,
    Sizes,
    Teacher,
    expected_ids,
    found_ids,
    marked_entries,
)
from benchmarks.loader_state import RunState
from benchmarks.loader_student import Student
from benchmarks.rank_usage import Usage
from benchmarks.worker_processes import ROOT

Marked = tuple[torch.Tensor, torch.Tensor]
REFUSALS = (ValueError, OSError, LookupError, RuntimeError, StopIteration, AssertionError)
"""How an implementation may refuse a case, which is a result too."""


class LoaderBench:
    """The measurements of one rank."""

    def __init__(self, root: str, sizes: Sizes, rank: int, world_size: int, store: str) -> None:
        self._sizes = sizes
        self._teacher = functools.cache(functools.partial(Teacher, sizes))
        self._decompression: Decompression | FrameDecoding = Decompression()
        self._package = load_implementation(
            root, sizes.seq_length, rank=rank, world_size=world_size, store=store
        )
        from megatron.core import parallel_state
        from megatron.training.global_vars import get_args

        args = get_args()
        self._state = RunState(args, parallel_state)
        if Path(root) == ROOT:
            args.logits_save_format, args.padded_vocab_size = (
                str(sizes.save_format),
                sizes.vocab_size,
            )
            self._adapter: Installed | Ours = Ours(args)
            if sizes.save_format == 3:
                self._decompression = FrameDecoding(self._adapter.frame_decoder)
        else:
            self._adapter = Installed(args)

    def write(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write a cache of *iterations* in shards of *per_shard*, by *dp* ranks of a teacher."""
        dp_size, gbs, folder = request["dp"], request["gbs"], request["folder"]
        cp_size = request["cp"] if self._adapter.writes_context_ranks else 1
        self._state.set_batches(request["length"], gbs, dp_size)
        teacher = self._teacher(request["length"])
        for dp_rank in range(dp_size):
            for cp_rank in range(cp_size):
                with self._state.as_rank(dp_rank, dp_size, cp_rank):
                    saver = self._package.LogitsSaverHooks(folder, self._sizes.top_k)
                teacher.attach(saver)
                for iteration in range(request["iterations"]):
                    self._state.set_position(iteration, gbs)
                    for sample in range(iteration * gbs + dp_rank, (iteration + 1) * gbs, dp_size):
                        teacher.show(sample, cp_rank, cp_size)
                    if (iteration + 1) % request["per_shard"] == 0:
                        saver._write_batched_tar(*saver.take_pending_data())
        return {}

    def floor(self, request: dict[str, Any]) -> dict[str, float]:
        """Return the us per token of decompression alone, and of one copy of the packed rows."""
        frames: list[Any] = []
        self._decompression.frames = frames
        answer = self.dataset(request)
        self._decompression.frames = None
        assert frames, "the implementation decompresses in a way that Decompression does not keep"
        tokens = answer["tokens"]
        rows = torch.ones(int(tokens * self._sizes.packed_bytes), dtype=torch.uint8)
        target = torch.zeros_like(rows)
        decompression = cpu_seconds(lambda: self._decompression.decode_again(frames))
        return {
            "decompression": decompression / tokens * 1e6,
            "copy": cpu_seconds(lambda: target.copy_(rows)) / tokens * 1e6,
            "raw bytes": answer["decompressed"] / tokens,
        }

    def dataset(self, request: dict[str, Any]) -> dict[str, Any]:
        """Iterate over the dataset of one rank, in this process, and verify what it yields."""
        dp_size, gbs, start = request["dp"], request["gbs"], request["start"]
        self._state.set_batches(request["length"], gbs, dp_size)
        self._decompression.take()
        step = request["length"] // QUARTERS
        memory = Memory()
        marked: list[tuple[int, Marked]] = []
        tokens = iterations = 0
        first = None
        before, began = Usage.now(), time.perf_counter()
        try:
            stream = self._adapter.dataset(request["folder"], 0, 1, 0, dp_size, start)
            for *_, values, indices in stream:
                if first is None:
                    first = time.perf_counter() - began, (Usage.now() - before).bytes_read
                for microbatch, part in enumerate(values):
                    sample = (start + iterations) * gbs + microbatch * dp_size
                    marked.append((sample, marked_entries(part, indices[microbatch], step)))
                    tokens += part.shape[0] * part.shape[1]
                iterations += 1
                if iterations == request["limit"]:
                    break
            used = Usage.now() - before
        except REFUSALS as error:
            return _refusal(error)
        peak = memory.peak()
        wanted = request["tokens"]
        if tokens != wanted or first is None:
            return _refusal(ValueError(f"it yields {tokens} tokens, expected {wanted}"))
        wrong = sum(found_ids(*rows) != expected_ids(sample) for sample, rows in marked)
        if wrong:
            return _refusal(ValueError(f"wrong rows for {wrong} of {len(marked)} samples"))
        return {
            "tokens": tokens,
            "cpu": used.own_cpu + used.child_cpu,
            "decompressed": self._decompression.take(),
            "read": used.bytes_read,
            "first seconds": first[0],
            "first read": first[1],
            "peak bytes": peak,
        }

    def loss(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the loss object as a student does, without its math; verify what reaches that.

        Collective over the ranks of a replica.
        """
        student = Student(self._adapter, self._state, request)
        copies = DeviceCopies()
        stalls: list[float] = []
        self._forget_counts()
        dist.barrier()
        before = Usage.now()
        try:
            with student.as_rank(), copies if request["copies"] else contextlib.nullcontext():
                loss = student.loss()
                for iteration in student.iterations:
                    time.sleep(request["pause"])
                    stalls.append(_stall(list(student.calls(loss, iteration))))
            used = Usage.now() - before
            student.check()
        except REFUSALS as error:
            return _refusal(error)
        waits = self._adapter.waits()
        del loss
        return_freed()
        return {
            "cpu": used.own_cpu + used.child_cpu,
            "own cpu": used.own_cpu,
            "decompressed": self._decompression.take(),
            "read": used.bytes_read - self._adapter.processes.take_read_at_start(),
            "copied": copies.bytes,
            # The first iterations open the cache and fill the queue; the last has none behind it.
            "stall": statistics.median(stalls[2:-1]),
            **({"waited": statistics.median(waits[2:-1])} if waits else {}),
        }

    def first_call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a new loss object once; nothing is read after the iteration that the call is of.

        Collective over the ranks of a replica.
        """
        student = Student(self._adapter, self._state, request)
        processes = self._adapter.processes
        processes.limit = 1
        self._forget_counts()
        dist.barrier()
        before, began = Usage.now(), time.perf_counter()
        try:
            with student.as_rank():
                loss = student.loss()
                next(student.calls(loss, student.iterations[0]))
                seconds, used = time.perf_counter() - began, Usage.now() - before
            student.check()
        except REFUSALS as error:
            return _refusal(error)
        finally:
            processes.limit = None
        del loss
        return_freed()
        read = used.bytes_read - processes.take_read_at_start()
        return {"first seconds": seconds, "first read": read}

    def _forget_counts(self) -> None:
        self._decompression.take()
        self._adapter.waits()
        self._adapter.processes.take_read_at_start()

    def idle_loader(self) -> dict[str, float]:
        """Have a forked process that loads nothing, as a floor."""
        before = Usage.now()
        nothing: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(1)), num_workers=1)
        for _ in nothing:
            time.sleep(0.2)
        used = Usage.now() - before
        return {"cpu": used.own_cpu + used.child_cpu}


def _stall(seconds: list[float]) -> float:
    """Return by how much the first and the last call of an iteration are longer than the others.

    A rank may fetch an iteration at its first microbatch, or already at the last of the one before.
    """
    return seconds[0] + seconds[-1] - 2 * statistics.median(seconds[1:-1])


def _refusal(error: BaseException) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer requests until the input ends."""
    root, store = sys.argv[1:3]
    rank, world_size, *sizes = map(int, sys.argv[3:])
    answer_requests(lambda: LoaderBench(root, Sizes(*sizes), rank, world_size, store))


if __name__ == "__main__":
    main()
