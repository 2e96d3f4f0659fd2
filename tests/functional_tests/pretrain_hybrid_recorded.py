# SPDX-License-Identifier: Apache-2.0
"""``pretrain_hybrid.py`` on the CPU, with recorders around it; for the functional tests only.

Mamba's kernels and Transformer Engine's final norm are replaced by the parts in plain torch. Pass
``--spec tests.functional_tests.parts.hybrid_spec local_hybrid_stack_spec``.
"""

import os
import time

_PROGRAM_START = time.time()

from runtime.bootstrap import prepare_process

# Also runs in the persistent checkpoint worker, which imports this file as __mp_main__.
prepare_process()

if __name__ == "__main__":
    from tests.functional_tests.parts import ssd

    # Before the trainer's imports, which decide what the Mamba mixer can use.
    ssd.install()

    from megatron.training.argument_utils import hybrid_config_from_args
    from pretrain_common import run_pretraining
    from tests.functional_tests.harness import RECORD_DIR_VARIABLE
    from tests.functional_tests.parts.hybrid_spec import use_torch_final_norm
    from tests.functional_tests.recorders import install_recorders

    use_torch_final_norm()
    if RECORD_DIR_VARIABLE in os.environ:
        install_recorders()
    run_pretraining(hybrid_config_from_args, program_start=_PROGRAM_START)
