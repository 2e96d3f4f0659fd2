# SPDX-License-Identifier: Apache-2.0
"""The loss against a dense float64 oracle, constants by hand, and what it promises around it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.training.distillation import row_passes
from megatron.training.distillation.sparse_kl import sparse_kl, sparse_kl_share
from tests.unit_tests.distributed import recorded_collectives, run_ranks
from tests.unit_tests.training.distillation.loss_cases import (
    CASES,
    EPS,
    FP32_CASES,
    WIDTH,
    Case,
    oracle,
    teacher,
    weights,
)

Loss = Callable[..., Tensor]


def run(case: Case, fn: Loss = sparse_kl, rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    """Loss and gradient of one rank, as CPU tensors."""
    given = case.inputs()
    width = WIDTH // size
    shard = given.pop("student_logits")[..., rank * width : (rank + 1) * width].clone()
    before = shard.clone()
    shard.requires_grad_()
    loss = fn(
        shard,
        **given,
        with_tail=case.tail != "none",
        vocab_size=case.vocab_size,
        tp_rank=rank,
        tp_size=size,
    )
    (grad,) = torch.autograd.grad(loss, shard, weights(case.shape, loss.dtype))
    assert torch.equal(shard.detach(), before)
    return loss.detach(), grad


def assert_matches(case: Case, loss: Tensor, grad: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    fine = 1e-11 if case.dtype == torch.float64 else 2e-6
    torch.testing.assert_close(loss.double(), expected[0], rtol=fine, atol=fine, msg=str(case))
    assert grad.dtype == case.dtype
    smallest = torch.finfo(case.dtype).smallest_normal if case.dtype == torch.float16 else 0
    torch.testing.assert_close(
        grad.double(), expected[1], rtol=EPS[case.dtype], atol=fine + smallest, msg=str(case)
    )
    assert not grad[..., case.vocab_size :].any(), case


def _all_cases(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    return [run(case, sparse_kl, rank, size) for case in CASES]


def _all_shares(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    return [run(case, sparse_kl_share, rank, size) for case in FP32_CASES]


def test_matches_dense_float64_and_tp2_matches_tp1() -> None:
    for case, first, second in zip(CASES, *run_ranks(2, _all_cases), strict=True):
        expected = oracle(case)
        loss, grad = run(case)
        assert loss.shape == case.shape
        assert loss.dtype == torch.promote_types(case.dtype, torch.float32)
        assert_matches(case, loss, grad, expected)

        assert torch.equal(first[0], second[0]), case
        torch.testing.assert_close(first[0], loss, rtol=1e-6, atol=2e-7, msg=str(case))
        assert_matches(case, first[0], torch.cat([first[1], second[1]], -1), expected)


def test_shares_sum_to_the_loss() -> None:
    for case, first, second in zip(FP32_CASES, *run_ranks(2, _all_shares), strict=True):
        loss, grad = run(case)
        torch.testing.assert_close(first[0] + second[0], loss, rtol=1e-6, atol=5e-7, msg=str(case))
        both = torch.cat([first[1], second[1]], -1)
        torch.testing.assert_close(both, grad, rtol=2e-6, atol=2e-6, msg=str(case))
        share, share_grad = run(case, sparse_kl_share)
        assert torch.equal(share, loss), case
        assert torch.equal(share_grad, grad), case


def test_constants_by_hand() -> None:
    logits = torch.tensor([[[0.5, 0.25, 0.25]]]).log().requires_grad_()
    logprobs, indices = torch.tensor([[[0.75]]]).log(), torch.tensor([[[0]]])
    loss = sparse_kl(logits, logprobs, indices)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)
    assert grad.flatten().tolist() == pytest.approx([-0.25, 0.125, 0.125], rel=1e-6)

    loss = sparse_kl(logits, logprobs, indices, with_tail=False)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.item() == pytest.approx(0.3040988, rel=1e-6)
    assert grad.flatten().tolist() == pytest.approx([-0.375, 0.1875, 0.1875], rel=1e-6)

    tail = torch.tensor([[0.125]]).log()  # P = 0.875
    loss = sparse_kl(logits, logprobs, indices, tail_logprob=tail)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.item() == pytest.approx(0.3040988 - 0.125 * math.log(4), rel=1e-6)
    assert grad.flatten().tolist() == pytest.approx([-0.3125, 0.15625, 0.15625], rel=1e-6)


@pytest.mark.parametrize("tail", ["stored", "complement", "none"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_gradcheck(tail: str, offset: float) -> None:
    case = Case(dtype=torch.float64, k=7, top_p=True, vocab_size=41, shape=(2, 2), tail=tail)
    given = case.inputs()
    logits = (given.pop("student_logits") + offset).requires_grad_()

    def loss(z: Tensor) -> Tensor:
        return sparse_kl(z, **given, with_tail=tail != "none", vocab_size=41)

    assert torch.autograd.gradcheck(loss, (logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [5, 64])
def test_student_that_equals_the_teacher(dtype: torch.dtype, k: int) -> None:
    torch.manual_seed(1)
    logits = (4 * torch.randn(9, 2, 64)).to(dtype).requires_grad_()
    dense = logits.detach().double().log_softmax(-1)
    logprobs, indices = dense.float().topk(k, -1)
    tail = dense.scatter(-1, indices, -math.inf).logsumexp(-1).float()
    loss = sparse_kl(logits, logprobs, indices, tail_logprob=tail)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.abs().max() < 1e-6
    assert grad.abs().max() < 5e-7


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("may_look", [True, False], ids=["cpu path", "accelerator path"])
@pytest.mark.parametrize("offset", [0.0, 300.0, -300.0, None], ids=str)
def test_fp32_gradient_error_below_1e_6(
    monkeypatch: pytest.MonkeyPatch, may_look: bool, offset: float | None
) -> None:
    """Over several chunks of several rows; the last offset is another one for each row."""
    monkeypatch.setattr(row_passes, "may_look", lambda x: may_look)
    torch.manual_seed(2)
    shape = (7, 3)
    logits = 2 * torch.randn(*shape, 30000)
    logits += torch.linspace(-200, 200, 21).view(7, 3, 1) if offset is None else offset
    logits.requires_grad_()
    logprobs, indices = teacher(shape, 30000, 100)
    loss = sparse_kl(logits, logprobs, indices)
    (grad,) = torch.autograd.grad(loss.sum(), logits)

    z = logits.detach().double().requires_grad_()
    logq, p = z.log_softmax(-1), logprobs.double().exp()
    mass = 1 - p.sum(-1)
    tail = logq.scatter(-1, indices, -math.inf).logsumexp(-1)
    want = (p * (logprobs - logq.gather(-1, indices))).sum(-1) + mass * (mass.log() - tail)
    (want_grad,) = torch.autograd.grad(want.sum(), z)
    assert error(grad, want_grad) <= 1e-6
    assert error(loss, want) <= 1e-6


def test_rows_without_upstream_gradient_get_exactly_zero() -> None:
    torch.manual_seed(3)
    clean = torch.randn(4, 2, 32)
    logprobs, indices = teacher((4, 2), 32, 5)
    upstream = torch.ones(4, 2)
    upstream[1, 0] = upstream[2, 1] = upstream[3, 0] = 0

    def gradient(logits: Tensor) -> Tensor:
        logits = logits.clone().requires_grad_()
        loss = sparse_kl(logits, logprobs, indices)
        return torch.autograd.grad(loss, logits, upstream)[0]

    broken = clean.clone()
    broken[1, 0, 3] = math.nan
    broken[2, 1] = math.inf
    broken[3, 0] = -math.inf
    grad = gradient(broken)
    assert not grad[upstream == 0].any()
    torch.testing.assert_close(grad, gradient(clean), rtol=1e-5, atol=1e-7)


def test_ids_beyond_the_vocabulary_change_nothing() -> None:
    torch.manual_seed(4)
    logits = torch.randn(3, 2, 40)
    logprobs, indices = teacher((3, 2), 33, 6)

    def result(logits: Tensor, logprobs: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.clone().requires_grad_()
        loss = sparse_kl(logits, logprobs, indices, vocab_size=33)
        return loss.detach(), torch.autograd.grad(loss.sum(), logits)[0]

    loss, grad = result(logits, logprobs, indices)
    for value in (-math.inf, 1e30, math.inf, math.nan):
        padded = logits.clone()
        padded[..., 33:] = value
        more, ids = torch.full((3, 2, 2), -0.5), torch.tensor([33, 39]).expand(3, 2, 2)
        found = result(padded, torch.cat([logprobs, more], -1), torch.cat([indices, ids], -1))
        torch.testing.assert_close(found, (loss, grad), rtol=1e-6, atol=1e-8)
        assert not found[1][..., 33:].any()


def test_student_tail_that_underflows_stays_finite() -> None:
    logits = torch.full((2, 1, 16), -500.0)
    logits[..., :2] = torch.tensor([[[0.0, 1.0]], [[500.0, 499.0]]])
    logits.requires_grad_()
    logprobs, indices = torch.tensor([0.5, 0.25]).log().expand(2, 1, 2), torch.tensor([0, 1])
    loss = sparse_kl(logits, logprobs, indices.expand(2, 1, 2))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("tail", [None, torch.full((2, 1), -math.inf)], ids=["complement", "-inf"])
def test_entries_that_cover_the_vocabulary(tail: Tensor | None) -> None:
    """fp16 rounding leaves a complement of about 1e-3, which no student could give a place."""
    torch.manual_seed(5)
    logits = torch.randn(2, 1, 12).requires_grad_()
    logprobs, indices = teacher((2, 1), 12, 12)
    loss = sparse_kl(logits, logprobs.half() - 0.001, indices, tail_logprob=tail)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    p = (logprobs.half() - 0.001).float().exp()
    want = (p * (logprobs - logits.detach().log_softmax(-1).gather(-1, indices))).sum(-1)
    torch.testing.assert_close(loss, want, rtol=0, atol=3e-3)
    assert grad.isfinite().all()


def test_teacher_entries_with_probability_zero() -> None:
    """Also where the student agrees that they are impossible."""
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]]).requires_grad_()
    logprobs = torch.tensor([[[math.log(0.5), -math.inf]]])
    loss = sparse_kl(logits, logprobs, torch.tensor([[[0, 2]]]))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert grad.flatten().tolist() == pytest.approx([0, 0, 0], abs=1e-6)


def test_backward_twice_and_layouts() -> None:
    torch.manual_seed(6)
    plain = torch.randn(5, 2, 24, dtype=torch.bfloat16)
    logprobs, indices = teacher((5, 2), 24, 4)
    logits = plain.clone().requires_grad_()
    loss = sparse_kl(logits, logprobs, indices)
    (first,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.equal(first, second)

    batch_first = plain.transpose(0, 1).contiguous().requires_grad_()
    strided = sparse_kl(batch_first.transpose(0, 1), logprobs, indices.int())
    assert torch.equal(strided, loss)
    (grad,) = torch.autograd.grad(strided.sum(), batch_first)
    assert torch.equal(grad.transpose(0, 1), first)


def test_holds_only_the_logits_and_the_entries() -> None:
    tokens, width, k = 8, 4096, 16
    logits = torch.randn(tokens, 1, width).requires_grad_()
    logprobs, indices = teacher((tokens, 1), width, k)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = sparse_kl(logits, logprobs, indices)
    large = [t for t in saved if t.numel() >= tokens * width]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]
    assert sum(t.nbytes for t in saved if t.numel() < tokens * width) <= tokens * (12 + 12 * k)
    assert not [v for v in vars(loss.grad_fn).values() if isinstance(v, Tensor)]


def _count_collectives(rank: int, size: int) -> tuple[list[str], list[str]]:
    logits = torch.randn(3, 2, 8).requires_grad_()
    torch.manual_seed(7)
    logprobs, indices = teacher((3, 2), 16, 4)
    with recorded_collectives() as forward:
        loss = sparse_kl(logits, logprobs, indices, tp_rank=rank, tp_size=size)
    with recorded_collectives() as backward:
        loss.sum().backward()
    return forward, backward


def test_one_collective_in_forward_and_none_in_backward() -> None:
    assert run_ranks(2, _count_collectives) == [(["all_gather_into_tensor"], [])] * 2


def _shard_of_padding(rank: int, size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(8)
    full = torch.randn(3, 2, 32)
    logprobs, indices = teacher((3, 2), 13, 5)
    logits = full[..., 16 * rank : 16 * (rank + 1)].clone().requires_grad_()
    loss = sparse_kl(logits, logprobs, indices, vocab_size=13, tp_rank=rank, tp_size=size)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    if rank == 0:
        alone = full[..., :16].clone().requires_grad_()
        want = sparse_kl(alone, logprobs, indices, vocab_size=13)
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(grad, torch.autograd.grad(want.sum(), alone)[0])
    return loss.detach(), grad


def test_shard_that_is_only_padding() -> None:
    (first, _), (second, grad) = run_ranks(2, _shard_of_padding)
    assert torch.equal(first, second)
    assert not grad.any()


def test_no_tokens_and_no_entries() -> None:
    logits = torch.randn(0, 2, 8).requires_grad_()
    loss = sparse_kl(logits, torch.empty(0, 2, 3), torch.empty(0, 2, 3, dtype=torch.int64))
    loss.sum().backward()
    assert loss.shape == (0, 2)
    assert logits.grad is not None
    logits = torch.randn(2, 2, 8).requires_grad_()
    loss = sparse_kl(logits, torch.empty(2, 2, 0), torch.empty(2, 2, 0, dtype=torch.int64))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.abs().max() < 1e-6  # all mass in one bucket on both sides
    assert grad.abs().max() < 1e-6


GOOD = {
    "student_logits": torch.zeros(2, 3, 8),
    "teacher_logprobs": torch.zeros(2, 3, 4),
    "teacher_indices": torch.zeros(2, 3, 4, dtype=torch.int64),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"student_logits": torch.zeros(6, 8)}, r"student_logits must be .*\(6, 8\)"),
        ({"student_logits": torch.zeros(2, 3, 8).int()}, "student_logits must be a float"),
        ({"teacher_logprobs": torch.zeros(3, 2, 4)}, r"\(S, B\) = \(2, 3\).*got \(3, 2, 4\)"),
        ({"teacher_indices": torch.zeros(2, 3, 5).long()}, r"\(2, 3, 4\).*got .*\(2, 3, 5\)"),
        ({"teacher_indices": torch.zeros(2, 3, 4)}, "int32 or int64.*float32"),
        ({"tail_logprob": torch.zeros(2)}, r"tail_logprob must be .*\(2, 3\), got \(2,\)"),
        ({"vocab_size": 9}, r"vocab_size must be in \[1, 8\].*got 9"),
        ({"tp_rank": 2, "tp_size": 2}, r"tp_rank must be in \[0, 2\).*got 2"),
    ],
)
@pytest.mark.parametrize("fn", [sparse_kl, sparse_kl_share])
def test_arguments_that_do_not_fit(fn: Loss, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fn(**(GOOD | change))
