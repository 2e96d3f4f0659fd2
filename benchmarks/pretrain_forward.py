# SPDX-License-Identifier: Apache-2.0
"""``pretrain_gpt.py`` without a loss: with frozen weights, the teacher's forward pass and no more.

For ``bench_trainer`` only, as the floor of a dump.
"""

import time

_PROGRAM_START = time.time()

from runtime.bootstrap import prepare_process

prepare_process()

if __name__ == "__main__":
    import torch

    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.training.argument_utils import gpt_config_from_args
    from pretrain_common import run_pretraining

    def no_loss(self: LanguageModule, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return zeros ``(B, S)``, connected to the logits as a loss is."""
        return logits[..., :0].sum(dim=-1, dtype=torch.float32).transpose(0, 1).contiguous()

    LanguageModule.compute_language_model_loss = no_loss
    run_pretraining(gpt_config_from_args, program_start=_PROGRAM_START)
