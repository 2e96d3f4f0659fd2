# SPDX-License-Identifier: Apache-2.0
"""Pretrain a hybrid model with Megatron's trainer; dump or distil from cached logits."""

import time

_PROGRAM_START = time.time()

from runtime.bootstrap import prepare_process

# Also runs in the persistent checkpoint worker, which imports this file as __mp_main__.
prepare_process()

if __name__ == "__main__":
    from megatron.training.argument_utils import hybrid_config_from_args
    from pretrain_common import run_pretraining

    run_pretraining(hybrid_config_from_args, program_start=_PROGRAM_START)
