# SPDX-License-Identifier: Apache-2.0
"""The tap on the output layer and the replacement of the model's loss."""

import pytest
import torch

from megatron.training.distillation.model_hooks import LossOverride, OutputLayerTap


class TinyModel(torch.nn.Module):
    """Calls its output layer as Megatron's GPTModel does: every MTP head, then the main head."""

    def __init__(self, mtp_num_layers: int = 0, returns_tuple: bool = True) -> None:
        super().__init__()
        self.mtp_num_layers = mtp_num_layers
        self.output_layer = _OutputLayer(returns_tuple)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for head in range(self.mtp_num_layers):
            self.output_layer(hidden + 100 * (head + 1))
        output = self.output_layer(hidden)
        logits = output[0] if isinstance(output, tuple) else output
        return self._scale_logits(logits) if hasattr(self, "_scale_logits") else logits

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        return logits.sum(-1).transpose(0, 1) + labels


class ScaledModel(TinyModel):
    def _scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return 0.5 * logits


class _OutputLayer(torch.nn.Module):
    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self.returns_tuple = returns_tuple

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        logits = hidden * 3
        return (logits, None) if self.returns_tuple else logits


@pytest.mark.parametrize("model_type", [TinyModel, ScaledModel])
@pytest.mark.parametrize("returns_tuple", [True, False])
@pytest.mark.parametrize("mtp_num_layers", [0, 1, 3])
def test_tap_sees_what_the_model_returns(
    model_type: type[TinyModel], returns_tuple: bool, mtp_num_layers: int
) -> None:
    model = model_type(mtp_num_layers, returns_tuple)
    seen: list[torch.Tensor] = []
    OutputLayerTap(model, mtp_num_layers, seen.append)
    returned = [model(torch.full((2, 1, 4), float(step))) for step in range(3)]
    assert len(seen) == 3
    for tapped, logits in zip(seen, returned, strict=True):
        torch.testing.assert_close(tapped, logits, rtol=0, atol=0)


@pytest.mark.parametrize("depths", [0, 2])
def test_hybrid_model_has_the_heads_of_its_pattern(depths: int) -> None:
    """Megatron only warns if --mtp-num-layers says otherwise, and builds what the pattern says."""
    model = TinyModel(depths)
    model.mtp_num_depths = depths
    seen: list[torch.Tensor] = []
    OutputLayerTap(model, 1, seen.append)
    for step in range(3):
        model(torch.full((1, 1, 2), float(step)))
    assert [float(logits.max()) for logits in seen] == [0.0, 3.0, 6.0]


def test_tap_ignores_evaluation_between_training_passes() -> None:
    model = TinyModel(mtp_num_layers=1)
    seen: list[torch.Tensor] = []
    OutputLayerTap(model, 1, seen.append)
    model(torch.zeros(1, 1, 2))
    model.eval()
    model(torch.ones(1, 1, 2))
    model.train()
    model(torch.full((1, 1, 2), 2.0))
    assert [float(logits.max()) for logits in seen] == [0.0, 6.0]


def test_removed_tap_sees_nothing() -> None:
    model = TinyModel()
    seen: list[torch.Tensor] = []
    tap = OutputLayerTap(model, 0, seen.append)
    tap.remove()
    model(torch.zeros(1, 1, 2))
    assert seen == []


def test_tap_keeps_the_graph() -> None:
    model = ScaledModel()
    seen: list[torch.Tensor] = []
    OutputLayerTap(model, 0, seen.append)
    hidden = torch.ones(1, 1, 2, requires_grad=True)
    model(hidden)
    seen[0].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[[1.5, 1.5]]]


def test_loss_override_gets_the_original_and_can_be_removed() -> None:
    model = TinyModel()
    labels, logits = torch.ones(2, 3), torch.zeros(3, 2, 4)
    plain = model.compute_language_model_loss(labels, logits)
    override = LossOverride(model, lambda original, labels, logits: 10 * original(labels, logits))
    assert torch.equal(model.compute_language_model_loss(labels, logits), 10 * plain)
    # Megatron passes some of them by name.
    assert torch.equal(model.compute_language_model_loss(labels=labels, logits=logits), 10 * plain)
    override.remove()
    assert torch.equal(model.compute_language_model_loss(labels, logits), plain)
    assert "compute_language_model_loss" not in model.__dict__


def test_loss_overrides_nest() -> None:
    model = TinyModel()
    labels, logits = torch.ones(1, 1), torch.zeros(1, 1, 1)
    LossOverride(model, lambda original, labels, logits: original(labels, logits) + 1)
    inner = model.__dict__["compute_language_model_loss"]
    outer = LossOverride(model, lambda original, labels, logits: original(labels, logits) * 7)
    assert model.compute_language_model_loss(labels, logits).item() == 14.0
    outer.remove()
    assert model.__dict__["compute_language_model_loss"] is inner
    assert model.compute_language_model_loss(labels, logits).item() == 2.0


def test_loss_of_the_main_head_is_told_from_the_others() -> None:
    """Claimed once per training forward pass, and not by what follows one without a loss."""
    model = TinyModel(2)
    tap = OutputLayerTap(model, 2, lambda logits: None)
    claims = []

    def run_heads(count: int) -> None:
        for _ in range(count):
            model.output_layer(torch.zeros(1, 1, 2))
            claims.append(tap.claim_loss())

    run_heads(3)
    claims.append(tap.claim_loss())
    assert claims == [False, False, True, False]
    claims.clear()
    for _ in range(3):
        model.output_layer(torch.zeros(1, 1, 2))  # nobody computes these losses
    model.eval()
    run_heads(3)
    assert claims == [False] * 3
    model.train()
    run_heads(3)
    assert claims == [False] * 5 + [True]
