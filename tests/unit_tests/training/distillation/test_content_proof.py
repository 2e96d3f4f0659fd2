# SPDX-License-Identifier: Apache-2.0
"""What happens when the labels of a batch are not those the teacher saw, and when none are known.

The targets are given here; ``test_misalignment`` has them written and read.
"""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.training.distillation import student_capture
from megatron.training.distillation.agreed_targets import Content
from megatron.training.distillation.cached_logits_loss import (
    CachedLogitsKDLoss,
    LossFuncCallable,
    StudentLogitsCapture,
)
from megatron.training.distillation.content_proof import ContentProof
from megatron.training.distillation.errors import TeacherContentError, TeacherDataMissingError
from megatron.training.distillation.fingerprint import LabelFingerprinter
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.targets import IterationFailure, IterationTargets
from tests.unit_tests.distributed import recorded_collectives, run_ranks
from tests.unit_tests.training.distillation.given_targets import GivenTargets, targets
from tests.unit_tests.training.distillation.run_stubs import (
    SETTINGS,
    GivenLogitsModel,
    PlainPatch,
    StubRun,
    group_layout,
)

SEQ, PADDED, TOP = 160, 16, 3
PROVEN = replace(SETTINGS, seq_length=SEQ)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> StubRun:
    monkeypatch.setattr(student_capture, "_active_capture", None)
    return StubRun(settings=PROVEN).install(monkeypatch)


def labels_of(sample: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sample)
    return torch.randint(0, PADDED - 3, (1, SEQ), generator=generator)


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(SEQ, 1, PADDED, generator=torch.Generator().manual_seed(seed))


def rows_of(sample: int, *, proven: bool = True) -> TeacherRows:
    """Targets of one sample, with the fingerprints of its labels."""
    falling, order = torch.log_softmax(logits_of(1000 + sample), -1)[..., :13].sort(descending=True)
    fingerprint = LabelFingerprinter(torch.arange(SEQ), SEQ)
    return TeacherRows(
        values=falling[..., :TOP],
        indices=order[..., :TOP].int(),
        label_fingerprints=fingerprint(labels_of(sample)) if proven else None,
    )


def open_loss(*items: IterationTargets | IterationFailure, **options: Any) -> CachedLogitsKDLoss:
    kd_loss = CachedLogitsKDLoss("the-cache", **options)
    kd_loss._feed.stream = GivenTargets(*items)  # type: ignore[assignment]
    kd_loss._agreed._has_listing = True
    return kd_loss


def batch(start: int, *samples: int, proven: bool = True) -> IterationTargets:
    return targets(start, *(rows_of(sample, proven=proven) for sample in samples))


# ---- a batch that differs ---------------------------------------------------------------------


def test_the_teachers_own_samples_are_trained_on(run: StubRun) -> None:
    kd_loss = open_loss(batch(0, 0, 1), batch(2, 2, 3))
    unproven = open_loss(batch(0, 0, 1), batch(2, 2, 3))
    for start in (0, 2, 2):  # the last one replayed
        run.move_to(start)
        for sample in (start, start + 1):
            loss = kd_loss(logits_of(sample), labels=labels_of(sample))
            plain = unproven(logits_of(sample))
            assert loss is not None
            assert plain is not None
            assert torch.equal(loss, plain)


@pytest.mark.parametrize(
    "options", [{}, {"ignore_errors": True, "ignore_hash": True}], ids=["strict", "ignoring"]
)
def test_first_microbatch_that_differs_is_not_used(
    run: StubRun, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kd_loss = open_loss(batch(4, 4, 5), **options)
    run.move_to(4)
    other = labels_of(4)
    other[0, 70] ^= 1
    monkeypatch.setattr(
        "megatron.training.distillation.cached_kd_loss.sparse_kl",
        lambda *_, **__: pytest.fail("used"),
    )
    with pytest.raises(TeacherContentError) as caught:
        kd_loss(logits_of(4), labels=other)
    for part in (
        "starts at sample 4",
        "sample 4: its labels differ from the teacher's first in chunk 1, tokens 64 to 127",
        "1 of its 3 compared chunks differ",
        *("--seed", "order", "--seq-length", "tokenizer", "batch schedule"),
        "--logits-load-ignore-hash and --logits-load-ignore-errors do not pass over this",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"ignore_errors": True, "ignore_hash": True}])
