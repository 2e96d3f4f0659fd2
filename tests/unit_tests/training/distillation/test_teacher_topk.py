# SPDX-License-Identifier: Apache-2.0
"""Top-K, tail and nucleus of the teacher against a dense float64 softmax."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.training.distillation import teacher_topk as module
from megatron.training.distillation.teacher_topk import TeacherTopK, apply_top_p, teacher_topk
from tests.unit_tests.distributed import recorded_collectives, run_ranks


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype
    k: int
    width: int  # of all ranks together
    vocab_size: int | None
    shape: tuple[int, int]
    ties: bool = False
    offset: float = 0.0

    def logits(self) -> Tensor:
        """Padding columns hold the largest values of all."""
        torch.manual_seed(hash((self.k, self.width, self.shape)) % 2**31)
        logits = 3 * torch.randn(*self.shape, self.width) + self.offset
        if self.ties:
            logits = logits.round()
        logits = logits.to(self.dtype)
        if self.vocab_size is not None:
            logits[..., self.vocab_size :] = 500
        return logits

    def run(self, rank: int = 0, size: int = 1) -> TeacherTopK | None:
        part = self.width // size
        shard = self.logits()[..., rank * part : (rank + 1) * part].clone()
        before = shard.clone()
        result = teacher_topk(shard, self.k, vocab_size=self.vocab_size, tp_rank=rank, tp_size=size)
        assert torch.equal(shard, before)
        return result

    def check(self, found: TeacherTopK) -> None:
        dense = self.logits()[..., : self.vocab_size].double().log_softmax(-1)
        k = min(self.k, dense.shape[-1])
        assert found.logprobs.shape == found.indices.shape == (*self.shape, k), self
        assert found.tail_logprob.shape == self.shape
        assert (found.logprobs.dtype, found.tail_logprob.dtype) == (torch.float32, torch.float32)
        assert found.indices.dtype == torch.int64
        close: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6, "msg": str(self)}
        # Values first: among equals any choice of ids is right, if they are different ids.
        torch.testing.assert_close(found.logprobs.double(), dense.topk(k, -1).values, **close)
        assert found.indices.min() >= 0
        assert found.indices.max() < dense.shape[-1], self
        assert (found.indices.sort(-1).values.diff(dim=-1) > 0).all(), self
        picked = dense.gather(-1, found.indices)
        torch.testing.assert_close(found.logprobs.double(), picked, **close)
        tail = dense.scatter(-1, found.indices, -math.inf).logsumexp(-1)
        torch.testing.assert_close(found.tail_logprob.double(), tail, **close)


CASES = [
    Case(dtype=dtype, k=k, width=width, vocab_size=vocab_size, shape=shape, ties=ties)
    for dtype, k, (width, vocab_size), shape, ties in itertools.product(
        (torch.bfloat16, torch.float32, torch.float16),
        (1, 5, 40, 300),  # beyond a shard of the narrow vocabularies, and beyond the vocabulary
        (
            (64, None),
            (64, 50),
            (64, 31),  # leaves a shard of two with padding only
            (64, 1),
            (2050, 2043),  # neither this nor its half is a multiple of a block
        ),
        ((1, 1), (5, 2)),
        (False, True),
    )
] + [
    Case(dtype=torch.float32, k=5, width=2048, vocab_size=None, shape=(3, 1), offset=offset)
    for offset in (-1000.0, 1000.0)
]


def _all_cases(rank: int, size: int) -> list[TeacherTopK | None]:
    return [case.run(rank, size) for case in CASES]


def test_matches_dense_float64_at_tp1_and_tp2() -> None:
    first, second = run_ranks(2, _all_cases)
    assert second == [None] * len(CASES)
    for case, merged in zip(CASES, first, strict=True):
        alone = case.run()
        assert alone is not None
        case.check(alone)
        case.check(merged)


def _four(rank: int, size: int) -> TeacherTopK | None:
    return FOUR.run(rank, size)


FOUR = Case(dtype=torch.bfloat16, k=24, width=64, vocab_size=37, shape=(3, 2))


def test_tp4_with_k_above_the_shard_and_a_shard_of_padding() -> None:
    first, *others = run_ranks(4, _four)
    assert others == [None] * 3
    FOUR.check(first)


@pytest.mark.parametrize("width", [20000, 20011, 3000, 100])
@pytest.mark.parametrize("k", [1, 64, 128])
def test_blocks_find_exactly_the_largest(
    width: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the largest share one block, lie in no block, or spread over chunks of rows."""
    monkeypatch.setattr(module, "_CPU_CHUNK_BYTES", 3 * 4 * width)
    torch.manual_seed(width + k)
    logits = torch.randn(30, 1, width)
    k = min(k, width)
    logits[0, 0, :: width // 16][:16] += 40  # about the columns of one block
    logits[1, 0, -k:] += 40
    logits[2, 0, :k] += 40
    logits[3, 0] = torch.arange(width) / 4
    logits[4, 0] = -torch.arange(width) / 4
    logits[5, 0] = 0
    found = teacher_topk(logits, k)
    assert found is not None
    dense = logits.double().log_softmax(-1)
    torch.testing.assert_close(
        found.logprobs.double(), dense.topk(k, -1).values, rtol=1e-6, atol=2e-6
    )
    tail = dense.scatter(-1, found.indices, -math.inf).logsumexp(-1)
    torch.testing.assert_close(found.tail_logprob.double(), tail, rtol=1e-6, atol=2e-6)


def test_constants_by_hand() -> None:
    logits = torch.tensor([[[0.125, 0.5, 0.125, 0.25]]]).log() + 7
    found = teacher_topk(logits, 2)
    assert found is not None
    assert found.indices.tolist() == [[[1, 3]]]
    assert found.logprobs.flatten().tolist() == pytest.approx([math.log(0.5), math.log(0.25)])
    assert found.tail_logprob.item() == pytest.approx(math.log(0.25))
    everything = teacher_topk(logits, 100)
    assert everything is not None
    assert everything.indices.flatten()[:2].tolist() == [1, 3]
    assert everything.tail_logprob.item() == -math.inf


def test_ids_of_impossible_columns() -> None:
    """A logit of -inf may fill up the K, with probability 0 and an id of the vocabulary."""
    logits = torch.tensor([[[1.0, -math.inf, 1.0, -math.inf, 50.0]]])
    found = teacher_topk(logits, 3, vocab_size=4)
    assert found is not None
    assert set(found.indices.flatten().tolist()) in ({0, 1, 2}, {0, 2, 3})
    assert found.logprobs.flatten().tolist() == pytest.approx(
        [-math.log(2), -math.log(2), -math.inf]
    )
    assert found.tail_logprob.item() == -math.inf


def _impossible(rank: int, size: int) -> TeacherTopK | None:
    full = torch.tensor([[[1.0, -math.inf, -math.inf, 1.0, 50.0, 50.0]]])
    shard = full[..., 3 * rank : 3 * rank + 3]
    return teacher_topk(shard, 3, vocab_size=4, tp_rank=rank, tp_size=size)


def test_filler_of_a_narrow_shard_is_masked() -> None:
    found = run_ranks(2, _impossible)[0]
    assert found.logprobs[0, 0, :2].tolist() == pytest.approx([-math.log(2)] * 2)
    third = (found.indices[0, 0, 2].item(), found.logprobs[0, 0, 2].item())
    assert third in ((-1, -1000.0), (1, -math.inf), (2, -math.inf))
    assert found.tail_logprob.item() == -math.inf


def test_accepts_logits_that_require_a_gradient_and_any_layout() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 2, 50, requires_grad=True)
    found = teacher_topk(logits, 3)
    strided = teacher_topk(logits.transpose(0, 1).contiguous().transpose(0, 1), 3)
    assert found is not None
    assert strided is not None
    assert not found.logprobs.requires_grad
    assert torch.equal(found.indices, strided.indices)
    empty = teacher_topk(logits[:0], 3)
    assert empty is not None
    assert empty.indices.shape == (0, 2, 3)


