# SPDX-License-Identifier: Apache-2.0
"""Brings the student's logits and labels together with the loss on the teacher's targets.

The trainer attaches the capture to the model, and the entry script makes the loss function. In
training the capture takes the place of the model's own loss of its main head: divergence and LM
loss come from one pass over the logits, and the loss function finds the divergence here. Where that
cannot be, because the model has a loss of its own kind, the loss function finds logits and labels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.training.distillation.model_hooks import LossOverride, OutputLayerTap


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicrobatchLosses:
    """Both losses of a microbatch, and the targets of one of them.

    Attributes:
        kd: ``(B, S / cp)`` divergence, or packed ``(1, B * S)``.
        lm: The LM loss, of the same shape.
        values: ``(S / cp, B, K)`` the teacher's log-probabilities.
        tail: ``(S / cp, B)`` log of the mass outside them, or None.
    """

    kd: torch.Tensor
    lm: torch.Tensor
    values: torch.Tensor
    tail: torch.Tensor | None


JointLoss = Callable[[torch.Tensor, torch.Tensor], MicrobatchLosses | None]
"""Called with logits ``(S, B, V / tp)`` and labels ``(B, S)``; None without targets."""

# Neither is given the other: the loss function is made before the model, and called without the
# capture. So a reference to each has to live here.
_active_capture: "StudentLogitsCapture | None" = None
_active_loss: JointLoss | None = None


def get_student_logits_capture() -> "StudentLogitsCapture | None":
    """Return this process's capture, or None if the run does not distil."""
    return _active_capture


def compute_losses_with(joint_loss: JointLoss) -> None:
    """Have captures compute both losses of a microbatch with *joint_loss* from now on."""
    global _active_loss
    _active_loss = joint_loss


class StudentLogitsCapture:
    """Keeps for the loss function what the latest training forward pass gives it.

    That is the :class:`MicrobatchLosses`, where :func:`compute_losses_with` named what computes
    them and the model's ``compute_language_model_loss`` is Megatron's. Otherwise it is the
    differentiable logits, and the labels that the model's own loss is given with them. Megatron's
    cross entropy works in place on fp32 logits, and Transformer Engine's on logits of any dtype:
    where the model's own loss would write to logits that are kept, it is given a copy.
    """

    def __init__(self) -> None:
        self._logits: torch.Tensor | None = None
        self._labels: torch.Tensor | None = None
        self._losses: MicrobatchLosses | None = None
        self._has_losses = False
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
            self._loss_override = LossOverride(model, self._loss_of(model, config))

    def _loss_of(
        self, model: torch.nn.Module, config: Any
    ) -> Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return what takes the place of the loss of *model*."""
        own = getattr(model.compute_language_model_loss, "__func__", None)
        joins = own is LanguageModule.compute_language_model_loss
        fused_in_place = (
            getattr(config, "cross_entropy_loss_fusion", False)
            and getattr(config, "cross_entropy_fusion_impl", None) == "te"
        )

        def loss(original: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            if self._tap is None or not self._tap.claim_loss():
                return original(labels, logits)
            if joins and _active_loss is not None:
                self._logits = None
                self._losses, self._has_losses = _active_loss(logits, labels), True
                return original(labels, logits) if self._losses is None else self._losses.lm
            self._labels = labels
            if self._holds(logits) and (fused_in_place or logits.dtype == torch.float32):
                logits = logits.clone()
            return original(labels, logits)

        return loss

    def _keep(self, logits: torch.Tensor) -> None:
        self._forget()
        self._logits = logits

    def _forget(self) -> None:
        self._logits = self._labels = self._losses = None
        self._has_losses = False

    def _holds(self, logits: torch.Tensor) -> bool:
        """Return whether *logits* shares its memory with the captured tensor."""
        return self._logits is not None and self._logits.data_ptr() == logits.data_ptr()

    @property
    def has_losses(self) -> bool:
        """Whether the losses of the latest forward pass were computed, or had no targets."""
        return self._has_losses

    def pop_losses(self) -> MicrobatchLosses | None:
        """Return the losses of the latest forward pass, None without targets, and forget them."""
        losses = self._losses
        self._forget()
        return losses

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
        self._forget()
