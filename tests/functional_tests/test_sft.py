# SPDX-License-Identifier: Apache-2.0
"""Dumps and students of packed conversations (``--sft``): the samples of a microbatch are joined.

The dump has two samples per microbatch; one student has four, the other has one.
"""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.functional_tests.caches import convert
from tests.functional_tests.cases import Workshop
from tests.functional_tests.harness import (
    MODEL,
    OPTIMIZER,
    RUN,
    JobResult,
    JobRunner,
    batch,
)
from tests.functional_tests.oracle import (
    Comparison,
    DumpOracle,
    DumpSettings,
    check_targets,
    distillation_losses,
)
from tests.functional_tests.parts.conversations import (
    PROMPT_FORMAT,
    word_id,
    write_conversations,
    write_tokenizer,
)
from tests.functional_tests.recorders import Record, load_records

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).resolve().parent / "pretrain_sft.py"
SEQ_LENGTH = 64
SAMPLES = 32
LINES = 40
"""``--split 80,20,0`` leaves SAMPLES of them for training."""
GLOBAL_BATCH = 4
SETTINGS = DumpSettings(k=20, p=0.95, save_format=3)
ALPHA = 0.5
STUDENTS = {
    "TP2 MBS4": (4, "--tensor-model-parallel-size 2 --eval-interval 4"),
    "DP2 MBS1": (1, ""),
}
LOSSES = ("lm loss", "logits distillation loss", "total loss")


STUDENT_FORMATS = {"TP2 MBS4": 3, "DP2 MBS1": 2}
"""The format of the dump, and that to which it is converted for the other."""


@dataclass(frozen=True, kw_only=True)
class SftRuns:
    """A dump and its students, finished."""

    cache: Path
    oracle: DumpOracle = field(repr=False)
    dumped: list[Record] = field(repr=False)
    jobs: dict[str, JobResult]
    records: dict[str, list[Record]] = field(repr=False)


