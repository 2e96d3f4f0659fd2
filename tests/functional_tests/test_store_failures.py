# SPDX-License-Identifier: Apache-2.0
"""A store that goes away for good, or answers with errors, ends dumps and students with a reason.

The entry script of these jobs tries again for seconds instead of minutes.
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.functional_tests.cases import DUMPS, Student, Workshop
from tests.functional_tests.failing_jobs import DisturbedDump, FailingJobs, RunningJob
from tests.functional_tests.faults import Faults
from tests.functional_tests.harness import JobResult
from tests.s3_server import S3Server

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

PATIENCE = 2.0
TRAINING_BEGINS = "before the start of training step"
STUDENT = Student(
    dump="dp2", ranks=2, global_batch=1, flags="--tensor-model-parallel-size 2", alpha=0.5
)
MakeDump = Callable[[str, int], DisturbedDump]


def impatient(server: S3Server) -> dict[str, Any]:
    """Return how to run a job on *server* that gives up soon."""
    return Faults(patience=PATIENCE).options(MSC_CONFIG=str(server.config))


@pytest.fixture(scope="module")
def make_dump(workshop: Workshop, failing_jobs: FailingJobs, s3_server: S3Server) -> MakeDump:
    """Make a dump like "dp2" on the server, by its name and format, in four windows."""

    def make(name: str, save_format: int) -> DisturbedDump:
        return DisturbedDump(
            workshop,
            failing_jobs,
            name,
            case=DUMPS["dp2"].in_format(save_format),
            cache=s3_server.url(name),
            save=workshop.directory / name,
            undisturbed=workshop.dump("dp2").cache,
            save_interval=2,
            flags=["--enable-msc"],
        )

    return make


@dataclass(frozen=True)
class LostAndResumed:
    """A dump that lost its server, and is whole since."""

    failed: JobResult
    url: str


@pytest.fixture(scope="module")
def stopped(make_dump: MakeDump, s3_server: S3Server) -> LostAndResumed:
    """Stop the server while a dump trains; resume it on the server that is back. Runs two jobs."""
    dump = make_dump("store-stops", 3)
    folder = s3_server.objects / "store-stops"

    def stop(job: RunningJob) -> None:
        job.wait_to_say(TRAINING_BEGINS)
        s3_server.stop()

    try:
        job = dump.fail(
            "Could not connect",
            "Check that the store can be reached",
            disturb=stop,
            kept=folder,
            **impatient(s3_server),
        )
    finally:
        s3_server.start()
    dump.resume(kept=folder, **impatient(s3_server))
    return LostAndResumed(job, str(dump.cache))


def test_dump_whose_store_stops(stopped: LostAndResumed) -> None:
    """It gave up after it had tried for a while; the rest is checked where it is made."""
    waited = re.findall(r"Trying again in [\d.]+ s, for another ([\d.]+) s", stopped.failed.log)
    assert len(waited) > 1
    assert float(waited[0]) == PATIENCE
    assert f"Cannot list {stopped.url}: Could not connect" in stopped.failed.log


def test_dump_whose_store_answers_with_errors(make_dump: MakeDump, s3_server: S3Server) -> None:
    dump = make_dump("store-refuses", 2)
    folder = s3_server.objects / "store-refuses"
    with contextlib.ExitStack() as refusal:

        def refuse(job: RunningJob) -> None:
            job.wait_to_say(TRAINING_BEGINS)
            refusal.enter_context(s3_server.refusing(503))

        job = dump.fail(
            r"\(503\)",
            "Service Unavailable",
            disturb=refuse,
            kept=folder,
            **impatient(s3_server),
        )
    assert re.search(r"Cannot list msc://.*Service Unavailable.*Trying again", job.log)
    dump.resume(kept=folder, **impatient(s3_server))


@pytest.mark.parametrize("flags", [[], ["--logits-load-ignore-errors"]], ids=["stops", "ignores"])
def test_student_whose_store_stops(
    workshop: Workshop,
    failing_jobs: FailingJobs,
    s3_server: S3Server,
    stopped: LostAndResumed,
    flags: list[str],
) -> None:
    """All ranks end together: at the first batch, or ignoring that, when too many are lost."""
    arguments = [*workshop.student_arguments(STUDENT, stopped.url), "--enable-msc", *flags]
    arguments += ["--logits-load-msc-prefetch-depth", "0", "--logits-load-decode-threads", "1"]

    def stop(job: RunningJob) -> None:
        job.wait_to_say(r"iteration +1/")
        s3_server.stop()

    try:
        job = failing_jobs.run(
            f"student-store-stops{len(flags)}",
            arguments,
            ranks=STUDENT.ranks,
            disturb=stop,
            says="TeacherDataError: Stopped" if flags else "TeacherDataError",
            **impatient(s3_server),
        )
    finally:
        s3_server.start()
    # The shards of samples 16 and later cannot be there; which of the others had come before the
    # server was gone is a race. The share of lost iterations is judged from the twentieth on.
    trained = len(job.iterations())
    assert sorted(job.iterations()) == list(range(1, trained + 1))
    assert trained == 19 if flags else trained <= 16
    assert re.search(rf"Cannot open {stopped.url}/\S+: Could not connect.*Trying again", job.log)
    for rank in range(STUDENT.ranks):
        said = job.of_rank(rank)
        if flags:
            assert "TeacherDataError: Stopped at the batch from sample 19 on" in said
            found = re.search(r"(\d+) of the 20 iterations of this job had no teacher", said)
            assert found is not None
            assert int(found.group(1)) >= 4
        else:
            assert f"TeacherDataError: Cannot read teacher shard {stopped.url}/" in said
            assert "Could not connect" in said
