# SPDX-License-Identifier: Apache-2.0
"""Keeps the student's logits and labels between the model's forward pass and its loss function."""

from typing import Any

import torch

from megatron.training.distillation.model_hooks import LossOverride, OutputLayerTap

# The loss function is called without the capture, so one reference has to live here.
_active_capture: "StudentLogitsCapture | None" = None


def get_student_logits_capture() -> "StudentLogitsCapture | None":
    """Return this process's capture, or None if the run does not distil."""
    return _active_capture


class StudentLogitsCapture:
    """Keeps the differentiable logits of the latest training forward pass for the loss function.

    The labels that the model's own loss is given with them are kept, too.

    Megatron's cross entropy works in place on fp32 logits, and Transformer Engine's on logits of
    any dtype: where the model's own loss would write to the captured tensor, it is given a copy.
    """

    def __init__(self) -> None:
        self._logits: torch.Tensor | None = None
        self._labels: torch.Tensor | None = None
        self._tap: OutputLayerTap | None = None
        self._loss_override: LossOverride | None = None

    def attach_hooks(self, model: torch.nn.Module) -> None:
        """Hook the model's output layer; a model chunk without one is left alone."""
        global _active_capture
        _active_capture = self
        if getattr(model, "output_layer", None) is None:
            return
        config = getattr(model, "config", None)
        self._tap = OutputLayerTap(model, getattr(config, "mtp_num_layers", 0) or 0, self._keep)
        if hasattr(model, "compute_language_model_loss"):
            fused_in_place = (
                getattr(config, "cross_entropy_loss_fusion", False)
                and getattr(config, "cross_entropy_fusion_impl", None) == "te"
            )
            self._loss_override = LossOverride(
                model, _UnharmedLoss(self, overwrites_any_dtype=bool(fused_in_place))
            )

    def _keep(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._labels = None

    def keep_labels(self, labels: torch.Tensor) -> None:
        """Keep *labels* if the model's loss is called with them for the captured logits."""
        if self._tap is not None and self._tap.claim_loss():
            self._labels = labels

    def holds(self, logits: torch.Tensor) -> bool:
        """Return whether *logits* shares its memory with the captured tensor."""
        return self._logits is not None and self._logits.data_ptr() == logits.data_ptr()

    def pop(self) -> torch.Tensor:
        """Return the captured logits ``(S, B, V / tp)``, as the model made them, and forget them.

        Raises:
            RuntimeError: No training forward pass went through a hooked output layer.
        """
        if self._logits is None:
            raise RuntimeError(
                "No student logits were captured in this forward pass: StudentLogitsCapture must "
                "be attached to the model whose loss is computed, and the model must be in "
                "training mode."
            )
        logits = self._logits
        self._logits = None
        return logits

    def pop_labels(self) -> torch.Tensor | None:
        """Return the labels of the captured logits, ``(B, S)`` or packed, and forget them.

        None where the model's ``compute_language_model_loss`` was not called with them.
        """
        labels, self._labels = self._labels, None
        return labels

    def remove_hooks(self) -> None:
        """Take the hooks off the model and forget what was captured."""
        if self._tap is not None:
            self._tap.remove()
            self._tap = None
        if self._loss_override is not None:
            self._loss_override.remove()
            self._loss_override = None
        self._logits = self._labels = None


class _UnharmedLoss:
    """The model's own loss, on a copy where it would overwrite the captured logits."""

    def __init__(self, capture: StudentLogitsCapture, *, overwrites_any_dtype: bool) -> None:
        self._capture = capture
        self._overwrites_any_dtype = overwrites_any_dtype

    def __call__(self, original: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self._capture.keep_labels(labels)
        overwrites = self._overwrites_any_dtype or logits.dtype == torch.float32
        if overwrites and self._capture.holds(logits):
            logits = logits.clone()
        loss: torch.Tensor = original(labels, logits)
        return loss
