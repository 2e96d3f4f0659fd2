# SPDX-License-Identifier: Apache-2.0
"""Dumps and students on a real S3 server: resumed, cut off from it, refused by it.

The jobs use the client that users have, ``--enable-msc`` with MSC_CONFIG. Checkpoints are local, so
that the flushes of the persistent checkpoint worker are all that goes to the store.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.functional_tests.caches import formats_of, read_cache
from tests.functional_tests.cases import DUMP_GLOBAL_BATCH, DUMPS, SAMPLES, Student, Workshop
from tests.functional_tests.oracle import check_targets
from tests.functional_tests.recorders import load_records
from tests.s3_server import S3Server, file_profile

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

NOTICED = r"Cannot \w+ msc://.*Trying again"
_POLL_SECONDS = 0.005


@contextmanager
def outage(server: S3Server, log: Path, begins: str) -> Iterator[None]:
    """Stop the server when a job prints *begins*; start it again when the job has noticed.

    Raises:
        AssertionError: The job ended before it printed *begins*, or never missed the server.
    """
    over = threading.Event()
    seen: list[str] = []

    def await_line(pattern: str) -> None:
        while not over.is_set():
            text = log.read_text(errors="replace") if log.exists() else ""
            if re.search(pattern, text):
                seen.append(pattern)
                return
            time.sleep(_POLL_SECONDS)

    def watch() -> None:
        await_line(begins)
        server.stop()
        await_line(NOTICED)
        server.start()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert seen == [begins, NOTICED]


@pytest.fixture(scope="module")
def s3_dump(workshop: Workshop, s3_server: S3Server) -> str:
    """URL of a dump like "dp2", made in two runs. Runs two jobs.

    The first stops half-way. The second goes back to the checkpoint before and flushes at another
    interval, so shards of the first are in its way; while it trains, the server is away. It goes on
    in another format, of which each shard is one.
    """
    save = workshop.directory / "s3-dump" / "save"
    url = s3_server.url("dump")
    arguments = [*workshop.dump_arguments(DUMPS["dp2"], url, save), "--enable-msc"]
    env = {"MSC_CONFIG": str(s3_server.config)}
    first = [*arguments, "--save-interval", "2", "--exit-interval", "4"]
    workshop.jobs.run("s3-dump-begun", first, ranks=2, env=env, fresh=True)
    assert shards(s3_server.objects / "dump") == [
        f"dp{rank}__{span}.tar" for rank in range(2) for span in ("0-8", "8-16")
    ]
    again = [*arguments, "--save-interval", "3", "--ckpt-step", "2"]
    again += ["--logits-save-format", str(workshop.format_of(3))]
    log = workshop.jobs.directory / "s3-dump-resumed.log"
    with outage(s3_server, log, begins=r"before the start of training step"):
        workshop.jobs.run("s3-dump-resumed", again, ranks=2, env=env)
    return url


def shards(folder: Path, suffix: str = ".tar") -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(suffix))


def test_resumed_dump_on_s3_has_the_payloads_of_the_local_one(
    workshop: Workshop, s3_server: S3Server, s3_dump: str
) -> None:
    folder = s3_server.objects / "dump"
    last = workshop.format_of(3)
    assert read_cache(folder, last) == read_cache(workshop.dump("dp2").cache, last)
    spans = [tuple(map(int, re.findall(r"\d+", name)[1:])) for name in shards(folder)]
    assert sorted(spans) == sorted([(0, 8), (8, 12), (12, 24), (24, 32)] * 2)
    formats = {"0-8": workshop.format_of(2), "8-12": last, "12-24": last, "24-32": last}
    assert formats_of(folder) == {
        f"dp{rank}__{span}.tar": save_format
        for rank in range(2)
        for span, save_format in formats.items()
    }


def test_shards_in_the_way_are_set_aside_on_s3(s3_server: S3Server, s3_dump: str) -> None:
    assert shards(s3_server.objects / "dump", ".tar.stale") == [
        f"dp{rank}__{span}.tar.stale" for rank in range(2) for span in ("12-16", "8-16")
    ]


def test_dump_outlives_the_restart_of_its_server(workshop: Workshop, s3_dump: str) -> None:
    """The flushes were in the persistent worker, which says what it waited for."""
    job = next(job for job in workshop.jobs.finished if job.name == "s3-dump-resumed")
    assert sorted(job.iterations()) == list(range(3, SAMPLES // DUMP_GLOBAL_BATCH + 1))
    assert f"Cannot list {s3_dump}: Could not connect" in job.log


def test_student_on_s3_outlives_a_restart_and_uses_the_right_targets(
    workshop: Workshop, s3_server: S3Server, s3_dump: str
) -> None:
    """At TP 2 from a dump at DP 2; shards are fetched one by one, so that one is due meanwhile."""
    case = Student(dump="dp2", ranks=2, micro_batch=2, flags="--tensor-model-parallel-size 2")
    arguments = [*workshop.student_arguments(case, s3_dump), "--enable-msc"]
    arguments += ["--logits-load-msc-prefetch-depth", "0", "--logits-load-decode-threads", "1"]
    record = workshop.directory / "s3-student-record"
    log = workshop.jobs.directory / "s3-student.log"
    with outage(s3_server, log, begins=r"iteration +1/"):
        job = workshop.jobs.run(
            "s3-student",
            arguments,
            ranks=case.ranks,
            record=record,
            env={"MSC_CONFIG": str(s3_server.config)},
        )
    assert len(job.iterations()) == SAMPLES // DUMP_GLOBAL_BATCH
    oracle = workshop.dump("dp2").oracle.in_format(workshop.format_of(3))
    found = check_targets(oracle, load_records(record))
    assert found.samples == oracle.samples
    assert found.rows == 2 * SAMPLES


def test_wrong_secret_stops_a_student_before_it_is_built(
    workshop: Workshop, s3_server: S3Server
) -> None:
    url = s3_server.url("dump", profile="-wrong")
    arguments = [*workshop.student_arguments(Student(dump="dp2"), url), "--enable-msc"]
    env = {"MSC_CONFIG": str(s3_server.config)}
    job = workshop.jobs.run("s3-student-refused", arguments, succeeds=False, env=env)
    assert f"--logits-load-dir {url} cannot be read" in job.log
    assert "SignatureDoesNotMatch" in job.log
    assert "Check the credentials" in job.log
    assert "building" not in job.log
    assert "Trying again" not in job.log
    for secret in (s3_server.wrong_secret, s3_server.secret_key):
        assert secret not in job.log


def test_missing_bucket_stops_a_dump_before_its_first_step(
    workshop: Workshop, s3_server: S3Server, tmp_path: Path
) -> None:
    url = s3_server.url("dump", profile="-missing")
    arguments = [*workshop.dump_arguments(DUMPS["tp1"], url, tmp_path / "save"), "--enable-msc"]
    env = {"MSC_CONFIG": str(s3_server.config)}
    job = workshop.jobs.run("s3-dump-refused", arguments, succeeds=False, env=env)
    assert f"The dump cannot start in {url}" in job.log
    assert "The specified bucket does not exist" in job.log
    assert "Check that the bucket of its profile exists" in job.log
    assert not job.iterations()
    assert s3_server.secret_key not in job.log


def test_file_profile_dumps_and_distils(workshop: Workshop, tmp_path: Path) -> None:
    """A profile of type ``file``, as one tries a configuration out with. Runs two jobs."""
    config = tmp_path / "msc.json"
    config.write_text(json.dumps({"profiles": {"disk": file_profile(tmp_path / "disk")}}))
    env = {"MSC_CONFIG": str(config)}
    url = "msc://disk/teacher"
    arguments = [*workshop.dump_arguments(DUMPS["tp1"], url, tmp_path / "save"), "--enable-msc"]
    workshop.jobs.run("file-profile-dump", arguments, env=env)
    assert read_cache(tmp_path / "disk" / "teacher") == read_cache(workshop.dump("tp1").cache)

    case = Student(dump="tp1", ranks=2)
    arguments = [*workshop.student_arguments(case, url), "--enable-msc"]
    record = tmp_path / "record"
    workshop.jobs.run("file-profile-student", arguments, ranks=2, record=record, env=env)
    found = check_targets(workshop.dump("tp1").oracle, load_records(record))
    assert found.rows == SAMPLES
