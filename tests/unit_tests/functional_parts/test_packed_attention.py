# SPDX-License-Identifier: Apache-2.0
"""The functional tests' packed attention against one token after the other, in float64."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.dot_product_attention import DotProductAttention
from tests.functional_tests.parts import packed_attention
from tests.functional_tests.parts.packed_attention import (
    PackedDotProductAttention,
    attend_within_spans,
    install_packed_attention,
)

HEADS, SIZE, SCALE = 4, 3, 0.7


def packed_tensors(total: int, groups: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(total)
    return [
        torch.randn(total, heads, SIZE, generator=generator) for heads in (HEADS, groups, groups)
    ]


def by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[int]
) -> torch.Tensor:
    """One token and one head at a time."""
    query, key, value = query.double(), key.double(), value.double()
    context = torch.empty_like(query)
    for token in range(query.size(0)):
        first = max(bound for bound in bounds if bound <= token)
        for head in range(HEADS):
            group = head // (HEADS // key.size(1))
            seen = range(first, token + 1)
            scores = [float(SCALE * query[token, head] @ key[other, group]) for other in seen]
            total = sum(math.exp(score) for score in scores)
            context[token, head] = sum(
                math.exp(score) / total * value[other, group]
                for score, other in zip(scores, seen, strict=True)
            )
    return context


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    "bounds", [[0, 7], [0, 1, 7], [0, 3, 4, 9], [0, 5, 5, 8], [0, *range(1, 7)]], ids=str
)
def test_each_span_attends_to_itself(bounds: list[int], groups: int) -> None:
    query, key, value = packed_tensors(bounds[-1], groups)
    found = attend_within_spans(query, key, value, bounds, SCALE)
    expected = by_hand(query, key, value, bounds)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    exact = attend_within_spans(query.double(), key.double(), value.double(), bounds, SCALE)
    # The softmax is in fp32, as Megatron's is.
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-6)


def test_other_spans_get_no_gradient() -> None:
    parts = [part.requires_grad_() for part in packed_tensors(6, HEADS)]
    attend_within_spans(*parts, [0, 2, 6], SCALE)[:2].sum().backward()
    for part in parts:
        assert part.grad is not None
        assert (part.grad[2:] == 0).all()


def test_bounds_must_cover_all_tokens() -> None:
    with pytest.raises(AssertionError):
        attend_within_spans(*packed_tensors(6, HEADS), [0, 5], SCALE)


def test_module_reads_the_spans_of_its_batch() -> None:
    attention = PackedDotProductAttention.__new__(PackedDotProductAttention)
    torch.nn.Module.__init__(attention)
    attention.attention_dropout = torch.nn.Dropout(0.0)
    attention.softmax_scale = SCALE
    tensors = packed_tensors(6, 2)
    packed = SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 4, 6], dtype=torch.int32),
        cu_seqlens_q_padded=None,
    )
    found = attention.forward(*tensors, None, packed_seq_params=packed)
    expected = by_hand(*tensors, [0, 4, 6]).flatten(1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_local_specs_use_it_once_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSpecProvider, "core_attention", LocalSpecProvider.core_attention)
    assert LocalSpecProvider().core_attention() is DotProductAttention
    install_packed_attention()
    assert LocalSpecProvider().core_attention() is packed_attention.PackedDotProductAttention
