# SPDX-License-Identifier: Apache-2.0
"""Failures of single operations inside a job: of a window's files, its encoding, a student's reads.

An operation that fails goes on failing, for the test decides in the job's environment.
"""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.file_faults import KILL, recorded_operations
from tests.functional_tests.cases import (
    DUMP_GLOBAL_BATCH,
    DUMP_ITERATIONS,
    DUMPS,
    FLUSH_INTERVAL,
    Student,
    Workshop,
)
from tests.functional_tests.failing_jobs import DisturbedDump, FailingJobs
from tests.functional_tests.faults import Faults

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

WINDOW = "dp0__16-32.tar"
PUBLICATION = [
    "listdir cache",
    f"open {WINDOW}.tmp",
    f"write {WINDOW}.tmp",
    f"fsync {WINDOW}.tmp",
    f"close {WINDOW}.tmp",
    f"replace {WINDOW}.tmp",
    "open cache",
    "fsync cache",
    "close cache",
]
"""What the checkpoint worker does, in this order, to make a window appear."""
OLD_SHARD = "dp0__8-16.tar"
MAKING_ROOM = [
    f"read {OLD_SHARD}",
    "write dp0__12-16.tar.tmp",
    f"stat {OLD_SHARD}.stale",
    f"rename {OLD_SHARD}",
]
"""Some of what it does before that, where an old shard is in the way."""
ALL = "LOGITS_ALL_FAULTS" in os.environ
"""Whether all operations of a kind fail in turn, and not only some; takes twelve minutes."""


@pytest.fixture
def dump(
    workshop: Workshop, failing_jobs: FailingJobs, tmp_path: Path, strategy: list[str]
) -> DisturbedDump:
    return DisturbedDump(
        workshop,
        failing_jobs,
        f"dump-{tmp_path.name}",
        case=DUMPS["tp1"],
        cache=tmp_path / "cache",
        save=tmp_path / "save",
        undisturbed=workshop.dump("tp1").cache,
        flags=strategy,
    )


# ---- writing -----------------------------------------------------------------------------------


def test_every_operation_on_the_files_of_a_window(
    workshop: Workshop, dump: DisturbedDump, tmp_path: Path
) -> None:
    """One job per operation: each resumes what the one before could not write."""
    workshop.jobs.run("dump-first-window", [*dump.arguments, "--exit-interval", "4"])
    operations: list[str] = []
    while operations[-1:] != PUBLICATION[-1:]:
        number = len(operations)
        record = tmp_path / f"record-{number}"
        faults = Faults(path=str(dump.cache), record=str(record), first_failing=number)
        job = dump.fail("Permission denied", **faults.options())
        assert dump.confirmed() == FLUSH_INTERVAL
        assert "Trying again" not in job.log
        operations = recorded_operations(record)[: number + 1]
        assert len(operations) == number + 1
    # The content may take several writes.
    assert list(dict.fromkeys(operations)) == PUBLICATION
    dump.resume()


def test_operations_that_make_room_for_a_window(
    workshop: Workshop, failing_jobs: FailingJobs, tmp_path: Path
) -> None:
    """A dump goes back to an older checkpoint and cuts the shard that is in its way."""
    begun = tmp_path / "begun"
    arguments = workshop.dump_arguments(
        DUMPS["tp1"], begun / "cache", begun / "save", save_interval=2
    )
    workshop.jobs.run("dump-to-go-back", [*arguments, "--exit-interval", "4"])
    (begun / "save" / "latest_checkpointed_iteration.txt").write_text("2")

    def dump(name: str) -> DisturbedDump:
        place = tmp_path / name
        shutil.copytree(begun, place)
        return DisturbedDump(
            workshop,
            failing_jobs,
            f"dump-makes-room-{name}",
            case=DUMPS["tp1"],
            cache=place / "cache",
            save=place / "save",
            undisturbed=workshop.dump("tp1").cache,
            save_interval=3,
        )

    whole, record = dump("whole"), tmp_path / "record"
    whole.resume(**Faults(path=str(whole.cache), record=str(record)).options())
    operations = recorded_operations(record)
    operations = operations[: operations.index("open dp0__8-12.tar.tmp")]
    assert {f"{verb} {OLD_SHARD}" for verb in ("open", "read", "rename")} <= set(operations)
    numbers = range(len(operations)) if ALL else map(operations.index, MAKING_ROOM)
    for number in numbers:
        disturbed = dump(f"{number}")
        faults = Faults(
            path=str(disturbed.cache), record=f"{record}-{number}", first_failing=number
        )
        job = failing_jobs.run(
            f"dump-makes-no-room-{number}", disturbed.arguments, **faults.options()
        )
        assert "The window of samples 8 to 11 (" in job.log
        assert "Permission denied" in job.log
        assert disturbed.confirmed() == 2
        disturbed.resume()


def test_operations_that_fail_once_are_tried_again(dump: DisturbedDump) -> None:
    faults = Faults(path=str(dump.cache), error="EIO", each_once=True, patience=10.0)
    job = dump.resume(**faults.options(), fresh=True)
    retried = re.findall(r"Cannot write (\S+\.tar): \[Errno 5\].*?Trying again in", job.log)
    # Of each window: open, write and with it close, fsync, replace. Of the directory, which is one
    # file: list, open, fsync and with it close.
    assert len(retried) == 2 * 4 + 3
    assert set(retried) == {f"{dump.cache}/{name}" for name in ("dp0__0-16.tar", WINDOW)}


def test_worker_that_is_killed_before_its_first_window(dump: DisturbedDump, tmp_path: Path) -> None:
    """By the checkpoint, which comes before."""
    record = tmp_path / "record"
    faults = Faults(path=str(dump.save), record=str(record), first_failing=0, error=KILL)
    dump.fail("checkpoint worker process has ended before that", **faults.options())
    (operation,) = recorded_operations(record)
    assert operation.endswith("__0_0.distcp")
    assert dump.confirmed() == 0
    assert not list(Path(dump.cache).iterdir())
    dump.resume()


