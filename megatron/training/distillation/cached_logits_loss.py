# SPDX-License-Identifier: Apache-2.0
"""Student side: the loss on a teacher's cached top-K log-probabilities.

The trainer attaches a :class:`StudentLogitsCapture` to the model; the entry script uses a
:class:`LossFuncCallable` as its loss function. On the last pipeline stage the targets of the same
global samples are fetched in the forward pass, proven by the labels to be theirs, and made a loss
together with the LM loss; the loss function returns ``alpha * kd_loss + (1 - alpha) * lm_loss``.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from megatron.training.distillation import arguments
from megatron.training.distillation.cached_kd_loss import CachedLogitsKDLoss
from megatron.training.distillation.errors import TeacherDataExhaustedError
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.skipped_steps import DEFAULT_MAX_SHARE
from megatron.training.distillation.sparse_kl import sparse_kl_share
from megatron.training.distillation.student_capture import (
    MicrobatchLosses,
    compute_losses_with,
    get_student_logits_capture,
)
from megatron.training.distillation.student_capture import (
    StudentLogitsCapture as StudentLogitsCapture,
)
from megatron.training.distillation.target_stream import StreamOptions
from megatron.training.distillation.targets import (
    DEFAULT_MAX_AHEAD_BYTES,
    IterationFailure,
    LoadLayout,
)
from megatron.training.global_vars import get_args

TeacherIteration = tuple[int, list[torch.Tensor], list[torch.Tensor]]


class LossFuncCallable:
    """Loss function of a distilled student: ``alpha * kd_loss + (1 - alpha) * lm_loss``.

    Args:
        logprobs_dir: Directory of the cache, a local path or ``msc://`` URL.
        decode_threads: Threads that decode payloads ahead.
        kd_loss_alpha: Weight of the distillation loss, in [0, 1].
        ignore_errors: Train a step on the LM loss alone when its cached data cannot be read.
        msc_prefetch_depth: Whole shards fetched ahead from an object store.
        ignore_hash: Accept shards of another run identity.
        max_skipped_share: With *ignore_errors*, the share of iterations above which all ranks stop.
        max_ahead_bytes: Bytes of decoded rows that a rank which reads may hold ahead of training.

    Raises:
        ValueError: *kd_loss_alpha* is outside [0, 1].
    """

    def __init__(
        self,
        logprobs_dir: str,
        decode_threads: int = 4,
        kd_loss_alpha: float = 1.0,
        ignore_errors: bool = False,
        msc_prefetch_depth: int = 2,
        ignore_hash: bool = False,
        max_skipped_share: float = DEFAULT_MAX_SHARE,
        max_ahead_bytes: int = DEFAULT_MAX_AHEAD_BYTES,
    ) -> None:
        if not 0.0 <= kd_loss_alpha <= 1.0:
            raise ValueError(f"kd_loss_alpha is {kd_loss_alpha}: expected a weight in [0, 1].")
        self.logprobs_dir = logprobs_dir
        self.alpha = kd_loss_alpha
        self._options: dict[str, Any] = {
            "decode_threads": decode_threads,
            "msc_prefetch_depth": msc_prefetch_depth,
            "ignore_hash": ignore_hash,
            "ignore_errors": ignore_errors,
            "max_skipped_share": max_skipped_share,
            "max_ahead_bytes": max_ahead_bytes,
        }
        self.kd_func: CachedLogitsKDLoss | None = None
        compute_losses_with(self._losses)

    def __call__(
        self, loss_mask: torch.Tensor, output_tensor: torch.Tensor, model: torch.nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of one microbatch; evaluation returns the LM loss only.

        Collective over TP and, at the first microbatch of an iteration, over the pipeline stage.

        Args:
            loss_mask: ``(B, S / cp)``, or ``(1, B * S)`` where the samples are packed; tokens whose
                mask is 0 do not count, whatever their loss and their targets are.
            output_tensor: Per-token LM losses, of the shape of *loss_mask*.
            model: The model, wrapped or not.

        Returns:
            The summed loss, the number of unmasked tokens (int), and the report: ``lm loss``,
            ``logits distillation loss`` and ``total loss``, each ``[sum, num_tokens]``.
        """
        mask = loss_mask.reshape(-1).float()
        num_tokens = mask.sum().detach().to(torch.int)
        lm_loss = _masked_sum(output_tensor, mask)
        report = {"lm loss": _entry(lm_loss, num_tokens)}
        if not model.training:
            return lm_loss, num_tokens, report

        capture = get_student_logits_capture()
        if capture is None:
            raise RuntimeError(
                "Cached-logits distillation needs a StudentLogitsCapture attached to the model; "
                "the trainer attaches it when --logits-load-dir is set."
            )
        kd_loss = self._kd_loss(capture, mask)
        if kd_loss is None:
            # The trainer prints an entry it has seen before and does not get as 0.
            report["total loss"] = _entry(lm_loss, num_tokens)
            return lm_loss, num_tokens, report
        report["logits distillation loss"] = _entry(kd_loss, num_tokens)
        total = self._mix(kd_loss, lm_loss)
        report["total loss"] = _entry(total, num_tokens)
        return total, num_tokens, report

    def _kd_loss(self, capture: StudentLogitsCapture, mask: torch.Tensor) -> torch.Tensor | None:
        if capture.has_losses:
            losses = capture.pop_losses()
            if losses is None:
                return None
            self._opened().report(losses, mask)
            return _masked_sum(losses.kd, mask)
        logits, labels = capture.pop(), capture.pop_labels()
        if self.alpha == 0.0:
            logits = logits.detach()
        per_token = self._opened()(logits, labels=labels, loss_mask=mask)
        return None if per_token is None else _masked_sum(per_token, mask)

    def _losses(self, logits: torch.Tensor, labels: torch.Tensor) -> MicrobatchLosses | None:
        """Compute both losses; see :meth:`CachedLogitsKDLoss.with_lm_loss` for collectives."""
        return self._opened().with_lm_loss(logits, labels)

    def _opened(self) -> CachedLogitsKDLoss:
        if self.kd_func is None:
            # The trainer builds its loss function before the parallel state exists.
            self.kd_func = CachedLogitsKDLoss(self.logprobs_dir, **self._options)
        return self.kd_func

    def _mix(self, kd_loss: torch.Tensor, lm_loss: torch.Tensor) -> torch.Tensor:
        """Weigh the losses; one with weight 0 is a metric only and takes no part in backward."""
        if self.alpha == 1.0:
            return kd_loss
        if self.alpha == 0.0:
            return lm_loss
        return self.alpha * kd_loss + (1.0 - self.alpha) * lm_loss


