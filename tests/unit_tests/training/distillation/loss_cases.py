# SPDX-License-Identifier: Apache-2.0
"""Inputs for the losses on the teacher's support, and the dense float64 oracle for them."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WIDTH = 48  # columns over all ranks
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16)}
EPS |= {torch.float32: 2e-6, torch.float64: 1e-11}


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype
    k: int
    top_p: bool
    vocab_size: int
    shape: tuple[int, int]
    tail: str

    def inputs(self) -> dict[str, Any]:
        """Full-width logits with wild padding columns; a teacher as a saver would store it."""
        torch.manual_seed(hash((self.k, self.top_p, self.vocab_size, self.shape)) % 2**31)
        logits = (3 * torch.randn(*self.shape, WIDTH, dtype=torch.float64)).to(self.dtype)
        logits[..., self.vocab_size :] = 30.0
        dense = (
            torch.randn(*self.shape, self.vocab_size, dtype=torch.float64).mul(2).log_softmax(-1)
        )
        logprobs, indices = dense.topk(min(self.k, self.vocab_size), -1)
        if self.top_p:
            masked = torch.rand(indices.shape) < 0.5
            masked[..., 0] = False
            logprobs = logprobs.masked_fill(masked, -1000.0)
            anything = torch.tensor([-1, 131071, 3])[torch.randint(3, indices.shape)]
            indices = torch.where(masked, anything, indices)
        tail = (1 - logprobs.exp().sum(-1)).clamp(min=1e-12).log()
        stored = torch.float64 if self.dtype == torch.float64 else torch.float16
        return {
            "student_logits": logits,
            "teacher_logprobs": logprobs.to(stored),
            "teacher_indices": indices.to(torch.int32 if self.top_p else torch.int64),
            "tail_logprob": tail.to(torch.promote_types(self.dtype, torch.float32))
            if self.tail == "stored"
            else None,
        }


CASES = [
    Case(dtype=dtype, k=k, top_p=top_p, vocab_size=vocab_size, shape=shape, tail=tail)
    for dtype, k, top_p, vocab_size, shape, tail in itertools.product(
        EPS,
        (1, 7, WIDTH),
        (False, True),
        (WIDTH, 41),
        ((1, 1), (5, 2)),
        ("stored", "complement", "none"),
    )
]

FP32_CASES = [case for case in CASES if case.dtype == torch.float32]


def dense_kl(
    logits: Tensor, logprobs: Tensor, indices: Tensor, tail_logprob: Tensor | None, case: Case
) -> Tensor:
    """The definition, token by token, in float64 over the whole vocabulary."""
    rows = []
    vocab_size = case.vocab_size
    for z, values, ids, tail in zip(
        logits.flatten(0, 1)[:, :vocab_size].log_softmax(-1),
        logprobs.flatten(0, 1).double(),
        indices.flatten(0, 1).tolist(),
        [None] * math.prod(case.shape) if tail_logprob is None else tail_logprob.flatten(),
        strict=True,
    ):
        kept = [i for i, v in zip(ids, values.tolist(), strict=True) if v != -1000.0]
        rest = [i for i in range(vocab_size) if i not in kept]
        values = values[values != -1000.0]
        loss = (values.exp() * (values - z[kept])).sum()
        if case.tail == "none":
            mass = 0.0
        elif tail is not None:
            mass = math.exp(tail)
        else:
            mass = max(0.0, 1 - values.exp().sum().item())
        if mass > 0 and rest:
            loss = loss + mass * (math.log(mass) - z[rest].logsumexp(-1))
        rows.append(loss)
    return torch.stack(rows).view(case.shape)


def weights(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """An upstream gradient with different numbers and one zero."""
    g = torch.linspace(-1, 2, shape[0] * shape[1], dtype=dtype).view(shape)
    return g if g.numel() > 1 else torch.ones_like(g)


def oracle(case: Case) -> tuple[Tensor, Tensor]:
    given = case.inputs()
    z = given["student_logits"].double().requires_grad_()
    loss = dense_kl(
        z, given["teacher_logprobs"], given["teacher_indices"], given["tail_logprob"], case
    )
    (grad,) = torch.autograd.grad(loss, z, weights(case.shape, torch.float64))
    return loss.detach(), grad


def teacher(tokens: tuple[int, int], vocab: int, k: int) -> tuple[Tensor, Tensor]:
    logprobs, indices = (2.5 * torch.randn(*tokens, vocab)).log_softmax(-1).topk(k, -1)
    return logprobs, indices