def _count_collectives(rank: int, size: int) -> list[str]:
    with recorded_collectives() as seen:
        FOUR.run(rank, size)
    return seen


def test_one_collective() -> None:
    assert run_ranks(2, _count_collectives) == [["gather"], ["gather"]]


def brute_force_top_p(
    logprobs: list[float], ids: list[int], tail: float, p: float, min_k: int
) -> tuple[list[tuple[int, float]], float]:
    """The kept ``(id, log-probability)`` pairs and the tail mass of one token."""
    kept, before = [], 0.0
    for i, (value, index) in enumerate(zip(logprobs, ids, strict=True)):
        if before < p or i < min_k:
            kept.append((index, value))
        else:
            tail += math.exp(value)
        before += math.exp(value)
    return kept, tail


@pytest.mark.parametrize(
    ("p", "min_k"), [*itertools.product((1e-6, 0.3, 0.7, 0.95, 1.0), (1, 4, 99))]
)
@pytest.mark.parametrize("shape", [(1, 1), (6, 3)])
def test_top_p_against_brute_force(p: float, min_k: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(int(p * 100) + min_k)
    topk = teacher_topk(2 * torch.randn(*shape, 40), 20)
    assert topk is not None
    nucleus, kept = apply_top_p(topk, p, min_k)
    expected = [
        brute_force_top_p(values, ids, math.exp(tail), p, min_k)
        for values, ids, tail in zip(
            topk.logprobs.flatten(0, 1).tolist(),
            topk.indices.flatten(0, 1).tolist(),
            topk.tail_logprob.flatten().tolist(),
            strict=True,
        )
    ]
    counts = [len(entries) for entries, _ in expected]
    assert kept.shape == shape
    assert kept.flatten().tolist() == counts
    assert nucleus.logprobs.shape == nucleus.indices.shape == (*shape, 20)
    for (entries, tail), values, ids, found in zip(
        expected,
        nucleus.logprobs.flatten(0, 1).tolist(),
        nucleus.indices.flatten(0, 1).tolist(),
        nucleus.tail_logprob.flatten().tolist(),
        strict=True,
    ):
        missing = 20 - len(entries)
        assert list(zip(ids, values, strict=True)) == entries + [(-1, -1000.0)] * missing
        assert math.exp(found) == pytest.approx(tail, rel=1e-5)


def test_top_p_by_hand() -> None:
    topk = TeacherTopK(
        logprobs=torch.tensor([[[0.5, 0.25, 0.125]], [[0.875, 0.0625, 0.03125]]]).log(),
        indices=torch.tensor([[[7, 3, 9]], [[1, 2, 3]]]),
        tail_logprob=torch.tensor([[0.125], [0.03125]]).log(),
    )
    nucleus, kept = apply_top_p(topk, 0.7, 1)
    assert kept.tolist() == [[2], [1]]
    assert nucleus.indices.tolist() == [[[7, 3, -1]], [[1, -1, -1]]]
    assert nucleus.logprobs[1, 0, 1:].tolist() == [-1000.0, -1000.0]
    assert nucleus.tail_logprob.exp().flatten().tolist() == pytest.approx([0.25, 0.125])
    # A whole vocabulary has no tail before, but may after.
    whole = TeacherTopK(
        logprobs=torch.tensor([[[0.75, 0.25]]]).log(),
        indices=torch.tensor([[[0, 1]]]),
        tail_logprob=torch.tensor([[-math.inf]]),
    )
    assert apply_top_p(whole, 1.0, 1)[0].tail_logprob.item() == -math.inf
    assert apply_top_p(whole, 0.5, 1)[0].tail_logprob.item() == pytest.approx(math.log(0.25))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logits": torch.zeros(6, 8)}, r"logits must be .*\(6, 8\)"),
        ({"logits": torch.zeros(2, 3, 8).int()}, "logits must be a float"),
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"vocab_size": 9}, r"vocab_size must be in \[1, 8\].*got 9"),
        ({"tp_rank": -1}, r"tp_rank must be in \[0, 1\).*got -1"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {"logits": torch.zeros(2, 3, 8), "k": 4}
    with pytest.raises(ValueError, match=words):
        teacher_topk(**(good | change))


@pytest.mark.parametrize(("p", "min_k"), [(0.0, 1), (1.5, 1), (0.5, 0)])
def test_top_p_arguments_that_do_not_fit(p: float, min_k: int) -> None:
    topk = teacher_topk(torch.zeros(1, 1, 4), 2)
    assert topk is not None
    with pytest.raises(ValueError, match=r"(p|min_k) must be .*, got"):
        apply_top_p(topk, p, min_k)