def _masked_sum(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum the losses whose mask is not 0; a NaN behind the mask stays out of sum and gradient."""
    losses = losses.reshape(-1).float()
    return torch.sum(torch.where(mask != 0, losses, 0.0) * mask)


def _entry(loss: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Return a report entry ``[sum, num_tokens]``."""
    return torch.cat([loss.detach().clone().view(1), num_tokens.view(1)])


def topk_kl_div(
    student_logits: torch.Tensor,
    teacher_topk_logprobs: torch.Tensor,
    teacher_topk_indices: torch.Tensor,
    tp_size: int,
    tp_rank: int,
    tp_group: dist.ProcessGroup | None,
    add_ghost_token: bool = False,
) -> torch.Tensor:
    """Return this TP rank's share of the KL divergence on the teacher's support.

    Collective over TP: every rank must call.

    Args:
        student_logits: ``(S, B, V / tp)``; never written to.
        teacher_topk_logprobs: ``(S, B, K)``; -1000.0 masks an entry.
        teacher_topk_indices: ``(S, B, K)`` global vocabulary ids.
        tp_size: Size of the tensor parallel group.
        tp_rank: Rank in the tensor parallel group.
        tp_group: The tensor parallel group; unused when *tp_size* is 1.
        add_ghost_token: Count the mass outside the K entries as one more entry.

    Returns:
        ``(B, S)`` fp32, unreduced; summed over TP it is the divergence.
    """
    share = sparse_kl_share(
        student_logits,
        teacher_topk_logprobs,
        teacher_topk_indices,
        with_tail=add_ghost_token,
        tp_rank=tp_rank,
        tp_size=tp_size,
        tp_group=tp_group,
    )
    return share.transpose(0, 1).contiguous()


class TeacherTarDataset(IterableDataset[TeacherIteration]):
    """A cache as a dataset of training iterations, for tools and tests.

    Yields ``(iteration, values, indices)`` with one ``(S / cp, mbs, K)`` pair per microbatch, and
    ends where the cache ends.
    """

    def __init__(self, options: StreamOptions, layout: LoadLayout, start_iteration: int) -> None:
        self._options = options
        self._layout = layout
        self._start_iteration = start_iteration

    def __iter__(self) -> Iterator[TeacherIteration]:
        gbs = self._layout.gbs
        reader = self._options.reader(self._layout)
        first_sample = self._start_iteration * gbs
        for item in reader.iterations(first_sample):
            if isinstance(item, IterationFailure):
                if isinstance(item.error, TeacherDataExhaustedError) and item.start > first_sample:
                    return
                raise item.error
            rows: tuple[TeacherRows, ...] = item.microbatches
            yield item.start // gbs, [row.values for row in rows], [row.indices for row in rows]


def make_teacher_tar_dataset(
    logprobs_dir: str,
    cp_rank: int,
    cp_size: int,
    dp_rank: int,
    dp_size: int,
    *,
    start_iteration: int = 0,
    decode_threads: int = 1,
    decode_lookahead: int | None = None,
    msc_prefetch_depth: int = 2,
    ignore_hash: bool = False,
) -> TeacherTarDataset:
    """Open a cache for one load rank; batch sizes are those of the global arguments.

    Returns:
        A dataset of ``(iteration, values, indices)``; see :class:`TeacherTarDataset`.
    """
    # Code written against NVIDIA's package replaces this module's get_args to set batch sizes.
    args = get_args()
    options = StreamOptions(
        logprobs_dir=logprobs_dir,
        expected_identifiers=None if ignore_hash else arguments.run_identifiers(args),
        decode_threads=decode_threads,
        decode_lookahead=decode_lookahead,
        msc_prefetch_depth=msc_prefetch_depth,
    )
    layout = LoadLayout(
        dp_rank=dp_rank,
        dp_size=dp_size,
        mbs=args.micro_batch_size,
        gbs=args.global_batch_size,
        cp_rank=cp_rank,
        cp_size=cp_size,
    )
    return TeacherTarDataset(options, layout, start_iteration)
