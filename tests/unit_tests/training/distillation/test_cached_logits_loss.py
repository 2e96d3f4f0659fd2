# SPDX-License-Identifier: Apache-2.0
"""The student's loss: what it is, what it trains, and what happens when targets are missing."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core import tensor_parallel
from megatron.training.distillation import cached_logits_loss, student_capture
from megatron.training.distillation.cached_logits_loss import (
    CachedLogitsKDLoss,
    LossFuncCallable,
    StudentLogitsCapture,
    get_student_logits_capture,
    make_teacher_tar_dataset,
    topk_kl_div,
)
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.shard_reader import (
    IterationFailure,
    IterationTargets,
    TeacherDataError,
    TeacherDataMissingError,
)
from megatron.training.distillation.utils import CacheIdentityError
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.training.distillation.cache_files import (
    IDENTIFIERS,
    SEQ,
    sample_of,
    write_shard,
)
from tests.unit_tests.training.distillation.given_targets import GivenTargets, targets
from tests.unit_tests.training.distillation.run_stubs import (
    SETTINGS,
    GivenLogitsModel,
    MegatronLossModel,
    PlainPatch,
    StubRun,
    group_layout,
)

PADDED, REAL, TOP = 16, 13, 3


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> StubRun:
    monkeypatch.setattr(student_capture, "_active_capture", None)
    monkeypatch.setattr(student_capture, "_active_loss", None)
    MegatronLossModel.install(monkeypatch)
    return StubRun().install(monkeypatch)


# ---- an oracle and targets to feed it ---------------------------------------------------------


def random_logits(seed: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(SEQ, batch, PADDED, generator=generator)).to(dtype)


def rows_from(teacher_logits: torch.Tensor, k: int = TOP) -> TeacherRows:
    """Top-k targets of these logits, in fp32, by sorting."""
    falling, order = torch.log_softmax(teacher_logits[..., :REAL].double(), -1).sort(
        descending=True
    )
    return TeacherRows(
        values=falling[..., :k].float(),
        indices=order[..., :k].int(),
        tail_logprob=falling[..., k:].logsumexp(-1).float(),
    )


def dense_kl(student_logits: torch.Tensor, rows: TeacherRows) -> torch.Tensor:
    """The loss ``(B, S)`` in float64 on the dense distribution; differentiable."""
    student = torch.log_softmax(student_logits.double()[..., :REAL], -1)
    teacher, ids = rows.values.double(), rows.indices.long()
    assert rows.tail_logprob is not None
    tail = rows.tail_logprob.double()
    inside = torch.zeros_like(student, dtype=torch.bool).scatter(-1, ids, True)
    student_tail = student.masked_fill(inside, -math.inf).logsumexp(-1)
    kept = (teacher.exp() * (teacher - student.gather(-1, ids))).sum(-1)
    return (kept + tail.exp() * (tail - student_tail)).transpose(0, 1)


def give(kd_loss: CachedLogitsKDLoss, *items: IterationTargets | IterationFailure) -> GivenTargets:
    stream = GivenTargets(*items)
    kd_loss._feed.stream = stream  # type: ignore[assignment]
    kd_loss._agreed._has_listing = True
    return stream


def failed(start: int, *, fatal: bool = False) -> IterationFailure:
    error: Exception = TeacherDataMissingError(f"no sample {start}")
    if fatal:
        error = CacheIdentityError("seed differs")
    return IterationFailure(start=start, error=error, fatal=fatal)


def open_loss(**options: Any) -> LossFuncCallable:
    """A loss whose cache is opened already, so that targets can be given to it."""
    loss_function = LossFuncCallable("unused", **options)
    loss_function.kd_func = CachedLogitsKDLoss(
        "unused", ignore_errors=options.get("ignore_errors", False)
    )
    return loss_function


both_paths = pytest.mark.parametrize("model_type", [GivenLogitsModel, MegatronLossModel])
"""A model with a loss of its own, and one whose loss comes from the pass of the divergence."""


def attached_model(
    model_type: type[GivenLogitsModel] = GivenLogitsModel, **options: Any
) -> GivenLogitsModel:
    model = model_type(**options)
    StudentLogitsCapture().attach_hooks(model)
    return model


# ---- the mixed loss and its gradient ----------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mtp_num_layers", [0, 2])
@both_paths
def test_loss_and_gradient_are_those_of_the_dense_mixture(
    run: StubRun,
    alpha: float,
    batch: int,
    dtype: torch.dtype,
    mtp_num_layers: int,
    model_type: type[GivenLogitsModel],
) -> None:
    """Through a model whose own loss overwrites fp32 logits, against float64 autograd."""
    loss_function = open_loss(kd_loss_alpha=alpha)
    rows = rows_from(random_logits(7, batch))
    assert loss_function.kd_func is not None
    give(loss_function.kd_func, targets(0, rows, rows))
    model = model_type(mtp_num_layers)
    model.config = SimpleNamespace(mtp_num_layers=mtp_num_layers, cross_entropy_loss_fusion=False)
    StudentLogitsCapture().attach_hooks(model)

    given = random_logits(1, batch, dtype).requires_grad_()
    labels = torch.arange(batch * SEQ).reshape(batch, SEQ) % REAL
    mask = torch.ones(batch, SEQ)
    mask[0, 1] = 0.0
    loss, num_tokens, report = loss_function(mask, model(given, labels), model)
    loss.backward()

    exact = given.detach().double().requires_grad_()
    kd = (dense_kl(exact, rows) * mask).sum()
    # The model's own loss is over all columns, as Megatron's is.
    chosen = torch.log_softmax(exact, -1).gather(-1, labels.T[..., None])[..., 0]
    lm = -(chosen.T * mask).sum()
    expected = alpha * kd + (1 - alpha) * lm
    expected.backward()

    assert num_tokens.item() == batch * SEQ - 1
    assert num_tokens.dtype == torch.int
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=1e-6)
    assert given.grad is not None
    assert exact.grad is not None
    gradient_tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(
        given.grad.double(), exact.grad, rtol=gradient_tolerance, atol=gradient_tolerance / 4
    )
    sums = {"lm loss": lm, "logits distillation loss": kd, "total loss": expected}
    assert set(report) == set(sums)
    for name, value in sums.items():
        assert not report[name].requires_grad
        assert report[name].tolist() == pytest.approx([value.item(), batch * SEQ - 1], rel=2e-6)


@both_paths
def test_student_equal_to_its_teacher_has_no_loss(
    run: StubRun, model_type: type[GivenLogitsModel]
) -> None:
    loss_function = open_loss()
    assert loss_function.kd_func is not None
    give(
        loss_function.kd_func, targets(0, rows_from(random_logits(1)), rows_from(random_logits(2)))
    )
    model = attached_model(model_type)
    given = random_logits(1).requires_grad_()
    loss, _, _ = loss_function(
        torch.ones(1, SEQ), model(given, torch.zeros(1, SEQ, dtype=torch.long)), model
    )
    loss.backward()
    assert abs(loss.item()) < 1e-5
    assert given.grad is not None
    assert given.grad.abs().max() < 1e-6


class _CountsBackward(torch.autograd.Function):
    """The identity; counts how often a gradient came through."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        _CountsBackward.passes += 1
        return gradients[0]


