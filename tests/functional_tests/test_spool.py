# SPDX-License-Identifier: Apache-2.0
"""A dump that spools on a disk writes the same cache, and leaves nothing there however it ends."""

import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from tests.functional_tests.caches import read_cache
from tests.functional_tests.cases import (
    DUMP_GLOBAL_BATCH,
    DUMP_ITERATIONS,
    DUMPS,
    FLUSH_INTERVAL,
    Workshop,
)
from tests.functional_tests.failing_jobs import FailingJobs, RunningJob, is_confirmed
from tests.functional_tests.harness import curves

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

CASE = DUMPS["dp2"]


def spools_of(directory: Path) -> dict[int, int]:
    """Return the processes that hold files of *directory* open, and how many."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(f"{directory}/"):
            process = int(entry.parts[2])
            found[process] = found.get(process, 0) + 1
    return found


def spools_of_all(directory: Path) -> dict[int, int] | None:
    """Return the same once all ranks have one. It reads much: not often."""
    time.sleep(0.5)
    found = spools_of(directory)
    return found if len(found) == CASE.ranks else None


def test_killed_dump_leaves_nothing_and_ends_as_one_in_memory(
    workshop: Workshop, failing_jobs: FailingJobs, tmp_path: Path
) -> None:
    in_memory = workshop.dump("dp2")
    spools, cache, save = (tmp_path / name for name in ("spools", "cache", "save"))
    spools.mkdir()

    def arguments(iterations: int, save_interval: int) -> list[str]:
        flags = workshop.dump_arguments(
            CASE.in_format(3), cache, save, iterations=iterations, save_interval=save_interval
        )
        return [*flags, "--logits-save-spool-dir", str(spools)]

    def kill_rank(job: RunningJob) -> None:
        held = job.wait_for(lambda: spools_of_all(spools), "all of its ranks spooled")
        assert set(held.values()) == {1}
        assert os.listdir(spools) == []
        os.kill(min(held), signal.SIGKILL)

    # A long window, so that there is a spool to be killed with.
    failing_jobs.run(
        "dump-killed-with-spools",
        arguments(5000, 2000),
        disturb=kill_rank,
        says=None,
        before_first_window=True,
        ranks=CASE.ranks,
    )
    assert os.listdir(spools) == []
    assert spools_of(spools) == {}

    tensorboard = tmp_path / "tensorboard"
    workshop.jobs.run(
        "dump-with-spools",
        [*arguments(DUMP_ITERATIONS, FLUSH_INTERVAL), "--tensorboard-dir", str(tensorboard)],
        ranks=CASE.ranks,
        fresh=True,
    )
    assert read_cache(cache) == read_cache(in_memory.cache, workshop.format_of(3))
    assert os.listdir(spools) == []
    sizes = curves(in_memory.tensorboard)["logits-flush-bytes"]
    for directory, least in ((in_memory.tensorboard, 0.5), (tensorboard, 0.0)):
        held_bytes = curves(directory)["logits-held-bytes"]
        assert sorted(held_bytes) == sorted(sizes)
        # The rank that holds most has at least the mean of the two.
        assert all(held_bytes[step] > least * size for step, size in sizes.items())


def test_full_spool_ends_the_job(
    workshop: Workshop, failing_jobs: FailingJobs, tmp_path: Path
) -> None:
    """One of two ranks; the other is in a collective by then."""
    spools, cache, save = (tmp_path / name for name in ("spools", "cache", "save"))
    spools.mkdir()
    arguments = workshop.dump_arguments(CASE, cache, save, iterations=5000, save_interval=5000)
    arguments += ["--logits-save-spool-dir", str(spools)]

    def limit_files(job: RunningJob) -> None:
        held = job.wait_for(lambda: spools_of_all(spools), "all of its ranks spooled")
        # What the rank prints goes to a file as well, and stays below.
        resource.prlimit(max(held), resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))

    job = failing_jobs.run(
        "dump-with-a-full-spool",
        arguments,
        disturb=limit_files,
        before_first_window=True,
        ranks=CASE.ranks,
    )
    found = re.search(
        r"LogitsWriteError: Samples (\d+) to (\d+) of the logits dump could not be kept.*"
        rf"cannot write \d+ bytes to a spool in {spools}: File too large",
        job.log,
    )
    assert found, job.tail()
    assert int(found.group(2)) - int(found.group(1)) == DUMP_GLOBAL_BATCH - 1
    assert os.listdir(spools) == []
    assert not is_confirmed(save)
