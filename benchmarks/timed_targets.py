# SPDX-License-Identifier: Apache-2.0
"""A student's stream of targets that prints what each iteration's cost, or holds them in memory."""

import copy
import os
import re
import time
from typing import Any

from benchmarks.rank_usage import Usage

HOLD = "HELD_TARGETS"
"""Environment variable: with 1 all targets are read before the first step, and the loader ends."""
COSTS = re.compile(r"targets: waited ([\d.]+) ms, trainer ([\d.]+) ms, loader ([\d.]+) ms")
"""What is printed per iteration: the wait, and since the one before the CPU time of all threads of
this process and of its child processes."""


def time_targets() -> None:
    """Have every stream of targets in this process print :data:`COSTS`."""
    from megatron.training.distillation.target_stream import TargetStream
    from megatron.training.global_vars import get_args

    read = TargetStream.iteration
    held: dict[int, Any] = {}
    last = Usage.now()

    def hold(stream: TargetStream, first: int) -> None:
        args = get_args()
        for iteration in range(args.train_iters):
            start = first + iteration * args.global_batch_size
            # A copy, as what is read lies in memory that is shared with the loader's process.
            held[start] = copy.deepcopy(read(stream, start))
        stream.close()

    def timed(stream: TargetStream, start_sample: int) -> Any:
        nonlocal last
        if os.environ.get(HOLD) == "1" and not held:
            hold(stream, start_sample)
        began = time.perf_counter()
        targets = held.get(start_sample) or read(stream, start_sample)
        waited = time.perf_counter() - began
        before, last = last, Usage.now()
        used = last - before
        print(
            f"targets: waited {1e3 * waited:.3f} ms, trainer {1e3 * used.own_cpu:.3f} ms, "
            f"loader {1e3 * used.child_cpu:.3f} ms"
        )
        return targets

    setattr(TargetStream, "iteration", timed)  # noqa: B010
