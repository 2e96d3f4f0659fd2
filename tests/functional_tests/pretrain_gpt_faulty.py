# SPDX-License-Identifier: Apache-2.0
"""``pretrain_gpt.py`` with failures in it, those that ``faults.py`` describes.

For the functional tests only.
"""

import time

_PROGRAM_START = time.time()

from runtime.bootstrap import prepare_process

# Also runs in the persistent checkpoint worker, which imports this file as __mp_main__.
prepare_process()

from tests.functional_tests.faults import install_faults

install_faults(in_worker=__name__ != "__main__")

if __name__ == "__main__":
    from megatron.training.argument_utils import gpt_config_from_args
    from pretrain_common import run_pretraining

    run_pretraining(gpt_config_from_args, program_start=_PROGRAM_START)
