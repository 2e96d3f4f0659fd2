# SPDX-License-Identifier: Apache-2.0
"""``pretrain_gpt.py`` with attention over packed sequences, and with recorders if asked."""

import time

_PROGRAM_START = time.time()

from runtime.bootstrap import prepare_process

# Also runs in the persistent checkpoint worker, which imports this file as __mp_main__.
prepare_process()

if __name__ == "__main__":
    import os

    from megatron.training.argument_utils import gpt_config_from_args
    from pretrain_common import run_pretraining
    from tests.functional_tests.harness import RECORD_DIR_VARIABLE
    from tests.functional_tests.parts.packed_attention import install_packed_attention
    from tests.functional_tests.recorders import install_recorders

    install_packed_attention()
    if RECORD_DIR_VARIABLE in os.environ:
        install_recorders()
    run_pretraining(gpt_config_from_args, program_start=_PROGRAM_START)
