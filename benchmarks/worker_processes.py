# SPDX-License-Identifier: Apache-2.0
"""Worker processes that hold one implementation each, and runs in which they take turns.

A worker (``implementation_worker``) reads a request as a line of JSON and answers with one.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
KEEP_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Freed memory is kept, as a GPU's allocator does: for times."""
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TRIM_THRESHOLD_": str(1 << 18)}
"""Freed memory is given back at once: for memory."""

Request = list[Any]
Answer = dict[str, Any]
Samples = dict[str, list[Any]]


def installed_root() -> Path:
    """Return the directory that holds the installed megatron-core."""
    return Path(str(metadata.distribution("megatron-core").locate_file("")))


class Worker:
    """A worker process with one implementation in it.

    Args:
        module: What the process runs.
        arguments: Its command line.
        allocator: Environment variables of glibc's allocator.
    """

    def __init__(
        self, module: str, arguments: Iterable[object], allocator: Mapping[str, str]
    ) -> None:
        environment = {**os.environ, **allocator, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._command = [sys.executable, "-m", module, *map(str, arguments)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- open as long as the process
        self._process = subprocess.Popen(
            self._command,
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, request: Request) -> None:
        """Begin a measurement."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Answer:
        """Return the numbers of the measurement that was begun.

        Raises:
            RuntimeError: The worker ended; with the end of its log.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{' '.join(self._command)} ended:\n{self._log.read()[-3000:]}")
        answer: Answer = json.loads(line)
        return answer

    def ask(self, request: Request) -> Answer:
        """Return the numbers of one measurement."""
        self.send(request)
        return self.receive()

    def close(self) -> None:
        """End the worker."""
        self._process.kill()
        self._process.wait()
        self._log.close()


class Replica:
    """Workers that answer as one, where each of them is a rank.

    Args:
        ranks: The workers.
        longest: Metrics of which the largest counts; others are added.
    """

    def __init__(self, ranks: Sequence[Worker], longest: Collection[str]) -> None:
        self.ranks = ranks
        self._longest = longest

    def send(self, request: Request) -> None:
        """Begin a measurement on every rank."""
        for rank in self.ranks:
            rank.send(request)

    def receive(self) -> Answer:
        """Return the numbers of all ranks together, or those of one that answers an error."""
        answers = [rank.receive() for rank in self.ranks]
        failed = [answer for answer in answers if "error" in answer]
        if failed:
            return failed[0]
        return {
            metric: (max if metric in self._longest else sum)(answer[metric] for answer in answers)
            for metric in answers[0]
        }

    def ask(self, request: Request) -> Answer:
        """Return the numbers of one measurement."""
        self.send(request)
        return self.receive()

    def close(self) -> None:
        """End the workers."""
        for rank in self.ranks:
            rank.close()


class Askable(Protocol):
    """A worker, or several that answer as one."""

    def ask(self, request: Request) -> Answer:
        """Return the numbers of one measurement."""

    def close(self) -> None:
        """End the processes."""


@contextmanager
def closing_all[W: Askable](workers: Mapping[str, W]) -> Iterator[Mapping[str, W]]:
    """Close all *workers* at the end."""
    with ExitStack() as stack:
        for worker in workers.values():
            stack.callback(worker.close)
        yield workers


def alternate(
    workers: Mapping[str, Askable], requests: Mapping[str, Request], runs: int
) -> dict[str, Samples]:
    """Ask each worker its request in turn, *runs* times; return by metric the samples by worker.

    One that answers an error is not asked again.
    """
    samples: dict[str, Samples] = {}
    for _ in range(runs):
        for name, request in requests.items():
            if name in samples.get("error", {}):
                continue
            for metric, number in workers[name].ask(request).items():
                samples.setdefault(metric, {}).setdefault(name, []).append(number)
    return samples
