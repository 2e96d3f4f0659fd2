# SPDX-License-Identifier: Apache-2.0
"""A student that loses its cache, its loader or a rank ends on all ranks, or goes on without it."""

import re
import shutil
from pathlib import Path

import pytest

from tests.file_faults import KILL, recorded_operations
from tests.functional_tests.cases import DUMP_ITERATIONS, SAMPLES, Student, Workshop
from tests.functional_tests.failing_jobs import FailingJobs, RunningJob
from tests.functional_tests.faults import Faults
from tests.functional_tests.harness import JobResult

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

AS_DUMPED = Student(dump="dp2", ranks=2, alpha=0.5)
ONE_BY_ONE = Student(
    dump="dp2", ranks=2, global_batch=1, flags="--tensor-model-parallel-size 2", alpha=0.5
)
IGNORING = "--logits-load-ignore-errors"


@pytest.fixture
def cache(workshop: Workshop, tmp_path: Path, save_format: int) -> Path:
    return shutil.copytree(workshop.cache("dp2", save_format), tmp_path / "cache")


@pytest.mark.parametrize(
    ("save_format", "flags"), [(3, []), (2, [IGNORING])], ids=["stops", "ignores"]
)
def test_directory_that_vanishes(
    workshop: Workshop, failing_jobs: FailingJobs, cache: Path, flags: list[str]
) -> None:
    """At the first batch whose shard is not open yet; or, ignoring that, when too many are lost."""

    def take_away(job: RunningJob) -> None:
        job.wait_to_say(r"iteration +1/")
        cache.rename(cache.with_name("elsewhere"))

    arguments = workshop.student_arguments(ONE_BY_ONE, cache)
    job = failing_jobs.run(
        f"student-loses-its-directory{len(flags)}",
        [*arguments, "--logits-load-decode-threads", "1", *flags],
        ranks=ONE_BY_ONE.ranks,
        disturb=take_away,
        says="TeacherDataError: Stopped" if flags else "TeacherDataMissingError: ",
    )
    # The first shards are open, and one of the later ones, which they were compared with.
    trained = len(job.iterations())
    assert sorted(job.iterations()) == list(range(1, trained + 1))
    for rank in range(ONE_BY_ONE.ranks):
        said = job.of_rank(rank)
        if not flags or rank == 0:  # one rank tells what is passed over
            assert f"'{cache}/dp1__16-32.tar'" in said
            assert "No such file or directory" in said
        if flags:
            assert "Stopped at the batch from sample 19 on: 2 of the 20 iterations" in said
    assert trained == (19 if flags else 17)


def losses_without_targets(job: JobResult) -> set[int]:
    """Return the iterations that were trained on the LM loss alone."""
    return {
        number
        for number, entries in job.iterations().items()
        if entries.get("logits distillation loss", 0) == 0
    }


@pytest.mark.parametrize("save_format", [2])
def test_killed_loader_stops_all_ranks(
    workshop: Workshop, failing_jobs: FailingJobs, cache: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    faults = kill_at(15, cache, record, rank=1)
    job = failing_jobs.run(
        "student-loses-its-loader",
        workshop.student_arguments(AS_DUMPED, cache),
        ranks=2,
        says="The loader process of",
        **faults.options(),
    )
    assert recorded_operations(record)[15].endswith(" dp1__0-16.tar")
    assert f"The loader process of {cache}" in job.of_rank(1)
    assert not job.iterations()
    assert job.first_failed_rank is not None


@pytest.mark.parametrize("save_format", [3])
def test_killed_loader_is_replaced_where_errors_are_ignored(
    workshop: Workshop, cache: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    faults = kill_at(15, cache, record, rank=1)
    job = workshop.jobs.run(
        "student-replaces-its-loader",
        [*workshop.student_arguments(AS_DUMPED, cache), IGNORING],
        ranks=2,
        **faults.options(),
    )
    assert sorted(job.iterations()) == list(range(1, DUMP_ITERATIONS + 1))
    # What was decoded ahead went with it.
    lost = losses_without_targets(job)
    assert 1 <= len(lost) < DUMP_ITERATIONS / 2
    counts = re.findall(r"starts at sample (\d+).*?\((\d+) steps so far\)", job.of_rank(0))
    assert [int(start) // (SAMPLES // DUMP_ITERATIONS) + 1 for start, _ in counts] == sorted(lost)
    assert f"The loader process of {cache}" in job.log


@pytest.mark.parametrize("save_format", [2])
def test_killed_rank_ends_the_others(
    workshop: Workshop, failing_jobs: FailingJobs, cache: Path, tmp_path: Path
) -> None:
    """The one that lists the directory, which the other waits for in a collective."""
    record = tmp_path / "record"
    faults = kill_at(1, cache, record, rank=0)
    job = failing_jobs.run(
        "student-loses-a-rank",
        workshop.student_arguments(AS_DUMPED, cache),
        ranks=2,
        says=r"Signal 9 \(SIGKILL\) received by PID",
        **faults.options(),
    )
    assert recorded_operations(record) == ["listdir cache"] * 2
    assert not job.iterations()
    assert job.first_failed_rank == 0


def kill_at(number: int, cache: Path, record: Path, *, rank: int) -> Faults:
    """Kill the process of a rank that takes this operation on the files of a cache."""
    return Faults(
        path=str(cache),
        rank=rank,
        in_worker=False,
        record=str(record),
        first_failing=number,
        only=True,
        error=KILL,
    )