def test_later_microbatch_that_differs_trains_nothing_and_stops(
    run: StubRun, options: dict[str, Any]
) -> None:
    run.settings = replace(PROVEN, global_batch_size=3)
    kd_loss = open_loss(batch(0, 0, 1, 2), **options)
    gradients = []
    for given in (0, 9):
        logits = logits_of(given).requires_grad_()
        loss = kd_loss(logits, labels=labels_of(given))
        assert loss is not None
        loss.sum().backward()
        assert logits.grad is not None
        gradients.append(logits.grad.abs().max().item())
        assert (loss == 0).all() == (given == 9)
    assert gradients[0] > 0
    assert gradients[1] == 0
    with pytest.raises(TeacherContentError, match=r"sample 1: .* chunk 0, tokens 0 to 63; 3 of"):
        kd_loss(logits_of(2), labels=labels_of(2))


def test_last_microbatch_that_differs_stops(run: StubRun) -> None:
    kd_loss = open_loss(batch(0, 0, 1))
    kd_loss(logits_of(0), labels=labels_of(0))
    with pytest.raises(TeacherContentError, match=r"sample 1: .*and 1 of the 1 samples"):
        kd_loss(logits_of(1), labels=labels_of(0))


def test_short_last_chunk_is_named_by_its_tokens(run: StubRun) -> None:
    kd_loss = open_loss(batch(0, 0, 1))
    other = labels_of(0)
    other[0, -1] ^= 1
    with pytest.raises(TeacherContentError, match=r"chunk 2, tokens 128 to 159"):
        kd_loss(logits_of(0), labels=other)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_replay_with_other_labels_is_found(run: StubRun, microbatches: int) -> None:
    run.settings = replace(PROVEN, global_batch_size=microbatches)
    kd_loss = open_loss(batch(0, *range(microbatches)))
    for sample in range(microbatches):
        kd_loss(logits_of(sample), labels=labels_of(sample))
    with pytest.raises(TeacherContentError, match="sample 0: "):  # noqa: PT012
        for sample in range(microbatches):
            kd_loss(logits_of(sample), labels=labels_of(7 if sample == 0 else sample))


def test_error_is_the_worst_of_what_a_rank_can_say(run: StubRun) -> None:
    proof = ContentProof(run.layout, seq_length=SEQ)
    content, detail = proof.compare(0, 0, rows_of(0), proof.fingerprints(labels_of(1)))
    assert content is Content.DIFFERS
    assert "3 of its 3" in detail


