# SPDX-License-Identifier: Apache-2.0
"""How teacher and student get hold of a model's logits without changing the model's code."""

from collections.abc import Callable
from typing import Any

import torch


class OutputLayerTap:
    """Hands the logits of the main head to a callback, once per training forward pass.

    The multi-token prediction heads pass the output layer before the main head does, in order, so
    the first *mtp_num_layers* calls of every forward pass are skipped. The model may scale its
    logits after the output layer (muP); the callback gets them scaled, as the loss does.

    The main head's labels come with the call of the model's loss that follows. What replaces that
    loss (:class:`LossOverride`) sees the calls of all heads and asks :meth:`claim_loss` which of
    them it is.

    Args:
        model: A model with an ``output_layer`` whose output is logits ``(S, B, V / tp)``, alone or
            as the first item of a tuple.
        mtp_num_layers: Number of multi-token prediction heads. A hybrid model has those of its
            layer pattern, whatever the flag says, and knows their number.
        on_logits: Called with the logits. Runs inside the forward pass.
    """

    def __init__(
        self,
        model: Any,
        mtp_num_layers: int,
        on_logits: Callable[[torch.Tensor], None],
    ) -> None:
        self._calls_before_main_head: int = getattr(model, "mtp_num_depths", mtp_num_layers)
        self._calls = 0
        self._expects_loss = False
        self._on_logits = on_logits
        self._scale: Callable[[torch.Tensor], torch.Tensor] | None = getattr(
            model, "_scale_logits", None
        )
        self._handle = model.output_layer.register_forward_hook(self._hook)

    def _hook(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._expects_loss = False
        if not module.training:
            return
        if self._calls < self._calls_before_main_head:
            self._calls += 1
            return
        self._calls = 0
        logits = output[0] if isinstance(output, tuple) else output
        self._on_logits(logits if self._scale is None else self._scale(logits))
        self._expects_loss = True

    def claim_loss(self) -> bool:
        """Return whether a call of the model's loss is the main head's in training; True once."""
        expected, self._expects_loss = self._expects_loss, False
        return expected

    def remove(self) -> None:
        """Take the hook off the output layer."""
        self._handle.remove()


class LossOverride:
    """Replaces a model's ``compute_language_model_loss`` until it is removed.

    Args:
        model: The model to set the replacement on.
        replacement: Called as ``replacement(original, labels, logits)`` with labels ``(B, S)`` and
            logits ``(S, B, V / tp)``; returns per-token losses ``(B, S)``.
    """

    def __init__(
        self,
        model: Any,
        replacement: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self._model = model
        self._shadowed = "compute_language_model_loss" in model.__dict__
        self._original: Callable[..., torch.Tensor] = model.compute_language_model_loss

        def compute_language_model_loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return replacement(self._original, labels, logits)

        model.compute_language_model_loss = compute_language_model_loss

    def remove(self) -> None:
        """Give the model its own method back."""
        if self._shadowed:
            self._model.compute_language_model_loss = self._original
        else:
            del self._model.compute_language_model_loss
