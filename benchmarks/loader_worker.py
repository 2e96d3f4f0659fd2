# SPDX-License-Identifier: Apache-2.0
"""One implementation's student data path in processes of its own, for ``bench_loader``.

Each process is a rank of the student.
"""

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

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
from benchmarks.loader_counts import Decompression, DeviceCopies
from benchmarks.loader_implementations import Installed, Ours
from benchmarks.loader_samples import (
    QUARTERS,
    Sizes,
    Teacher,
    expected_ids,
    found_ids,
    marked_entries,
)
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
        self._decompression = Decompression()
        self._package = load_implementation(
            root, sizes.seq_length, rank=rank, world_size=world_size, store=store
        )
        from megatron.core import parallel_state
        from megatron.training.global_vars import get_args

        self._parallel_state = parallel_state
        self._args = get_args()
        adapter = Ours if Path(root) == ROOT else Installed
        self._adapter = adapter(self._args)

    def write(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write a cache of *iterations* in shards of *per_shard*, by *dp* ranks of a teacher."""
        dp_size, gbs, folder = request["dp"], request["gbs"], request["folder"]
        cp_size = request["cp"] if self._adapter.writes_context_ranks else 1
        self._set_batches(request["length"], gbs, dp_size)
        teacher = self._teacher(request["length"])
        for dp_rank in range(dp_size):
            for cp_rank in range(cp_size):
                with self._as_rank(dp_rank, dp_size, cp_rank):
                    saver = self._package.LogitsSaverHooks(folder, self._sizes.top_k)
                teacher.attach(saver)
                for iteration in range(request["iterations"]):
                    self._set_position(iteration, gbs)
                    for sample in range(iteration * gbs + dp_rank, (iteration + 1) * gbs, dp_size):
                        teacher.show(sample, cp_rank, cp_size)
                    if (iteration + 1) % request["per_shard"] == 0:
                        saver._write_batched_tar(*saver.take_pending_data())
        return {}

    def floor(self, request: dict[str, Any]) -> dict[str, float]:
        """Return the us per token of decompression alone, and of one copy of the packed rows."""
        frames: list[bytes] = []
        self._decompression.frames = frames
        answer = self.dataset(request)
        self._decompression.frames = None
        assert frames, "the implementation decompresses in a way that Decompression does not keep"
        tokens = answer["tokens"]
        rows = torch.ones(int(tokens * self._sizes.packed_bytes), dtype=torch.uint8)
        target = torch.zeros_like(rows)
        decompression = cpu_seconds(lambda: self._decompression.decompress_again(frames))
        return {
            "decompression": decompression / tokens * 1e6,
            "copy": cpu_seconds(lambda: target.copy_(rows)) / tokens * 1e6,
            "raw bytes": answer["decompressed"] / tokens,
        }

    def dataset(self, request: dict[str, Any]) -> dict[str, Any]:
        """Iterate over the dataset of one rank, in this process, and verify what it yields."""
        dp_size, gbs, start = request["dp"], request["gbs"], request.get("start", 0)
        self._set_batches(request["length"], gbs, dp_size)
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
                if iterations == request.get("limit"):
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
        gbs, pause, iterations = request["gbs"], request["pause"], request["iterations"]
        cp_rank = self._set_parallel(request.get("tp", 1), request.get("cp", 1))
        cp_size = request.get("cp", 1)
        self._set_batches(request["length"], gbs, 1)
        length, step = request["length"] // cp_size, request["length"] // QUARTERS
        logits = torch.zeros(length, 1, 1)
        labels = [torch.full((1, length), sample) for sample in range(iterations * gbs)]
        marked: list[Marked] = []

        def deliver(logits: torch.Tensor, values: Any, indices: Any, *_: Any, **__: Any) -> Any:
            marked.append(marked_entries(values, indices, step))
            return torch.zeros(logits.shape[:2])

        copies = DeviceCopies()
        stalls: list[float] = []
        self._decompression.take()
        self._adapter.waits()
        dist.barrier()
        before = Usage.now()
        try:
            loss = self._adapter.loss(request["folder"], deliver)
            with copies if request.get("copies") else contextlib.nullcontext():
                for iteration in range(iterations):
                    time.sleep(pause)
                    self._set_position(iteration, gbs)
                    batch = labels[iteration * gbs : (iteration + 1) * gbs]
                    stalls.append(self._stall(loss, logits, batch))
            used = Usage.now() - before
        except REFUSALS as error:
            return _refusal(error)
        waits = self._adapter.waits()
        del loss
        return_freed()
        wrong = sum(
            found_ids(*rows) != expected_ids(sample, cp_rank, cp_size)
            for sample, rows in enumerate(marked)
        )
        if wrong:
            return _refusal(ValueError(f"wrong rows for {wrong} of {len(marked)} samples"))
        return {
            "cpu": used.own_cpu + used.child_cpu,
            "own cpu": used.own_cpu,
            "decompressed": self._decompression.take(),
            "read": used.bytes_read,
            "copied": copies.bytes,
            # The first iterations open the cache and fill the queue.
            "stall": statistics.median(stalls[2:]),
            **({"waited": statistics.median(waits[2:])} if waits else {}),
        }

    def _stall(self, loss: Any, logits: torch.Tensor, batch: list[torch.Tensor]) -> float:
        """Call *loss* for an iteration; return the seconds by which the first call is longer."""
        seconds = []
        for labels in batch:
            began = time.perf_counter()
            self._adapter.call(loss, logits, labels)
            seconds.append(time.perf_counter() - began)
        return seconds[0] - statistics.median(seconds[1:])

    def idle_loader(self) -> dict[str, float]:
        """Have a forked process that loads nothing, as a floor."""
        before = Usage.now()
        nothing: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(1)), num_workers=1)
        for _ in nothing:
            time.sleep(0.2)
        used = Usage.now() - before
        return {"cpu": used.own_cpu + used.child_cpu}

    # ---- the state of a run -----------------------------------------------------------------

    def _set_batches(self, length: int, gbs: int, dp_size: int) -> None:
        import megatron.core.num_microbatches_calculator as microbatches

        vars(self._args).update(
            seq_length=length, global_batch_size=gbs, data_parallel_size=dp_size
        )
        microbatches.unset_num_microbatches_calculator()
        microbatches.init_num_microbatches_calculator(0, None, gbs, 1, dp_size, False)

    def _set_position(self, iteration: int, gbs: int) -> None:
        self._args.curr_iteration = self._args.iteration = iteration
        self._args.consumed_train_samples = iteration * gbs

    def _set_parallel(self, tp_size: int, cp_size: int) -> int:
        """Make all processes one replica; return this one's context parallel rank."""
        state = self._parallel_state
        if state.get_tensor_model_parallel_world_size() != tp_size or (
            state.get_context_parallel_world_size() != cp_size
        ):
            state.destroy_model_parallel()
            state.initialize_model_parallel(
                tensor_model_parallel_size=tp_size, context_parallel_size=cp_size
            )
        return int(state.get_context_parallel_rank())

    @contextlib.contextmanager
    def _as_rank(self, dp_rank: int, dp_size: int, cp_rank: int) -> Iterator[None]:
        """Have the parallel state say that this process is one of several teacher ranks."""
        with mock.patch.multiple(
            self._parallel_state,
            get_data_parallel_rank=mock.Mock(return_value=dp_rank),
            get_data_parallel_world_size=mock.Mock(return_value=dp_size),
            get_context_parallel_rank=mock.Mock(return_value=cp_rank),
        ):
            yield


def _refusal(error: BaseException) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer requests until the input ends."""
    root, store = sys.argv[1:3]
    rank, world_size, *sizes = map(int, sys.argv[3:])
    answer_requests(lambda: LoaderBench(root, Sizes(*sizes), rank, world_size, store))


if __name__ == "__main__":
    main()
