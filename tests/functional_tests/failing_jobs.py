# SPDX-License-Identifier: Apache-2.0
"""Runs jobs that are to fail, times their end, and looks at what they leave behind."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.functional_tests.caches import Payloads, read_cache
from tests.functional_tests.cases import (
    DUMP_GLOBAL_BATCH,
    DUMP_ITERATIONS,
    FLUSH_INTERVAL,
    Dump,
    Workshop,
)
from tests.functional_tests.checkpoints import latest_iteration
from tests.functional_tests.harness import JobResult, JobRunner

SECONDS_TO_END = 60.0
WRITE_FAILURE = "LogitsWriteError"
WINDOW = re.compile(
    r"LogitsWriteError: The window of samples (\d+) to (\d+) \((.*?)\) of the logits dump could "
    r"not be written: (.*)"
)
_SECONDS_TO_BE_REAPED = 5.0
_POLL_SECONDS = 0.002


class RunningJob:
    """A job that a thread waits for.

    Args:
        job: Its result.
        log: Where it prints.
    """

    def __init__(self, job: "Future[JobResult]", log: Path) -> None:
        self._job = job
        self._log = log

    def wait_for[T](self, found: Callable[[], T | None], what: str) -> T:
        """Return what *found* gives, while the job runs."""
        while True:
            result = found()
            if result is not None:
                return result
            assert not self._job.done(), f"it ended before {what}: {self._job.result().tail()}"
            time.sleep(_POLL_SECONDS)

    def wait_to_say(self, pattern: str) -> None:
        """Wait until the job prints a line with *pattern*."""
        self.wait_for(lambda: self._says(pattern) or None, f"it said {pattern!r}")

    def wait_to_confirm(self, save: Path) -> None:
        """Wait until a checkpoint in *save* is confirmed."""
        self.wait_for(lambda: is_confirmed(save) or None, "a checkpoint was confirmed")

    def result(self) -> JobResult:
        """Return the job when it has ended."""
        return self._job.result()

    def _says(self, pattern: str) -> bool:
        if not self._log.exists():
            return False
        return re.search(pattern, self._log.read_text(errors="replace")) is not None


@contextlib.contextmanager
def running(
    jobs: JobRunner, name: str, arguments: list[str], **options: Any
) -> Iterator[RunningJob]:
    """Give a job that runs meanwhile; the options are those of :meth:`JobRunner.run`."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(jobs.run, name, arguments, **options)
        yield RunningJob(job, jobs.directory / f"{name}.log")


@dataclass(frozen=True, kw_only=True)
class FailedJob:
    """A job that has ended as it should: soon after it had said why, with nothing left of it.

    Attributes:
        job: The job.
        seconds: From the message of the failure, or the kill, to the end of the launcher, which is
            the last to end.
    """

    job: JobResult
    seconds: float


class FailingJobs:
    """Runs jobs that are to fail and remembers how long their ends took."""

    def __init__(self, jobs: JobRunner) -> None:
        self._jobs = jobs
        self.ended: list[FailedJob] = []

    def run(
        self,
        name: str,
        arguments: list[str],
        *,
        disturb: Callable[[RunningJob], object] = lambda job: None,
        says: str | None = WRITE_FAILURE,
        before_first_window: bool = False,
        **options: Any,
    ) -> JobResult:
        """Run a job that fails and return it.

        Args:
            name: Name of the job.
            arguments: Its command line.
            disturb: Makes it fail, while it runs.
            says: Pattern of its first words about the failure, from which time runs; None where
                nothing can say it, and time runs from the end of *disturb*.
            before_first_window: Its checkpoint workers do not know their trainers yet and cannot
                end with them; what is left of it is ended here.
            **options: Of :meth:`JobRunner.run`.

        Raises:
            AssertionError: The job went on too long after it had named its failure, ended well or
                without a word, or has left a process behind.
        """
        with running(self._jobs, name, arguments, succeeds=False, **options) as job:
            disturb(job)
            if says is not None:
                job.wait_to_say(says)
            named = time.monotonic()
            result = job.result()
            seconds = time.monotonic() - named
        assert seconds < SECONDS_TO_END, (name, seconds)
        self.ended.append(FailedJob(job=result, seconds=seconds))
        if before_first_window:
            end_what_is_left(self._jobs.directory)
        assert_none_left(self._jobs.directory)
        return result