# ---- nothing to compare -----------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["fingerprints", "labels"])
def test_what_is_not_checked_is_told_once(
    run: StubRun, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    proven = missing != "fingerprints"
    kd_loss = open_loss(batch(0, 0, 1, proven=proven), batch(2, 2, 3, proven=proven))
    with caplog.at_level(logging.WARNING):
        for start in (0, 2):
            run.move_to(start)
            for sample in (start, start + 1):
                labels = None if missing == "labels" else labels_of(sample + 50)
                loss = kd_loss(logits_of(sample), labels=labels)
                assert loss is not None
                assert (loss != 0).any()
    (warning,) = caplog.messages
    assert "starts at sample 0 on, targets of the-cache are used without proof" in warning
    expected = {"fingerprints": "no label fingerprints", "labels": "no compute_language_model_loss"}
    assert expected[missing] in warning


def test_labels_come_from_the_main_heads_loss(run: StubRun) -> None:
    """Through the model and the capture, past the labels of other heads and of evaluation."""
    run.settings = replace(PROVEN, global_batch_size=1)
    model = GivenLogitsModel(mtp_num_layers=1)
    model.config = type("Config", (), {"mtp_num_layers": 1})()
    capture = StudentLogitsCapture()
    capture.attach_hooks(model)
    loss_function = LossFuncCallable("the-cache")
    loss_function.kd_func = open_loss(batch(0, 0), batch(1, 1))
    mask = torch.ones(1, SEQ)
    loss_function(mask, model(logits_of(0), labels_of(0)), model)
    model.eval()
    loss_function(mask, model(logits_of(8), labels_of(8)), model)
    assert capture.pop_labels() is None
    model.train()
    run.move_to(1)
    with pytest.raises(TeacherContentError, match="sample 1: "):
        loss_function(mask, model(logits_of(1), labels_of(8)), model)


# ---- several ranks ----------------------------------------------------------------------------


def _one_rank_differs(
    rank: int, world_size: int, microbatch: int, ignore_errors: bool
) -> tuple[str, list[float], list[str]]:
    settings = replace(PROVEN, global_batch_size=3 * world_size)
    StubRun(settings=settings, layout=group_layout(dp_rank=rank, dp_size=world_size)).install(
        PlainPatch
    )
    samples = [m * world_size + rank for m in range(3)]
    kd_loss = open_loss(batch(0, *samples), ignore_errors=ignore_errors)
    sums = []
    with recorded_collectives() as calls:
        try:
            for m, sample in enumerate(samples):
                wrong = rank == 1 and m == microbatch
                labels = labels_of(99 if wrong else sample)
                loss = kd_loss(logits_of(sample), labels=labels)
                assert loss is not None
                sums.append(loss.sum().item())
        except TeacherContentError as error:
            return str(error), sums, calls
    return "", sums, calls


@pytest.mark.parametrize("ignore_errors", [False, True])
@pytest.mark.parametrize("microbatch", [0, 1, 2])
def test_all_ranks_stop_where_one_differs(microbatch: int, ignore_errors: bool) -> None:
    results = run_ranks(2, _one_rank_differs, microbatch, ignore_errors)
    (told, sums, calls), (other_told, other_sums, other_calls) = results
    assert told == other_told
    assert f"rank 1: sample {2 * microbatch + 1}: its labels differ" in told
    assert "rank 0" not in told
    assert calls == other_calls
    # Nothing of the first is used; the others stop with the last, before the optimizer's step.
    assert len(sums) == len(other_sums) == (0 if microbatch == 0 else 2)
    assert all(value > 0 for value in sums)
    assert [value == 0 for value in other_sums] == [m == microbatch for m in range(len(sums))]


def test_ranks_that_agree_communicate_twice_an_iteration() -> None:
    for told, sums, calls in run_ranks(2, _one_rank_differs, -1, False):
        assert told == ""
        assert len(sums) == 3
        assert calls == ["all_reduce", "all_reduce"]


def _labels_differ_while_data_is_missing(rank: int, world_size: int) -> str:
    StubRun(settings=PROVEN, layout=group_layout(dp_rank=rank, dp_size=world_size)).install(
        PlainPatch
    )
    missing = IterationFailure(start=0, error=TeacherDataMissingError("gone"), fatal=False)
    kd_loss = open_loss(missing if rank == 0 else batch(0, 1), ignore_errors=True)
    try:
        kd_loss(logits_of(0), labels=labels_of(9))
    except TeacherContentError as error:
        return str(error)
    return "went on"


def test_other_content_outweighs_missing_data() -> None:
    results = run_ranks(2, _labels_differ_while_data_is_missing)
    assert all("rank 1: sample 1: " in result for result in results)


def _mixed_cache(rank: int, world_size: int) -> list[str]:
    StubRun(settings=PROVEN, layout=group_layout(dp_rank=rank, dp_size=world_size)).install(
        PlainPatch
    )
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.training.distillation").addHandler(handler)
    kd_loss = open_loss(batch(0, rank, proven=rank == 0))
    for _ in range(2):
        kd_loss(logits_of(0), labels=labels_of(rank))
    return told


def test_rank_without_fingerprints_is_told_by_the_speaker() -> None:
    (warning,), silent = run_ranks(2, _mixed_cache)
    assert "rank 1: its rows have no label fingerprints" in warning
    assert silent == []
