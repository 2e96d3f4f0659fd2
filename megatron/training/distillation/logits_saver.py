# SPDX-License-Identifier: Apache-2.0
"""Teacher side: record the top-K log-probabilities of every training token.

The trainer builds one :class:`LogitsSaverHooks` on every rank and attaches it to the rank's last
model chunk. On the last pipeline stage a hook on the output layer reduces each microbatch's logits
to its top-K entries, and the call of the model's loss that follows brings the labels, of which
fingerprints are kept. When an iteration is complete both are packed and compressed in a background
thread. ``save_checkpoint`` takes what has been collected and queues its write behind the
checkpoint's own, so a checkpoint is confirmed only when its logits are on disk.
"""

import itertools
import logging
from collections.abc import Callable
from functools import partial

import torch

from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.training.distillation import arguments, parallel, spool, storage
from megatron.training.distillation.backlog import wait_for_room
from megatron.training.distillation.continuation import check_continues
from megatron.training.distillation.errors import CacheIdentityError
from megatron.training.distillation.fingerprint import LabelFingerprinter
from megatron.training.distillation.flush_report import Flush, report_flush
from megatron.training.distillation.iteration_buffer import BufferedIteration, IterationBuffer
from megatron.training.distillation.member_content import Content
from megatron.training.distillation.metrics import WindowMasses
from megatron.training.distillation.model_hooks import LossOverride, OutputLayerTap
from megatron.training.distillation.packed_layout import is_packed, unpack_samples
from megatron.training.distillation.save_format import TORCH_DTYPES
from megatron.training.distillation.teacher_topk import TeacherTopK, apply_top_p, teacher_topk
from megatron.training.distillation.utils import ShardMeta, ShardName
from megatron.training.distillation.write_watch import WriteWatch, write_and_report

logger = logging.getLogger(__name__)

# checkpointing.py asks for the saver by function call, so one reference has to live here.
_active_saver: "LogitsSaverHooks | None" = None


def get_logits_saver() -> "LogitsSaverHooks | None":
    """Return this process's saver, or None if the run records nothing."""
    return _active_saver


