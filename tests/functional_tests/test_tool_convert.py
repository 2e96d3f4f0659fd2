# SPDX-License-Identifier: Apache-2.0
"""A converted cache trains a student on what a dump with its K, P and layout would have held."""

from pathlib import Path

import pytest

from tests.functional_tests.cases import SAMPLES, Student, Workshop
from tests.functional_tests.oracle import DumpOracle, DumpSettings, check_targets
from tests.functional_tests.recorders import load_records
from tools import logits_cache

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]


def test_a_student_of_a_converted_cache(workshop: Workshop, tmp_path: Path) -> None:
    """The dump has all entries in fp32, so that the oracle of another dump applies."""
    dump = workshop.dump("pp2")
    flags = "--top-k 12 --top-p 0.8 --top-p-min-k 2 --dtype fp16 --format 3 --jobs 1"
    flags += " --data-parallel-size 2 --micro-batch-size 2 --global-batch-size 8"
    cache = tmp_path / "cache"
    assert logits_cache.main(["convert", str(dump.cache), str(cache), *flags.split()]) == 0
    assert {path.name.partition("__")[0] for path in cache.iterdir()} == {"dp0", "dp1"}

    case = Student(dump="pp2", ranks=2, micro_batch=2, global_batch=8)
    record = tmp_path / "record"
    arguments = workshop.student_arguments(case, cache)
    job = workshop.jobs.run("student-converted", arguments, ranks=case.ranks, record=record)
    settings = DumpSettings(k=12, p=0.8, min_k=2, dtype="fp16", save_format=3)
    oracle = DumpOracle(dump.record, settings)
    found = check_targets(oracle, load_records(record))
    assert found.samples == oracle.samples
    assert found.rows == SAMPLES
    assert "are used without proof" not in job.log
