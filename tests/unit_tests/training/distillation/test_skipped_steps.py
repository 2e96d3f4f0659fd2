# SPDX-License-Identifier: Apache-2.0
"""When a student has lost too many targets, against a rule applied by brute force; on ranks too."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.training.distillation.cached_logits_loss import CachedLogitsKDLoss, LossFuncCallable
from megatron.training.distillation.errors import TeacherDataError, TeacherDataMissingError
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.skipped_steps import SkippedSteps
from megatron.training.distillation.targets import IterationFailure, IterationTargets
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.training.distillation.given_targets import GivenTargets, targets
from tests.unit_tests.training.distillation.run_stubs import (
    SETTINGS,
    PlainPatch,
    StubRun,
    group_layout,
)

RUN = replace(SETTINGS, global_batch_size=6)


def stop(outcomes: list[bool], **options: Any) -> int | None:
    """Return after how many iterations a run with these outcomes (True: skipped) stops."""
    steps = SkippedSteps(**options)
    for number, skipped in enumerate(outcomes, 1):
        if steps.count(skipped=skipped) is not None:
            return number
    return None


def expected_stop(outcomes: list[bool], share: float) -> int | None:
    for number in range(20, len(outcomes) + 1):
        seen = outcomes[:number]
        if share < 1 and (sum(seen) > share * number or all(seen[-20:])):
            return number
    return None


@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.04, 0.1, 0.5, 0.97, 1.0])
def test_stops_where_the_rule_says(share: float, rate: float) -> None:
    draw = random.Random(f"{share} {rate}")
    for length in (19, 20, 60, 400):
        outcomes = [draw.random() < rate for _ in range(length)]
        assert stop(outcomes, max_share=share) == expected_stop(outcomes, share)


def test_known_cases() -> None:
    assert stop([True] * 19) is None
    assert stop([True] * 20) == 20
    # Judged when 20 iterations have been looked at, though the 20th has its targets.
    assert stop([True, True] + [False] * 18) == 20
    assert stop([True] + [False] * 18) is None
    # One of 20 is the limit, not more than it; the next one stops.
    assert stop([True] + [False] * 100) is None
    assert stop([False] * 38 + [True, True]) is None
    assert stop([False] * 38 + [True, True, True]) == 41
    # A long run whose cache goes away does not wait until the share of it is large.
    assert stop([False] * 10_000 + [True] * 30) == 10_020
    assert stop([True] * 1000, max_share=1.0) is None


def test_message_says_count_share_limit_and_what_to_do() -> None:
    steps = SkippedSteps(0.1)
    problems = [steps.count(skipped=number < 3) for number in range(20)]
    assert problems[:-1] == [None] * 19
    message = problems[-1]
    assert message is not None
    for part in (
        "3 of the 20 iterations",
        "(15.0%)",
        "--logits-load-max-skipped-share is 0.1",
        "Dump the samples",
        "allow a larger share",
    ):
        assert part in message
    assert (steps.skipped, steps.looked_at) == (3, 20)


@pytest.mark.parametrize("share", [-0.01, 1.01, math.nan])
def test_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"max_skipped_share is .*\[0, 1\]"):
        SkippedSteps(share)


def test_loss_passes_the_share_on(monkeypatch: pytest.MonkeyPatch) -> None:
    StubRun().install(monkeypatch)
    loss_function = LossFuncCallable("unused", ignore_errors=True, max_skipped_share=0.25)
    kd_loss = CachedLogitsKDLoss("unused", **loss_function._options)
    assert kd_loss._agreed._steps._max_share == 0.25
    # Code that does not know of the limit is held to the default.
    assert CachedLogitsKDLoss("unused")._agreed._steps._max_share == 0.05


class FailingStream(GivenTargets):
    """A stream of one rank whose iterations fail where it is told to."""

    def __init__(self, failing: set[int]) -> None:
        super().__init__()
        self.failing = failing
        self.rows = TeacherRows(
            values=torch.zeros(RUN.seq_length, 1, 1),
            indices=torch.zeros(RUN.seq_length, 1, 1, dtype=torch.int32),
        )

    def iteration(self, start: int) -> IterationTargets | IterationFailure:
        if start // RUN.global_batch_size not in self.failing:
            return targets(start, self.rows, self.rows)
        error = TeacherDataMissingError(f"no sample {start}")
        return IterationFailure(start=start, error=error, fatal=False)


def _train(rank: int, world_size: int, failing: list[set[int]], share: float) -> tuple[int, str]:
    layout = group_layout(dp_rank=rank, dp_size=world_size)
    run = StubRun(layout=layout, settings=RUN).install(PlainPatch)
    kd_loss = CachedLogitsKDLoss("unused", ignore_errors=True, max_skipped_share=share)
    kd_loss._feed.stream = FailingStream(failing[rank])  # type: ignore[assignment]
    kd_loss._agreed._has_listing = True
    for iteration in range(60):
        run.move_to(iteration * RUN.global_batch_size)
        try:
            for _ in range(2):
                kd_loss(torch.zeros(RUN.seq_length, 1, 16))
        except TeacherDataError as error:
            return iteration, str(error)
    return 60, ""


@pytest.mark.parametrize(
    ("share", "stopped_at"),
    [(0.05, 19), (0.1, 24), (0.5, 60)],
)
def test_all_ranks_stop_at_the_same_iteration(share: float, stopped_at: int) -> None:
    """Each rank misses other iterations; what counts is where any of them does."""
    failing: list[set[int]] = [{1}, {18, 24}, {30, 31}]
    results = run_ranks(3, _train, failing, share)
    assert [iteration for iteration, _ in results] == [stopped_at] * 3
    messages = {message for _, message in results}
    assert len(messages) == 1
    if stopped_at < 60:
        looked_at = stopped_at + 1
        skipped = len([n for n in set().union(*failing) if n <= stopped_at])
        assert f"{skipped} of the {looked_at} iterations" in messages.pop()
