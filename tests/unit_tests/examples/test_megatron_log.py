# SPDX-License-Identifier: Apache-2.0
"""Tests of examples.offline_distillation.megatron_log, on lines as the trainer prints them."""

import pytest

from examples.offline_distillation.megatron_log import (
    Iteration,
    Validation,
    failure_index,
    parse_line,
    validation_curve,
)

ITERATION_LINE = (
    " [2031-05-04 10:11:12.345678] iteration       25/     200 | consumed samples:          400 |"
    " elapsed time per iteration (ms): 231.4 | learning rate: 2.951057E-03 | global batch size: "
    "   16 | lm loss: 5.012345E+00 | logits distillation loss: 1.250000E+00 | total loss: "
    "1.626234E+00 | loss scale: 1.0 | grad norm: 0.812 | number of skipped iterations:   0 |"
)
VALIDATION_LINE = (
    " validation loss at iteration 40 | lm loss value: 4.5E+00 | lm loss PPL: 9.0E+01 | "
)
END_LINE = (
    " validation loss at iteration 60 on validation set | lm loss value: 4.25E+00 | "
    "lm loss PPL: 7.0E+01 | "
)


def test_iteration_line() -> None:
    assert parse_line(ITERATION_LINE) == Iteration(
        number=25,
        total=200,
        milliseconds=231.4,
        losses={"lm loss": 5.012345, "logits distillation loss": 1.25, "total loss": 1.626234},
    )


def test_validation_lines() -> None:
    assert parse_line(VALIDATION_LINE) == Validation(
        iteration=40, losses={"lm loss": 4.5}, at_end=False
    )
    assert parse_line(VALIDATION_LINE.replace("validation", "validation-0", 1)) == parse_line(
        VALIDATION_LINE
    )
    assert parse_line(END_LINE) == Validation(iteration=60, losses={"lm loss": 4.25}, at_end=True)


def test_a_line_with_another_ranks_text_around_it() -> None:
    assert parse_line("[rank0]: saving checkpoint" + VALIDATION_LINE + "(min, max) time") == (
        parse_line(VALIDATION_LINE)
    )


@pytest.mark.parametrize(
    "line",
    [
        "",
        "training ...",
        " > saved checkpoint at iteration      50 to out [ t 1/1, p 1/1 ]",
        "[after training is done] datetime: 2031-05-04 10:11:12",
        "-" * 80,
        "validation loss at iteration 40 | ",
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    assert parse_line(line) is None


def test_curve_of_a_resumed_run_takes_the_later_report() -> None:
    lines = [
        " validation loss at iteration 20 | lm loss value: 6.0E+00 | ",
        " validation loss at iteration 40 | lm loss value: 5.5E+00 | ",
        "Terminated",
        VALIDATION_LINE,
        END_LINE,
    ]
    assert validation_curve(lines) == {20: 6.0, 40: 4.5, 60: 4.25}


def test_the_extra_evaluation_counts_only_where_there_is_no_other() -> None:
    regular = " validation loss at iteration 60 | lm loss value: 4.0E+00 | "
    assert validation_curve([regular, END_LINE]) == {60: 4.0}
    assert validation_curve([END_LINE]) == {60: 4.25}


def test_curve_of_another_loss_is_empty() -> None:
    assert validation_curve([VALIDATION_LINE], loss="other loss") == {}


def test_the_failure_is_the_ranks_and_not_the_launchers() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  raise ValueError("K is 0")',
        "[rank0]: ValueError: K is 0, use at least 1",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    ]
    assert failure_index(lines) == 2
    assert failure_index(["all good", "an Error in the middle"]) is None
