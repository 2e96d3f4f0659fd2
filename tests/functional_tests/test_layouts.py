# SPDX-License-Identifier: Apache-2.0
"""Ranks of a group act alike, and what must not change a dump's or a student's numbers does not."""

from pathlib import Path

import pytest

from tests.functional_tests.caches import read_cache
from tests.functional_tests.cases import (
    DUMP_ITERATIONS,
    DUMPS,
    FLUSH_INTERVAL,
    RECOMPUTE,
    SAMPLES,
    STUDENTS,
    Student,
    Workshop,
)
from tests.functional_tests.recorders import Calls, load_calls

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

REPLAYED = [
    *("--rerun-mode", "validate_results", "--no-check-for-nan-in-loss-and-grad"),
    *("--check-for-spiky-loss", "--error-injection-rate", "1"),
    *("--error-injection-type", "transient_error"),
]
"""An error injected into every step, from the second on, has the rerun state machine replay it."""
REPLAYS = "Need to rerun step to check reproducibility of initial result"


def check_collectives(calls: dict[int, Calls]) -> None:
    """Every rank of a group has taken part in every collective over it, as often as the others."""
    keys = {key for rank in calls.values() for key in rank.collectives}
    assert keys
    for key in keys:
        group = [int(rank) for rank in key.split()[1].split(",")]
        counts = {rank: calls[rank].collectives.get(key, 0) for rank in group}
        assert len(set(counts.values())) == 1, f"{key}: {counts}"


@pytest.mark.parametrize("name", DUMPS)
def test_ranks_of_a_dump_queue_and_communicate_alike(workshop: Workshop, name: str) -> None:
    calls = load_calls(workshop.dump(name).record)
    assert sorted(calls) == list(range(DUMPS[name].ranks))
    # A checkpoint and a shard per flush, also where a stage has no output layer.
    flushes = DUMP_ITERATIONS // FLUSH_INTERVAL
    assert {rank.async_requests for rank in calls.values()} == {2 * flushes}
    check_collectives(calls)


@pytest.mark.parametrize("name", STUDENTS)
def test_ranks_of_a_student_communicate_alike(workshop: Workshop, name: str) -> None:
    calls = load_calls(workshop.student(name).record)
    assert sorted(calls) == list(range(STUDENTS[name].ranks))
    check_collectives(calls)


@pytest.mark.parametrize("name", STUDENTS)
def test_targets_of_a_student_are_proven(workshop: Workshop, name: str) -> None:
    """It has gone through, and no rank lacked fingerprints or labels."""
    job = workshop.student(name).job
    assert len(job.iterations()) == SAMPLES // STUDENTS[name].global_batch
    assert "without proof" not in job.log


@pytest.mark.parametrize("flags", [REPLAYED, RECOMPUTE.split()], ids=["replayed", "recomputed"])
def test_dump_that_computes_twice_records_once(
    workshop: Workshop, tmp_path: Path, request: pytest.FixtureRequest, flags: list[str]
) -> None:
    """Each step replayed by the rerun state machine, or its activations computed again."""
    cache = tmp_path / "cache"
    arguments = workshop.dump_arguments(DUMPS["tp1"], cache, tmp_path / "save")
    kind = request.node.callspec.id
    job = workshop.jobs.run(f"dump-{kind}", [*arguments, *flags])
    assert sorted(job.iterations()) == list(range(1, DUMP_ITERATIONS + 1))
    assert job.log.count(REPLAYS) == (DUMP_ITERATIONS - 1 if kind == "replayed" else 0)
    assert read_cache(cache) == read_cache(workshop.dump("tp1").cache)


def test_replayed_student_sees_the_same_targets_again(workshop: Workshop) -> None:
    case = STUDENTS["MBS2"]
    arguments = workshop.student_arguments(
        Student(dump=case.dump, micro_batch=case.micro_batch, alpha=case.alpha),
        workshop.dump(case.dump).cache,
    )
    job = workshop.jobs.run("student-replayed", [*arguments, *REPLAYED])
    assert job.log.count(REPLAYS) == DUMP_ITERATIONS - 1
    plain = workshop.student("MBS2").job
    for loss in ("lm loss", "logits distillation loss", "total loss", "grad norm"):
        assert len(job.series(loss)) == DUMP_ITERATIONS
        assert job.series(loss) == plain.series(loss)
