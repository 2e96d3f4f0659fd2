# SPDX-License-Identifier: Apache-2.0
"""Every row of targets that a student used is what the dumping model's own logits say."""

import math
from collections.abc import Callable

import pytest
import torch

from tests.functional_tests.cases import DUMPS, SAMPLES, STUDENTS, Workshop
from tests.functional_tests.oracle import check_targets, distillation_losses
from tests.functional_tests.recorders import load_records

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", STUDENTS)
def test_every_target_equals_the_oracle(
    workshop: Workshop, table_row: Callable[[str], None], name: str
) -> None:
    case = STUDENTS[name]
    dump = workshop.dump(case.dump)
    student = workshop.student(name)
    found = check_targets(dump.oracle, student.records)
    assert found.samples == dump.oracle.samples
    tensor_parallel = len({record["tp_rank"] for record in student.records})
    assert found.rows == SAMPLES * tensor_parallel
    assert len(found.samples) == SAMPLES
    settings = dump.oracle.settings
    dtype = "8 bit" if settings.eight_bit else settings.dtype
    stored = f"{dtype:5} v{settings.save_format}"
    nucleus = "" if settings.p is None else f" p={settings.p:g}"
    table_row(
        f"dump {case.dump:4} k={settings.k:<3}{nucleus:7} {stored}  student {name:20} "
        f"MBS{case.micro_batch} GBS{case.global_batch} x{case.ranks}: {found.rows:3} rows, "
        f"{found.entries:6} entries equal ({found.tied} tied), errors beyond rounding: values "
        f"{max(found.value_error, 0.0):.1e}, tail {found.tail_error:.1e}"
    )


@pytest.mark.parametrize("name", STUDENTS)
def test_logged_losses_are_those_of_the_oracle(workshop: Workshop, name: str) -> None:
    """In float64 from the student's own logits, and mixed as documented."""
    case = STUDENTS[name]
    student = workshop.student(name)
    logged = student.job.series("logits distillation loss")
    expected = distillation_losses(student.records)
    # Numbers are printed with seven digits. Terms of order 1 cancel in a loss that is near 0.
    assert logged == pytest.approx(expected, rel=3e-6, abs=1e-7)

    language_model = student.job.series("lm loss")
    total = student.job.series("total loss")
    for kd_loss, lm_loss, mixed in zip(logged, language_model, total, strict=True):
        assert mixed == pytest.approx(case.alpha * kd_loss + (1 - case.alpha) * lm_loss, rel=3e-6)
    assert all(math.isfinite(loss) for loss in total)


def test_students_of_padded_vocabulary_are_checked(workshop: Workshop) -> None:
    """The oracle would not notice padding whose logits were too small to matter."""
    records = load_records(workshop.dump("tp1").record)
    real, padding = 95, slice(95, None)
    logits = torch.cat([record["logits"] for record in records], dim=1).double()
    mass = torch.softmax(logits, dim=-1)[..., padding].sum(-1)
    assert logits.size(-1) > real
    assert mass.max() > 1e-4


def test_multi_token_heads_are_not_what_is_recorded(workshop: Workshop) -> None:
    """The model returns, without a loss, the logits of its main head: those were dumped."""
    records = load_records(workshop.dump("mtp").record)
    assert len(records) == SAMPLES // DUMPS["mtp"].micro_batch
    for record in records:
        torch.testing.assert_close(record["logits"], record["returned_logits"], rtol=0, atol=1e-6)
