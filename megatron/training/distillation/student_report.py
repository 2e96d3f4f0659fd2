# SPDX-License-Identifier: Apache-2.0
"""Writes what the student measures of its targets to TensorBoard, W&B and the log.

The rank that writes the trainer's own curves writes these, and of its own tokens: no collective is
worth a curve. In iterations that are not written nothing is measured.
"""

import logging

import torch

from megatron.training.distillation import arguments
from megatron.training.distillation.metrics import TargetMasses

logger = logging.getLogger(__name__)


class StudentReport:
    """Measures one iteration after the other and writes each when its last microbatch is there."""

    def __init__(self) -> None:
        self._iteration = 0
        self._microbatches_left = 0
        self._masses: TargetMasses | None = None
        self._numbers: dict[str, float] = {}

    def begin(self, iteration: int, *, microbatches: int, skipped: int, wait: float) -> None:
        """Start an iteration; one without targets is written at once.

        Args:
            iteration: As the trainer counts in its log, from 1.
            microbatches: How many will be added; 0 if the iteration has no targets.
            skipped: Iterations of this job that had none so far.
            wait: Seconds that this rank has waited for the targets.
        """
        self._masses = None
        if not (arguments.curves_are_due(iteration) or arguments.line_is_due(iteration)):
            return
        self._iteration = iteration
        self._numbers = {"kd-skipped-steps": skipped, "kd-loader-wait": wait}
        if microbatches == 0:
            self._numbers["kd-tokens-with-targets"] = 0.0
            self._write()
            return
        self._microbatches_left = microbatches
        self._masses = TargetMasses()

    def add(
        self,
        values: torch.Tensor,
        tail_logprob: torch.Tensor | None,
        loss_mask: torch.Tensor | None,
    ) -> None:
        """Add the targets of one microbatch; arguments are those of :meth:`TargetMasses.add`.

        Microbatches of a replayed step do not count again.
        """
        if self._masses is None:
            return
        self._masses.add(values, tail_logprob, loss_mask)
        self._microbatches_left -= 1
        if self._microbatches_left > 0:
            return
        means = self._masses.means()
        self._masses = None
        if means is not None:
            self._numbers |= {
                "kd-teacher-mass-kept": means.mass_kept,
                "kd-teacher-tail-mass": means.tail_mass,
                "kd-tokens-with-targets": means.with_targets,
            }
        self._write()

    def _write(self) -> None:
        if arguments.curves_are_due(self._iteration):
            for name, value in self._numbers.items():
                arguments.log_scalar(name, value, self._iteration)
        if arguments.line_is_due(self._iteration):
            numbers = " | ".join(f"{name}: {value:.6G}" for name, value in self._numbers.items())
            logger.info(" distillation at iteration %8d | %s |", self._iteration, numbers)
