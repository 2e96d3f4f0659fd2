# SPDX-License-Identifier: Apache-2.0
"""What a student writes to its curves and its log, when, and what it costs."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.training.distillation import arguments, student_capture
from megatron.training.distillation.cached_logits_loss import (
    CachedLogitsKDLoss,
    LossFuncCallable,
    StudentLogitsCapture,
)
from megatron.training.distillation.student_report import StudentReport
from megatron.training.distillation.targets import IterationTargets
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS, SEQ, write_shard
from tests.unit_tests.training.distillation.run_stubs import GivenLogitsModel, StubRun

MASK = torch.ones(4)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> StubRun:
    monkeypatch.setattr(student_capture, "_active_capture", None)
    return StubRun().install(monkeypatch)


def microbatch(kept: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets ``(4, 1, 1)`` with this probability, half of the rest in the tail."""
    return torch.full((4, 1, 1), math.log(kept)), torch.full((4, 1), math.log((1 - kept) / 2))


def test_iteration_is_written_with_its_last_microbatch(
    run: StubRun, caplog: pytest.LogCaptureFixture
) -> None:
    report = StudentReport()
    with caplog.at_level(logging.INFO):
        report.begin(7, microbatches=2, skipped=3, wait=0.5)
        report.add(*microbatch(0.5), MASK)
        assert run.scalars == []
        report.add(*microbatch(0.25), MASK)
        # A replay of the step writes nothing again.
        report.add(*microbatch(0.1), MASK)
    assert run.scalars == [
        ("kd-skipped-steps", 3, 7),
        ("kd-loader-wait", 0.5, 7),
        ("kd-teacher-mass-kept", pytest.approx(0.375), 7),
        ("kd-teacher-tail-mass", pytest.approx(0.3125), 7),
        ("kd-tokens-with-targets", 1.0, 7),
    ]
    (record,) = caplog.records
    assert record.getMessage() == (
        " distillation at iteration        7 | kd-skipped-steps: 3 | kd-loader-wait: 0.5 | "
        "kd-teacher-mass-kept: 0.375 | kd-teacher-tail-mass: 0.3125 | kd-tokens-with-targets: 1 |"
    )


def test_iteration_without_targets_is_written_at_once(run: StubRun) -> None:
    report = StudentReport()
    report.begin(4, microbatches=0, skipped=1, wait=0.25)
    assert run.scalars == [
        ("kd-skipped-steps", 1, 4),
        ("kd-loader-wait", 0.25, 4),
        ("kd-tokens-with-targets", 0.0, 4),
    ]


def test_fully_masked_iteration_has_no_masses(run: StubRun) -> None:
    report = StudentReport()
    report.begin(1, microbatches=1, skipped=0, wait=0.0)
    report.add(*microbatch(0.5), torch.zeros(4))
    assert [name for name, _, _ in run.scalars] == ["kd-skipped-steps", "kd-loader-wait"]


