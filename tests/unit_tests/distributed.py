# SPDX-License-Identifier: Apache-2.0
"""The base of all multi-process unit tests: run one function on every rank of a gloo group."""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *("batch_isend_irecv", "isend", "irecv", "send", "recv", "monitored_barrier"),
)

# How long the other ranks may still report after one failed: they are likely to hang in a
# collective, but may also fail for a reason of their own.
_GRACE_SECONDS = 3.0


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank of a gloo group; results by rank.

    Each rank is a forked process with one torch thread, inside an initialised default group.
    Forking keeps `fn` callable though test modules are not importable by name, and starts in
    milliseconds.  Results must be picklable and come back as copies.

    Raises:
        AssertionError: a rank failed, died or did not finish within `timeout` seconds; names each
            such rank, with its traceback if it raised.  All processes are dead by then.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(theirs, f"file://{folder}/store", rank, world_size, timeout, fn, args),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            outcomes = _collect(pipes, timeout)
        finally:
            for process in processes:
                process.kill()
            for process, pipe in zip(processes, pipes, strict=True):
                process.join()
                pipe.close()
    problems = [
        f"rank {rank} {_describe(outcomes.get(rank), timeout)}"
        for rank in range(world_size)
        if rank not in outcomes or not outcomes[rank][0]
    ]
    if problems:
        raise AssertionError("\n".join([f"{len(problems)} of {world_size} ranks", *problems]))
    return [outcomes[rank][1] for rank in range(world_size)]


@contextmanager
def recorded_collectives() -> Iterator[list[str]]:
    """The names of the `torch.distributed` functions that this process calls inside, in order."""
    seen: list[str] = []

    def recording(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in _COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, recording(name)))
        yield seen


def _collect(pipes: list[Connection], timeout: float) -> dict[int, tuple[bool, Any]]:
    """``(succeeded, result or traceback)`` of each rank that reported or died in time."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout
    while ranks and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(ranks), left):
            assert isinstance(pipe, Connection)
            try:
                succeeded, outcome = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, outcome = False, "the process ended without a result"
            if not succeeded:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            outcomes[ranks.pop(pipe)] = succeeded, outcome
    return outcomes


def _describe(outcome: tuple[bool, Any] | None, timeout: float) -> str:
    if outcome is None:
        return f"hung: no result within {timeout:g} s, or within {_GRACE_SECONDS:g} s of a failure"
    return f"failed:\n{outcome[1]}"


def _rank_main(
    pipe: Connection,
    store: str,
    rank: int,
    world_size: int,
    timeout: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        # Plain pickle copies tensors; multiprocessing's own would share memory that dies with us.
        report = pickle.dumps((True, fn(rank, world_size, *args)))
        dist.destroy_process_group()
    except BaseException:  # whatever ends a rank, pytest.fail included, is a result to report
        report = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing that the parent registered to run at exit is ours
