# SPDX-License-Identifier: Apache-2.0
"""A teacher with more ids than format 2 can store is dumped and distilled all the same."""

from pathlib import Path

import pytest
import torch

from tests.functional_tests.caches import formats_of
from tests.functional_tests.cases import DUMP_GLOBAL_BATCH, Dump, Student, Workshop
from tests.functional_tests.harness import batch
from tests.functional_tests.oracle import DumpOracle, DumpSettings, check_targets
from tests.functional_tests.recorders import load_records

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

VOCAB, PADDED = 140_000, 140_032
ITERATIONS = 2
MODEL = f"--vocab-size {VOCAB} --num-layers 1 --hidden-size 16"
# Random weights: the distribution is flat, so that ids come from everywhere and values tie.
CASE = Dump(
    settings=DumpSettings(k=9, save_format=3, vocab_size=VOCAB), flags=MODEL, pretrained=False
)


def test_format_3_is_chosen_and_keeps_every_id(workshop: Workshop, tmp_path: Path) -> None:
    cache, record = tmp_path / "cache", tmp_path / "record"
    arguments = workshop.dump_arguments(
        CASE, cache, tmp_path / "save", iterations=ITERATIONS, save_interval=ITERATIONS
    )
    arguments += ["--logits-save-format", "auto"]
    job = workshop.jobs.run("dump-large-vocabulary", arguments, record=record)
    assert f"the padded vocabulary of {PADDED} entries needs ids of more than 17 bits" in job.log
    assert set(formats_of(cache).values()) == {3}

    case = Student(dump="", ranks=2, micro_batch=2, flags=MODEL)
    student = tmp_path / "student"
    arguments = workshop.student_arguments(case, cache)
    arguments += batch(case.micro_batch, case.global_batch, ITERATIONS)
    workshop.jobs.run("student-large-vocabulary", arguments, ranks=case.ranks, record=student)
    records, oracle = load_records(student), DumpOracle(record, CASE.settings)
    found = check_targets(oracle, records)
    assert found.samples == oracle.samples
    assert found.rows == ITERATIONS * DUMP_GLOBAL_BATCH
    ids = torch.cat([part["indices"].flatten() for part in records])
    for lowest, highest in ((0, 1 << 16), (1 << 16, 1 << 17), (1 << 17, VOCAB)):
        assert ((ids >= lowest) & (ids < highest)).any()