@pytest.mark.parametrize(("alpha", "passes"), [(1.0, 0), (0.5, 1), (0.0, 1)])
@both_paths
def test_lm_loss_costs_a_backward_pass_only_if_it_counts(
    run: StubRun, alpha: float, passes: int, model_type: type[GivenLogitsModel]
) -> None:
    loss_function = open_loss(kd_loss_alpha=alpha)
    assert loss_function.kd_func is not None
    rows = rows_from(random_logits(7))
    give(loss_function.kd_func, targets(0, rows, rows))
    model = attached_model(model_type)
    given = random_logits(1).requires_grad_()
    _CountsBackward.passes = 0
    lm_losses = _CountsBackward.apply(model(given, torch.zeros(1, SEQ, dtype=torch.long)))
    loss, _, _ = loss_function(torch.ones(1, SEQ), lm_losses, model)
    loss.backward()
    assert _CountsBackward.passes == passes


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@both_paths
def test_fully_masked_microbatch(
    run: StubRun, alpha: float, model_type: type[GivenLogitsModel]
) -> None:
    loss_function = open_loss(kd_loss_alpha=alpha)
    assert loss_function.kd_func is not None
    rows = rows_from(random_logits(7))
    give(loss_function.kd_func, targets(0, rows, rows))
    model = attached_model(model_type)
    given = random_logits(1).requires_grad_()
    loss, num_tokens, report = loss_function(
        torch.zeros(1, SEQ), model(given, torch.zeros(1, SEQ, dtype=torch.long)), model
    )
    loss.backward()
    assert loss.item() == 0.0
    assert num_tokens.item() == 0
    assert all(entry.tolist() == [0.0, 0.0] for entry in report.values())
    assert given.grad is not None
    assert (given.grad == 0).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@both_paths
