# SPDX-License-Identifier: Apache-2.0
"""What a job says and does when its cache or its flags are wrong."""

import re
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from tests.functional_tests import wandb_stand_in
from tests.functional_tests.cases import DUMP_GLOBAL_BATCH, DUMP_ITERATIONS, Student, Workshop
from tests.functional_tests.harness import check_same_curves, curves
from tests.functional_tests.recorders import Record, load_records

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

DAMAGED_SHARD = "dp1__0-16.tar"
DAMAGED_MEMBER = "8-12.pt.zst"
LOST_SHARD = "dp0__16-32.tar"
AS_DUMPED = Student(dump="dp2", ranks=2)


@pytest.fixture
def damaged_cache(workshop: Workshop, tmp_path: Path, save_format: int) -> Path:
    """A cache of two DP ranks in which one member of rank 1 has a flipped bit.

    It is in what any row of the member needs: the header of format 3.
    """
    cache = tmp_path / "damaged"
    shutil.copytree(workshop.cache("dp2", save_format), cache)
    path = cache / DAMAGED_SHARD
    with tarfile.open(path) as tar:
        member = tar.getmember(DAMAGED_MEMBER)
    content = bytearray(path.read_bytes())
    content[member.offset_data + 30] ^= 0x10
    path.write_bytes(content)
    return cache


@pytest.mark.parametrize("save_format", [2])
def test_damaged_data_stops_the_student(workshop: Workshop, damaged_cache: Path) -> None:
    arguments = workshop.student_arguments(AS_DUMPED, damaged_cache)
    job = workshop.jobs.run("student-damaged", arguments, ranks=2, succeeds=False)
    # The iterations before are trained, the damaged one is not.
    assert sorted(job.iterations()) == [1, 2]
    message = job.of_rank(1)
    assert str(damaged_cache / DAMAGED_SHARD) in message
    assert DAMAGED_MEMBER in message
    assert "is damaged" in message
    # The other rank stops as well, and says whose fault it is.
    other = job.of_rank(0)
    assert "Another rank" in other
    assert "starts at sample 8" in other
    assert str(damaged_cache / DAMAGED_SHARD) in other


@pytest.mark.parametrize("save_format", [3])
def test_ignored_errors_fall_back_together_and_recover(
    workshop: Workshop, damaged_cache: Path, tmp_path: Path
) -> None:
    """One damaged member on rank 1, and a whole shard of rank 0 cut short in its last member."""
    cache = tmp_path / "cache"
    shutil.copytree(damaged_cache, cache)
    cut = cache / LOST_SHARD
    with tarfile.open(cut) as tar:
        last = tar.getmember("28-32.pt.zst")
    content = bytearray(cut.read_bytes())
    content[last.offset_data : last.offset_data + last.size] = bytes(last.size)
    cut.write_bytes(content)

    arguments = workshop.student_arguments(AS_DUMPED, cache)
    arguments += ["--logits-load-ignore-errors"]
    arguments += ["--tensorboard-dir", str(tmp_path / "tensorboard")]
    arguments += wandb_stand_in.flags(tmp_path / "wandb")
    record = tmp_path / "record"
    job = workshop.jobs.run(
        "student-ignores-errors",
        arguments,
        ranks=2,
        record=record,
        env={wandb_stand_in.VARIABLE: "1"},
    )
    without_targets = {
        (entry["start"], entry["dp_rank"])
        for entry in load_records(record)
        if "values" not in entry
    }
    assert without_targets == {(8, 0), (8, 1), (28, 0), (28, 1)}
    skipped = {3, 8}
    iterations = job.iterations()
    assert sorted(iterations) == list(range(1, DUMP_ITERATIONS + 1))
    for number, entries in iterations.items():
        # Megatron prints an entry that a step did not report as 0.
        assert (entries["logits distillation loss"] == 0) == (number in skipped), number
        trained_on = "lm loss" if number in skipped else "logits distillation loss"
        assert entries["total loss"] == entries[trained_on] > 0
    counts = re.findall(r"starts at sample (\d+).*?\((\d+) steps so far\)", job.of_rank(0))
    assert counts == [("8", "1"), ("28", "2")]
    assert str(cache / DAMAGED_SHARD) in job.log
    assert str(cut) in job.log
    found = curves(tmp_path / "tensorboard")
    check_curves(found, load_records(record), skipped)
    own = {name for name in found if name.startswith("kd-")}
    check_same_curves(found, wandb_stand_in.history(tmp_path / "wandb"), own)
    # The rank that writes the curves says the same in the log, once an iteration.
    assert len(re.findall(r"distillation at iteration +\d+ \| kd-", job.of_rank(1))) == (
        DUMP_ITERATIONS
    )
    assert "distillation at iteration" not in job.of_rank(0)


