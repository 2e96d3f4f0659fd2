# SPDX-License-Identifier: Apache-2.0
"""Pretrain a hybrid model with Megatron's trainer; dump or distil from cached logits."""

import time

_PROGRAM_START = time.time()

from runtime.bootstrap import prepare_process

# Also runs in the persistent checkpoint worker, which imports this file as __mp_main__.
prepare_process()

if __name__ == "__main__":
    from pretrain_common import run_pretraining
    from runtime.model_checks import checked_hybrid_config

    run_pretraining(checked_hybrid_config, program_start=_PROGRAM_START)
