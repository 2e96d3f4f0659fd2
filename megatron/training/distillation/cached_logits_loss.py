# SPDX-License-Identifier: Apache-2.0
"""Student side: the loss on a teacher's cached top-K log-probabilities.

The trainer attaches a :class:`StudentLogitsCapture` to the model; the entry script uses a
:class:`LossFuncCallable` as its loss function. On the last pipeline stage it takes the captured
logits, fetches the targets of the same global samples, has it proven by the labels that they are,
and returns ``alpha * kd_loss + (1 - alpha) * lm_loss``.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from megatron.training.distillation import arguments, parallel
from megatron.training.distillation.agreed_targets import AgreedTargets, Content
from megatron.training.distillation.content_proof import ContentProof
from megatron.training.distillation.errors import TeacherDataExhaustedError
from megatron.training.distillation.packed_layout import is_packed, pack_samples
from megatron.training.distillation.payload import TeacherRows
from megatron.training.distillation.skipped_steps import DEFAULT_MAX_SHARE
from megatron.training.distillation.sparse_kl import sparse_kl, sparse_kl_share
from megatron.training.distillation.student_capture import (
    StudentLogitsCapture as StudentLogitsCapture,
)
from megatron.training.distillation.student_capture import get_student_logits_capture
from megatron.training.distillation.student_report import StudentReport
from megatron.training.distillation.target_stream import StreamOptions, TargetStream
from megatron.training.distillation.targets import (
    IterationFailure,
    IterationTargets,
    LoadLayout,
)
from megatron.training.global_vars import get_args

TeacherIteration = tuple[int, list[torch.Tensor], list[torch.Tensor]]


class CachedLogitsKDLoss:
    """Per-token KL divergence of the student from the teacher's cached distribution.

    Args:
        logprobs_dir: Directory of the cache, a local path or ``msc://`` URL.
        decode_threads: Threads that decode payloads ahead.
        msc_prefetch_depth: Whole shards fetched ahead from an object store.
        ignore_hash: Accept shards of another run identity.
        ignore_errors: Answer None for iterations whose data cannot be read, instead of raising.
        max_skipped_share: With *ignore_errors*, the share of iterations above which all ranks stop.
    """

    def __init__(
        self,
        logprobs_dir: str,
        decode_threads: int = 4,
        msc_prefetch_depth: int = 2,
        ignore_hash: bool = False,
        ignore_errors: bool = False,
        max_skipped_share: float = DEFAULT_MAX_SHARE,
    ) -> None:
        self.logprobs_dir = logprobs_dir
        self._settings = arguments.RunSettings.from_global_args()
        self._layout = parallel.ParallelLayout.from_parallel_state()
        self._stream = TargetStream(
            StreamOptions(
                logprobs_dir=logprobs_dir,
                expected_identifiers=self._settings.expected_run(
                    enforced=not ignore_hash, reports=self._layout.speaks_for_stage
                ),
                decode_threads=decode_threads,
                decode_lookahead=None,
                msc_prefetch_depth=msc_prefetch_depth,
            ),
            LoadLayout(
                dp_rank=self._layout.dp_rank,
                dp_size=self._layout.dp_size,
                mbs=self._settings.micro_batch_size,
                gbs=self._settings.global_batch_size,
                cp_rank=self._layout.cp_rank,
                cp_size=self._layout.cp_size,
                seq_length=self._settings.seq_length,
            ),
        )
        self._agreed = AgreedTargets(
            logprobs_dir,
            self._stream,
            self._layout,
            ignore_errors=ignore_errors,
            max_skipped_share=max_skipped_share,
        )
        self._proof = ContentProof(self._layout, seq_length=self._settings.seq_length)
        self._report = StudentReport()
        self._position: tuple[int, int] | None = None
        self._targets: IterationTargets | None = None
        self._next_microbatch = 0
        self._microbatches_seen = 0

    @property
    def skipped_iterations(self) -> int:
        """Iterations that were trained without targets."""
        return self._agreed.skipped_iterations

    def __call__(
        self,
        student_logits: torch.Tensor,
        iteration: int | None = None,
        microbatch_idx: int | None = None,
        *,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Return the loss of the next microbatch.

        Collective over TP for the loss, and over CP for its labels. Collective over the whole
        pipeline stage at the first microbatch of an iteration, where the ranks agree on whether it
        has targets for this batch, and at the last of several, where they agree on whether those of
        the others were for theirs. A microbatch after the first whose targets are for other tokens
        has no loss and no gradient.

        Args:
            student_logits: ``(S / cp, B, V / tp)``, or ``(B * S, 1, V / tp)`` where the samples of
                the microbatch are packed into one sequence; never written to.
            iteration: Iteration under a fixed global batch size; the trainer's position by default.
            microbatch_idx: Microbatch of the iteration; counted by default, and counted again when
                a step is replayed.
            labels: ``(B, S / cp)``, or packed like the logits; None leaves contents unproven.
            loss_mask: Of the size of the result; tokens whose mask is 0 stay out of the curves.

        Returns:
            ``(B, S / cp)``, or ``(1, B * S)`` where the samples are packed; fp32, the same on every
            TP rank. None where the iteration's data could not be read and errors are ignored.

        Raises:
            TeacherContentError: The teacher saw other tokens for these samples, on any rank.
            TeacherDataError: The iteration's data is missing, exhausted or damaged, on any rank.
            ValueError: The logits are not those of a microbatch of this run.
        """
        batch = self._proof.fingerprints(labels)
        position = self._resolve(iteration)
        is_first = position != self._position
        if is_first:
            self._open_iteration(position, microbatch_idx or 0, batch)
        if self._targets is None:
            return None
        if microbatch_idx is None:
            microbatch_idx = self._next_microbatch % len(self._targets.microbatches)
            self._next_microbatch = microbatch_idx + 1
        rows = self._targets.microbatches[microbatch_idx]
        differs = None if is_first else self._proof.defer(microbatch_idx, rows, batch)
        self._microbatches_seen += 1
        if self._microbatches_seen == len(self._targets.microbatches):
            self._microbatches_seen = 0
            self._proof.settle(position[1])
        values, indices, tail = self._like_logits(rows, student_logits)
        self._report.add(values, tail, loss_mask)
        loss = sparse_kl(
            student_logits,
            values,
            indices,
            tail_logprob=tail,
            vocab_size=self._settings.vocab_size,
            tp_rank=self._layout.tp_rank,
            tp_size=self._layout.tp_size,
            tp_group=self._layout.tp_group,
        )
        if differs is not None:
            loss = torch.where(differs, 0.0, loss)
        return loss.transpose(0, 1).contiguous()

    def _open_iteration(
        self, position: tuple[int, int], microbatch: int, batch: torch.Tensor | None
    ) -> None:
        """Fetch the targets of an iteration, proven for the *microbatch* it begins with.

        Collective over TP x CP x DP of the stage: every rank must call.
        """

        def compare(targets: IterationTargets) -> tuple[Content, str]:
            return self._proof.compare(
                targets.start, microbatch, targets.microbatches[microbatch], batch
            )

        self._proof.forget()
        self._targets = self._agreed.agree_on(position[1], compare)
        self._position = position
        self._next_microbatch = self._microbatches_seen = 0
        self._report.begin(
            position[0] + 1,
            microbatches=0 if self._targets is None else len(self._targets.microbatches),
            skipped=self.skipped_iterations,
            wait=self._stream.take_wait(),
        )

    def _like_logits(
        self, rows: TeacherRows, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return a microbatch's values, ids and tail on the device and in the layout of *logits*.

        Raises:
            ValueError: The logits are not those of these samples.
        """
        positions, micro_batch_size = rows.values.shape[:2]
        packed = is_packed(
            logits,
            positions=positions,
            micro_batch_size=micro_batch_size,
            cp_size=self._layout.cp_size,
        )

        def place(part: torch.Tensor) -> torch.Tensor:
            part = part.to(logits.device, non_blocking=True)
            return pack_samples(part) if packed else part

        tail = rows.tail_logprob
        return place(rows.values), place(rows.indices), None if tail is None else place(tail)

    def _resolve(self, iteration: int | None) -> tuple[int, int]:
        """Return the iteration and its first global sample."""
        if iteration is not None:
            return iteration, iteration * self._settings.global_batch_size
        position = arguments.current_position()
        return position.iteration, position.start_sample


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
        }
        self.kd_func: CachedLogitsKDLoss | None = None

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
        kd_loss = self._kd_loss(capture.pop(), capture.pop_labels(), mask)
        if kd_loss is None:
            # The trainer prints an entry it has seen before and does not get as 0.
            report["total loss"] = _entry(lm_loss, num_tokens)
            return lm_loss, num_tokens, report
        report["logits distillation loss"] = _entry(kd_loss, num_tokens)
        total = self._mix(kd_loss, lm_loss)
        report["total loss"] = _entry(total, num_tokens)
        return total, num_tokens, report

    def _kd_loss(
        self, logits: torch.Tensor, labels: torch.Tensor | None, mask: torch.Tensor
    ) -> torch.Tensor | None:
        if self.kd_func is None:
            # The trainer builds its loss function before the parallel state exists.
            self.kd_func = CachedLogitsKDLoss(self.logprobs_dir, **self._options)
        if self.alpha == 0.0:
            logits = logits.detach()
        per_token = self.kd_func(logits, labels=labels, loss_mask=mask)
        return None if per_token is None else _masked_sum(per_token, mask)

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
