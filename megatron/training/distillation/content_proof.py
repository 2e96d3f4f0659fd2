# SPDX-License-Identifier: Apache-2.0
"""Proves that the student's batches are those the teacher's rows were recorded for.

Both sides compute fingerprints of the label tokens (``fingerprint``); the teacher's come with its
rows. The first microbatch of an iteration is compared before its targets are used, inside the
agreement that the ranks make on them anyway. The comparison of a later one stays on the device; the
ranks agree on all of them at the last microbatch, before the optimizer's step.
"""

from dataclasses import dataclass

import torch

from megatron.training.distillation import parallel
from megatron.training.distillation.agreed_targets import Content, other_content
from megatron.training.distillation.errors import TeacherContentError
from megatron.training.distillation.fingerprint import (
    CHUNK,
    LabelFingerprinter,
    differing_chunks,
)
from megatron.training.distillation.packed_rows import PackedRows

_NO_LABELS = (
    "this model calls no compute_language_model_loss in training, so the labels of its batches are "
    "not known here"
)
_NO_FINGERPRINTS = (
    "its rows have no label fingerprints (format v1, another program's or an earlier version's "
    "cache)"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Deferred:
    """A microbatch whose comparison the ranks have not agreed on yet."""

    microbatch: int
    batch: torch.Tensor
    teacher: torch.Tensor | None


class ContentProof:
    """Compares one rank's microbatches with the teacher's rows for the same samples.

    Args:
        layout: This rank's place.
        seq_length: Positions of a whole sample.
    """

    def __init__(self, layout: parallel.ParallelLayout, *, seq_length: int) -> None:
        self._layout = layout
        self._seq_length = seq_length
        self._fingerprint: LabelFingerprinter | None = None
        self._deferred: list[_Deferred] = []

    def fingerprints(self, labels: torch.Tensor | None) -> torch.Tensor | None:
        """Return the fingerprints ``(C, B)`` of whole samples, on the device of *labels*.

        Collective over CP where there are labels, which is a property of the model.

        Args:
            labels: ``(B, S / cp)``, or ``(1, B * S)`` where the samples are packed.
        """
        if labels is None:
            return None
        if self._fingerprint is None:
            positions = parallel.sequence_positions(self._seq_length, self._layout)
            self._fingerprint = LabelFingerprinter(positions, self._seq_length)
        return parallel.sum_over_context(self._fingerprint(labels), self._layout)

    def compare(
        self, start: int, microbatch: int, rows: PackedRows, batch: torch.Tensor | None
    ) -> tuple[Content, str]:
        """Compare a microbatch of the iteration from sample *start* on now; say what was found."""
        if batch is None:
            return Content.UNPROVEN, _NO_LABELS
        if rows.label_fingerprints is None:
            return Content.UNPROVEN, _NO_FINGERPRINTS
        differs = differing_chunks(batch.cpu(), rows.label_fingerprints.cpu())
        if not differs.any():
            return Content.PROVEN, ""
        return Content.DIFFERS, self._describe(start, microbatch, differs)

    def defer(
        self, microbatch: int, rows: PackedRows, batch: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Compare a microbatch on the device of *batch* and keep it for :meth:`settle`.

        Returns:
            Whether it differs, a bool tensor without dimensions; None if that cannot be told.
        """
        if batch is None:
            return None
        teacher = rows.label_fingerprints
        if teacher is not None:
            teacher = teacher.to(batch.device, non_blocking=True)
        self._deferred.append(_Deferred(microbatch=microbatch, batch=batch, teacher=teacher))
        return None if teacher is None else differing_chunks(batch, teacher).any()

    def settle(self, start: int) -> None:
        """Have the ranks agree on the deferred microbatches of the iteration from *start* on.

        Collective over TP x CP x DP of the stage where something was deferred, which depends on the
        number of microbatches alone: every rank must call.

        Raises:
            TeacherContentError: On all ranks, if a microbatch of any of them differs.
        """
        deferred, self._deferred = self._deferred, []
        if not deferred:
            return
        found = [
            (item.microbatch, differing_chunks(item.batch, item.teacher))
            for item in deferred
            if item.teacher is not None
        ]
        detail = ""
        # One look at the device for all of them.
        if found and bool(torch.stack([differs.any() for _, differs in found]).any()):
            microbatch, differs = next(entry for entry in found if entry[1].any())
            detail = self._describe(start, microbatch, differs.cpu())
        worst, details = parallel.worst_over_stage(int(bool(detail)), detail, self._layout)
        if worst:
            raise TeacherContentError(other_content(start, details))

    def forget(self) -> None:
        """Drop what was deferred for an iteration that did not come to its last microbatch."""
        self._deferred = []

    def _describe(self, start: int, microbatch: int, differs: torch.Tensor) -> str:
        """Say which sample's labels differ first, and where."""
        chunks, samples = differs.shape
        column = int(differs.any(dim=0).int().argmax())
        chunk = int(differs[:, column].int().argmax())
        layout = self._layout
        sample = start + (microbatch * layout.dp_size + layout.dp_rank) * samples + column
        end = min((chunk + 1) * CHUNK, self._seq_length)
        return (
            f"sample {sample}: its labels differ from the teacher's first in chunk {chunk}, tokens "
            f"{chunk * CHUNK} to {end - 1}; {int(differs[:, column].sum())} of its {chunks} "
            f"compared chunks differ, and {int(differs.any(dim=0).sum())} of the {samples} samples "
            f"of microbatch {microbatch}"
        )
