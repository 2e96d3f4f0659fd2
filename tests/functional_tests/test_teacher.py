# SPDX-License-Identifier: Apache-2.0
"""A dump leaves its teacher alone, can be repeated and resumed, never records random weights."""

import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.functional_tests.caches import decode, formats_of, read_cache
from tests.functional_tests.cases import (
    ASYNC_SAVE,
    DUMP_GLOBAL_BATCH,
    DUMP_ITERATIONS,
    DUMPS,
    FLUSH_INTERVAL,
    SAMPLES,
    Student,
    Workshop,
)
from tests.functional_tests.checkpoints import latest_iteration, load_weights
from tests.functional_tests.harness import (
    NO_EVALUATION,
    JobResult,
    batch,
    check_same_curves,
    curves,
)
from tests.functional_tests.oracle import check_targets, labels_key
from tests.functional_tests.recorders import load_records
from tests.functional_tests.wandb_stand_in import history

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", DUMPS)
def test_frozen_dump_leaves_the_weights_bit_identical(workshop: Workshop, name: str) -> None:
    dump = workshop.dump(name)
    if DUMPS[name].pretrained:
        teacher = load_weights(workshop.teacher, latest_iteration(workshop.teacher))
    else:
        teacher = load_weights(dump.save, FLUSH_INTERVAL)
    assert latest_iteration(dump.save) == DUMP_ITERATIONS
    dumped = load_weights(dump.save, DUMP_ITERATIONS)
    assert len(teacher) > 10
    assert set(dumped) == set(teacher)
    for key, weight in teacher.items():
        expected = weight.bfloat16() if "--bf16" in DUMPS[name].flags.split() else weight
        assert dumped[key].dtype == expected.dtype
        assert torch.equal(dumped[key], expected), f"{key} has changed"


def test_unfrozen_run_changes_the_weights(workshop: Workshop) -> None:
    """What the test above would see if nothing were frozen, here of a student."""
    student = workshop.student("as dumped")
    early, late = load_weights(student.save, 3), load_weights(student.save, 6)
    assert not any(torch.equal(early[key], late[key]) for key in early)


@pytest.mark.parametrize("name", DUMPS)
def test_shards_are_one_per_rank_and_flush(workshop: Workshop, name: str) -> None:
    dump = workshop.dump(name)
    data_parallel = 2 if name in ("dp2", "moe") else 1
    flush = FLUSH_INTERVAL * DUMP_GLOBAL_BATCH
    assert sorted(path.name for path in dump.cache.iterdir()) == sorted(
        f"dp{rank}__{start}-{start + flush}.tar"
        for rank in range(data_parallel)
        for start in range(0, SAMPLES, flush)
    )
    assert list(read_cache(dump.cache)) == [
        (f"dp{rank}", f"{start}-{start + DUMP_GLOBAL_BATCH}.pt.zst")
        for rank in range(data_parallel)
        for flush_start in sorted(range(0, SAMPLES, flush), key=str)
        for start in range(flush_start, flush_start + flush, DUMP_GLOBAL_BATCH)
    ]


STOPPED = 3
"""Iterations of a dump that is stopped: not where a batch of eight samples ends."""


def interrupted_dump(workshop: Workshop) -> tuple[Path, Path, JobResult, JobResult]:
    """Dump like "tp1", stopped in format 2 and started again in 3. Runs two jobs."""
    place = workshop.directory / "interrupted"

    def arguments(save_format: int) -> list[str]:
        case = DUMPS["tp1"].in_format(save_format)
        return workshop.dump_arguments(case, place / "cache", place / "save")

    stopped = ["--exit-interval", str(STOPPED)]
    first = workshop.jobs.run("dump-begun", [*arguments(2), *stopped], fresh=True)
    second = workshop.jobs.run("dump-continued", arguments(3), record=place / "record")
    return place / "cache", place / "record", first, second


def test_second_dump_resumes_at_its_sample_and_writes_the_same(workshop: Workshop) -> None:
    """A student whose second batch comes from both sides of the seam uses the right targets."""
    cache, record, first, second = interrupted_dump(workshop)
    assert sorted(first.iterations()) == list(range(1, STOPPED + 1))
    assert sorted(second.iterations()) == list(range(STOPPED + 1, DUMP_ITERATIONS + 1))
    seam = STOPPED * DUMP_GLOBAL_BATCH
    starts = {entry["start"] for entry in load_records(record)}
    assert starts == set(range(seam, SAMPLES, DUMP_GLOBAL_BATCH))
    before, behind = workshop.format_of(2), workshop.format_of(3)
    assert read_cache(cache, behind) == read_cache(workshop.dump("tp1").cache)
    assert formats_of(cache) == {
        f"dp0__0-{seam}.tar": before,
        f"dp0__{seam}-{seam + DUMP_GLOBAL_BATCH}.tar": behind,
        f"dp0__{seam + DUMP_GLOBAL_BATCH}-{SAMPLES}.tar": behind,
    }
    warning = f"goes on in {cache}, whose shard {cache}/dp0__0-{seam}.tar differs: "
    assert (f"{warning}version of the cache format is 2 there, 3 here." in second.log) == (
        before != behind
    )

    case = Student(dump="tp1", ranks=2, micro_batch=2, global_batch=8)
    assert seam % case.global_batch
    job = workshop.jobs.run(
        "student-over-a-seam",
        workshop.student_arguments(case, cache),
        ranks=case.ranks,
        record=cache.parent / "student-record",
    )
    assert "without proof" not in job.log
    oracle = workshop.dump("tp1").oracle
    found = check_targets(oracle, load_records(cache.parent / "student-record"))
    assert found.samples == oracle.samples
    assert found.rows == SAMPLES


