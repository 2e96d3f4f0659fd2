# SPDX-License-Identifier: Apache-2.0
"""Stands in for Megatron's global state: a run's settings, its layout, and where training is."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.training.distillation import arguments, parallel, write_watch
from megatron.training.distillation.arguments import RunSettings, TrainingPosition
from megatron.training.distillation.parallel import ParallelLayout
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS

SETTINGS = RunSettings(
    micro_batch_size=1,
    global_batch_size=2,
    seq_length=4,
    vocab_size=13,
    mtp_num_layers=0,
    identifiers=IDENTIFIERS,
)
SINGLE = ParallelLayout(
    tp_rank=0,
    tp_size=1,
    tp_group=None,
    tp_source=0,
    cp_rank=0,
    cp_size=1,
    cp_group=None,
    replica_group=None,
    dp_rank=0,
    dp_size=1,
    stage_group=None,
)

START = TrainingPosition(iteration=0, start_sample=0, num_microbatches=2)


@dataclass
class StubRun:
    """What the modules under test believe of the run; installed by :meth:`install`."""

    settings: RunSettings = SETTINGS
    layout: ParallelLayout = SINGLE
    position: TrainingPosition = START
    scalars: list[tuple[str, float, int]] = field(default_factory=list)
    writes: bool = True
    """Whether this rank writes curves and lines."""

    def install(self, patch: Any) -> "StubRun":
        """Replace the readers of global state; *patch* has pytest's ``monkeypatch.setattr``."""
        patch.setattr(RunSettings, "from_global_args", staticmethod(lambda: self.settings))
        patch.setattr(ParallelLayout, "from_parallel_state", staticmethod(lambda: self.layout))
        patch.setattr(arguments, "current_position", lambda: self.position)
        # A saver whose windows are never written watches on, in a process that is not its job.
        patch.setattr(write_watch, "end_process", lambda error: None)
        patch.setattr(arguments, "log_scalar", lambda *scalar: self.scalars.append(scalar))
        patch.setattr(arguments, "curves_are_due", lambda iteration: self.writes)
        patch.setattr(arguments, "curves_are_written", lambda iteration: self.writes)
        patch.setattr(arguments, "line_is_due", lambda iteration: self.writes)
        if dist.is_initialized():
            return self
        patch.setattr(parallel, "worst_over_stage", lambda code, detail, layout: (code, detail))
        patch.setattr(parallel, "sum_over_stage", lambda values, layout: values)
        patch.setattr(parallel, "max_over_stage", lambda values, layout: values)
        patch.setattr(parallel, "from_speaker", lambda value, layout: value)
        return self

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return the steps and values that were written under *name*."""
        return [(step, value) for written, value, step in self.scalars if written == name]

    def move_to(self, start_sample: int) -> None:
        """Go to the iteration that starts at this sample."""
        gbs = self.settings.global_batch_size
        self.position = replace(
            self.position, iteration=start_sample // gbs, start_sample=start_sample
        )


def placed(**sizes: Any) -> ParallelLayout:
    """A layout without groups, for what does not communicate; *sizes* replace fields of SINGLE."""
    return replace(SINGLE, **sizes)


def group_layout(**sizes: Any) -> ParallelLayout:
    """A layout over the whole gloo group of a forked rank; *sizes* replace fields of SINGLE."""
    names = ("stage_group", "tp_group", "cp_group", "replica_group")
    return replace(SINGLE, **{**dict.fromkeys(names, dist.group.WORLD), **sizes})


class PlainPatch:
    """``setattr`` without undoing, for processes that end with the test."""

    @staticmethod
    def setattr(target: Any, name: str, value: Any) -> None:
        """Set the attribute."""
        setattr(target, name, value)


class GivenLogitsModel(torch.nn.Module):
    """A model whose logits ``(S, B, V / tp)`` are its input; it computes its loss as Megatron does.

    The cross entropy works in place on fp32 logits, as Megatron's does.
    """

    def __init__(self, mtp_num_layers: int = 0, frozen: bool = False) -> None:
        super().__init__()
        self.mtp_num_layers = mtp_num_layers
        self.output_layer = _Identity()
        self.weight = torch.nn.Parameter(torch.ones(()), requires_grad=not frozen)
        self.config = None

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for _ in range(self.mtp_num_layers):
            # Losses of other heads, on other logits.
            logits, _ = self.output_layer(hidden.detach() * -2 + 1)
            self.compute_language_model_loss(labels, logits)
        logits, _ = self.output_layer(hidden * self.weight)
        return self.compute_language_model_loss(labels, logits)

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        return InPlaceCrossEntropy.apply(logits, labels)


class MegatronLossModel(GivenLogitsModel):
    """The same with the loss of Megatron's models, which the student's capture joins."""

    compute_language_model_loss = LanguageModule.compute_language_model_loss

    def __init__(self, mtp_num_layers: int = 0, frozen: bool = False) -> None:
        super().__init__(mtp_num_layers, frozen)
        self.config = SimpleNamespace(
            mtp_num_layers=mtp_num_layers, cross_entropy_loss_fusion=False
        )
        self.tp_group = None

    @staticmethod
    def install(patch: Any) -> None:
        """Have Megatron's loss do without a process group."""
        patch.setattr(
            tensor_parallel,
            "vocab_parallel_cross_entropy",
            lambda logits, labels, tp_group: InPlaceCrossEntropy.apply(logits, labels.T).T,
        )


class _Identity(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hidden * 1, None


class InPlaceCrossEntropy(torch.autograd.Function):
    """Cross entropy that destroys fp32 logits, as Megatron's vocabulary-parallel one does."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        work = logits.float()
        work -= work.amax(-1, keepdim=True)
        chosen = work.gather(-1, labels.transpose(0, 1)[..., None])[..., 0]
        work.exp_()
        total = work.sum(-1)
        ctx.save_for_backward(work / total[..., None], labels)
        return (total.log() - chosen).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        probabilities, labels = ctx.saved_tensors
        target = labels.transpose(0, 1)[..., None]
        gradient = probabilities.scatter_add(-1, target, -torch.ones_like(target).float())
        return gradient * gradients[0].transpose(0, 1)[..., None], None