@pytest.fixture(scope="module")
def place(jobs: JobRunner) -> Iterator[Path]:
    """A directory for everything, also for what the jsonl reader keeps in the user's home."""
    directory = jobs.directory / "sft"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(directory / "huggingface"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        directory.mkdir()
        yield directory


def common_arguments(place: Path) -> list[str]:
    """Write the data set and return the flags of every run over it."""
    corpus = write_conversations(place / "conversations.jsonl", LINES)
    arguments = [*MODEL, *OPTIMIZER, *RUN, "--data-path", str(corpus)]
    # The trainer stops at an SFT data set of no samples, which --eval-iters 0 would ask for.
    arguments += ["--eval-iters", "1", "--eval-interval", "1000"]
    arguments += ["--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH)]
    arguments += ["--sft", "--no-create-attention-mask-in-dataloader"]
    arguments += ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model"]
    arguments += [str(write_tokenizer(place / "tokenizer"))]
    return [*arguments, "--sft-tokenizer-prompt-format", PROMPT_FORMAT]


@pytest.fixture(scope="module")
def sft(jobs: JobRunner, workshop: Workshop, place: Path) -> SftRuns:
    common = common_arguments(place)
    teacher, save, cache = place / "teacher", place / "save", place / "cache"
    arguments = [*common, *batch(8, 8, 20), "--save", str(teacher)]
    jobs.run("sft-teacher", [*arguments, "--save-interval", "20"], script=SCRIPT)

    iterations = SAMPLES // GLOBAL_BATCH
    arguments = [*common, *batch(2, GLOBAL_BATCH, iterations)]
    arguments += ["--pretrained-checkpoint", str(teacher), "--load", str(save), "--save", str(save)]
    arguments += shlex.split("--save-interval 4 --async-save --use-persistent-ckpt-worker")
    arguments += ["--freeze-all-layers", "--logits-save-dir", str(cache)]
    arguments += ["--logits-save-top-k", str(SETTINGS.k), "--logits-save-top-p", str(SETTINGS.p)]
    save_format = workshop.format_of(SETTINGS.save_format)
    arguments += ["--logits-save-format", str(save_format)]
    jobs.run("sft-dump", arguments, script=SCRIPT, record=place / "dump")

    results, records = {}, {}
    for name, (micro_batch, flags) in STUDENTS.items():
        directory = place / name.replace(" ", "-")
        arguments = [*common, *batch(micro_batch, GLOBAL_BATCH, iterations), *flags.split()]
        wanted, source = workshop.format_of(STUDENT_FORMATS[name]), cache
        if wanted != save_format:
            source = convert(cache, place / f"cache-v{wanted}", wanted)
        arguments += ["--logits-load-dir", str(source), "--logits-load-kd-loss-alpha", str(ALPHA)]
        arguments += ["--calculate-per-token-loss"]
        results[name] = jobs.run(
            f"sft-student-{directory.name}", arguments, ranks=2, script=SCRIPT, record=directory
        )
        records[name] = load_records(directory)
    return SftRuns(
        cache=cache,
        oracle=DumpOracle(place / "dump", SETTINGS),
        dumped=load_records(place / "dump"),
        jobs=results,
        records=records,
    )


def test_corpus_has_all_that_makes_packing_hard(sft: SftRuns) -> None:
    """Masked prompts, padding, samples cut off, and unlike samples in one microbatch."""
    masks = torch.cat([record["loss_mask"] for record in sft.dumped])
    labels = torch.cat([record["labels"] for record in sft.dumped])
    assert masks.shape == labels.shape == (SAMPLES, SEQ_LENGTH)
    assert ((masks == 0) | (masks == 1)).all()
    prompts, padding = labels == -100, labels == 0
    assert torch.equal(masks == 0, prompts | padding)
    assert prompts.any(1).all()
    padded = padding.sum(1)
    # The last label of a sample that is cut off is padding, too.
    assert (padded > 1).sum() >= SAMPLES // 4
    assert (padded == 1).sum() >= SAMPLES // 4
    per_microbatch = [record["loss_mask"].sum(1).tolist() for record in sft.dumped]
    assert all(len(counts) == 2 for counts in per_microbatch)
    assert sum(first != second for first, second in per_microbatch) > len(per_microbatch) // 2


@pytest.mark.parametrize("name", STUDENTS)
def test_every_target_equals_the_oracle(sft: SftRuns, name: str) -> None:
    found: Comparison = check_targets(sft.oracle, sft.records[name])
    assert found.samples == sft.oracle.samples
    assert len(found.samples) == SAMPLES
    tensor_parallel = len({record["tp_rank"] for record in sft.records[name]})
    assert found.rows == SAMPLES * tensor_parallel
    assert found.tokens == found.rows * SEQ_LENGTH


@pytest.mark.parametrize("name", STUDENTS)
def test_logged_losses_are_means_over_unmasked_tokens(sft: SftRuns, name: str) -> None:
    job, records = sft.jobs[name], sft.records[name]
    logged = job.series("logits distillation loss")
    assert logged == pytest.approx(distillation_losses(records), rel=3e-6)
    everywhere = [{**record, "loss_mask": torch.ones_like(record["labels"])} for record in records]
    for counted, overall in zip(logged, distillation_losses(everywhere), strict=True):
        assert abs(counted / overall - 1) > 1e-3
    for lm_loss, kd_loss, mixed in zip(*map(job.series, LOSSES), strict=True):
        assert mixed == pytest.approx(ALPHA * kd_loss + (1 - ALPHA) * lm_loss, rel=3e-6)


def test_students_train_alike_in_every_layout(sft: SftRuns) -> None:
    """Under --calculate-per-token-loss; without it all microbatches weigh the same."""
    joined, single = (sft.jobs[name] for name in STUDENTS)
    for loss in LOSSES:
        assert len(joined.series(loss)) == SAMPLES // GLOBAL_BATCH
        assert joined.series(loss) == pytest.approx(single.series(loss), rel=1e-5)
    kd_losses = joined.series("logits distillation loss")
    assert kd_losses[-1] < 0.9 * kd_losses[0]


def test_global_sample_is_the_line_of_that_number(sft: SftRuns) -> None:
    """The SFT data set does not shuffle; a line is told by its first answer."""
    lines = (sft.cache.parent / "conversations.jsonl").read_text().splitlines()
    for record in sft.dumped:
        for row, labels in enumerate(record["labels"]):
            number = record["start"] + 2 * record["microbatch"] + row
            answer = json.loads(lines[number])["messages"][2]
            assert answer["role"] == "assistant"
            words = [word_id(word) for word in answer["content"].split()]
            assert labels[labels >= 0][: len(words)].tolist() == words


def test_evaluation_reports_the_language_model_loss_only(sft: SftRuns) -> None:
    lines = [
        line
        for line in sft.jobs["TP2 MBS4"].of_rank(1).splitlines()
        if line.lstrip().startswith("validation loss at")
    ]
    assert len(lines) >= 2
    for line in lines:
        assert "lm loss value:" in line
        assert "distillation" not in line