def test_checkpoint_that_cannot_be_written(
    failing_jobs: FailingJobs, dump: DisturbedDump, strategy: list[str], tmp_path: Path
) -> None:
    """Its window can be, and nothing of it is confirmed."""
    record = tmp_path / "record"
    faults = Faults(path=str(dump.save), record=str(record), first_failing=0, error="ENOSPC")
    job = failing_jobs.run(
        f"dump-{strategy[-1]}-without-its-checkpoint",
        dump.arguments,
        says="No space left on device",
        **faults.options(),
    )
    assert "LogitsWriteError" not in job.log
    assert dump.confirmed() == 0
    dump.check_kept()
    dump.resume()


def test_iteration_that_cannot_be_encoded(
    workshop: Workshop, failing_jobs: FailingJobs, tmp_path: Path
) -> None:
    """The job ends as soon as it is known; the other rank may be anywhere."""
    dump = DisturbedDump(
        workshop,
        failing_jobs,
        "dump-cannot-encode",
        case=DUMPS["dp2"],
        cache=tmp_path / "cache",
        save=tmp_path / "save",
        undisturbed=workshop.dump("dp2").cache,
    )
    unencodable = FLUSH_INTERVAL + 1
    job = failing_jobs.run(
        "dump-cannot-encode-0",
        dump.arguments,
        ranks=2,
        **Faults(rank=1, unencodable=unencodable).options(),
    )
    start = unencodable * DUMP_GLOBAL_BATCH
    for part in (
        f"LogitsWriteError: Samples {start} to {start + DUMP_GLOBAL_BATCH - 1} of the logits dump",
        "could not be kept for their checkpoint: ValueError: an index does not fit",
        "Nothing of this window is confirmed: start the job again",
    ):
        assert part in job.of_rank(1)
    assert "LogitsWriteError" not in job.of_rank(0)
    assert len(job.iterations()) >= FLUSH_INTERVAL
    assert dump.confirmed() <= FLUSH_INTERVAL
    dump.check_kept()
    dump.resume()


# ---- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save_format", "rank", "number", "operation"),
    [
        (3, 0, 1, "listdir cache"),  # the first is at the start, on all ranks
        (2, 1, 0, "open dp1__0-16.tar"),
        (3, 1, 3, "read dp1__0-16.tar"),  # its first header
        (2, 1, 15, "read dp1__0-16.tar"),  # its first member, behind what tells of the next shard
        (3, 1, 15, "read dp1__0-16.tar"),  # the same, of which it is the header
    ],
)
def test_read_that_fails_on_one_rank_stops_all(
    workshop: Workshop,
    failing_jobs: FailingJobs,
    tmp_path: Path,
    save_format: int,
    rank: int,
    number: int,
    operation: str,
) -> None:
    """All numbers are in the test below, which is long, and in the unit tests of the reader."""
    # The operations name it, and a converted one has another name.
    cache, record = tmp_path / "cache", tmp_path / "record"
    shutil.copytree(workshop.cache("dp2", save_format), cache)
    arguments = workshop.student_arguments(Student(dump="dp2", ranks=2), cache)
    faults = Faults(
        path=str(cache), rank=rank, in_worker=False, record=str(record), first_failing=number
    )
    job = failing_jobs.run(
        f"student-fails-to-{operation.replace(' ', '-')}-{number}-v{save_format}",
        [*arguments, "--logits-load-decode-threads", "1"],
        ranks=2,
        says="TeacherDataError",
        **faults.options(),
    )
    assert recorded_operations(record)[number] == operation
    assert not job.iterations()
    # torchrun ends the others when one has failed, perhaps before they have said so.
    telling = [each for each in range(2) if "TeacherDataError: " in job.of_rank(each)]
    assert job.first_failed_rank in telling
    for each in telling:
        assert "Permission denied" in job.of_rank(each)
        assert str(cache) in job.of_rank(each)
    if rank == 1 and 0 in telling:
        assert "Another rank of this pipeline stage" in job.of_rank(0)
        assert "starts at sample 0" in job.of_rank(0)


@pytest.mark.skipif(not ALL, reason="LOGITS_ALL_FAULTS is not set")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("save_format", [2, 3])
def test_every_read_of_a_rank(
    workshop: Workshop, failing_jobs: FailingJobs, tmp_path: Path, save_format: int
) -> None:
    cache, record = tmp_path / "cache", tmp_path / "record"
    shutil.copytree(workshop.cache("dp2", save_format), cache)
    arguments = workshop.student_arguments(Student(dump="dp2", ranks=2), cache)
    arguments += ["--logits-load-decode-threads", "1"]
    faults = Faults(path=str(cache), rank=1, in_worker=False, record=str(record))
    workshop.jobs.run("student-reads", arguments, ranks=2, **faults.options())
    reads = recorded_operations(record)
    assert len(reads) > 30
    for number, operation in enumerate(reads):
        record = tmp_path / f"record-{number}"
        failing = replace(faults, record=str(record), first_failing=number)
        job = failing_jobs.run(
            f"student-fails-at-{number}-v{save_format}",
            arguments,
            ranks=2,
            says="TeacherDataError",
            **failing.options(),
        )
        assert recorded_operations(record)[number] == operation
        trained = len(job.iterations())
        assert sorted(job.iterations()) == list(range(1, trained + 1))
        assert trained < DUMP_ITERATIONS
        assert re.search(rf"TeacherDataError: .*{cache}", job.of_rank(1))
        assert "Permission denied" in job.of_rank(1)
