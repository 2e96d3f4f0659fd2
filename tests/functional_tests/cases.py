# SPDX-License-Identifier: Apache-2.0
"""The dumps and students of the functional tests; each runs once, when a test first asks for it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.functional_tests import wandb_stand_in
from tests.functional_tests.caches import convert
from tests.functional_tests.corpus import write_corpus
from tests.functional_tests.harness import (
    MODEL,
    NO_EVALUATION,
    OPTIMIZER,
    RUN,
    JobResult,
    JobRunner,
    batch,
)
from tests.functional_tests.oracle import DumpOracle, DumpSettings
from tests.functional_tests.recorders import Record, load_records

SAMPLES = 32
DUMP_GLOBAL_BATCH = 4
DUMP_ITERATIONS = SAMPLES // DUMP_GLOBAL_BATCH
FLUSH_INTERVAL = 4
ASYNC_SAVE = ["--async-save", "--use-persistent-ckpt-worker"]
STRATEGIES = ("mcore", "nvrx")
"""Whose checkpoint workers can write a dump; Megatron's default is nvidia-resiliency-ext's."""


@dataclass(frozen=True, kw_only=True)
class Dump:
    """A teacher run over SAMPLES samples."""

    settings: DumpSettings
    ranks: int = 1
    flags: str = ""
    micro_batch: int = 1
    crosscheck: bool = False
    pretrained: bool = True
    """Whether the shared teacher's checkpoint fits its model; else it keeps its random weights."""

    def in_format(self, save_format: int) -> "Dump":
        """Return the same dump in a format; values have 8 bits where it asks and format 3 is it."""
        eight_bit = self.settings.eight_bit and save_format == 3
        settings = replace(self.settings, save_format=save_format, eight_bit=eight_bit)
        return replace(self, settings=settings)


