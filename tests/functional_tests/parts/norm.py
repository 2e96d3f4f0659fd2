# SPDX-License-Identifier: Apache-2.0
"""A norm for sequence parallelism in plain torch, for tests: the local one refuses it."""

import copy
from typing import Any

from megatron.core.transformer.torch_norm import WrappedTorchNorm


def install() -> None:
    """Have the local norm accept sequence parallelism.

    Each rank normalises its own part of the sequence, so the weights see a part of the gradient;
    the trainer sums it over TP for parameters that are marked.
    """
    construct = WrappedTorchNorm.__new__

    def construct_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return construct(cls, config, *args, **kwargs)
        without = copy.copy(config)
        without.sequence_parallel = False
        norm: Any = construct(cls, without, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = construct_marked  # type: ignore[method-assign, assignment]
