# SPDX-License-Identifier: Apache-2.0
"""``pretrain_gpt.py`` with recorders around it, and parts that let it run without a GPU.

For the functional tests only.
"""

import time

_PROGRAM_START = time.time()

from runtime.bootstrap import prepare_process

# Also runs in the persistent checkpoint worker, which imports this file as __mp_main__.
prepare_process()

if __name__ == "__main__":
    from megatron.training.argument_utils import gpt_config_from_args
    from pretrain_common import run_pretraining
    from tests.functional_tests.parts import attention, norm
    from tests.functional_tests.recorders import install_recorders
    from tests.functional_tests.wandb_stand_in import install_where_asked

    attention.install()
    norm.install()
    install_recorders()
    install_where_asked()
    run_pretraining(gpt_config_from_args, program_start=_PROGRAM_START)
