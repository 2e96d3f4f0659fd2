# SPDX-License-Identifier: Apache-2.0
"""The loss of one microbatch after the other on the targets that the cache has for them."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron.training.distillation import arguments, parallel
from megatron.training.distillation.agreed_targets import AgreedTargets, Content
from megatron.training.distillation.content_proof import ContentProof
from megatron.training.distillation.packed_layout import is_packed, pack_samples
from megatron.training.distillation.packed_rows import PackedRows
from megatron.training.distillation.skipped_steps import DEFAULT_MAX_SHARE
from megatron.training.distillation.sparse_kl import sparse_kl, sparse_kl_and_cross_entropy
from megatron.training.distillation.student_capture import MicrobatchLosses
from megatron.training.distillation.student_report import StudentReport
from megatron.training.distillation.target_feed import OpenIteration, TargetFeed
from megatron.training.distillation.target_stream import StreamOptions, TargetStream
from megatron.training.distillation.targets import DEFAULT_MAX_AHEAD_BYTES, LoadLayout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Targets:
    """The targets of one microbatch, in the layout of its logits.

    Attributes:
        values: ``(S / cp, B, K)`` log-probabilities.
        indices: ``(S / cp, B, K)`` ids.
        tail: ``(S / cp, B)`` log of the mass outside them, or None.
        differs: Whether they are for other tokens, a bool without dimensions; None if it is not
            known, or known that they are not.
    """

    values: torch.Tensor
    indices: torch.Tensor
    tail: torch.Tensor | None
    differs: torch.Tensor | None

    def hide(self, loss: torch.Tensor) -> torch.Tensor:
        """Return *loss*, or zeros without a gradient if the targets are for other tokens."""
        return loss if self.differs is None else torch.where(self.differs, 0.0, loss)


class CachedLogitsKDLoss:
    """Per-token KL divergence of the student from the teacher's cached distribution.

    Args:
        logprobs_dir: Directory of the cache, a local path or ``msc://`` URL.
        decode_threads: Threads that decode payloads ahead.
        msc_prefetch_depth: Whole shards fetched ahead from an object store.
        ignore_hash: Accept shards of another run identity.
        ignore_errors: Answer None for iterations whose data cannot be read, instead of raising.
        max_skipped_share: With *ignore_errors*, the share of iterations above which all ranks stop.
        max_ahead_bytes: Bytes of decoded rows that a rank which reads may hold ahead of training.
    """

    def __init__(
        self,
        logprobs_dir: str,
        decode_threads: int = 4,
        msc_prefetch_depth: int = 2,
        ignore_hash: bool = False,
        ignore_errors: bool = False,
        max_skipped_share: float = DEFAULT_MAX_SHARE,
        max_ahead_bytes: int = DEFAULT_MAX_AHEAD_BYTES,
    ) -> None:
        self.logprobs_dir = logprobs_dir
        self._settings = arguments.RunSettings.from_global_args()
        self._layout = parallel.ParallelLayout.from_parallel_state()
        seq_length = self._settings.seq_length
        if seq_length is None:
            raise ValueError("A student needs the length of its samples: set --seq-length.")
        device = parallel.targets_device(self._layout)
        stream = TargetStream(
            StreamOptions(
                logprobs_dir=logprobs_dir,
                expected_identifiers=self._settings.expected_run(
                    enforced=not ignore_hash, reports=self._layout.speaks_for_stage
                ),
                decode_threads=decode_threads,
                decode_lookahead=None,
                msc_prefetch_depth=msc_prefetch_depth,
                max_ahead_bytes=max_ahead_bytes,
            ),
            LoadLayout(
                dp_rank=self._layout.dp_rank,
                dp_size=self._layout.dp_size,
                mbs=self._settings.micro_batch_size,
                gbs=self._settings.global_batch_size,
                cp_rank=None,  # of all of them, one rank reads
                cp_size=self._layout.cp_size,
                seq_length=seq_length,
            ),
            device=device,
        )
        self._feed = TargetFeed(
            stream, self._layout, gbs=self._settings.global_batch_size, device=device
        )
        self._agreed = AgreedTargets(
            logprobs_dir,
            self._feed,
            self._layout,
            ignore_errors=ignore_errors,
            max_skipped_share=max_skipped_share,
        )
        self._proof = ContentProof(self._layout, seq_length=seq_length)
        self._report = StudentReport()
        self._shard: dict[str, Any] = {
            "vocab_size": self._settings.vocab_size,
            "tp_rank": self._layout.tp_rank,
            "tp_size": self._layout.tp_size,
            "tp_group": self._layout.tp_group,
        }
        self._position: tuple[int, int] | None = None
        self._targets: OpenIteration | None = None
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

        Collective over TP for the loss, over CP for its labels, and over TP x CP for the targets,
        which one rank of these reads. Collective over the whole pipeline stage at the first
        microbatch of an iteration, where the ranks agree on whether it has targets for this batch,
        and at the last of several, where they agree on whether those of the others were for theirs.
        A microbatch after the first whose targets are for other tokens has no loss and no gradient.

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
        found = self._targets_of(student_logits, labels, iteration, microbatch_idx)
        if found is None:
            return None
        self._report.add(found.values, found.tail, loss_mask)
        loss = sparse_kl(
            student_logits, found.values, found.indices, tail_logprob=found.tail, **self._shard
        )
        return found.hide(loss).transpose(0, 1).contiguous()

    def with_lm_loss(
        self, student_logits: torch.Tensor, labels: torch.Tensor
    ) -> MicrobatchLosses | None:
        """Return the loss of the next microbatch and its LM loss, from one pass over the logits.

        Collective as a call is; nothing is reported until :meth:`report`.

        Args:
            student_logits: As for a call.
            labels: ``(B, S / cp)``, or packed like the logits.

        Returns:
            None where the iteration's data could not be read and errors are ignored.

        Raises:
            Exception: As a call does.
        """
        found = self._targets_of(student_logits, labels, None, None)
        if found is None:
            return None
        kd, lm = sparse_kl_and_cross_entropy(
            student_logits,
            found.values,
            found.indices,
            labels.transpose(0, 1),
            tail_logprob=found.tail,
            **self._shard,
        )
        return MicrobatchLosses(
            kd=found.hide(kd).transpose(0, 1).contiguous(),
            lm=lm.transpose(0, 1).contiguous(),
            values=found.values,
            tail=found.tail,
        )

    def report(self, losses: MicrobatchLosses, loss_mask: torch.Tensor | None) -> None:
        """Add the targets of a microbatch to the curves; tokens whose mask is 0 stay out."""
        self._report.add(losses.values, losses.tail, loss_mask)

    def _targets_of(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        iteration: int | None,
        microbatch_idx: int | None,
    ) -> "_Targets | None":
        """Return the targets of the next microbatch. Arguments and collectives of a call."""
        batch = self._proof.fingerprints(labels)
        position = self._resolve(iteration)
        is_first = position != self._position
        if is_first:
            self._open_iteration(position, microbatch_idx or 0, batch)
        if self._targets is None:
            return None
        if microbatch_idx is None:
            microbatch_idx = self._next_microbatch % self._targets.microbatches
            self._next_microbatch = microbatch_idx + 1
        rows = self._feed.take(microbatch_idx)
        differs = None if is_first else self._proof.defer(microbatch_idx, rows, batch)
        self._microbatches_seen += 1
        if self._microbatches_seen == self._targets.microbatches:
            self._microbatches_seen = 0
            self._proof.settle(position[1])
        return self._like_logits(rows, logits, differs)

    def _open_iteration(
        self, position: tuple[int, int], microbatch: int, batch: torch.Tensor | None
    ) -> None:
        """Fetch the targets of an iteration, proven for the *microbatch* it begins with.

        Collective over TP x CP x DP of the stage: every rank must call.
        """

        def compare(targets: OpenIteration) -> tuple[Content, str]:
            return self._proof.compare(targets.start, microbatch, targets.first, batch)

        self._proof.forget()
        self._targets = self._agreed.agree_on(position[1], microbatch, compare)
        self._position = position
        self._next_microbatch = self._microbatches_seen = 0
        self._report.begin(
            position[0] + 1,
            microbatches=0 if self._targets is None else self._targets.microbatches,
            skipped=self.skipped_iterations,
            wait=self._feed.wait,
        )

    def _like_logits(
        self, packed_rows: PackedRows, logits: torch.Tensor, differs: torch.Tensor | None
    ) -> "_Targets":
        """Return the targets of a microbatch on the device and in the layout of *logits*.

        Raises:
            ValueError: The logits are not those of these samples.
        """
        positions, micro_batch_size = packed_rows.values.shape[:2]
        packed = is_packed(
            logits,
            positions=positions,
            micro_batch_size=micro_batch_size,
            cp_size=self._layout.cp_size,
        )

        def place(part: torch.Tensor) -> torch.Tensor:
            if part.device != logits.device:  # gloo with a GPU
                part = part.to(logits.device)
            return pack_samples(part) if packed else part

        rows = packed_rows.unpack_all()
        tail = rows.tail_logprob
        return _Targets(
            values=place(rows.values),
            indices=place(rows.indices),
            tail=None if tail is None else place(tail),
            differs=differs,
        )

    def _resolve(self, iteration: int | None) -> tuple[int, int]:
        """Return the iteration and its first global sample."""
        if iteration is not None:
            return iteration, iteration * self._settings.global_batch_size
        position = arguments.current_position()
        return position.iteration, position.start_sample