def test_average_number_of_kept_entries_is_logged(workshop: Workshop) -> None:
    dump = workshop.dump("dp2")
    events = EventAccumulator(str(dump.tensorboard)).Reload()
    logged = events.Scalars("avg-logprobs-kept")
    assert len(logged) == DUMP_ITERATIONS
    records = load_records(dump.record)
    for index, scalar in enumerate(logged):
        keys = [
            labels_key(labels)
            for record in records
            if record["start"] == index * DUMP_GLOBAL_BATCH
            for labels in record["labels"]
        ]
        assert len(keys) == DUMP_GLOBAL_BATCH
        # An entry at the very edge of the nucleus may fall either way.
        assert scalar.value == pytest.approx(dump.oracle.mean_kept(keys), abs=0.02)
    lm_loss_steps = [scalar.step for scalar in events.Scalars("lm loss")]
    assert [scalar.step for scalar in logged] == lm_loss_steps


def test_nothing_is_logged_without_top_p(workshop: Workshop) -> None:
    found = curves(workshop.dump("tp1").tensorboard)
    assert "lm loss" in found
    assert "avg-logprobs-kept" not in found


@pytest.mark.parametrize("name", ["tp2", "dp2"])
def test_flushes_are_logged_for_all_ranks(workshop: Workshop, name: str) -> None:
    """Under TP the rank that writes the curves holds no entries; under DP it holds half."""
    dump = workshop.dump(name)
    found = curves(dump.tensorboard)
    flushes = range(FLUSH_INTERVAL, DUMP_ITERATIONS + 1, FLUSH_INTERVAL)
    members = read_cache(dump.cache)
    window = FLUSH_INTERVAL * DUMP_GLOBAL_BATCH
    sizes = dict.fromkeys(flushes, 0.0)
    masses: dict[int, list[torch.Tensor]] = {flush: [] for flush in flushes}
    for (_, member), payload in members.items():
        flush = (int(member.split("-")[0]) // window + 1) * FLUSH_INTERVAL
        sizes[flush] += len(payload)
        tail = decode(payload, dump.oracle.settings.save_format).tail_logprob
        assert tail is not None
        masses[flush].append(1 - tail.double().exp())
    assert found["logits-flush-bytes"] == sizes
    assert found["logits-kept-mass"] == {
        flush: pytest.approx(float(torch.cat(masses[flush], 1).mean()), rel=1e-5)
        for flush in flushes
    }
    # At least what is handed over waits, at most the window before with it.
    waiting = found["logits-waiting-bytes"]
    assert waiting[FLUSH_INTERVAL] == sizes[FLUSH_INTERVAL]
    assert sizes[DUMP_ITERATIONS] <= waiting[DUMP_ITERATIONS] <= sum(sizes.values())
    assert found.get("logits-flush-time", {}).keys() <= {DUMP_ITERATIONS}
    lines = re.findall(
        r"logits of samples (\d+) to (\d+) handed over at iteration +(\d+) \| samples: (\d+) ",
        dump.job.log,
    )
    assert [[int(number) for number in line] for line in lines] == [
        [start, start + window - 1, (start // window + 1) * FLUSH_INTERVAL, window]
        for start in range(0, SAMPLES, window)
    ]


@pytest.mark.parametrize("name", ["tp2", "dp2"])
def test_wandb_gets_the_same_curves(workshop: Workshop, name: str) -> None:
    dump = workshop.dump(name)
    assert dump.wandb is not None
    check_same_curves(
        curves(dump.tensorboard),
        history(dump.wandb),
        {
            *("logits-flush-bytes", "logits-waiting-bytes", "logits-held-bytes"),
            *("logits-flush-wait", "logits-kept-mass", "avg-logprobs-kept"),
        },
    )


def test_dump_without_its_checkpoint_stops(workshop: Workshop, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    arguments = [*workshop.common, *NO_EVALUATION, *batch(1, 4, 8), "--load", str(missing)]
    arguments += ["--save", str(tmp_path / "save"), "--save-interval", "4", *ASYNC_SAVE]
    arguments += ["--freeze-all-layers", "--logits-save-dir", str(tmp_path / "cache")]
    job = workshop.jobs.run("dump-of-nothing", arguments, succeeds=False)
    assert f"No checkpoint was found in --load {missing}" in job.log
    assert "would record random weights" in job.log
    assert not (tmp_path / "cache").exists()
    assert not job.iterations()