class LogitsSaverHooks:
    """Records a model's top-K log-probabilities and hands them to the checkpoint queue.

    Every rank constructs one, so that every rank queues the same number of asynchronous requests;
    a pipeline stage without an output layer stays idle and queues empty ones.

    Constructing one is collective over the pipeline stage (TP x CP x DP): every rank must do it.

    Args:
        save_dir: Directory of the cache, a local path or ``msc://`` URL.
        k: Entries per token.
        p: Keep of the top K only the smallest leading set whose mass reaches *p*; None for all.
        min_k: Entries kept whatever *p* says.
        save_dtype: ``fp16``, ``bf16`` or ``fp32``, or ``uint8`` for 8-bit codes, which the run's
            settings may ask for in place of fp16.

    Raises:
        ValueError: An argument is out of its range, or the run's format cannot store what it asks
            for.
        CacheIdentityError: *save_dir* holds shards of another dump, or cannot be used.
    """

    def __init__(
        self,
        save_dir: str,
        k: int,
        *,
        p: float | None = None,
        min_k: int = 1,
        save_dtype: str = "fp16",
    ) -> None:
        if k < 1:
            raise ValueError(f"k is {k}: expected at least 1 entry per token.")
        if p is not None and not 0.0 < p <= 1.0:
            raise ValueError(f"p is {p}: expected a probability mass in (0, 1], or None.")
        if min_k < 1:
            raise ValueError(f"min_k is {min_k}: expected at least 1.")
        if save_dtype not in TORCH_DTYPES:
            raise ValueError(f"save_dtype is {save_dtype!r}: expected one of {list(TORCH_DTYPES)}.")
        self.save_dir = save_dir
        self.k = k
        self.p = p
        self.min_k = min_k
        self._settings = arguments.RunSettings.from_global_args()
        self._layout = parallel.ParallelLayout.from_parallel_state()
        save_format = self._settings.format_of(save_dtype)
        encode = save_format.encoder()
        self._torch_dtype = TORCH_DTYPES[save_format.save_dtype]
        meta = self._settings.shard_meta(
            save_format, k=k, p=p, min_k=min_k, dp_size=self._layout.dp_size
        )
        self._meta_bytes = meta.to_bytes()

        self._tap: OutputLayerTap | None = None
        self._loss_override: LossOverride | None = None
        self._position: arguments.TrainingPosition | None = None
        self._microbatches: list[TeacherTopK | None] = []
        self._fingerprints: list[torch.Tensor | None] = []
        self._kept_counts: list[torch.Tensor] = []
        self._masses = WindowMasses()

        self._fingerprint: LabelFingerprinter | None = None

        self._open_directory(meta)
        self._watch = WriteWatch()
        self._buffer = IterationBuffer(self._settings.spool_dir, self._watch.end_job, encode)
        global _active_saver
        _active_saver = self

    def _open_directory(self, meta: ShardMeta) -> None:
        """Make the directory and refuse one that holds another dump; try that of the spools.

        Collective over the pipeline stage: those that write make it, for it may lie on a disk of
        their node; one rank looks, all raise.
        """
        code, detail = 0, ""
        if self._layout.tp_rank == self._layout.cp_rank == 0:
            try:
                if self._settings.spool_dir is not None:
                    _try_spools(self._settings.spool_dir)
                storage.makedirs(self.save_dir)
                if self._layout.speaks_for_stage:
                    check_continues(self.save_dir, meta)
            except (CacheIdentityError, *storage.ERRORS) as error:
                code, detail = 1, str(error)
        code, details = parallel.worst_over_stage(code, detail, self._layout)
        if code:
            raise CacheIdentityError(f"The dump cannot start in {self.save_dir}: {details}")

    def attach_hooks(self, model: torch.nn.Module) -> None:
        """Hook the model's output layer; a model chunk without one is left alone.

        The model's ``compute_language_model_loss`` is hooked for its labels; a model without one is
        recorded without fingerprints. If no parameter of the model wants a gradient
        (``--freeze-all-layers``), that loss is replaced by zeros in training: nothing would come of
        computing it. Evaluation computes it.
        """
        if getattr(model, "output_layer", None) is None:
            return
        self._tap = OutputLayerTap(model, self._settings.mtp_num_layers, self._on_logits)
        if not hasattr(model, "compute_language_model_loss"):
            return
        frozen = not any(parameter.requires_grad for parameter in model.parameters())
        loss = partial(_zero_loss_in_training, model) if frozen else _own_loss
        self._loss_override = LossOverride(model, partial(self._on_loss, loss))

    def remove_hooks(self) -> None:
        """Take the hooks off the model and give it its own loss back."""
        if self._tap is not None:
            self._tap.remove()
            self._tap = None
        if self._loss_override is not None:
            self._loss_override.remove()
            self._loss_override = None

    # ------------------------------------------------------------------------------------------
    #  Collecting
    # ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _on_logits(self, logits: torch.Tensor) -> None:
        """Reduce one microbatch. Collective over TP.

        An iteration closes with the loss of its last microbatch, or where that is not computed,
        here; see :meth:`_close_iteration` for its collectives.
        """
        self._close_if_complete()
        position = arguments.current_position()
        if self._position is None or self._position.start_sample != position.start_sample:
            if self._position is not None and self._microbatches:
                logger.warning(
                    "The batch that starts at sample %s is not recorded: %d of its %d microbatches "
                    "passed the output layer before training went on at sample %d.",
                    self._position.start_sample,
                    len(self._microbatches),
                    self._position.num_microbatches,
                    position.start_sample,
                )
            self._forget_iteration()
        self._position = position
        self._microbatches.append(self._reduce(logits))
        self._fingerprints.append(None)
        if self._loss_override is None:
            self._close_if_complete()

    def _on_loss(
        self,
        loss: Callable[..., torch.Tensor],
        original: Callable[..., torch.Tensor],
        labels: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """Take the labels of the microbatch that passed the output layer; return its *loss*.

        Closes the iteration with its last microbatch; see :meth:`_close_iteration` for the
        collectives.
        """
        if self._tap is not None and self._tap.claim_loss():
            with torch.no_grad():
                if self._layout.tp_rank == 0:
                    self._fingerprints[-1] = self._fingerprinter(labels)(labels)
                self._close_if_complete()
        return loss(original, labels, logits)

    def _fingerprinter(self, labels: torch.Tensor) -> LabelFingerprinter:
        if self._fingerprint is None:
            length = self._settings.seq_length or labels.shape[1] * self._layout.cp_size
            self._fingerprint = LabelFingerprinter(
                parallel.sequence_positions(length, self._layout), length
            )
        return self._fingerprint

    def _close_if_complete(self) -> None:
        """Close the iteration if all of its microbatches are there.

        See :meth:`_close_iteration` for its collectives. The ranks of a group run the same code on
        as many microbatches, so they come here with the same ones.
        """
        position = self._position
        if position is not None and len(self._microbatches) == position.num_microbatches:
            self._close_iteration(position)
            # A replay of this step starts from an empty list and replaces the buffered iteration.
            self._forget_iteration()

    def _forget_iteration(self) -> None:
        self._microbatches = []
        self._fingerprints = []
        self._kept_counts = []

    def _reduce(self, logits: torch.Tensor) -> TeacherTopK | None:
        """Return the entries of one microbatch on TP rank 0, None elsewhere. Collective over TP.

        The entries have one row per sample, ``(S / cp, B, K)``, in whichever layout the logits are.

        Raises:
            ValueError: The logits are not those of a microbatch of this run; on every TP rank.
        """
        layout, settings = self._layout, self._settings
        packed = settings.seq_length is not None and is_packed(
            logits,
            positions=settings.seq_length // layout.cp_size,
            micro_batch_size=settings.micro_batch_size,
            cp_size=layout.cp_size,
        )
        entries = teacher_topk(
            logits,
            self.k,
            vocab_size=settings.vocab_size,
            tp_rank=layout.tp_rank,
            tp_size=layout.tp_size,
            tp_group=layout.tp_group,
            tp_dst_rank=layout.tp_source,
        )
        if entries is not None and packed:
            entries = TeacherTopK(
                logprobs=unpack_samples(entries.logprobs, settings.micro_batch_size),
                indices=unpack_samples(entries.indices, settings.micro_batch_size),
                tail_logprob=unpack_samples(entries.tail_logprob, settings.micro_batch_size),
            )
        if entries is None or self.p is None:
            return entries
        entries, kept = apply_top_p(entries, self.p, self.min_k)
        self._kept_counts.append(kept)
        return entries

    def _close_iteration(self, position: arguments.TrainingPosition) -> None:
        """Buffer a complete iteration, without waiting for the device.

        Collective over CP. With top-P, where the trainer writes its curves, also over the stage;
        only then the device is waited for.
        """
        if self._layout.tp_rank == 0:
            self._buffer_iteration(position.start_sample)
            tails = [entry.tail_logprob for entry in self._microbatches if entry is not None]
            self._masses.add(position.start_sample, tails)
        # The trainer's own curves count iterations from 1.
        if self.p is not None and arguments.curves_are_written(position.iteration + 1):
            kept = sum((float(count.sum()) for count in self._kept_counts), 0.0)
            tokens = float(sum(count.numel() for count in self._kept_counts))
            kept, tokens = parallel.sum_over_stage([kept, tokens], self._layout)
            arguments.log_scalar("avg-logprobs-kept", kept / tokens, position.iteration + 1)

    def _buffer_iteration(self, start_sample: int) -> None:
        """Merge the microbatches and hand them to the buffer. Collective over CP."""
        entries = [entry for entry in self._microbatches if entry is not None]
        values = torch.cat([e.logprobs for e in entries], dim=1).to(self._torch_dtype)
        indices = torch.cat([e.indices.to(torch.int32) for e in entries], dim=1)
        tail = torch.cat([e.tail_logprob for e in entries], dim=1)
        whole = [parallel.gather_sequence(part, self._layout) for part in (values, indices, tail)]
        fingerprints = self._whole_fingerprints()
        if self._layout.cp_rank != 0:
            return
        all_values, all_indices, all_tail = (part for part in whole if part is not None)
        self._buffer.add(
            start_sample,
            start_sample + self._settings.global_batch_size,
            all_values,
            all_indices,
            all_tail,
            fingerprints,
        )

    def _whole_fingerprints(self) -> torch.Tensor | None:
        """Return the fingerprints ``(C, n)`` of the iteration's labels. Collective over CP.

        None if the model's loss was not called with the labels of every microbatch; that is a
        property of the model, the same on all ranks of the group.
        """
        parts = [part for part in self._fingerprints if part is not None]
        if len(parts) < len(self._fingerprints):
            return None
        return parallel.sum_over_context(torch.cat(parts, dim=1), self._layout)

    # ------------------------------------------------------------------------------------------
    #  Handing over
    # ------------------------------------------------------------------------------------------

    @property
    def _write_batched_tar(self) -> Callable[..., None]:
        """What the checkpoint worker calls; picklable."""
        return partial(write_and_report, self._watch.reports)

    def take_pending_data(self) -> tuple[str, bytes, list[tuple[str, Content]], bool]:
        """Hand over what has been collected since the last call, and report it.

        Collective over the pipeline stage (TP x CP x DP): every rank must call. A rank whose
        earlier windows leave no room for this one waits before the first collective of the report.

        A complete iteration whose loss has not been computed is closed; see
        :meth:`_close_iteration` for its collectives.

        Returns:
            The arguments of ``_write_batched_tar``: shard path, metadata member, payload members
            ``(name, place of the compressed bytes)`` in ascending order, and whether the worker
            must enable the multi-storage client. The path is empty where this rank has nothing to
            write. The bytes are readable until the window has been reported written.

        Raises:
            LogitsWriteError: An iteration could not be compressed or spooled.
        """
        self._close_if_complete()
        iterations, release = self._buffer.take()
        size = sum(len(iteration.payload) for iteration in iterations)
        waited = wait_for_room(self._watch, size, self._settings.max_waiting_bytes)
        self._report(iterations, size, waited)
        msc_enabled = MultiStorageClientFeature.is_enabled()
        if not iterations:
            self._watch.hand_over("A window without samples of this rank")
            return "", self._meta_bytes, [], msc_enabled
        for before, after in itertools.pairwise(iterations):
            if before.end != after.start:
                logger.warning(
                    "Samples %d to %d are not recorded: training passed over them, or they did not "
                    "pass the model's output layer.",
                    before.end,
                    after.start - 1,
                )
        name = ShardName(self._layout.dp_rank, iterations[0].start, iterations[-1].end)
        members: list[tuple[str, Content]] = [
            (iteration.member_name, iteration.payload) for iteration in iterations
        ]
        path = storage.join(self.save_dir, str(name))
        self._watch.hand_over(
            f"The window of samples {name.start} to {name.end - 1} ({path})",
            size,
            release,
        )
        return path, self._meta_bytes, members, msc_enabled

    def _report(self, iterations: list[BufferedIteration], size: int, waited: float) -> None:
        """Report what is about to be handed over. Collective over the pipeline stage."""
        kept_mass, tokens = self._masses.take()
        flush = Flush(
            start=iterations[0].start if iterations else 0,
            end=iterations[-1].end if iterations else 0,
            samples=sum(iteration.end - iteration.start for iteration in iterations)
            // self._layout.dp_size,
            size=size,
            waiting=self._watch.waiting_bytes(),
            held=self._buffer.take_held_peak(),
            waited=waited,
            kept_mass=kept_mass,
            tokens=tokens,
            written=self._watch.take_written(),
        )
        report_flush(flush, self._layout, self._settings.seq_length)


def _try_spools(directory: str) -> None:
    try:
        spool.check_directory(directory)
    except OSError as error:
        raise OSError(
            error.errno,
            f"--logits-save-spool-dir cannot be used: {error.strerror}. Give a directory that "
            "exists on every node and can be written, or leave the flag out to spool in memory.",
        ) from error


def _own_loss(
    original: Callable[..., torch.Tensor], labels: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    return original(labels, logits)


def _zero_loss_in_training(
    model: torch.nn.Module,
    original: Callable[..., torch.Tensor],
    labels: torch.Tensor,
    logits: torch.Tensor,
) -> torch.Tensor:
    """Return zero losses ``(B, S)`` that stay connected to *logits*; the true ones in evaluation.

    An earlier pipeline stage waits for a gradient of its output also when all weights are frozen.
    The sum over an empty slice is zero whatever the logits are, and so is its gradient.
    """
    if not model.training:
        return original(labels, logits)
    return logits[..., :0].sum(dim=-1, dtype=torch.float32).transpose(0, 1).contiguous()
