# SPDX-License-Identifier: Apache-2.0
"""What is measured of the teacher's distribution, summed up where the tensors are.

Pure collecting: nothing here knows of ranks, writes anything, or waits for the device before the
sums are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.training.distillation.utils import LOGPROB_SENTINEL


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetMeans:
    """Means over the unmasked tokens of the microbatches that were added.

    Attributes:
        mass_kept: The teacher's probability inside the kept entries.
        tail_mass: The teacher's probability outside of them.
        with_targets: Share of the tokens that have at least one entry.
    """

    mass_kept: float
    tail_mass: float
    with_targets: float


class TargetMasses:
    """Sums up the student's targets of one iteration."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(
        self,
        values: torch.Tensor,
        tail_logprob: torch.Tensor | None,
        loss_mask: torch.Tensor | None = None,
    ) -> None:
        """Add one microbatch, without waiting for the device.

        Args:
            values: ``(S, B, K)`` log-probabilities; -1000.0 masks an entry.
            tail_logprob: ``(S, B)``, or None to take the complement of the kept mass.
            loss_mask: ``S * B`` numbers in the order of ``(B, S)``; tokens whose mask is 0 do not
                count, whatever their targets are. None counts all.
        """
        is_entry = values != LOGPROB_SENTINEL
        # (S, B)
        kept = torch.where(is_entry, values.float().exp(), 0.0).sum(-1)
        tail = (1 - kept).clamp(min=0) if tail_logprob is None else tail_logprob.float().exp()
        has_entry = is_entry.any(-1)
        if loss_mask is None:
            counts = torch.ones_like(has_entry)
        else:
            counts = loss_mask.reshape(values.shape[1], values.shape[0]).transpose(0, 1) != 0
        sums = torch.stack(
            [
                torch.where(counts, kept, 0.0).sum(dtype=torch.float64),
                torch.where(counts, tail, 0.0).sum(dtype=torch.float64),
                (counts & has_entry).sum(dtype=torch.float64),
                counts.sum(dtype=torch.float64),
            ]
        )
        self._sums = sums if self._sums is None else self._sums + sums

    def means(self) -> TargetMeans | None:
        """Return the means; None if no token counts. Waits for the device."""
        if self._sums is None:
            return None
        kept, tail, with_targets, tokens = self._sums.tolist()
        if tokens == 0:
            return None
        return TargetMeans(
            mass_kept=kept / tokens, tail_mass=tail / tokens, with_targets=with_targets / tokens
        )


class WindowMasses:
    """Sums up what a teacher keeps, by iteration, until a window is handed over."""

    def __init__(self) -> None:
        self._iterations: dict[int, tuple[torch.Tensor, int]] = {}

    def add(self, start_sample: int, tail_logprobs: Sequence[torch.Tensor]) -> None:
        """Add one iteration, without waiting for the device; a replay of it replaces it.

        Args:
            start_sample: First global sample of the iteration.
            tail_logprobs: ``(S, B)`` log of the mass outside the kept entries, per microbatch.
        """
        # What is kept is what the tail leaves: a number per token instead of K.
        sums = [-torch.expm1(tail.float()).sum(dtype=torch.float64) for tail in tail_logprobs]
        tokens = sum(tail.numel() for tail in tail_logprobs)
        self._iterations[start_sample] = torch.stack(sums).sum(), tokens

    def take(self) -> tuple[float, int]:
        """Return the kept mass of all tokens and their number, and forget them."""
        iterations = list(self._iterations.values())
        self._iterations = {}
        if not iterations:
            return 0.0, 0
        mass = float(torch.stack([mass for mass, _ in iterations]).sum())
        return mass, sum(tokens for _, tokens in iterations)
