# SPDX-License-Identifier: Apache-2.0
"""Students whose batches are not what the teacher saw: each stops, and says which sample differs.

``tests/unit_tests/training/distillation/test_misalignment.py`` has the other ways to get there.
"""

import io
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.functional_tests.cases import DUMPS, Student, Workshop
from tests.functional_tests.corpus import write_corpus
from tests.functional_tests.harness import JobResult, batch
from tests.functional_tests.oracle import check_targets
from tests.functional_tests.recorders import load_records

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


@pytest.mark.parametrize("change", [{"seed": 1}, {"shift": 1}], ids=["other", "shifted by one"])
def test_other_tokens_under_the_same_name_stop(
    workshop: Workshop, tmp_path: Path, change: dict[str, int]
) -> None:
    corpus = write_corpus(tmp_path / workshop.corpus.name, **change)
    arguments = workshop.student_arguments(AS_DUMPED, workshop.cache("dp2", 3))
    arguments += ["--data-path", str(corpus)]
    name = f"student-corpus-{'-'.join(change)}"
    job = workshop.jobs.run(name, arguments, ranks=2, succeeds=False)
    check_stopped(job, 0, {0: 0, 1: 1})


OTHER_RUNS = {
    # Megatron makes no blend without samples for evaluation.
    "blend": (
        "--data-path 0.5 {corpus} 0.5 {corpus} --eval-iters 1",
        r"its blend is .*, here it is .*\[0\.5,\"corpus\"\],\[0\.5,\"corpus\"\]",
    ),
    "number of samples": ("--train-iters 9", "its train_samples is 32, here it is 36"),
    "tokenizer": (
        "--vocab-size 94",
        "its vocab_size is 95, here it is 94; its tokenizer is .*, here it is ",
    ),
    "split": ("--split 50,50,0", 'its split is "80,20,0", here it is "50,50,0"'),
    "longer sequences": (
        "--seq-length 32 --max-position-embeddings 32",
        "its sequence_length is 16, here it is 32",
    ),
    "shorter sequences": ("--seq-length 8", "the student's 8: .* nothing would prove that"),
    "sampler": ("--dataloader-type cyclic", "--dataloader-type cyclic is not supported"),
}


@pytest.mark.parametrize("change", OTHER_RUNS)
def test_another_run_is_stopped_by_name(workshop: Workshop, change: str) -> None:
    flags, named = OTHER_RUNS[change]
    arguments = workshop.student_arguments(AS_DUMPED, workshop.cache("dp2", 3))
    arguments += [*flags.format(corpus=workshop.corpus).split(), "--logits-load-ignore-errors"]
    name = f"student-other-{change.replace(' ', '-')}"
    job = workshop.jobs.run(name, arguments, ranks=2, succeeds=False)
    assert re.search(named, job.log), job.tail()
    assert not job.iterations()


def test_batch_size_that_changes_on_resume(workshop: Workshop, tmp_path: Path) -> None:
    """A dump stops; a student goes on, at a sample where no batch of the teacher begins or ends."""
    arguments = workshop.dump_arguments(DUMPS["tp1"], tmp_path / "cache", tmp_path / "save")
    workshop.jobs.run("dump-of-fours", [*arguments, "--exit-interval", "4"])
    arguments += batch(1, 8, 4)
    job = workshop.jobs.run("dump-of-eights", arguments, succeeds=False)
    assert f"The dump cannot start in {tmp_path / 'cache'}" in job.log
    assert "--global-batch-size is 4 there, 8 here" in job.log

    def student(global_batch: int) -> list[str]:
        case = Student(dump="tp1", global_batch=global_batch)
        arguments = workshop.student_arguments(case, workshop.cache("tp1", 2))
        save = str(tmp_path / "student")
        return [*arguments, "--load", save, "--save", save, "--save-interval", "1000"]

    workshop.jobs.run("student-of-twos", [*student(2), "--exit-interval", "7"])
    # Megatron counts iterations on: this is the eighth of eight.
    job = workshop.jobs.run("student-of-fours", student(4), record=tmp_path / "record")
    (start,) = {record["start"] for record in load_records(tmp_path / "record")}
    assert start == 14
    assert check_targets(workshop.dump("tp1").oracle, load_records(tmp_path / "record")).rows == 4
    assert "without proof" not in job.log


def test_shard_of_another_dump_is_named(workshop: Workshop, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(workshop.cache("dp2", 2), cache)
    shutil.copy(workshop.cache("tp1", 3) / "dp0__16-32.tar", cache)
    arguments = [*workshop.student_arguments(AS_DUMPED, cache), "--logits-load-ignore-errors"]
    job = workshop.jobs.run("student-mixed", arguments, ranks=2, succeeds=False)
    assert re.search(rf"MixedCacheError: .*{cache}.*belongs to another dump than {cache}/", job.log)
    assert re.search("its k is (12, there it is 60|60, there it is 12)", job.log)


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
    """As in a cache of an earlier version."""
    cache, dumped = tmp_path / "cache", workshop.cache("dp2", 3)
    shutil.copytree(dumped, cache)
    first, second = "dp0__16-32.tar", "dp1__16-32.tar"
    break_seal(dumped / first, cache / second)
    break_seal(dumped / second, cache / first)
    arguments = [*workshop.student_arguments(AS_DUMPED, cache), *IGNORING]
    job = workshop.jobs.run("student-swapped", arguments, ranks=2, succeeds=False)
    check_stopped(job, 16, {0: 16, 1: 17})


def test_sealed_shard_of_another_rank_is_not_opened(workshop: Workshop, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(workshop.cache("dp2", 2), cache)
    first, second = cache / "dp0__0-16.tar", cache / "dp1__0-16.tar"
    first.replace(tmp_path / "first")
    second.replace(first)
    (tmp_path / "first").replace(second)
    arguments = workshop.student_arguments(AS_DUMPED, cache)
    job = workshop.jobs.run("student-swapped-sealed", arguments, ranks=2, succeeds=False)
    assert not job.iterations()
    assert re.search(rf"CacheFormatError: .*{cache}/dp[01]__0-16.tar", job.log)
    assert re.search("dp0__0-16.tar.* dp1__0-16.tar|dp1__0-16.tar.* dp0__0-16.tar", job.log)
