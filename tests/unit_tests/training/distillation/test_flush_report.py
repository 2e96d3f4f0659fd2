# SPDX-License-Identifier: Apache-2.0
"""What a dump writes at each flush to its curves and its log, for the whole stage."""

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.distillation import logits_saver
from megatron.training.distillation.flush_report import Flush, report_flush
from megatron.training.distillation.logits_saver import LogitsSaverHooks
from megatron.training.distillation.write_watch import WrittenWindow
from tests.unit_tests.distributed import recorded_collectives, run_ranks
from tests.unit_tests.training.distillation.run_stubs import (
    SETTINGS,
    GivenLogitsModel,
    PlainPatch,
    StubRun,
    group_layout,
)

NOTHING = Flush(
    start=0,
    end=0,
    samples=0,
    size=0,
    waiting=0,
    held=0,
    waited=0.0,
    kept_mass=0.0,
    tokens=0,
    written=(),
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> StubRun:
    monkeypatch.setattr(logits_saver, "_active_saver", None)
    return StubRun().install(monkeypatch)


def test_each_flush_is_reported_and_the_time_of_the_one_before(
    run: StubRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 3, save_dtype="fp32")
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    generator = torch.Generator().manual_seed(0)
    sizes, masses = [], []
    with caplog.at_level(logging.INFO):
        for starts in ((0, 2), (4,)):
            kept: list[torch.Tensor] = []
            for start in starts:
                run.move_to(start)
                for _ in range(2):
                    logits = torch.randn(SETTINGS.seq_length, 1, 16, generator=generator)
                    real = torch.softmax(logits[..., : SETTINGS.vocab_size].double(), -1)
                    kept.append(real.topk(3).values.sum(-1))
                    model(logits, torch.zeros(1, SETTINGS.seq_length, dtype=torch.long))
            pending = saver.take_pending_data()
            sizes.append(sum(len(payload) for _, payload in pending[2]))
            masses.append(float(torch.stack(kept).mean()))
            saver._write_batched_tar(*pending)
    assert run.curve("logits-flush-bytes") == [(2, sizes[0]), (3, sizes[1])]
    # What was handed over before is written.
    assert run.curve("logits-waiting-bytes") == [(2, sizes[0]), (3, sizes[1])]
    assert run.curve("logits-flush-wait") == [(2, 0.0), (3, 0.0)]
    # The spooled bytes, and the tensors that wait for them: fp32, int32, a tail and fingerprints.
    raw = 2 * SETTINGS.seq_length * (3 * (4 + 4) + 4) + 2 * 8
    (_, first_held), (_, second_held) = run.curve("logits-held-bytes")
    assert max(sizes[0], raw) <= first_held <= sizes[0] + 2 * raw
    # The window before may still be there.
    assert max(sizes[1], raw) <= second_held <= sum(sizes) + raw
    assert run.curve("logits-kept-mass") == [
        (2, pytest.approx(masses[0], rel=1e-6)),
        (3, pytest.approx(masses[1], rel=1e-6)),
    ]
    ((step, seconds),) = run.curve("logits-flush-time")
    assert step == 3
    assert 0 <= seconds < 60
    first, second = (record.getMessage() for record in caplog.records)
    assert "logits of samples 0 to 3 handed over at iteration        2 | samples: 4 |" in first
    assert f"bytes per token: {sizes[0] / (4 * SETTINGS.seq_length):.2f} |" in first
    assert "waited: 0.000 s | no earlier window" in first
    assert "logits of samples 4 to 5 handed over at iteration        3 | samples: 2 |" in second
    assert f"before that {sizes[0] / 1e6:.3f} MB were written in {seconds:.3f} s" in second


def test_wait_for_an_earlier_write_is_reported(
    run: StubRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run.settings = replace(run.settings, max_waiting_bytes=1)
    saver = LogitsSaverHooks(str(tmp_path), 3)
    model = GivenLogitsModel()
    saver.attach_hooks(model)

    def window(start: int) -> None:
        run.move_to(start)
        for _ in range(2):
            logits = torch.randn(SETTINGS.seq_length, 1, 16)
            model(logits, torch.zeros(1, SETTINGS.seq_length, dtype=torch.long))

    window(0)
    # Larger than the bound, but alone.
    first = saver.take_pending_data()
    window(2)
    # Written once it has been found waiting.
    later = threading.Timer(0.2, saver._write_batched_tar, first)
    oldest = saver._watch.oldest
    monkeypatch.setattr(saver._watch, "oldest", lambda: later.start() or oldest())
    with caplog.at_level(logging.INFO):
        second = saver.take_pending_data()
    later.join()
    size = sum(len(payload) for _, payload in second[2])
    assert run.curve("logits-waiting-bytes")[1] == (2, size)
    (_, none), (step, seconds) = run.curve("logits-flush-wait")
    assert none == 0.0
    assert step == 2
    assert 0 < seconds < 60
    warning, _, report = (record.getMessage() for record in caplog.records)
    assert f"The window of samples 0 to 1 ({first[0]}) is written next" in warning
    assert f"waited: {seconds:.3f} s" in report
    # Nothing to hand over, nothing to wait for.
    assert saver.take_pending_data()[2] == []


def test_stage_without_samples_reports_nothing(
    run: StubRun, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        report_flush(NOTHING, run.layout, 4)
    assert run.scalars == []
    assert not caplog.records


def _flush_on_rank(rank: int, world_size: int) -> tuple[list[Any], list[str]]:
    """TP 2 x DP 2: only the first TP rank of each replica has anything."""
    layout = group_layout(tp_rank=rank % 2, tp_size=2, dp_rank=rank // 2, dp_size=2)
    run = StubRun(layout=layout).install(PlainPatch)
    run.move_to(6)
    flush = NOTHING
    if layout.tp_rank == 0:
        flush = Flush(
            start=0,
            end=8,
            samples=4,
            size=100 + rank,
            waiting=10,
            held=1000 - rank,
            waited=0.25 * rank,
            kept_mass=12.0 + rank,
            tokens=16,
            written=(WrittenWindow(50, 1.0 + rank), WrittenWindow(5, 0.5)),
        )
    with recorded_collectives() as seen:
        report_flush(flush, layout, SETTINGS.seq_length)
    return run.scalars, seen


def test_numbers_are_those_of_the_stage_on_every_rank() -> None:
    for scalars, collectives in run_ranks(4, _flush_on_rank):
        assert collectives == ["all_reduce", "all_reduce"]
        assert scalars == [
            ("logits-flush-bytes", 202.0, 4),
            ("logits-waiting-bytes", 222.0, 4),
            # The rank's that held most.
            ("logits-held-bytes", 1000.0, 4),
            # The slowest rank's.
            ("logits-flush-wait", 0.5, 4),
            ("logits-kept-mass", 26 / 32, 4),
            ("logits-flush-time", 3.5, 4),
        ]
