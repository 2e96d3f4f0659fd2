# SPDX-License-Identifier: Apache-2.0
"""A dump whose window cannot be written ends, confirms nothing of it, and dumps it again."""

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.functional_tests.caches import read_cache
from tests.functional_tests.cases import (
    DUMP_GLOBAL_BATCH,
    DUMP_ITERATIONS,
    DUMPS,
    SAMPLES,
    Workshop,
)
from tests.functional_tests.checkpoints import latest_iteration
from tests.functional_tests.harness import JobResult

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

SECONDS_TO_END = 60.0


def wait_for[T](job: "Future[JobResult]", found: Callable[[], T | None], what: str) -> T:
    """Return what *found* gives, while *job* runs."""
    while True:
        result = found()
        if result is not None:
            return result
        assert not job.done(), f"the job ended before {what}: {job.result().tail()}"
        time.sleep(0.002)


def end_of(job: "Future[JobResult]", log: Path) -> tuple[JobResult, float]:
    """Return the ended job, and the seconds it took to end after it had named the failure."""
    wait_for(
        job, lambda: "LogitsWriteError" in log.read_text(errors="replace") or None, "it failed"
    )
    named = time.monotonic()
    return job.result(), time.monotonic() - named


def test_failure_in_the_last_flush_ends_all_ranks(workshop: Workshop, tmp_path: Path) -> None:
    """One of two ranks cannot write; the only flush is the last, where the trainer waits for it."""
    cache, save = tmp_path / "cache", tmp_path / "save"
    case = DUMPS["dp2"]
    arguments = workshop.dump_arguments(case, cache, save, save_interval=DUMP_ITERATIONS)
    name = "dump-fails-at-its-end"
    log = workshop.directory / f"{name}.log"
    shard = cache / f"dp1__0-{SAMPLES}.tar"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(workshop.jobs.run, name, arguments, ranks=case.ranks, succeeds=False)
        wait_for(job, lambda: cache.is_dir() or None, "it made its directory")
        shard.mkdir()
        result, seconds = end_of(job, log)
    assert seconds < SECONDS_TO_END
    assert len(result.iterations()) == DUMP_ITERATIONS
    message = result.of_rank(1)
    for part in (
        f"The window of samples 0 to {SAMPLES - 1} ({shard})",
        "IsADirectoryError",
        "is not confirmed",
    ):
        assert part in message
    assert "LogitsWriteError" not in result.of_rank(0)
    assert result.first_failed_rank == 1
    assert result.left_behind() == []
    assert not (save / "latest_checkpointed_iteration.txt").exists()

    shard.rmdir()
    workshop.jobs.run("dump-after-its-failure", arguments, ranks=case.ranks)
    assert latest_iteration(save) == DUMP_ITERATIONS
    assert read_cache(cache) == read_cache(workshop.dump("dp2").cache)


def test_killed_checkpoint_worker_ends_the_job(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, save, reports = tmp_path / "cache", tmp_path / "save", tmp_path / "reports"
    reports.mkdir()
    monkeypatch.setenv("TMPDIR", str(reports))
    interval = 8
    arguments = workshop.dump_arguments(
        DUMPS["tp1"], cache, save, iterations=10 * interval, save_interval=interval
    )
    name = "dump-loses-its-worker"

    def worker() -> int | None:
        for report in reports.glob("logits-writes-*/worker"):
            return int(report.read_text())
        return None

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(workshop.jobs.run, name, arguments, succeeds=False)
        process = wait_for(job, worker, "its worker wrote")
        tracker = save / "latest_checkpointed_iteration.txt"
        wait_for(job, lambda: tracker.exists() or None, "its first checkpoint was confirmed")
        os.kill(process, signal.SIGKILL)
        result, seconds = end_of(job, workshop.directory / f"{name}.log")
    assert seconds < SECONDS_TO_END
    assert "checkpoint worker process has ended" in result.log
    assert result.left_behind() == []
    confirmed = latest_iteration(save)
    assert interval <= confirmed < 10 * interval
    window = confirmed * DUMP_GLOBAL_BATCH
    assert f"The window of samples {window} to {window + interval * DUMP_GLOBAL_BATCH - 1}" in (
        result.log
    )
    assert "not confirmed: start the job again" in result.log


def test_vanished_directory_ends_the_job(workshop: Workshop, tmp_path: Path) -> None:
    """As when a file system is unmounted: no other directory is made in its place."""
    cache, save = tmp_path / "cache", tmp_path / "save"
    arguments = workshop.dump_arguments(DUMPS["tp1"], cache, save, iterations=80, save_interval=8)
    name = "dump-loses-its-directory"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(workshop.jobs.run, name, arguments, succeeds=False)
        tracker = save / "latest_checkpointed_iteration.txt"
        wait_for(job, lambda: tracker.exists() or None, "its first checkpoint was confirmed")
        cache.rename(tmp_path / "elsewhere")
        result, seconds = end_of(job, workshop.directory / f"{name}.log")
    assert seconds < SECONDS_TO_END
    assert re.search(r"LogitsWriteError: The window of samples \d+ to \d+", result.log)
    assert f"No such file or directory: '{cache}'" in result.log
    assert not cache.exists()
    # What was confirmed is in the directory that was there.
    kept = read_cache(tmp_path / "elsewhere")
    confirmed = latest_iteration(save) * DUMP_GLOBAL_BATCH
    assert {("dp0", f"{start}-{start + 4}.pt.zst") for start in range(0, confirmed, 4)} <= set(kept)