def test_masked_positions_may_hold_anything(
    run: StubRun, alpha: float, poison: float, model_type: type[GivenLogitsModel]
) -> None:
    """Neither the logits nor the LM loss of a masked token reach the loss or a gradient."""
    rows = rows_from(random_logits(7))
    mask = torch.ones(1, SEQ)
    mask[0, 2] = 0.0
    outcomes = []
    for spoilt in (False, True):
        loss_function = open_loss(kd_loss_alpha=alpha)
        assert loss_function.kd_func is not None
        give(loss_function.kd_func, targets(0, rows, rows))
        model = attached_model(model_type)
        given, lm_losses = random_logits(1), torch.arange(1.0, 1 + SEQ)[None]
        if spoilt:
            given[2, 0, 3] = poison
            lm_losses[0, 2] = poison
        given.requires_grad_()
        lm_losses.requires_grad_()
        model.output_layer(given)
        loss, num_tokens, report = loss_function(mask, lm_losses, model)
        loss.backward()
        assert num_tokens.item() == SEQ - 1
        assert all(entry.isfinite().all() for entry in report.values())
        outcomes.append((loss.detach(), given.grad, lm_losses.grad))
    for clean, other in zip(*outcomes, strict=True):
        assert (clean is None) == (other is None)
        if clean is not None:
            torch.testing.assert_close(other, clean, rtol=1e-6, atol=1e-7)
    assert (outcomes[1][1] is None) == (alpha == 0.0)
    assert (outcomes[1][2] is None) == (alpha == 1.0)


def spoil(rows: TeacherRows, token: int, sample: int, poison: str) -> TeacherRows:
    """The same targets but for one token, which gets what no teacher would have written."""
    assert rows.tail_logprob is not None
    values, ids, tail = rows.values.clone(), rows.indices.clone(), rows.tail_logprob.clone()
    place = token, sample
    if poison == "nan":
        values[place], tail[place] = math.nan, math.nan
    elif poison == "inf":
        values[place], tail[place] = math.inf, math.inf
    elif poison == "ids":
        ids[place] = torch.tensor([131070, 13, 131071])
    elif poison == "large":
        values[place], tail[place], ids[place] = 80.0, 80.0, torch.tensor([12, 0, 3])
    return TeacherRows(values=values, indices=ids, tail_logprob=tail)


