# SPDX-License-Identifier: Apache-2.0
"""Trying again: what, how often, how long, and what the log says of it."""

import logging

import pytest

from megatron.training.distillation import storage_retry
from megatron.training.distillation.storage_retry import retry


class Away(Exception):
    """What a store that is away raises."""


class Clock:
    """Time that passes only in pauses; each attempt takes *attempt_seconds*."""

    def __init__(self, attempt_seconds: float = 0.0) -> None:
        self.now = 100.0
        self.attempt_seconds = attempt_seconds
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def __call__(self) -> float:
        self.now += self.attempt_seconds
        return self.now


def run(action, clock, *, is_transient=lambda error: True):
    return retry(
        action,
        what="read msc://store/x.tar",
        errors=(Away,),
        is_transient=is_transient,
        pause=clock.pause,
        clock=clock,
    )


def failing(times: int, error: Exception | None = None):
    """An action that fails *times* times and then tells how often it was called."""
    calls = []

    def action() -> int:
        calls.append(None)
        if len(calls) <= times:
            raise error or Away(f"attempt {len(calls)}")
        return len(calls)

    return action


def test_success_is_not_touched():
    clock = Clock()
    assert run(failing(0), clock) == 1
    assert clock.pauses == []


def test_delays_grow_to_a_limit_and_differ_between_writers():
    clock = Clock()
    assert run(failing(8), clock) == 9
    ceilings = [1, 2, 4, 8, 16, 30, 30, 30]
    for pause, ceiling in zip(clock.pauses, ceilings, strict=True):
        assert ceiling / 2 <= pause <= ceiling
    other = Clock()
    run(failing(8), other)
    assert clock.pauses != other.pauses


@pytest.mark.parametrize("attempt_seconds", [0.0, 50.0])
def test_patience_ends(attempt_seconds):
    clock = Clock(attempt_seconds)
    with pytest.raises(Away) as caught:
        run(failing(1000), clock)
    spent = clock.now - 100.0
    assert spent >= storage_retry.PATIENCE_SECONDS
    assert spent <= storage_retry.PATIENCE_SECONDS + 2 * attempt_seconds + 1e-6
    assert str(caught.value) == f"attempt {len(clock.pauses) + 1}"


def test_what_cannot_be_helped_is_raised_at_once():
    clock = Clock()
    with pytest.raises(Away, match="attempt 1"):
        run(failing(5), clock, is_transient=lambda error: False)
    with pytest.raises(ZeroDivisionError):
        run(failing(5, ZeroDivisionError()), clock)
    assert clock.pauses == []


def test_every_attempt_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        run(failing(2), Clock())
    assert len(caplog.messages) == 2
    for number, message in enumerate(caplog.messages, 1):
        assert message.startswith(f"Cannot read msc://store/x.tar: attempt {number}. Trying again")
    assert "for another 240 s" in caplog.messages[0]


def test_a_pause_may_give_up():
    def pause(seconds: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        retry(
            failing(3),
            what="read",
            errors=(Away,),
            is_transient=lambda error: True,
            pause=pause,
        )


def test_patience_fits_between_an_outage_and_a_collective():
    assert 120 <= storage_retry.PATIENCE_SECONDS <= 300
