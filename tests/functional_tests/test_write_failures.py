# SPDX-License-Identifier: Apache-2.0
"""A dump whose window cannot be written ends, confirms nothing of it, and dumps it again.

The causes come from outside of the job: full and lost disks, killed processes.
"""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.functional_tests.cases import DUMP_ITERATIONS, DUMPS, SAMPLES, Workshop
from tests.functional_tests.disks import scratch_disk
from tests.functional_tests.failing_jobs import DisturbedDump, FailingJobs, RunningJob, running
from tests.functional_tests.faults import Faults

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

CASE = DUMPS["dp2"]
LONG_CASE = CASE.in_format(3)
LONG_ITERATIONS = 80
LONG_INTERVAL = 8
MakeDump = Callable[..., DisturbedDump]


@pytest.fixture(scope="module")
def long_cache(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump long enough to be disturbed while it runs."""
    place = tmp_path_factory.mktemp("long")
    arguments = workshop.dump_arguments(
        LONG_CASE,
        place / "cache",
        place / "save",
        iterations=LONG_ITERATIONS,
        save_interval=LONG_INTERVAL,
    )
    workshop.jobs.run("dump-long", arguments, ranks=CASE.ranks)
    return place / "cache"


@pytest.fixture
def long_dump(
    workshop: Workshop,
    failing_jobs: FailingJobs,
    tmp_path: Path,
    long_cache: Path,
    strategy: list[str],
) -> MakeDump:
    """Make a long dump that is to be disturbed, by its name and directory."""

    def make(name: str, cache: Path) -> DisturbedDump:
        return DisturbedDump(
            workshop,
            failing_jobs,
            f"{name}-{strategy[-1]}",
            case=LONG_CASE,
            cache=cache,
            save=tmp_path / "save",
            undisturbed=long_cache,
            iterations=LONG_ITERATIONS,
            save_interval=LONG_INTERVAL,
            flags=strategy,
        )

    return make


# ---- disks -------------------------------------------------------------------------------------


def test_failure_in_the_last_flush_ends_all_ranks(
    workshop: Workshop, failing_jobs: FailingJobs, tmp_path: Path, strategy: list[str]
) -> None:
    """One of two ranks cannot write; the only flush is the last, where the trainer waits for it."""
    cache = tmp_path / "cache"
    dump = DisturbedDump(
        workshop,
        failing_jobs,
        f"dump-fails-at-its-end-{strategy[-1]}",
        case=CASE,
        cache=cache,
        save=tmp_path / "save",
        undisturbed=workshop.dump("dp2").cache,
        save_interval=DUMP_ITERATIONS,
        flags=strategy,
    )
    shard = cache / f"dp1__0-{SAMPLES}.tar"

    def take_its_name(job: RunningJob) -> None:
        job.wait_to_say("before the start of training step")
        shard.mkdir()

    # A directory is no shard. The other rank's worker may not have begun its window yet: that of
    # nvrx is an interpreter of its own, which takes longer to start than these iterations.
    job = dump.fail(
        "IsADirectoryError",
        disturb=take_its_name,
        kept=tmp_path / "nothing",
        before_first_window=True,
    )
    assert len(job.iterations()) == DUMP_ITERATIONS
    assert "LogitsWriteError" in job.of_rank(1)
    assert "LogitsWriteError" not in job.of_rank(0)
    assert dump.confirmed() == 0

    shard.rmdir()
    dump.resume()


def test_full_disk(
    workshop: Workshop, failing_jobs: FailingJobs, tmp_path: Path, strategy: list[str]
) -> None:
    """The second windows do not fit: the dump gives up; the next waits until there is room."""
    whole = workshop.dump("dp2").cache
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = {path.name: -(-path.stat().st_size // page) * page for path in whole.glob("*.tar")}
    first = sum(size for name, size in sizes.items() if "__0-" in name)
    with scratch_disk(tmp_path, first + min(sizes.values()) // 2) as disk:
        dump = DisturbedDump(
            workshop,
            failing_jobs,
            f"dump-fills-its-disk-{strategy[-1]}",
            case=CASE,
            cache=disk.path,
            save=tmp_path / "save",
            undisturbed=whole,
            flags=strategy,
        )
        impatient = Faults(patience=3.0).options()
        job = dump.fail("No space left on device", **impatient)
        assert "Trying again" in job.log
        assert not list(disk.path.glob("*.tmp"))

        # Still full, until the dump has noticed.
        waiting = f"dump-waits-for-room-{strategy[-1]}"
        with running(workshop.jobs, waiting, dump.arguments, ranks=2) as again:
            again.wait_to_say(r"Cannot write .*No space left on device.*Trying again")
            disk.resize(4 * sum(sizes.values()))
        dump.check_whole()


@pytest.mark.parametrize("how", ["vanished", "read-only"])
def test_lost_directory(tmp_path: Path, long_dump: MakeDump, how: str) -> None:
    """As when a file system is unmounted: no other directory is made in its place."""
    with scratch_disk(tmp_path, 2**24) as disk:
        cache = disk.path / "cache"
        dump = long_dump(f"dump-loses-its-directory-{how}", cache)

        def lose(job: RunningJob) -> None:
            job.wait_to_confirm(dump.save)
            disk.detach() if how == "vanished" else disk.allow_writes(False)

        reason, kept = f"No such file or directory: '{cache}'", disk.aside / "cache"
        if how == "read-only":
            reason, kept = "Read-only file system", cache
        job = dump.fail(reason, disturb=lose, kept=kept)
        assert "Trying again" not in job.log
        assert kept == cache or not cache.exists()
        assert 0 < dump.confirmed() < LONG_ITERATIONS

        disk.attach() if how == "vanished" else disk.allow_writes(True)
        dump.resume()


# ---- killed processes --------------------------------------------------------------------------


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int] | None]:
    """Give the checkpoint workers of the job that runs, once all ranks' have written."""
    reports = tmp_path / "reports"
    reports.mkdir()
    monkeypatch.setenv("TMPDIR", str(reports))

    def find() -> list[int] | None:
        found = [int(path.read_text()) for path in reports.glob("logits-writes-*/worker")]
        return found if len(found) == CASE.ranks else None

    return find


def test_killed_checkpoint_worker(
    tmp_path: Path, long_dump: MakeDump, workers: Callable[[], list[int] | None]
) -> None:
    dump = long_dump("dump-loses-its-worker", tmp_path / "cache")

    def kill_worker(job: RunningJob) -> None:
        found = job.wait_for(workers, "its workers wrote")
        job.wait_to_confirm(dump.save)
        os.kill(found[-1], signal.SIGKILL)

    dump.fail("checkpoint worker process has ended", disturb=kill_worker)
    assert 0 < dump.confirmed() < LONG_ITERATIONS
    dump.resume()


def test_killed_rank(
    workshop: Workshop,
    failing_jobs: FailingJobs,
    tmp_path: Path,
    long_dump: MakeDump,
    workers: Callable[[], list[int] | None],
    strategy: list[str],
) -> None:
    """Nothing of the dump can say so; torchrun does."""
    dump = long_dump("dump-loses-a-rank", tmp_path / "cache")

    def kill_rank(job: RunningJob) -> None:
        found = job.wait_for(workers, "its workers wrote")
        job.wait_to_confirm(dump.save)
        rank = parent_of(found[-1])
        # megatron-core has its worker from a fork server.
        os.kill(parent_of(rank) if "mcore" in strategy else rank, signal.SIGKILL)

    job = failing_jobs.run(
        f"dump-loses-a-rank-{strategy[-1]}-0",
        dump.arguments,
        ranks=CASE.ranks,
        disturb=kill_rank,
        says=None,
        fresh=True,
    )
    assert re.search(r"Signal 9 \(SIGKILL\) received by PID", job.log)
    assert 0 < dump.confirmed() < LONG_ITERATIONS
    assert job.first_failed_rank is not None
    dump.check_kept()
    dump.resume()


def parent_of(process: int) -> int:
    status = Path(f"/proc/{process}/stat").read_text()
    return int(status.rpartition(")")[2].split()[1])
