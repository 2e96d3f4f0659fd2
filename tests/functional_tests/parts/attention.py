# SPDX-License-Identifier: Apache-2.0
"""Context parallel attention in plain torch, for tests: Megatron's own needs Transformer Engine."""

import copy
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.training import get_args


class ContextParallelAttention(DotProductAttention):
    """Attends from this rank's positions to those of all context parallel ranks.

    Keys and values are gathered over the CP group and put back in natural order. The mask that the
    data loader makes has this rank's rows and all columns, so it fits as it is.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        whole_sequence = copy.copy(config)
        whole_sequence.context_parallel_size = 1
        super().__init__(whole_sequence, *args, **kwargs)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return the context ``(S / cp, B, H)`` of *query* ``(S / cp, B, heads, head size)``.

        Collective over CP, forward and backward.
        """
        context: torch.Tensor = super().forward(
            query, _whole_sequence(key), _whole_sequence(value), *args, **kwargs
        )
        return context


def natural_order(cp_size: int, length: int) -> torch.Tensor:
    """Return where position ``0, 1, ..., length - 1`` lies in the joined parts of the CP ranks.

    Rank ``r`` holds chunks ``r`` and ``2 * cp_size - 1 - r`` of the sequence.
    """
    chunks = torch.arange(length).view(2 * cp_size, -1)
    held = [chunk for rank in range(cp_size) for chunk in (rank, 2 * cp_size - 1 - rank)]
    return torch.argsort(chunks[held].flatten())


def install() -> None:
    """Have models built with the local spec use this attention under context parallelism."""
    core_attention = LocalSpecProvider.core_attention

    def choose(self: LocalSpecProvider) -> type:
        if get_args().context_parallel_size > 1:
            return ContextParallelAttention
        return core_attention(self)

    LocalSpecProvider.core_attention = choose  # type: ignore[method-assign]


def _whole_sequence(part: torch.Tensor) -> torch.Tensor:
    group = parallel_state.get_context_parallel_group()
    joined = gather_from_sequence_parallel_region(part, group=group)
    order = natural_order(group.size(), joined.size(0))
    return joined[order]