def end_what_is_left(directory: Path) -> None:
    """Kill the processes of jobs that stay behind."""
    for process in _processes_with_output_in(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def assert_none_left(directory: Path) -> None:
    """Fail if a process of a job stays behind.

    Whatever a job starts has its output below *directory*, where torchrun keeps it.
    """
    deadline = time.monotonic() + _SECONDS_TO_BE_REAPED
    while left := _processes_with_output_in(directory):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(_POLL_SECONDS)


class DisturbedDump:
    """A dump that fails, is resumed, and must end like one that was not disturbed.

    Args:
        workshop: Gives the command line.
        failing_jobs: Runs what is to fail.
        name: Names its jobs.
        case: Which dump it is.
        cache: Its directory.
        save: Where its checkpoints go.
        undisturbed: Cache of the same dump without a failure; may be in format 2.
        iterations: Length of the dump.
        save_interval: Iterations per window.
        flags: Further flags.
    """

    def __init__(
        self,
        workshop: Workshop,
        failing_jobs: FailingJobs,
        name: str,
        *,
        case: Dump,
        cache: Path | str,
        save: Path,
        undisturbed: Path,
        iterations: int = DUMP_ITERATIONS,
        save_interval: int = FLUSH_INTERVAL,
        flags: Sequence[str] = (),
    ) -> None:
        self._jobs = workshop.jobs
        self._failing_jobs = failing_jobs
        self._name = name
        self._runs = 0
        self._case = case
        self._iterations = iterations
        self._interval = save_interval
        self._undisturbed = undisturbed
        self._save_format = workshop.format_of(case.settings.save_format)
        self.cache = cache
        self.save = save
        self.arguments = workshop.dump_arguments(
            case, cache, save, iterations=iterations, save_interval=save_interval
        )
        self.arguments += flags

    def confirmed(self) -> int:
        """Return how many iterations a resumed dump does not repeat."""
        return latest_iteration(self.save) if is_confirmed(self.save) else 0

    def fail(
        self,
        *reason: str,
        disturb: Callable[[RunningJob], object] = lambda job: None,
        kept: Path | None = None,
        **options: Any,
    ) -> JobResult:
        """Run the dump, which fails, and check what it says, confirms and leaves.

        Args:
            *reason: Patterns of what it gives as the reason.
            disturb: Makes it fail, while it runs.
            kept: Where its shards are then, if not where it wrote them.
            **options: Of :meth:`JobRunner.run`.
        """
        before = self.confirmed()
        job = self._failing_jobs.run(
            self._next_name(), self.arguments, ranks=self._case.ranks, disturb=disturb, **options
        )
        found = WINDOW.search(job.log)
        assert found is not None, job.tail()
        start, end, path, message = found.groups()
        assert path == f"{str(self.cache).rstrip('/')}/{Path(path).name}"
        assert Path(path).name.partition("__")[2] == f"{start}-{int(end) + 1}.tar"
        for pattern in reason:
            assert re.search(pattern, message), (pattern, message)
        assert "is not confirmed: start the job again" in message
        # Checkpoints before that window may be confirmed, its own is not.
        confirmed = self.confirmed() * DUMP_GLOBAL_BATCH
        assert before * DUMP_GLOBAL_BATCH <= confirmed <= int(start)
        self.check_kept(kept)
        return job

    def resume(self, kept: Path | None = None, **options: Any) -> JobResult:
        """Run the dump to its end and check that nothing tells that it was disturbed."""
        job = self._jobs.run(self._next_name(), self.arguments, ranks=self._case.ranks, **options)
        self.check_whole(kept)
        return job

    def check_whole(self, kept: Path | None = None) -> None:
        """Check that all is confirmed and there, bit by bit."""
        assert self.confirmed() == self._iterations
        assert read_cache(kept or Path(self.cache)) == self._expected()

    def check_kept(self, kept: Path | None = None) -> None:
        """Check that what is there is right, and that what was confirmed is there."""
        found, undisturbed = read_cache(kept or Path(self.cache)), self._expected()
        assert found.items() <= undisturbed.items()
        confirmed = self.confirmed() * DUMP_GLOBAL_BATCH
        assert {place for place in undisturbed if _first_sample(place[1]) < confirmed} <= set(found)

    def _expected(self) -> Payloads:
        return read_cache(self._undisturbed, self._save_format)

    def _next_name(self) -> str:
        self._runs += 1
        return f"{self._name}-{self._runs}"


def _first_sample(member: str) -> int:
    return int(member.partition("-")[0])


def is_confirmed(save: Path) -> bool:
    """Return whether any checkpoint in *save* is confirmed."""
    return (save / "latest_checkpointed_iteration.txt").exists()


def _processes_with_output_in(directory: Path) -> dict[int, str]:
    """Return the command lines of the processes that hold a file below *directory* open."""
    found = {}
    for entry in Path("/proc").iterdir():
        # A process may end meanwhile, and those of other users are not shown.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and any(
                stream.readlink().is_relative_to(directory) for stream in (entry / "fd").iterdir()
            ):
                command = (entry / "cmdline").read_bytes()
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found