def test_nothing_is_measured_where_nothing_is_written(
    run: StubRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.writes = False
    monkeypatch.setattr(torch, "where", None)
    report = StudentReport()
    report.begin(7, microbatches=1, skipped=0, wait=0.5)
    report.add(*microbatch(0.5), MASK)
    assert run.scalars == []


def test_device_is_read_once_per_written_iteration(
    run: StubRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, name: str = name, original: Any = original) -> Any:
            reads.append(name)
            return original(tensor)

        monkeypatch.setattr(torch.Tensor, name, read)
    report = StudentReport()
    report.begin(7, microbatches=8, skipped=0, wait=0.5)
    for _ in range(7):
        report.add(*microbatch(0.5), MASK)
    assert reads == []
    report.add(*microbatch(0.5), MASK)
    assert reads == ["tolist"]


def test_loss_reports_the_unmasked_tokens_of_its_cache(run: StubRun, tmp_path: Path) -> None:
    """Through the loss function, from a cache that a student reads."""
    write_shard(tmp_path, 0, 4, gbs=2)
    loss_function = LossFuncCallable(str(tmp_path))
    model = GivenLogitsModel()
    StudentLogitsCapture().attach_hooks(model)
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    assert run.settings.identifiers == IDENTIFIERS
    for start in (0, 2):
        run.move_to(start)
        for _ in range(2):
            losses = model(torch.zeros(SEQ, 1, 16), torch.zeros(1, SEQ, dtype=torch.long))
            loss_function(mask, losses, model)
    kd_loss = loss_function.kd_func
    assert isinstance(kd_loss, CachedLogitsKDLoss)
    assert run.curve("kd-skipped-steps") == [(1, 0), (2, 0)]
    assert run.curve("kd-tokens-with-targets") == [(1, 1.0), (2, 1.0)]
    # Opening the cache takes a while, and the second iteration is there already or soon.
    (first, waited), (second, _) = run.curve("kd-loader-wait")
    assert (first, second) == (1, 2)
    assert 0 < waited < 60
    read = kd_loss._feed._read
    assert isinstance(read, IterationTargets)
    rows = read.microbatches
    counted = [0, 1, 3]
    kept = torch.stack([part.values[counted].float().exp().sum(-1) for part in rows])
    assert run.curve("kd-teacher-mass-kept")[1] == (2, pytest.approx(float(kept.mean())))


# ---- when the trainer writes -------------------------------------------------------------------


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[Any, ...]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.written.append((values, step))


def test_scalars_go_to_both_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    tensorboard, wandb = Writer(), Writer()
    monkeypatch.setattr(arguments, "get_tensorboard_writer", lambda: tensorboard)
    monkeypatch.setattr(arguments, "get_wandb_writer", lambda: wandb)
    arguments.log_scalar("kd-loader-wait", 0.5, 3)
    assert tensorboard.written == [("kd-loader-wait", 0.5, 3)]
    assert wandb.written == [({"kd-loader-wait": 0.5}, 3)]
    monkeypatch.setattr(arguments, "get_tensorboard_writer", lambda: None)
    monkeypatch.setattr(arguments, "get_wandb_writer", lambda: None)
    arguments.log_scalar("kd-loader-wait", 0.5, 4)
    assert len(tensorboard.written) == len(wandb.written) == 1


@pytest.mark.parametrize("tensorboard", [True, False])
@pytest.mark.parametrize("wandb", [True, False])
def test_curves_keep_the_trainers_interval(
    monkeypatch: pytest.MonkeyPatch, tensorboard: bool, wandb: bool
) -> None:
    args = SimpleNamespace(tensorboard_log_interval=3)
    monkeypatch.setattr(arguments, "get_args", lambda: args)
    monkeypatch.setattr(
        arguments, "get_tensorboard_writer", lambda: Writer() if tensorboard else None
    )
    monkeypatch.setattr(arguments, "get_wandb_writer", lambda: Writer() if wandb else None)
    due = [iteration for iteration in range(1, 10) if arguments.curves_are_due(iteration)]
    assert due == ([3, 6, 9] if tensorboard or wandb else [])


@pytest.mark.parametrize("tensorboard_dir", ["curves", None])
@pytest.mark.parametrize("wandb_project", ["project", ""])
def test_all_ranks_know_when_one_writes_curves(
    monkeypatch: pytest.MonkeyPatch, tensorboard_dir: str | None, wandb_project: str
) -> None:
    args = SimpleNamespace(
        tensorboard_log_interval=3, tensorboard_dir=tensorboard_dir, wandb_project=wandb_project
    )
    monkeypatch.setattr(arguments, "get_args", lambda: args)
    # Not the one with the writers.
    for name in ("get_tensorboard_writer", "get_wandb_writer"):
        monkeypatch.setattr(arguments, name, lambda: None)
    due = [iteration for iteration in range(1, 10) if arguments.curves_are_written(iteration)]
    assert due == ([3, 6, 9] if tensorboard_dir or wandb_project else [])


def test_line_comes_from_the_last_rank_at_the_trainers_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = SimpleNamespace(log_interval=4, rank=7, world_size=8)
    monkeypatch.setattr(arguments, "get_args", lambda: args)
    assert [n for n in range(1, 10) if arguments.line_is_due(n)] == [4, 8]
    args.rank = 0
    assert not any(arguments.line_is_due(n) for n in range(1, 10))
