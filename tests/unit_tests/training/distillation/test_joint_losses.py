# SPDX-License-Identifier: Apache-2.0
"""The divergence and the LM loss in one pass: each is what it is alone, gradients included."""

import math

import pytest
import torch
from torch import Tensor

from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.training.distillation import row_passes
from megatron.training.distillation.sparse_kl import sparse_kl, sparse_kl_and_cross_entropy
from tests.unit_tests.distributed import recorded_collectives, run_ranks
from tests.unit_tests.training.distillation.loss_cases import (
    CASES,
    EPS,
    WIDTH,
    Case,
    oracle,
    teacher,
    weights,
)

JOINT_CASES = [
    case for case in CASES if case.tail != "none" and case.k != WIDTH and case.shape != (1, 1)
]


def labels_of(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(sum(case.shape))
    return torch.randint(case.vocab_size, case.shape, generator=generator)


def lm_weights(case: Case, dtype: torch.dtype) -> Tensor:
    """Another upstream gradient, whose zero is at another token."""
    return weights(case.shape, dtype).flip(0)


def lm_logits(case: Case) -> Tensor:
    """Columns that pad are tame here: they take part in the LM loss."""
    logits = case.inputs()["student_logits"]
    logits[..., case.vocab_size :] = 1.5
    return logits


def run(case: Case, rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    given = case.inputs()
    del given["student_logits"]
    width = WIDTH // size
    shard = lm_logits(case)[..., rank * width : (rank + 1) * width].clone()
    before = shard.clone()
    shard.requires_grad_()
    kl, lm = sparse_kl_and_cross_entropy(
        shard,
        given.pop("teacher_logprobs"),
        given.pop("teacher_indices"),
        labels_of(case),
        **given,
        vocab_size=case.vocab_size,
        tp_rank=rank,
        tp_size=size,
    )
    upstream = (weights(case.shape, kl.dtype), lm_weights(case, kl.dtype))
    (grad,) = torch.autograd.grad((kl, lm), shard, upstream)
    assert torch.equal(shard.detach(), before)
    return kl.detach(), lm.detach(), grad


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    kl, kl_grad = oracle(case)
    z = lm_logits(case).double().requires_grad_()
    lm = -z.log_softmax(-1).gather(-1, labels_of(case)[..., None])[..., 0]
    (lm_grad,) = torch.autograd.grad(lm, z, lm_weights(case, torch.float64))
    return kl, lm.detach(), kl_grad + lm_grad


def _all_cases(rank: int, size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [run(case, rank, size) for case in JOINT_CASES]


def test_both_match_dense_float64_at_tp1_and_tp2() -> None:
    for case, first, second in zip(JOINT_CASES, *run_ranks(2, _all_cases), strict=True):
        alone = run(case, 0, 1)
        assert torch.equal(first[0], second[0]), case
        assert torch.equal(first[1], second[1]), case
        both = (first[0], first[1], torch.cat([first[2], second[2]], -1))
        kl, lm, grad = expected(case)
        fine = 1e-11 if case.dtype == torch.float64 else 2e-6
        smallest = torch.finfo(case.dtype).smallest_normal if case.dtype == torch.float16 else 0
        for found in (alone, both):
            assert found[0].dtype == found[1].dtype == torch.promote_types(case.dtype, torch.float)
            assert found[2].dtype == case.dtype
            for value, want in ((found[0], kl), (found[1], lm)):
                torch.testing.assert_close(
                    value.double(), want, rtol=fine, atol=fine, msg=str(case)
                )
            # The two gradients may cancel: errors are relative to either, each at most 2.
            torch.testing.assert_close(
                found[2].double(),
                grad,
                rtol=EPS[case.dtype],
                atol=4 * fine + smallest,
                msg=str(case),
            )


def _of_megatron(rank: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    import torch.distributed as dist

    torch.manual_seed(11)
    full = (4 * torch.randn(6, 2, 64)).to(dtype)
    logprobs, indices = teacher((6, 2), 60, 5)
    labels = torch.randint(60, (6, 2))
    width = 64 // size
    shard = full[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    _, lm = sparse_kl_and_cross_entropy(
        shard, logprobs, indices, labels, vocab_size=60, tp_rank=rank, tp_size=size
    )
    (grad,) = torch.autograd.grad(lm.sum(), shard)
    theirs = shard.detach().clone().requires_grad_()
    want = vocab_parallel_cross_entropy(theirs.clone(), labels, tp_group=dist.group.WORLD)
    (want_grad,) = torch.autograd.grad(want.sum(), theirs)
    return lm.detach(), want.detach(), grad, want_grad


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lm_loss_is_megatrons(dtype: torch.dtype, size: int) -> None:
    for lm, want, grad, want_grad in run_ranks(size, _of_megatron, dtype):
        torch.testing.assert_close(lm, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad, want_grad, rtol=EPS[dtype], atol=1e-6)


def test_constants_by_hand() -> None:
    """Student 1/2, 1/4, 1/8, 1/8 over three ids and one column that pads; teacher 3/4 on id 0."""
    logits = torch.tensor([[[0.5, 0.25, 0.125, 0.125]]]).double().log().requires_grad_()
    logprobs, indices = torch.tensor([[[0.75]]]).double().log(), torch.tensor([[[0]]])
    kl, lm = sparse_kl_and_cross_entropy(
        logits, logprobs, indices, torch.tensor([[1]]), vocab_size=3
    )
    # q = 4/7, 3/7 in the tail
    assert kl.item() == pytest.approx(
        0.75 * math.log(0.75 / (4 / 7)) + 0.25 * math.log(0.25 / (3 / 7))
    )
    assert lm.item() == pytest.approx(math.log(4))
    (kl_grad,) = torch.autograd.grad(kl, logits, retain_graph=True)
    assert kl_grad.flatten().tolist() == pytest.approx(
        [4 / 7 - 3 / 4, 2 / 7 - 1 / 6, 1 / 7 - 1 / 12, 0]
    )
    (lm_grad,) = torch.autograd.grad(lm, logits)
    assert lm_grad.flatten().tolist() == pytest.approx([0.5, -0.75, 0.125, 0.125])


@pytest.mark.parametrize("wanted", ["kl", "lm", "both"])
def test_gradcheck(wanted: str) -> None:
    torch.manual_seed(5)
    logits = torch.randn(3, 2, 12, dtype=torch.float64, requires_grad=True)
    logprobs, indices = teacher((3, 2), 11, 4)
    labels = torch.randint(11, (3, 2))
    labels[0, 0] = indices[0, 0, 0]  # a label that the teacher kept

    def losses(z: Tensor) -> tuple[Tensor, ...]:
        found = sparse_kl_and_cross_entropy(z, logprobs.double(), indices, labels, vocab_size=11)
        return {"kl": found[:1], "lm": found[1:], "both": found}[wanted]

    assert torch.autograd.gradcheck(losses, (logits,))


@pytest.mark.parametrize("may_look", [True, False], ids=["cpu path", "accelerator path"])
@pytest.mark.parametrize("offset", [0.0, 300.0, -300.0], ids=str)
def test_fp32_gradient_error_below_1e_6(
    monkeypatch: pytest.MonkeyPatch, may_look: bool, offset: float
) -> None:
    monkeypatch.setattr(row_passes, "may_look", lambda x: may_look)
    torch.manual_seed(2)
    logits = (2 * torch.randn(7, 3, 30000) + offset).requires_grad_()
    logprobs, indices = teacher((7, 3), 29990, 100)
    labels = torch.randint(29990, (7, 3))
    kl, lm = sparse_kl_and_cross_entropy(logits, logprobs, indices, labels, vocab_size=29990)
    (grad,) = torch.autograd.grad(0.7 * kl.sum() + 0.3 * lm.sum(), logits)

    z = logits.detach().double().requires_grad_()
    logq, p = z[..., :29990].log_softmax(-1), logprobs.double().exp()
    mass = 1 - p.sum(-1)
    tail = logq.scatter(-1, indices, -math.inf).logsumexp(-1)
    want_kl = (p * (logprobs - logq.gather(-1, indices))).sum(-1) + mass * (mass.log() - tail)
    want_lm = -z.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    (want,) = torch.autograd.grad(0.7 * want_kl.sum() + 0.3 * want_lm.sum(), z)
    assert ((grad.double() - want).norm() / want.norm()).item() <= 1e-6
    assert ((lm.double() - want_lm).norm() / want_lm.norm()).item() <= 1e-6


def test_a_loss_that_is_not_wanted_leaves_the_other_as_it_is_alone() -> None:
    torch.manual_seed(6)
    logits = torch.randn(5, 2, 40).requires_grad_()
    logprobs, indices = teacher((5, 2), 33, 6)
    labels = torch.randint(33, (5, 2))
    kl, _ = sparse_kl_and_cross_entropy(logits, logprobs, indices, labels, vocab_size=33)
    (grad,) = torch.autograd.grad(kl.sum(), logits)
    want = sparse_kl(logits, logprobs, indices, vocab_size=33)
    assert torch.equal(kl, want)
    assert torch.equal(grad, torch.autograd.grad(want.sum(), logits)[0])
    assert not grad[..., 33:].any()


def _gradient(logits: Tensor, labels: Tensor, kl_upstream: Tensor, lm_upstream: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    logprobs, indices = teacher((4, 2), 32, 5)
    losses = sparse_kl_and_cross_entropy(logits, logprobs, indices, labels)
    (grad,) = torch.autograd.grad(losses, logits, (kl_upstream, lm_upstream))
    return grad


def test_rows_without_upstream_gradient_get_exactly_zero() -> None:
    torch.manual_seed(3)
    clean = torch.randn(4, 2, 32)
    labels = torch.randint(32, (4, 2))
    used = torch.ones(4, 2)
    used[1, 0] = used[2, 1] = used[3, 0] = 0
    broken = clean.clone()
    broken[1, 0, 3] = math.nan
    broken[2, 1] = math.inf
    broken[3, 0] = -math.inf
    torch.manual_seed(3)
    want = _gradient(clean, labels, used, used)
    torch.manual_seed(3)
    grad = _gradient(broken, labels, used, used)
    assert not grad[used == 0].any()
    torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-7)


def test_divergence_that_is_not_finite_leaves_the_lm_gradient_alone() -> None:
    """A token whose targets do not count still learns from its label."""
    logits = torch.randn(1, 1, 8)
    logprobs, indices = torch.tensor([[[math.nan, -1.0]]]), torch.tensor([[[0, 1]]])
    labels = torch.tensor([[2]])
    z = logits.clone().requires_grad_()
    losses = sparse_kl_and_cross_entropy(z, logprobs, indices, labels)
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    (grad,) = torch.autograd.grad(losses, z, (zero, one))
    want = logits.softmax(-1)
    want[..., 2] -= 1
    torch.testing.assert_close(grad, want)


def test_label_outside_the_vocabulary_has_the_gradient_of_megatron() -> None:
    torch.manual_seed(12)
    logits = torch.randn(1, 3, 16)
    logprobs, indices = teacher((1, 3), 16, 4)
    labels = torch.tensor([[-100, 16, -1]])
    z = logits.clone().requires_grad_()
    _, lm = sparse_kl_and_cross_entropy(z, logprobs, indices, labels)
    (grad,) = torch.autograd.grad(lm.sum(), z)
    assert lm.isfinite().all()
    torch.testing.assert_close(grad, logits.softmax(-1))


def _count_collectives(rank: int, size: int) -> tuple[list[str], list[str]]:
    logits = torch.randn(3, 2, 8).requires_grad_()
    torch.manual_seed(7)
    logprobs, indices = teacher((3, 2), 16, 4)
    labels = torch.randint(16, (3, 2))
    with recorded_collectives() as forward:
        kl, lm = sparse_kl_and_cross_entropy(
            logits, logprobs, indices, labels, tp_rank=rank, tp_size=size
        )
    with recorded_collectives() as backward:
        (kl + lm).sum().backward()
    return forward, backward


def test_one_collective_in_forward_and_none_in_backward() -> None:
    assert run_ranks(2, _count_collectives) == [(["all_gather_into_tensor"], [])] * 2


def test_backward_twice() -> None:
    torch.manual_seed(13)
    logits = torch.randn(2, 2, 20).requires_grad_()
    logprobs, indices = teacher((2, 2), 20, 4)
    kl, lm = sparse_kl_and_cross_entropy(logits, logprobs, indices, torch.randint(20, (2, 2)))
    (first,) = torch.autograd.grad((kl + lm).sum(), logits, retain_graph=True)
    (second,) = torch.autograd.grad((kl + lm).sum(), logits)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.zeros(3, 2).long(), r"\(S, B\) = \(2, 3\), got torch.int64 \(3, 2\)"),
        (torch.zeros(2, 3), "labels must be int64.*float32"),
    ],
)
def test_labels_that_do_not_fit(labels: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sparse_kl_and_cross_entropy(
            torch.zeros(2, 3, 8), torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).long(), labels
        )
