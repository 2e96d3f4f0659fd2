# SPDX-License-Identifier: Apache-2.0
"""Students whose batches are not what the teacher saw: each stops, and says which sample differs.

``tests/unit_tests/training/distillation/test_misalignment.py`` has the other ways to get there.
"""

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.functional_tests.cases import Student, Workshop
from tests.functional_tests.corpus import write_corpus
from tests.functional_tests.harness import JobResult

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

AS_DUMPED = Student(dump="dp2", ranks=2)
IGNORING = ["--logits-load-ignore-hash", "--logits-load-ignore-errors"]


def check_stopped(job: JobResult, start: int, samples: dict[int, int]) -> None:
    """All ranks stopped at the batch from *start* on; *samples* are those that differ, by rank."""
    for rank in (0, 1):
        told = job.of_rank(rank)
        assert "TeacherContentError: " in told
        assert f"starts at sample {start} does not hold what the teacher saw" in told
        for owner, sample in samples.items():
            assert f"rank {owner}: sample {sample}: its labels differ" in told
        assert "first in chunk 0, tokens 0 to 15" in told
        assert "Compare with the teacher's run: --seed" in told
    # What came before is trained, this batch is not.
    assert sorted(job.iterations()) == list(range(1, start // 4 + 1))
    assert "without proof" not in job.log


def test_another_seed_stops_where_the_hash_is_ignored(workshop: Workshop) -> None:
    arguments = workshop.student_arguments(AS_DUMPED, workshop.cache("dp2", 2))
    arguments += ["--seed", "4321", *IGNORING]
    job = workshop.jobs.run("student-other-seed", arguments, ranks=2, succeeds=False)
    check_stopped(job, 0, {0: 0, 1: 1})


def test_other_tokens_under_the_same_name_stop(workshop: Workshop, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / workshop.corpus.name, seed=1)
    arguments = workshop.student_arguments(AS_DUMPED, workshop.cache("dp2", 3))
    arguments += ["--data-path", str(corpus)]
    job = workshop.jobs.run("student-other-corpus", arguments, ranks=2, succeeds=False)
    check_stopped(job, 0, {0: 0, 1: 1})


def break_seal(source: Path, target: Path) -> None:
    """Write the shard *source* to *target* with the metadata of an earlier version."""
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for number, member in enumerate(old.getmembers()):
            stream = old.extractfile(member)
            assert stream is not None
            content = stream.read()
            if number == 0:
                meta = json.loads(content)
                assert meta.pop("content")["name"] == source.name
                assert meta.pop("manifest")
                content = json.dumps(meta).encode()
            entry = tarfile.TarInfo(member.name)
            entry.size = len(content)
            new.addfile(entry, io.BytesIO(content))


def test_shards_swapped_between_ranks_stop(workshop: Workshop, tmp_path: Path) -> None:
    """As in a cache of an earlier version: a sealed shard would not even be opened."""
    cache, dumped = tmp_path / "cache", workshop.cache("dp2", 3)
    shutil.copytree(dumped, cache)
    first, second = "dp0__16-32.tar", "dp1__16-32.tar"
    break_seal(dumped / first, cache / second)
    break_seal(dumped / second, cache / first)
    arguments = [*workshop.student_arguments(AS_DUMPED, cache), *IGNORING]
    job = workshop.jobs.run("student-swapped", arguments, ranks=2, succeeds=False)
    check_stopped(job, 16, {0: 16, 1: 17})