@pytest.mark.parametrize("packed", [False, True], ids=["side by side", "packed"])
@pytest.mark.parametrize("poison", ["nan", "inf", "ids", "large"])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
@both_paths
def test_targets_of_masked_tokens_do_not_count(
    run: StubRun, alpha: float, poison: str, packed: bool, model_type: type[GivenLogitsModel]
) -> None:
    """Loss, report and gradient are bit for bit those of the teacher's own targets."""
    batch, token, sample = 2, 1, 1
    clean = rows_from(random_logits(7, batch))
    mask = torch.ones(batch, SEQ)
    mask[sample, token] = 0.0
    outcomes = []
    for rows in (clean, spoil(clean, token, sample, poison)):
        assert rows is clean or not torch.equal(rows.values, clean.values) or poison == "ids"
        loss_function = open_loss(kd_loss_alpha=alpha)
        assert loss_function.kd_func is not None
        give(loss_function.kd_func, targets(0, rows, rows))
        model = attached_model(model_type)
        given, batch_mask = random_logits(1, batch), mask
        if packed:
            given, batch_mask = joined(given), mask.reshape(1, -1)
        given.requires_grad_()
        losses = model(given, torch.zeros(batch_mask.shape, dtype=torch.long))
        loss, num_tokens, report = loss_function(batch_mask, losses, model)
        loss.backward()
        assert num_tokens.item() == batch * SEQ - 1
        assert given.grad is not None
        outcomes.append((loss.detach(), given.grad, *report.values()))
    assert all(part.isfinite().all() for part in outcomes[0])
    for expected, found in zip(*outcomes, strict=True):
        assert torch.equal(found, expected)


# ---- packed sequences -------------------------------------------------------------------------


def joined(logits: torch.Tensor) -> torch.Tensor:
    """Lay the samples of ``(S, B, V)`` one after the other, as the trainer does under --sft."""
    return torch.cat(list(logits.unbind(1)))[:, None]


@pytest.mark.parametrize("with_tail", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_packed_samples_have_the_same_loss(run: StubRun, batch: int, with_tail: bool) -> None:
    """Per token, in the order of the trainer's joined loss mask; and its gradient."""
    rows = rows_from(random_logits(7, batch))
    if not with_tail:
        rows = replace(rows, tail_logprob=None)
    kd_loss = CachedLogitsKDLoss("unused")
    give(kd_loss, targets(0, rows, rows))
    beside, packed = random_logits(1, batch), joined(random_logits(1, batch))
    losses = []
    for logits in (beside, packed):
        logits.requires_grad_()
        loss = kd_loss(logits)
        assert loss is not None
        loss.sum().backward()
        losses.append(loss.detach())
    assert losses[0].shape == (batch, SEQ)
    assert losses[1].shape == (1, batch * SEQ)
    assert torch.equal(losses[1], losses[0].reshape(1, -1))
    assert beside.grad is not None
    assert packed.grad is not None
    assert torch.equal(packed.grad, joined(beside.grad))


@both_paths
def test_packed_mask_selects_the_tokens_it_names(
    run: StubRun, model_type: type[GivenLogitsModel]
) -> None:
    """Against float64 on the samples side by side, with a mask that differs per sample."""
    batch = 2
    rows = rows_from(random_logits(7, batch))
    loss_function = open_loss()
    assert loss_function.kd_func is not None
    give(loss_function.kd_func, targets(0, rows))
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    model = attached_model(model_type)
    given = joined(random_logits(1, batch))
    output = model(given, torch.zeros(1, batch * SEQ, dtype=torch.long))
    loss, num_tokens, _ = loss_function(mask.reshape(1, -1), output, model)
    assert num_tokens.item() == 3
    expected = (dense_kl(random_logits(1, batch), rows) * mask).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(SEQ, 1), (2 * SEQ, 2), (3 * SEQ, 1), (SEQ - 1, 2)])
def test_logits_of_another_microbatch_are_refused(run: StubRun, shape: tuple[int, int]) -> None:
    kd_loss = CachedLogitsKDLoss("unused")
    give(kd_loss, targets(0, rows_from(random_logits(7, batch=2))))
    with pytest.raises(ValueError, match=r"\(positions, samples\) = .*expected \(\d+, 2\), or"):
        kd_loss(torch.zeros(*shape, PADDED))


