# SPDX-License-Identifier: Apache-2.0
"""``pretrain_gpt.py`` whose last rank has a slow store for the windows of its dump.

Megatron's own checkpoint strategy lets the trainer wait until its worker takes over the tensors,
which it does after the window before. Local checkpoints, for example, give their worker copies and
do not wait. Here the trainer does the same, so that only the dump itself can hold it back.

For the functional tests only.
"""

import os
import time
from typing import Any

_PROGRAM_START = time.time()

from runtime.bootstrap import prepare_process

# Also runs in the persistent checkpoint worker, which imports this file as __mp_main__.
prepare_process()


def stage_tensors_in_the_trainer() -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    schedule = AsyncCallsQueue.schedule_async_request

    def schedule_staged(self: Any, request: Any) -> int:
        if request.preload_fn is not None:
            arguments = list(request.async_fn_args)
            arguments[1] = request.preload_fn()
            request = request._replace(async_fn_args=arguments, preload_fn=None)
        return schedule(self, request)

    AsyncCallsQueue.schedule_async_request = schedule_staged


def slow_down_windows(seconds: float) -> None:
    from megatron.training.distillation import write_watch

    write_batched_tar = write_watch.write_batched_tar

    def write_slowly(*args: Any) -> None:
        time.sleep(seconds)
        write_batched_tar(*args)

    write_watch.write_batched_tar = write_slowly


if __name__ == "__main__":
    from megatron.training.argument_utils import gpt_config_from_args
    from pretrain_common import run_pretraining

    stage_tensors_in_the_trainer()
    run_pretraining(gpt_config_from_args, program_start=_PROGRAM_START)
elif int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    from tests.functional_tests.harness import WRITE_SECONDS_VARIABLE

    slow_down_windows(float(os.environ[WRITE_SECONDS_VARIABLE]))
