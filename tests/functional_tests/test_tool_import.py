# SPDX-License-Identifier: Apache-2.0
"""A cache imported from a server's answers is the one that a real dump of the same model wrote.

The server is made up: it answers with the float64 log-probabilities of the teacher that dumped.
"""

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.distillation.packed_rows import TeacherRows
from tests.functional_tests.caches import decode, formats_of, read_cache
from tests.functional_tests.cases import DUMPS, SAMPLES, Student, Workshop
from tests.functional_tests.harness import SEQ_LENGTH
from tests.functional_tests.launcher import REPOSITORY_ROOT
from tests.functional_tests.oracle import (
    MASKED,
    Comparison,
    DumpOracle,
    check_targets,
    distillation_losses,
)
from tests.functional_tests.recorders import load_records
from tests.unit_tests.tools.server_answers import sglang, vllm_completion

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

SERVERS = {"tp1": vllm_completion, "dp2": sglang}
"""What answers for the teacher of each dump; one has top-P, two DP ranks, and the other format."""


def tool(verb: str, place: Path, *options: str, megatron: list[str]) -> str:
    """Run a verb as a user does; return what it prints."""
    command = [sys.executable, "-m", "tools.logits_cache", verb, str(place), *options]
    done = subprocess.run(
        [*command, "--", *megatron], cwd=REPOSITORY_ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def answer(
    prompts: Path, answers: Path, oracle: DumpOracle, server: Callable[..., Any], k: int
) -> None:
    """Write what a server answers, the last prompt first."""
    lines = []
    for line in reversed(prompts.read_text().splitlines()):
        tokens = json.loads(line)["prompt_token_ids"]
        distributions = oracle.logprobs(torch.tensor(tokens[1:])).tolist()
        lines.append(json.dumps(server(tokens, distributions, k)))
    answers.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def imported(workshop: Workshop) -> Callable[[str], Path]:
    """Import what the teacher of a dump says, with the dump's own command line, once each."""
    place = workshop.directory / "imported"
    place.mkdir()
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name in made:
            return made[name]
        case, run = DUMPS[name], workshop.dump(name)
        megatron = workshop.dump_arguments(case, run.cache, run.save)
        prompts, answers, cache = (place / f"{name}{end}" for end in (".prompts", ".jsonl", ""))
        said = tool("prompts", prompts, megatron=megatron)
        assert f"{SAMPLES} prompts of {SEQ_LENGTH + 1} tokens for {SAMPLES} samples" in said
        answer(prompts, answers, run.oracle, SERVERS[name], case.settings.k)
        ranks = ["--data-parallel-size", str(case.ranks)]
        tool("import", cache, "--jsonl", str(answers), *ranks, megatron=megatron)
        made[name] = cache
        return cache

    return make


def meta_of(path: Path) -> dict[str, Any]:
    """Return a shard's metadata without what it says of its own payloads."""
    with tarfile.open(path) as tar:
        stream = tar.extractfile("_meta.json")
        assert stream is not None
        meta: dict[str, Any] = json.load(stream)
    assert meta.pop("content")["name"] == path.name
    return meta


def rows_of(cache: Path) -> dict[tuple[str, str], TeacherRows]:
    version = next(iter(formats_of(cache).values()))
    return {place: decode(payload, version) for place, payload in read_cache(cache).items()}


@pytest.mark.parametrize("name", SERVERS)
def test_shards_are_those_of_a_dump(
    workshop: Workshop, imported: Callable[[str], Path], name: str
) -> None:
    """Names, members and metadata are equal, and so is the proof of content."""
    dumped, cache = workshop.dump(name).cache, imported(name)
    names = [path.name for path in sorted(dumped.glob("*.tar"))]
    assert [path.name for path in sorted(cache.iterdir())] == names
    for shard in names:
        assert meta_of(cache / shard) == meta_of(dumped / shard)
    ours, theirs = rows_of(cache), rows_of(dumped)
    assert ours.keys() == theirs.keys()
    for place, rows in ours.items():
        assert rows.label_fingerprints is not None
        assert theirs[place].label_fingerprints is not None
        assert torch.equal(rows.label_fingerprints, theirs[place].label_fingerprints)


@pytest.mark.parametrize("name", SERVERS)
def test_entries_are_those_of_a_dump(
    workshop: Workshop, imported: Callable[[str], Path], name: str
) -> None:
    """Values differ by the rounding of the dump's fp32 arithmetic, then to fp16."""
    ours, theirs = rows_of(imported(name)), rows_of(workshop.dump(name).cache)
    entries = 0
    for place, rows in ours.items():
        dumped = theirs[place]
        kept = rows.values != MASKED
        assert torch.equal(kept, dumped.values != MASKED)
        assert torch.equal(in_order(rows), in_order(dumped))
        values, expected = rows.values[kept].double(), dumped.values[kept].double()
        # Half a step of fp16 may be to either side.
        torch.testing.assert_close(values, expected, rtol=2**-10, atol=1e-6)
        assert rows.tail_logprob is not None
        assert dumped.tail_logprob is not None
        torch.testing.assert_close(rows.tail_logprob, dumped.tail_logprob, rtol=2e-6, atol=2e-6)
        entries += int(kept.sum())
    assert entries > SAMPLES * SEQ_LENGTH


def in_order(rows: TeacherRows) -> torch.Tensor:
    """Return the kept ids of every token, ascending: rounding may exchange neighbours."""
    return rows.indices.masked_fill(rows.values == MASKED, -1).sort(-1).values


@pytest.mark.parametrize("name", SERVERS)
def test_a_student_trains_on_the_oracles_targets(
    workshop: Workshop,
    imported: Callable[[str], Path],
    table_row: Callable[[str], None],
    name: str,
) -> None:
    """With the proof of content on, at another layout than the cache's."""
    case = Student(dump=name, ranks=2, micro_batch=2, global_batch=8, alpha=0.5)
    record = workshop.directory / f"student-imported-{name}" / "record"
    job = workshop.jobs.run(
        f"student-imported-{name}",
        workshop.student_arguments(case, imported(name)),
        ranks=case.ranks,
        record=record,
    )
    assert "without proof" not in job.log
    oracle, records = workshop.dump(name).oracle, load_records(record)
    found: Comparison = check_targets(oracle, records)
    assert found.samples == oracle.samples
    assert len(found.samples) == SAMPLES
    logged = job.series("logits distillation loss")
    assert logged == pytest.approx(distillation_losses(records), rel=3e-6, abs=1e-7)
    table_row(
        f"import of dump {name:4} by {SERVERS[name].__name__:15} {found.rows:3} rows, "
        f"{found.entries:6} entries equal ({found.tied} tied), errors beyond rounding: values "
        f"{max(found.value_error, 0.0):.1e}, tail {found.tail_error:.1e}"
    )


def test_a_student_of_other_data_is_stopped(
    workshop: Workshop, imported: Callable[[str], Path]
) -> None:
    """The identity is that of the flags; beyond it, the labels must be those of the prompts."""
    case = Student(dump="tp1")
    arguments = workshop.student_arguments(case, imported("tp1"))
    job = workshop.jobs.run(
        "student-imported-other-seed",
        [*arguments, "--seed", "4321", "--logits-load-ignore-hash"],
        succeeds=False,
    )
    assert "does not hold what the teacher saw" in job.log