@both_paths
def test_evaluation_reports_the_lm_loss_only(
    run: StubRun, model_type: type[GivenLogitsModel]
) -> None:
    loss_function = LossFuncCallable("/nowhere")
    model = attached_model(model_type).eval()
    output = torch.tensor([[1.0, 2.0, 3.0, math.nan]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    loss, num_tokens, report = loss_function(mask, output, model)
    assert (loss.item(), num_tokens.item()) == (3.0, 2)
    assert set(report) == {"lm loss"}
    assert report["lm loss"].tolist() == [3.0, 2.0]
    # The cache has not been opened.
    assert loss_function.kd_func is None


def test_megatrons_loss_is_run_for_other_heads_and_in_evaluation_only(
    run: StubRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[torch.Tensor] = []

    def counted(logits: torch.Tensor, labels: torch.Tensor, tp_group: None) -> torch.Tensor:
        calls.append(logits.detach().clone())
        return logits.float().sum(-1)

    monkeypatch.setattr(tensor_parallel, "vocab_parallel_cross_entropy", counted)
    loss_function = open_loss(ignore_errors=True)
    assert loss_function.kd_func is not None
    rows = rows_from(random_logits(7))
    give(loss_function.kd_func, targets(0, rows, rows), failed(2))
    model = attached_model(MegatronLossModel, mtp_num_layers=1)
    given, labels = random_logits(1), torch.zeros(1, SEQ, dtype=torch.long)
    exact = given.clone()

    def step() -> dict[str, torch.Tensor]:
        calls.clear()
        _, _, report = loss_function(torch.ones(1, SEQ), model(given, labels), model)
        return report

    report = step()
    assert [torch.equal(logits, exact) for logits in calls] == [False]
    assert "logits distillation loss" in report
    # Without targets and without training the main head's loss is its own.
    run.move_to(2)
    assert "logits distillation loss" not in step()
    assert [torch.equal(logits, exact) for logits in calls] == [False, True]
    model.eval()
    assert set(step()) == {"lm loss"}
    assert [torch.equal(logits, exact) for logits in calls] == [False, True]
    assert torch.equal(given, exact)


# ---- capture ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "fusion", "copied"),
    [
        (torch.float32, None, True),
        (torch.bfloat16, None, False),
        (torch.bfloat16, "native", False),
        (torch.bfloat16, "te", True),
        (torch.float32, "te", True),
    ],
)
def test_the_models_loss_gets_a_copy_only_if_it_would_overwrite(
    run: StubRun, dtype: torch.dtype, fusion: str | None, copied: bool
) -> None:
    model = GivenLogitsModel()
    model.config = SimpleNamespace(
        mtp_num_layers=None,
        cross_entropy_loss_fusion=fusion is not None,
        cross_entropy_fusion_impl=fusion or "native",
    )
    received: list[torch.Tensor] = []

    def own_loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        received.append(logits)
        return logits.sum()

    model.compute_language_model_loss = own_loss  # type: ignore[method-assign]
    capture = StudentLogitsCapture()
    capture.attach_hooks(model)
    given = random_logits(1, dtype=dtype)
    model(given, torch.zeros(1, SEQ, dtype=torch.long))
    captured = capture.pop()
    assert torch.equal(captured, given)
    assert (received[0].data_ptr() != captured.data_ptr()) is copied
    assert torch.equal(received[0], captured)


def test_captured_logits_survive_a_loss_in_place(run: StubRun) -> None:
    model = attached_model()
    given = random_logits(1)
    model(given.clone(), torch.zeros(1, SEQ, dtype=torch.long))
    capture = get_student_logits_capture()
    assert capture is not None
    assert torch.equal(capture.pop(), given)


def test_capture_is_taken_once(run: StubRun) -> None:
    capture = StudentLogitsCapture()
    model = GivenLogitsModel()
    capture.attach_hooks(model)
    assert get_student_logits_capture() is capture
    with pytest.raises(RuntimeError, match=r"No student logits were captured"):
        capture.pop()
    model(random_logits(1), torch.zeros(1, SEQ, dtype=torch.long))
    capture.pop()
    with pytest.raises(RuntimeError, match=r"No student logits were captured"):
        capture.pop()


@both_paths
def test_evaluation_leaves_no_logits_behind(
    run: StubRun, model_type: type[GivenLogitsModel]
) -> None:
    capture = StudentLogitsCapture()
    model = model_type()
    capture.attach_hooks(model)
    model.eval()
    model(random_logits(1), torch.zeros(1, SEQ, dtype=torch.long))
    with pytest.raises(RuntimeError, match=r"No student logits"):
        capture.pop()


@both_paths
def test_removed_capture_leaves_the_model_as_it_was(
    run: StubRun, model_type: type[GivenLogitsModel]
) -> None:
    capture = StudentLogitsCapture()
    model = model_type()
    capture.attach_hooks(model)
    model(random_logits(1), torch.zeros(1, SEQ, dtype=torch.long))
    capture.remove_hooks()
    model(random_logits(1), torch.zeros(1, SEQ, dtype=torch.long))
    assert "compute_language_model_loss" not in model.__dict__
    with pytest.raises(RuntimeError, match=r"No student logits"):
        capture.pop()


def test_stage_without_output_layer_stays_idle(run: StubRun) -> None:
    stage = torch.nn.Linear(2, 2)
    capture = StudentLogitsCapture()
    capture.attach_hooks(stage)
    stage(torch.zeros(1, 2))
    capture.remove_hooks()


def test_loss_without_a_capture_says_so(run: StubRun) -> None:
    with pytest.raises(RuntimeError, match=r"needs a StudentLogitsCapture attached"):
        LossFuncCallable("/nowhere")(torch.ones(1, SEQ), torch.ones(1, SEQ), torch.nn.Linear(1, 1))


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"kd_loss_alpha is .*: expected a weight in \[0, 1\]"):
        LossFuncCallable("/nowhere", kd_loss_alpha=alpha)


# ---- which targets ----------------------------------------------------------------------------


def test_microbatches_are_counted_and_counted_again_in_a_replay(run: StubRun) -> None:
    kd_loss = CachedLogitsKDLoss("unused")
    rows = [rows_from(random_logits(seed)) for seed in range(4)]
    stream = give(kd_loss, targets(0, *rows[:2]), targets(2, *rows[2:]))
    student = random_logits(9)

    def used() -> int:
        loss = kd_loss(student)
        assert loss is not None
        matches = [
            index
            for index, row in enumerate(rows)
            if torch.allclose(loss.double(), dense_kl(student, row), rtol=1e-5)
        ]
        assert len(matches) == 1
        return matches[0]

    assert [used() for _ in range(4)] == [0, 1, 0, 1]
    run.move_to(2)
    assert [used(), used()] == [2, 3]
    run.move_to(0)
    assert [used()] == [0]
    # One look-up an iteration, however many microbatches and replays.
    assert stream.asked == [0, 2, 0]


def test_iteration_and_microbatch_can_be_named(run: StubRun) -> None:
    kd_loss = CachedLogitsKDLoss("unused")
    rows = [rows_from(random_logits(seed)) for seed in range(2)]
    stream = give(kd_loss, targets(6, *rows))
    student = random_logits(9)
    for index in (1, 0):
        loss = kd_loss(student, iteration=3, microbatch_idx=index)
        assert loss is not None
        torch.testing.assert_close(loss.double(), dense_kl(student, rows[index]), rtol=1e-5, atol=0)
    assert stream.asked == [6]


def test_loss_shape_and_type(run: StubRun) -> None:
    kd_loss = CachedLogitsKDLoss("unused")
    rows = rows_from(random_logits(1, batch=3))
    give(kd_loss, targets(0, rows))
    loss = kd_loss(random_logits(2, batch=3, dtype=torch.bfloat16))
    assert loss is not None
    assert loss.shape == (3, SEQ)
    assert loss.dtype == torch.float32


def test_targets_come_from_the_cache_by_sample(run: StubRun, tmp_path: Path) -> None:
    """From files to the loss through the real stream, on rank 1 of 2."""
    write_shard(tmp_path, 0, 16, gbs=8, mbs=2)
    run.settings = replace(SETTINGS, global_batch_size=4, seq_length=SEQ)
    run.layout = replace(run.layout, dp_rank=1, dp_size=2)
    kd_loss = CachedLogitsKDLoss(str(tmp_path))
    # From rank 0, which lists for both.
    kd_loss._feed.stream.use_listing([path.name for path in tmp_path.iterdir()])
    kd_loss._agreed._has_listing = True
    seen: list[list[int]] = []
    for start in (4, 8):
        run.move_to(start)
        kd_loss(random_logits(1))
        read = kd_loss._feed._read
        assert isinstance(read, IterationTargets)
        seen.append([sample_of(rows.values)[0] for rows in read.microbatches])
    assert seen == [[5, 7], [9, 11]]


# ---- missing targets --------------------------------------------------------------------------


def test_missing_targets_stop_the_run(run: StubRun) -> None:
    kd_loss = CachedLogitsKDLoss("unused")
    give(kd_loss, failed(0))
    with pytest.raises(TeacherDataMissingError, match=r"no sample 0"):
        kd_loss(random_logits(1))


@both_paths
def test_ignored_errors_fall_back_to_the_lm_loss_and_recover(
    run: StubRun, caplog: pytest.LogCaptureFixture, model_type: type[GivenLogitsModel]
) -> None:
    loss_function = open_loss(ignore_errors=True)
    kd_loss = loss_function.kd_func
    assert kd_loss is not None
    rows = rows_from(random_logits(7))
    give(kd_loss, targets(0, rows, rows), failed(2), failed(4), targets(6, rows, rows))
    model = attached_model(model_type)
    labels, mask = torch.zeros(1, SEQ, dtype=torch.long), torch.ones(1, SEQ)
    reported = []
    with caplog.at_level(logging.WARNING):
        for start in (0, 2, 4, 6):
            run.move_to(start)
            for _ in range(2):
                given = random_logits(1).requires_grad_()
                lm_losses = model(given, labels)
                loss, _, report = loss_function(mask, lm_losses, model)
                reported.append("logits distillation loss" in report)
                if not reported[-1]:
                    assert report["total loss"].tolist() == report["lm loss"].tolist()
                    assert loss.item() == pytest.approx(lm_losses.sum().item())
                    loss.backward()
                    assert given.grad is not None
                    assert given.grad.abs().sum() > 0
    assert reported == [True, True, False, False, False, False, True, True]
    assert kd_loss.skipped_iterations == 2
    skips = [record for record in caplog.records if "No teacher targets" in record.getMessage()]
    for record, sample, count in zip(skips, (2, 4), (1, 2), strict=True):
        message = record.getMessage()
        assert f"starts at sample {sample}" in message
        assert f"{count} steps so far" in message
        assert f"no sample {sample}" in message


def test_another_runs_data_is_never_ignored(run: StubRun) -> None:
    kd_loss = CachedLogitsKDLoss("unused", ignore_errors=True)
    give(kd_loss, failed(0, fatal=True))
    with pytest.raises(CacheIdentityError, match=r"seed differs"):
        kd_loss(random_logits(1))


def _one_rank_fails(
    rank: int, world_size: int, ignore_errors: bool, fatal: bool
) -> tuple[str, str] | None:
    StubRun(layout=group_layout(dp_rank=rank, dp_size=world_size)).install(PlainPatch)
    kd_loss = CachedLogitsKDLoss("unused", ignore_errors=ignore_errors)
    rows = rows_from(random_logits(0))
    give(kd_loss, failed(0, fatal=fatal) if rank == 1 else targets(0, rows, rows))
    try:
        loss = kd_loss(random_logits(1))
    except (TeacherDataError, CacheIdentityError) as error:
        return type(error).__name__, str(error)
    assert (loss is None) == (kd_loss.skipped_iterations == 1)
    return None if loss is None else ("loss", "")


@pytest.mark.parametrize(
    ("ignore_errors", "fatal", "names"),
    [
        (False, False, ["TeacherDataError", "TeacherDataMissingError"]),
        (False, True, ["TeacherDataError", "CacheIdentityError"]),
        (True, True, ["TeacherDataError", "CacheIdentityError"]),
        (True, False, None),
    ],
)
def test_all_ranks_decide_alike(ignore_errors: bool, fatal: bool, names: list[str] | None) -> None:
    results = run_ranks(2, _one_rank_fails, ignore_errors, fatal)
    if names is None:
        assert results == [None, None]
        return
    assert [name for name, _ in results] == names
    told = results[0][1]
    for part in ("Another rank", "starts at sample 0", "rank 1:"):
        assert part in told


# ---- NVIDIA's names ---------------------------------------------------------------------------


def _kl_share(rank: int, world_size: int, ghost: bool) -> tuple[torch.Tensor, torch.Tensor]:
    import torch.distributed as dist

    width = PADDED // world_size
    shard = random_logits(1, batch=2)[..., rank * width : (rank + 1) * width].clone()
    shard.requires_grad_()
    teacher = torch.log_softmax(random_logits(2, batch=2).double(), -1).float()
    values, indices = teacher.topk(TOP)
    group = dist.group.WORLD if world_size > 1 else None
    share = topk_kl_div(shard, values, indices, world_size, rank, group, add_ghost_token=ghost)
    share.sum().backward()
    assert shard.grad is not None
    return share.detach(), shard.grad


@pytest.mark.parametrize("ghost", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_topk_kl_div_shares_sum_to_the_divergence(world_size: int, ghost: bool) -> None:
    results = run_ranks(world_size, _kl_share, ghost)
    exact = random_logits(1, batch=2).double().requires_grad_()
    student = torch.log_softmax(exact, -1)
    teacher = torch.log_softmax(random_logits(2, batch=2).double(), -1)
    values, indices = teacher.topk(TOP)
    expected = (values.exp() * (values - student.gather(-1, indices))).sum(-1)
    if ghost:
        rest = 1 - values.exp().sum(-1)
        student_rest = 1 - student.gather(-1, indices).exp().sum(-1)
        expected = expected + rest * (rest.log() - student_rest.log())
    expected.sum().backward()
    assert exact.grad is not None
    shares, gradients = zip(*results, strict=True)
    assert all(share.shape == (2, SEQ) for share in shares)
    torch.testing.assert_close(sum(shares).double(), expected.detach().T, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(gradients, -1).double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_teacher_tar_dataset_yields_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(tmp_path, 0, 16, gbs=4, mbs=1, dp=2)
    namespace = SimpleNamespace(micro_batch_size=2, global_batch_size=8)
    monkeypatch.setattr(cached_logits_loss, "get_args", lambda: namespace)
    dataset = make_teacher_tar_dataset(str(tmp_path), 0, 1, 0, 1, ignore_hash=True)
    found = list(dataset)
    assert [iteration for iteration, _, _ in found] == [0, 1]
    assert [[sample_of(values) for values in item[1]] for item in found] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[8, 9], [10, 11], [12, 13], [14, 15]],
    ]
    for _, values, indices in found:
        assert [part.shape for part in indices] == [part.shape for part in values]
        assert all(part.dtype in (torch.int32, torch.int64) for part in indices)
    later = make_teacher_tar_dataset(
        str(tmp_path), 0, 1, 1, 2, start_iteration=1, decode_threads=3, ignore_hash=True
    )
    ((iteration, values, _),) = list(later)
    assert iteration == 1
    assert [sample_of(part) for part in values] == [[10, 11], [14, 15]]


def test_teacher_tar_dataset_checks_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(tmp_path, 0, 8)
    namespace = SimpleNamespace(micro_batch_size=1, global_batch_size=4)
    monkeypatch.setattr(cached_logits_loss, "get_args", lambda: namespace)
    for seed in (1, 2):
        identifiers = {**IDENTIFIERS, "seed": seed}
        monkeypatch.setattr(
            cached_logits_loss.arguments, "run_identifiers", lambda args, ids=identifiers: ids
        )
        dataset = make_teacher_tar_dataset(str(tmp_path), 0, 1, 0, 1)
        if seed == 1:
            assert len(list(dataset)) == 2
        else:
            with pytest.raises(CacheIdentityError, match=r"seed is 1, here it is 2"):
                list(dataset)
