# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences in plain torch; Megatron's needs Transformer Engine for it."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.dot_product_attention import DotProductAttention


def install_packed_attention() -> None:
    """Have the local model specs use :class:`PackedDotProductAttention`."""
    LocalSpecProvider.core_attention = lambda self: PackedDotProductAttention


class PackedDotProductAttention(DotProductAttention):
    """Megatron's attention, which also takes sequences packed into one (thd layout)."""

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the context: ``(T, heads * size)`` for packed queries ``(T, heads, size)``."""
        packed = kwargs.get("packed_seq_params")
        if packed is None:
            return super().forward(query, key, value, *args, **kwargs)
        assert packed.qkv_format == "thd"
        assert packed.cu_seqlens_q_padded is None
        assert self.attention_dropout.p == 0, "dropout is not implemented"
        bounds = packed.cu_seqlens_q.tolist()
        return attend_within_spans(query, key, value, bounds, self.softmax_scale).flatten(1)


def attend_within_spans(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Attend causally within each span, and to nothing outside of it.

    Args:
        query: ``(T, heads, size)``.
        key: ``(T, groups, size)``; heads that follow each other share a group.
        value: ``(T, groups, size)``.
        bounds: Where spans begin and end, from 0 to ``T``; spans may be empty.
        scale: Factor on the scores before the softmax.

    Returns:
        ``(T, heads, size)``.
    """
    assert bounds[0] == 0
    assert bounds[-1] == query.size(0)
    sharing = query.size(1) // key.size(1)
    # (T, heads, size) -> (heads, T, size)
    query, key, value = (
        part.transpose(0, 1)
        for part in (query, key.repeat_interleave(sharing, 1), value.repeat_interleave(sharing, 1))
    )
    contexts = []
    for first, end in itertools.pairwise(bounds):
        span = slice(first, end)
        scores = scale * query[:, span] @ key[:, span].transpose(1, 2)
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        weights = scores.float().masked_fill(future, float("-inf")).softmax(-1)
        contexts.append(weights.to(value.dtype) @ value[:, span])
    return torch.cat(contexts, 1).transpose(0, 1)
