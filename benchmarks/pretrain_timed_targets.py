# SPDX-License-Identifier: Apache-2.0
"""``pretrain_gpt.py`` for a student that says what its targets cost, or holds them in memory.

For ``bench_student_step`` only; see ``timed_targets.py``.
"""

import time

_PROGRAM_START = time.time()

from runtime.bootstrap import prepare_process

prepare_process()

if __name__ == "__main__":
    from benchmarks.timed_targets import time_targets
    from megatron.training.argument_utils import gpt_config_from_args
    from pretrain_common import run_pretraining

    time_targets()
    run_pretraining(gpt_config_from_args, program_start=_PROGRAM_START)
