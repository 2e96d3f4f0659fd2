# SPDX-License-Identifier: Apache-2.0
"""Puts a process of ``bench_loader`` into the place of a rank of a run, without its trainer."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


class RunState:
    """Megatron's global state, as far as a saver or a loss asks for it.

    Args:
        args: The global arguments.
        parallel_state: ``megatron.core.parallel_state``.
    """

    def __init__(self, args: argparse.Namespace, parallel_state: Any) -> None:
        self._args = args
        self._parallel_state = parallel_state

    def set_batches(self, length: int, gbs: int, dp_size: int) -> None:
        """Set the batch sizes; a micro batch is one sample."""
        import megatron.core.num_microbatches_calculator as microbatches

        vars(self._args).update(
            seq_length=length, global_batch_size=gbs, data_parallel_size=dp_size
        )
        microbatches.unset_num_microbatches_calculator()
        microbatches.init_num_microbatches_calculator(0, None, gbs, 1, dp_size, False)

    def set_position(self, iteration: int, gbs: int) -> None:
        """Set the iteration that runs."""
        self._args.curr_iteration = self._args.iteration = iteration
        self._args.consumed_train_samples = iteration * gbs

    def set_parallel(self, tp_size: int, cp_size: int) -> int:
        """Make all processes one replica; return this one's context parallel rank."""
        state = self._parallel_state
        if state.get_tensor_model_parallel_world_size() != tp_size or (
            state.get_context_parallel_world_size() != cp_size
        ):
            state.destroy_model_parallel()
            state.initialize_model_parallel(
                tensor_model_parallel_size=tp_size, context_parallel_size=cp_size
            )
        return int(state.get_context_parallel_rank())

    @contextlib.contextmanager
    def as_rank(self, dp_rank: int, dp_size: int, cp_rank: int) -> Iterator[None]:
        """Have the parallel state say that this process is one of several DP ranks.

        Its groups stay as they are: the other DP ranks do not exist.
        """
        with mock.patch.multiple(
            self._parallel_state,
            get_data_parallel_rank=mock.Mock(return_value=dp_rank),
            get_data_parallel_world_size=mock.Mock(return_value=dp_size),
            get_context_parallel_rank=mock.Mock(return_value=cp_rank),
        ):
            yield