@dataclass(frozen=True, kw_only=True)
class Student:
    """A student run over the samples of a dump."""

    dump: str
    ranks: int = 1
    flags: str = ""
    micro_batch: int = 1
    global_batch: int = DUMP_GLOBAL_BATCH
    alpha: float = 1.0

    @property
    def batch(self) -> list[str]:
        """Return the flags of its batch schedule."""
        return batch(self.micro_batch, self.global_batch, SAMPLES // self.global_batch)


RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

# Both formats have every dtype, ragged tokens, and TP, CP and PP.
DUMPS = {
    "tp1": Dump(settings=DumpSettings(k=12, save_format=3)),
    "tp2": Dump(
        settings=DumpSettings(k=40, p=0.8, min_k=2, dtype="bf16", save_format=3),
        ranks=2,
        flags="--tensor-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "pp2": Dump(
        settings=DumpSettings(k=95, dtype="fp32"),
        ranks=2,
        flags="--pipeline-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "dp2": Dump(settings=DumpSettings(k=60, p=0.9), ranks=2),
    "vpp": Dump(
        settings=DumpSettings(k=1, save_format=3),
        ranks=2,
        flags="--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --bf16",
        micro_batch=2,
    ),
    "mtp": Dump(
        settings=DumpSettings(k=12, p=0.95, dtype="fp32", save_format=3),
        flags="--mtp-num-layers 1 --dist-ckpt-strictness log_all",
        micro_batch=2,
        crosscheck=True,
    ),
    "cp2": Dump(
        settings=DumpSettings(k=30, p=0.9, save_format=3, eight_bit=True),
        ranks=2,
        flags="--context-parallel-size 2 --use-distributed-optimizer",
        micro_batch=2,
    ),
    "tp2cp2": Dump(
        settings=DumpSettings(k=12, dtype="bf16"),
        ranks=4,
        flags="--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --bf16",
    ),
    "moe": Dump(
        settings=DumpSettings(k=20, dtype="fp32", save_format=3),
        ranks=2,
        flags="--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear "
        "--untie-embeddings-and-output-weights",
        pretrained=False,
    ),
}

STUDENTS = {
    "as dumped": Student(
        dump="tp1", alpha=0.5, flags="--eval-interval 4 --eval-iters 1 --save-interval 3"
    ),
    "DP2": Student(dump="tp1", ranks=2, alpha=0.5),
    "MBS2": Student(dump="tp1", micro_batch=2, alpha=0.5),
    "TP2": Student(dump="tp1", ranks=2, flags="--tensor-model-parallel-size 2", alpha=0.5),
    "DP2 MBS2 GBS8": Student(dump="tp1", ranks=2, micro_batch=2, global_batch=8),
    "GBS2": Student(dump="tp1", global_batch=2, alpha=0.0),
    "tp2 DP2 MBS2": Student(dump="tp2", ranks=2, micro_batch=2),
    "pp2 TP2 MBS4": Student(
        dump="pp2", ranks=2, micro_batch=4, flags="--tensor-model-parallel-size 2"
    ),
    "dp2 MBS4 GBS8": Student(dump="dp2", micro_batch=4, global_batch=8),
    "dp2 PP2 MBS2": Student(
        dump="dp2", ranks=2, micro_batch=2, flags="--pipeline-model-parallel-size 2", alpha=0.25
    ),
    "vpp DP2 GBS2": Student(dump="vpp", ranks=2, global_batch=2),
    "mtp MTP1 MBS1 GBS8": Student(dump="mtp", flags="--mtp-num-layers 1", global_batch=8),
    "CP2": Student(dump="tp1", ranks=2, flags="--context-parallel-size 2", alpha=0.5),
    "TP2 SP": Student(
        dump="tp1",
        ranks=2,
        flags="--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
        alpha=0.5,
    ),
    "recompute": Student(dump="tp1", micro_batch=2, flags=RECOMPUTE, alpha=0.5),
    "per token": Student(dump="tp1", flags="--calculate-per-token-loss", alpha=0.5),
    "PP2 untied": Student(
        dump="tp1",
        ranks=2,
        flags="--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights",
    ),
    "cp2 DP2 GBS8": Student(dump="cp2", ranks=2, global_batch=8),
    "cp2 as dumped": Student(dump="cp2", ranks=2, micro_batch=2, flags="--context-parallel-size 2"),
    "tp2cp2 PP2 CP2 MBS2": Student(
        dump="tp2cp2",
        ranks=4,
        micro_batch=2,
        flags="--pipeline-model-parallel-size 2 --context-parallel-size 2 --bf16",
    ),
    "moe VPP MBS2": Student(
        dump="moe",
        ranks=2,
        micro_batch=2,
        flags="--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "moe EP2": Student(
        dump="moe",
        ranks=2,
        flags="--num-experts 2 --expert-model-parallel-size 2 --disable-bias-linear",
    ),
}
SAME_LOSS = ["as dumped", "DP2", "MBS2", "TP2", "CP2", "TP2 SP", "recompute", "per token"]
"""Students of one dump, global batch and alpha, whose layouts must not change the loss."""


@dataclass(frozen=True, kw_only=True)
class DumpRun:
    """A finished dump."""

    job: JobResult
    cache: Path
    save: Path
    record: Path
    oracle: DumpOracle = field(repr=False)
    tensorboard: Path
    wandb: Path | None = None


@dataclass(frozen=True, kw_only=True)
class StudentRun:
    """A finished student."""

    job: JobResult
    save: Path
    record: Path
    records: list[Record] = field(repr=False)


class Workshop:
    """Makes what tests share, once each, and keeps it for the session.

    Args:
        jobs: Runs the jobs.
        only_format: The format of all dumps; None for that of each.
    """

    def __init__(self, jobs: JobRunner, only_format: int | None = None) -> None:
        self.jobs = jobs
        self.only_format = only_format
        self.directory = jobs.directory
        self._made: dict[Any, Any] = {}

    @cached_property
    def corpus(self) -> Path:
        """Prefix of the data set."""
        return write_corpus(self.directory / "corpus")

    @property
    def common(self) -> list[str]:
        """Flags of every run."""
        return [*MODEL, *OPTIMIZER, *RUN, "--data-path", str(self.corpus)]

    @property
    def teacher(self) -> Path:
        """Checkpoint directory of a teacher trained for a few iterations at TP 1."""
        return self._once("teacher", self._make_teacher)

    def format_of(self, save_format: int) -> int:
        """Return the format of what is to be in *save_format* unless all is in one."""
        return self.only_format or save_format

    def dump_arguments(
        self,
        case: Dump,
        cache: Path | str,
        save: Path,
        *,
        iterations: int = DUMP_ITERATIONS,
        save_interval: int = FLUSH_INTERVAL,
    ) -> list[str]:
        """Return the command line of a dump, which resumes from *save* if something is there."""
        settings = case.in_format(self.format_of(case.settings.save_format)).settings
        arguments = [*self.common, *NO_EVALUATION, *case.flags.split()]
        arguments += batch(case.micro_batch, DUMP_GLOBAL_BATCH, iterations)
        if case.pretrained:
            arguments += ["--pretrained-checkpoint", str(self.teacher), "--load", str(save)]
        arguments += ["--save", str(save), "--save-interval", str(save_interval), *ASYNC_SAVE]
        arguments += ["--freeze-all-layers", "--logits-save-dir", str(cache)]
        arguments += ["--logits-save-format", str(settings.save_format)]
        if settings.eight_bit:
            arguments += ["--logits-save-8bit"]
        arguments += ["--logits-save-top-k", str(settings.k), "--logits-save-dtype", settings.dtype]
        if settings.p is not None:
            arguments += ["--logits-save-top-p", str(settings.p)]
            arguments += ["--logits-save-top-p-min-k", str(settings.min_k)]
        return arguments

    def dump(self, name: str) -> DumpRun:
        """Return the dump *name* of DUMPS."""
        return self._once(("dump", name), lambda: self._make_dump(name))

    def cache(self, name: str, save_format: int) -> Path:
        """Return the cache of the dump *name* in a format, converted if it is in the other."""
        dump, wanted = self.dump(name), self.format_of(save_format)
        if dump.oracle.settings.save_format == wanted:
            return dump.cache
        target = self.directory / f"dump-{name}" / f"cache-v{wanted}"
        return self._once(("cache", name, wanted), lambda: convert(dump.cache, target, wanted))

    def student(self, name: str) -> StudentRun:
        """Return the student *name* of STUDENTS."""
        return self._once(("student", name), lambda: self._make_student(name))

    def student_arguments(self, case: Student, cache: Path | str) -> list[str]:
        """Return the command line of a student of *cache*."""
        arguments = [*self.common, *NO_EVALUATION, *case.batch, *case.flags.split()]
        arguments += ["--logits-load-dir", str(cache)]
        return [*arguments, "--logits-load-kd-loss-alpha", str(case.alpha)]

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Make *key* at its first use; a failure is told again at every use."""
        if key not in self._made:
            try:
                self._made[key] = make()
            except AssertionError as error:
                self._made[key] = error
        if isinstance(self._made[key], AssertionError):
            raise self._made[key]
        return self._made[key]

    def _make_teacher(self) -> Path:
        save = self.directory / "teacher"
        arguments = [*self.common, *NO_EVALUATION, *batch(8, 8, 40)]
        self.jobs.run("teacher", [*arguments, "--save", str(save), "--save-interval", "40"])
        return save

    def _make_dump(self, name: str) -> DumpRun:
        case = DUMPS[name]
        case = case.in_format(self.format_of(case.settings.save_format))
        place = self.directory / f"dump-{name}"
        cache, save, record = place / "cache", place / "save", place / "record"
        arguments = self.dump_arguments(case, cache, save)
        arguments += ["--tensorboard-dir", str(place / "tensorboard")]
        job = self.jobs.run(
            f"dump-{name}",
            [*arguments, *wandb_stand_in.flags(place / "wandb")],
            ranks=case.ranks,
            record=record,
            crosscheck=case.crosscheck,
            env={wandb_stand_in.VARIABLE: "1"},
        )
        return DumpRun(
            job=job,
            cache=cache,
            save=save,
            record=record,
            oracle=DumpOracle(record, case.settings),
            tensorboard=place / "tensorboard",
            wandb=place / "wandb",
        )

    def _make_student(self, name: str) -> StudentRun:
        case = STUDENTS[name]
        place = self.directory / ("student-" + name.replace(" ", "-"))
        arguments = self.student_arguments(case, self.dump(case.dump).cache)
        if "--save-interval" in arguments:
            arguments += ["--save", str(place / "save"), *ASYNC_SAVE]
        record = place / "record"
        job = self.jobs.run(place.name, arguments, ranks=case.ranks, record=record)
        records = load_records(record)
        return StudentRun(job=job, save=place / "save", record=record, records=records)
