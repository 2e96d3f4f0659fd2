# SPDX-License-Identifier: Apache-2.0
"""A student's losses: the same in every layout, after a restart, in evaluation, at every alpha."""

import re

import pytest

from tests.functional_tests.cases import (
    DUMP_ITERATIONS,
    SAME_LOSS,
    SAMPLES,
    STUDENTS,
    Workshop,
)
from tests.functional_tests.harness import NO_EVALUATION

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

LOSSES = ("lm loss", "logits distillation loss", "total loss")
VALIDATION = re.compile(r"validation loss at .*")


@pytest.mark.parametrize("name", SAME_LOSS[1:])
def test_same_global_batch_gives_the_same_loss(workshop: Workshop, name: str) -> None:
    reference = workshop.student(SAME_LOSS[0]).job
    other = workshop.student(name).job
    for loss in LOSSES:
        assert len(other.series(loss)) == DUMP_ITERATIONS
        assert other.series(loss) == pytest.approx(reference.series(loss), rel=1e-5)


@pytest.mark.parametrize(
    ("iteration", "ranks", "flags"),
    [(3, 2, ""), (6, 2, "--tensor-model-parallel-size 2")],
    ids=["at 3 with DP2", "at 6 with TP2"],
)
def test_resumed_student_finds_its_place(
    workshop: Workshop, iteration: int, ranks: int, flags: str
) -> None:
    """The rest of an uninterrupted run, from one of its checkpoints and in another layout."""
    whole = workshop.student("as dumped")
    case = STUDENTS["as dumped"]
    arguments = [*workshop.common, *NO_EVALUATION, *case.batch, *flags.split()]
    arguments += ["--logits-load-dir", str(workshop.dump(case.dump).cache)]
    arguments += ["--logits-load-kd-loss-alpha", str(case.alpha)]
    arguments += ["--load", str(whole.save), "--ckpt-step", str(iteration)]
    job = workshop.jobs.run(f"student-resumed-at-{iteration}", arguments, ranks=ranks)
    assert sorted(job.iterations()) == list(range(iteration + 1, DUMP_ITERATIONS + 1))
    for loss in LOSSES:
        rest = whole.job.series(loss)[iteration:]
        assert job.series(loss) == pytest.approx(rest, rel=1e-5)


def test_evaluation_reports_the_language_model_loss_only(workshop: Workshop) -> None:
    lines = VALIDATION.findall(workshop.student("as dumped").job.log)
    assert len(lines) >= 2
    for line in lines:
        assert "lm loss value:" in line
        assert "distillation" not in line
        assert "total loss" not in line


def test_alpha_0_trains_like_a_run_without_distillation(workshop: Workshop) -> None:
    distilled = STUDENTS["GBS2"]
    assert distilled.alpha == 0.0
    arguments = [*workshop.common, *NO_EVALUATION, *distilled.batch]
    plain = workshop.jobs.run("plain-GBS2", arguments)
    assert len(plain.series("lm loss")) == SAMPLES // distilled.global_batch
    # The same to rounding: the LM loss comes from the pass of the divergence.
    assert workshop.student("GBS2").job.series("lm loss") == pytest.approx(
        plain.series("lm loss"), rel=1e-6
    )
    assert workshop.student("GBS2").job.series("grad norm") == plain.series("grad norm")
    assert not any(
        "distillation" in name for entries in plain.iterations().values() for name in entries
    )


def test_alpha_1_trains_on_the_targets(workshop: Workshop) -> None:
    """The distillation loss falls, and the run differs from one on the LM loss."""
    student = workshop.student("pp2 TP2 MBS4").job
    losses = student.series("logits distillation loss")
    assert losses[-1] < 0.9 * losses[0]
    assert student.series("total loss") == losses