def check_curves(
    found: dict[str, dict[int, float]], records: list[Record], skipped: set[int]
) -> None:
    """The curves are those of the last rank, over the targets that it was trained on."""
    everywhere = set(range(1, DUMP_ITERATIONS + 1))
    assert found["lm loss"].keys() == everywhere
    assert found["kd-skipped-steps"] == {
        number: len([one for one in skipped if one <= number]) for number in everywhere
    }
    assert found["kd-tokens-with-targets"] == {
        number: float(number not in skipped) for number in everywhere
    }
    assert found["kd-loader-wait"].keys() == everywhere
    assert all(0 <= seconds < 60 for seconds in found["kd-loader-wait"].values())
    for name, mass_of in (
        (
            "kd-teacher-mass-kept",
            lambda record: (record["values"].double().exp() * (record["values"] != -1000)).sum(-1),
        ),
        ("kd-teacher-tail-mass", lambda record: record["tail"].double().exp()),
    ):
        assert found[name].keys() == everywhere - skipped
        for number, mean in found[name].items():
            masses = [
                mass_of(record)
                for record in records
                if record["start"] == (number - 1) * DUMP_GLOBAL_BATCH and record["dp_rank"] == 1
            ]
            assert len(masses) == DUMP_GLOBAL_BATCH // 2
            assert mean == pytest.approx(float(torch.cat(masses).mean()), rel=1e-5), (name, number)
    kept, tail = found["kd-teacher-mass-kept"], found["kd-teacher-tail-mass"]
    assert all(kept[number] + tail[number] == pytest.approx(1, abs=2e-3) for number in kept)


@pytest.mark.parametrize("save_format", [2])
def test_too_many_ignored_errors_stop_all_ranks(workshop: Workshop, damaged_cache: Path) -> None:
    """The lost member has 2 of 20 samples: over the limit, which is judged from step 20 on."""
    case = Student(dump="dp2", ranks=2, flags="--tensor-model-parallel-size 2", global_batch=1)
    arguments = [*workshop.student_arguments(case, damaged_cache), "--logits-load-ignore-errors"]
    job = workshop.jobs.run("student-loses-too-many", arguments, ranks=2, succeeds=False)
    assert sorted(job.iterations()) == list(range(1, 20))
    for rank in range(2):
        said = job.of_rank(rank)
        for part in (
            "TeacherDataError: Stopped at the batch from sample 19 on",
            "2 of the 20 iterations of this job had no teacher targets (10.0%)",
            "--logits-load-max-skipped-share is 0.05",
        ):
            assert part in said


def test_cache_of_another_run_stops_the_student(workshop: Workshop) -> None:
    cache = workshop.cache("dp2", 3)
    arguments = workshop.student_arguments(AS_DUMPED, cache)
    # Errors are ignored, another run's data is not.
    arguments += ["--seed", "4321", "--logits-load-ignore-errors"]
    job = workshop.jobs.run("student-of-another-run", arguments, ranks=2, succeeds=False)
    assert not job.iterations()
    for part in ("CacheIdentityError", str(cache), "its seed is 1234, here it is 4321"):
        assert part in job.log
    assert "train_samples is" not in job.log


def test_ignored_hash_accepts_the_same_data_under_another_name(
    workshop: Workshop, tmp_path: Path
) -> None:
    arguments = workshop.student_arguments(AS_DUMPED, workshop.dump("dp2").cache)
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{workshop.corpus}{suffix}", tmp_path / f"renamed{suffix}")
    arguments += ["--data-path", str(tmp_path / "renamed"), "--exit-interval", "2"]
    job = workshop.jobs.run("student-renamed", arguments, ranks=2, succeeds=False)
    assert "its blend is" in job.log
    job = workshop.jobs.run(
        "student-ignores-hash", [*arguments, "--logits-load-ignore-hash"], ranks=2
    )
    assert len(job.series("logits distillation loss")) == 2
    assert "without proof" not in job.log


def test_refused_flags_stop_a_dump_before_it_is_built(workshop: Workshop, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    arguments = [*workshop.common, "--micro-batch-size", "1", "--global-batch-size", "8"]
    arguments += ["--train-samples", "32", "--rampup-batch-size", "4", "4", "16"]
    arguments += ["--logits-save-dir", str(cache), "--logits-save-top-p", "1.5"]
    job = workshop.jobs.run("dump-refused", arguments, succeeds=False)
    for part in (
        "ValueError: Logits distillation cannot run like this:",
        "add --async-save, --use-persistent-ckpt-worker, --save DIR, --save-interval N",
        "--logits-save-top-p is 1.5",
        "--rampup-batch-size is not supported",
    ):
        assert part in job.log
    assert not cache.exists()
    assert "building" not in job.log


def test_unreadable_cache_stops_a_student_before_it_is_built(
    workshop: Workshop, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    arguments = workshop.student_arguments(AS_DUMPED, missing)
    job = workshop.jobs.run("student-of-nothing", arguments, succeeds=False)
    assert f"--logits-load-dir {missing} cannot be read" in job.log
    assert "building" not in job.log
