# SPDX-License-Identifier: Apache-2.0
"""Hybrid models, of Mamba, attention and MLP layers, dump and distil like GPT models do.

They run ``pretrain_hybrid.py``'s start-up with Mamba's kernels and Transformer Engine's modules
replaced by parts in plain torch.
"""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.functional_tests.cases import (
    DUMP_ITERATIONS,
    SAMPLES,
    Dump,
    DumpRun,
    Student,
    StudentRun,
    Workshop,
)
from tests.functional_tests.checkpoints import latest_iteration, load_weights
from tests.functional_tests.harness import NO_EVALUATION, batch
from tests.functional_tests.oracle import (
    DumpOracle,
    DumpSettings,
    check_targets,
    distillation_losses,
)
from tests.functional_tests.recorders import load_records

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).resolve().parent / "pretrain_hybrid_recorded.py"
PATTERN = "--hybrid-layer-pattern"
HYBRID = shlex.split(
    "--spec tests.functional_tests.parts.hybrid_spec local_hybrid_stack_spec "
    "--mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8"
)
# muP scales the logits after the output layer, here by a quarter.
MUP = "--use-mup --mup-base-hidden-size 8"
TEACHER = f"{PATTERN} M*-M {MUP}"


@dataclass(frozen=True, kw_only=True)
class HybridStudent:
    """A hybrid student of the hybrid dump, or of a dump of a GPT teacher."""

    case: Student
    gpt_dump: str | None = None


# A hybrid model has the heads of multi-token prediction that its pattern names: here none, whatever
# --mtp-num-layers says.
DUMP = Dump(
    settings=DumpSettings(k=24, p=0.5, min_k=2, save_format=3),
    ranks=2,
    flags=f"{TEACHER} --mtp-num-layers 1 --tensor-model-parallel-size 2 --sequence-parallel",
)
STUDENTS = {
    # The head of multi-token prediction passes the output layer first. The other path through
    # the Mamba mixer convolves and gates by itself.
    "MTP1": HybridStudent(
        case=Student(
            dump="hybrid",
            flags=f"{PATTERN} M*M/M {MUP} --disable-mamba-mem-eff-path",
            micro_batch=2,
            global_batch=8,
        )
    ),
    "PP2": HybridStudent(
        case=Student(
            dump="hybrid",
            ranks=2,
            flags=f"{PATTERN} M*|-M --pipeline-model-parallel-size 2",
            micro_batch=2,
            alpha=0.5,
        )
    ),
    "of GPT DP2": HybridStudent(
        case=Student(dump="dp2", ranks=2, flags=f"{PATTERN} M-M*", alpha=0.25), gpt_dump="dp2"
    ),
}


class HybridWorkshop(Workshop):
    """Makes the hybrid teacher, its dump and the students, once each."""

    def __init__(self, gpt: Workshop) -> None:
        super().__init__(gpt.jobs, gpt.only_format)
        self.gpt = gpt
        self.directory = gpt.directory / "hybrid"

    @property
    def common(self) -> list[str]:
        return [*self.gpt.common, *HYBRID]

    def dump(self, name: str) -> DumpRun:
        if name == "hybrid":
            return super().dump(name)
        return self.gpt.dump(name)

    def _make_teacher(self) -> Path:
        save = self.directory / "teacher"
        arguments = [*self.common, *NO_EVALUATION, *batch(8, 8, 40), *TEACHER.split()]
        arguments += ["--save", str(save), "--save-interval", "40"]
        self.jobs.run("hybrid-teacher", arguments, script=SCRIPT, fresh=True)
        return save

    def _make_dump(self, name: str) -> DumpRun:
        place = self.directory / "dump"
        cache, save, record = place / "cache", place / "save", place / "record"
        case = DUMP.in_format(self.format_of(DUMP.settings.save_format))
        arguments = self.dump_arguments(case, cache, save)
        job = self.jobs.run(
            "hybrid-dump",
            arguments,
            ranks=DUMP.ranks,
            script=SCRIPT,
            record=record,
            fresh=True,
        )
        return DumpRun(
            job=job,
            cache=cache,
            save=save,
            record=record,
            oracle=DumpOracle(record, case.settings),
            tensorboard=place / "tensorboard",
        )

    def _make_student(self, name: str) -> StudentRun:
        case = STUDENTS[name].case
        place = self.directory / ("student-" + name.replace(" ", "-"))
        record = place / "record"
        arguments = self.student_arguments(case, self.dump(case.dump).cache)
        job = self.jobs.run(
            f"hybrid-{place.name}",
            arguments,
            ranks=case.ranks,
            script=SCRIPT,
            record=record,
            fresh=True,
        )
        return StudentRun(job=job, save=place / "save", record=record, records=load_records(record))


@pytest.fixture(scope="module")
def hybrid(workshop: Workshop) -> HybridWorkshop:
    return HybridWorkshop(workshop)


def test_frozen_hybrid_dump_leaves_the_weights_bit_identical(hybrid: HybridWorkshop) -> None:
    """The teacher was trained at TP 1 and dumped at TP 2, so its Mamba layers were resharded."""
    dump = hybrid.dump("hybrid")
    teacher = load_weights(hybrid.teacher, latest_iteration(hybrid.teacher))
    assert latest_iteration(dump.save) == DUMP_ITERATIONS
    dumped = load_weights(dump.save, DUMP_ITERATIONS)
    assert set(dumped) == set(teacher)
    for part in ("mixer.A_log", "mixer.dt_bias", "mixer.norm.weight", "final_norm.weight"):
        assert any(name.endswith(part) for name in teacher), part
    for name, weight in teacher.items():
        assert weight.equal(dumped[name]), f"{name} has changed"


@pytest.mark.parametrize("name", STUDENTS)
def test_every_target_of_a_hybrid_student_equals_the_oracle(
    hybrid: HybridWorkshop, table_row: Callable[[str], None], name: str
) -> None:
    case = STUDENTS[name].case
    dump = hybrid.dump(case.dump)
    student = hybrid.student(name)
    found = check_targets(dump.oracle, student.records)
    assert found.samples == dump.oracle.samples
    assert found.rows == len(found.samples) == SAMPLES
    settings = dump.oracle.settings
    every = found.tokens * settings.k
    assert found.entries == every if settings.p is None else found.entries < every
    nucleus = "" if settings.p is None else f" p={settings.p:g}"
    stored = f"{settings.dtype} v{settings.save_format}"
    table_row(
        f"dump {case.dump:6} k={settings.k:<2}{nucleus:6} {stored}  hybrid student "
        f"{name:10} MBS{case.micro_batch} GBS{case.global_batch} x{case.ranks}: {found.rows:3} "
        f"rows, {found.entries:6} entries equal ({found.tied} tied), errors beyond rounding: "
        f"values {max(found.value_error, 0.0):.1e}, tail {found.tail_error:.1e}"
    )


@pytest.mark.parametrize("name", STUDENTS)
def test_losses_of_a_hybrid_student_are_those_of_the_oracle(
    hybrid: HybridWorkshop, name: str
) -> None:
    case = STUDENTS[name].case
    student = hybrid.student(name)
    logged = student.job.series("logits distillation loss")
    assert len(logged) == SAMPLES // case.global_batch
    assert logged == pytest.approx(distillation_losses(student.records), rel=3e-6)
    language_model = student.job.series("lm loss")
    total = student.job.series("total loss")
    for kd_loss, lm_loss, mixed in zip(logged, language_model, total, strict=True):
        assert mixed == pytest.approx(case.alpha * kd_loss + (1 - case.alpha) * lm_loss, rel=3e-6)
    assert all(math.isfinite(loss) for loss in total)
