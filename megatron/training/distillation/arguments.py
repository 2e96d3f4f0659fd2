# SPDX-License-Identifier: Apache-2.0
"""Command-line flags, and frozen views of Megatron's global arguments.

This is the only module of the package that reads ``get_args()``; every other module is handed
values. Megatron's own parser already defines an older set of the ``--logits-*`` flags:
:func:`add_distillation_args` corrects those in place and adds what is missing.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.distillation.backlog import DEFAULT_MAX_WAITING_BYTES
from megatron.training.distillation.manifest import ExpectedRun, RunManifest
from megatron.training.distillation.run_manifest import run_manifest
from megatron.training.distillation.save_format import (
    AUTO,
    SAVE_FORMATS,
    SaveFormat,
    choose_format,
    recorded_dtype,
)
from megatron.training.distillation.shard_meta import SaverSettings, ShardMeta
from megatron.training.distillation.skipped_steps import DEFAULT_MAX_SHARE
from megatron.training.distillation.targets import DEFAULT_MAX_AHEAD_BYTES
from megatron.training.global_vars import (
    get_args,
    get_tensorboard_writer,
    get_tokenizer,
    get_wandb_writer,
)
from megatron.training.utils import get_blend_and_blend_per_split

SAVE_DTYPES = ("fp16", "bf16", "fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One command-line flag; *options* are the keyword arguments of ``add_argument``."""

    name: str
    options: dict[str, Any]


FLAGS = (
    Flag(
        name="--logits-save-dir",
        options={
            "type": str,
            "default": None,
            "metavar": "DIR",
            "help": "Teacher: record the top-K token log-probabilities of every training sample "
            "in DIR, a local path or msc:// URL. Needs --async-save, --use-persistent-ckpt-worker, "
            "--save and --save-interval, because shards are written with the checkpoints. Combine "
            "with --freeze-all-layers.",
        },
    ),
    Flag(
        name="--logits-save-top-k",
        options={
            "type": int,
            "default": 128,
            "metavar": "K",
            "help": "Teacher: log-probabilities recorded per token. Default: 128.",
        },
    ),
    Flag(
        name="--logits-save-top-p",
        options={
            "type": float,
            "default": None,
            "metavar": "P",
            "help": "Teacher: of the top K keep only the smallest leading set whose probability "
            "mass reaches P, in (0, 1]. Default: off.",
        },
    ),
    Flag(
        name="--logits-save-top-p-min-k",
        options={
            "type": int,
            "default": 1,
            "metavar": "K",
            "help": "Teacher: entries kept per token whatever --logits-save-top-p says. "
            "Default: 1.",
        },
    ),
    Flag(
        name="--logits-save-dtype",
        options={
            "type": str,
            "default": "fp16",
            "choices": list(SAVE_DTYPES),
            "help": "Teacher: dtype of the recorded log-probabilities. Default: fp16.",
        },
    ),
    Flag(
        name="--logits-save-8bit",
        options={
            "action": "store_true",
            "default": False,
            "help": "Teacher: record 8-bit codes of the log-probabilities, which students read as "
            "fp16. Format 3 only.",
        },
    ),
    Flag(
        name="--logits-save-format",
        options={
            "type": str,
            "default": AUTO,
            "choices": list(SAVE_FORMATS),
            "help": "Teacher: version of the cache format. 2 is what other software reads too, for "
            "vocabularies of at most 131072 entries; 3 is smaller and takes any vocabulary; auto "
            "is 3 where --logits-save-8bit or the padded vocabulary needs it, else 2. Default: "
            "auto.",
        },
    ),
    Flag(
        name="--logits-save-max-waiting-bytes",
        options={
            "type": int,
            "default": DEFAULT_MAX_WAITING_BYTES,
            "metavar": "BYTES",
            "help": "Teacher: compressed bytes that one rank may have handed to its checkpoint "
            "worker and that are not yet written. A checkpoint that would exceed it waits for "
            f"earlier writes first. Default: {DEFAULT_MAX_WAITING_BYTES} (8 GiB).",
        },
    ),
    Flag(
        name="--logits-save-spool-dir",
        options={
            "type": str,
            "default": None,
            "metavar": "DIR",
            "help": "Teacher: keep compressed logits that wait for their checkpoint, or for its "
            "worker, in files without names on DIR, a directory on a disk of each node, instead of "
            "in memory. Default: memory.",
        },
    ),
    Flag(
        name="--logits-load-dir",
        options={
            "type": str,
            "default": None,
            "metavar": "DIR",
            "help": "Student: train on the cached log-probabilities in DIR, a local path or "
            "msc:// URL. Seed, data and train samples must be those of the teacher's run.",
        },
    ),
    Flag(
        name="--logits-load-decode-threads",
        options={
            "type": int,
            "default": 4,
            "metavar": "N",
            "help": "Student: threads that decompress and unpack cached payloads. Default: 4.",
        },
    ),
    Flag(
        name="--logits-load-msc-prefetch-depth",
        options={
            "type": int,
            "default": 2,
            "metavar": "N",
            "help": "Student: whole shards fetched ahead from an object store. Default: 2.",
        },
    ),
    Flag(
        name="--logits-load-max-ahead-bytes",
        options={
            "type": int,
            "default": DEFAULT_MAX_AHEAD_BYTES,
            "metavar": "BYTES",
            "help": "Student: bytes of decoded log-probabilities that a rank which reads may hold "
            "ahead of training; fewer iterations are decoded ahead where they would take more. "
            f"Default: {DEFAULT_MAX_AHEAD_BYTES} (2 GiB).",
        },
    ),
    Flag(
        name="--logits-load-kd-loss-alpha",
        options={
            "type": float,
            "default": 1.0,
            "metavar": "ALPHA",
            "help": "Student: weight of the distillation loss in "
            "alpha * kd_loss + (1 - alpha) * lm_loss, in [0, 1]. Default: 1.0.",
        },
    ),
    Flag(
        name="--logits-load-ignore-errors",
        options={
            "action": "store_true",
            "default": False,
            "help": "Student: train a step on the LM loss alone when its cached data cannot be "
            "read, instead of stopping. Data of another run still stops.",
        },
    ),
    Flag(
        name="--logits-load-max-skipped-share",
        options={
            "type": float,
            "default": DEFAULT_MAX_SHARE,
            "metavar": "SHARE",
            "help": "Student, with --logits-load-ignore-errors: stop when more than this share of "
            "the iterations of this job had no targets (after 20 iterations), or 20 in a row, in "
            f"[0, 1]; 1 never stops. Default: {DEFAULT_MAX_SHARE}.",
        },
    ),
    Flag(
        name="--logits-load-ignore-hash",
        options={
            "action": "store_true",
            "default": False,
            "help": "Student: accept shards whose run identity (seed, train samples, data blend) "
            "differs from this run's.",
        },
    ),
    Flag(
        name="--logits-load-prefetch-factor",
        options={
            "type": int,
            "default": None,
            "metavar": "N",
            "help": "Accepted for compatibility; has no effect.",
        },
    ),
)


def add_distillation_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the distillation flags to a parser that may already define some of them.

    An option that exists is corrected in place: adding it again would be an argparse conflict.
    Use as (part of) Megatron's ``extra_args_provider``.
    """
    group = parser.add_argument_group("logits distillation")
    for flag in FLAGS:
        action = parser._option_string_actions.get(flag.name)
        if action is None:
            group.add_argument(flag.name, **flag.options)
            continue
        for attribute, value in flag.options.items():
            if attribute != "action":
                setattr(action, attribute, value)
    return parser


# ----------------------------------------------------------------------------------------------
#  Frozen views
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What the hooks and the loader need to know of a run.

    Attributes:
        micro_batch_size: Samples per microbatch of one data parallel rank.
        global_batch_size: Samples per iteration over all data parallel ranks.
        seq_length: Tokens per sample; None where only a tool set the arguments.
        vocab_size: Size of the real vocabulary, without padding; None if no tokenizer says.
        mtp_num_layers: Multi-token prediction heads, which pass the output layer before the main.
        identifiers: The run identity of the shard metadata, in the order that is hashed.
        manifest: What else decides the numbers in a cache.
        max_waiting_bytes: Bytes of a dump that one rank may have handed over and not yet written.
        spool_dir: Directory on this node for what a dump has not yet written; None for memory.
        padded_vocab_size: Size of the output layer; None if it is not known.
        save_format: The value of ``--logits-save-format``.
        save_8bit: Whether ``--logits-save-8bit`` is given.
    """

    micro_batch_size: int
    global_batch_size: int
    seq_length: int | None
    vocab_size: int | None
    mtp_num_layers: int
    identifiers: dict[str, Any]
    manifest: RunManifest | None = None
    max_waiting_bytes: int = DEFAULT_MAX_WAITING_BYTES
    spool_dir: str | None = None
    padded_vocab_size: int | None = None
    save_format: str = AUTO
    save_8bit: bool = False

    @classmethod
    def from_global_args(cls) -> "RunSettings":
        """Read Megatron's global arguments."""
        args = get_args()
        return cls(
            micro_batch_size=args.micro_batch_size,
            global_batch_size=args.global_batch_size,
            seq_length=args.seq_length,
            vocab_size=real_vocab_size(args),
            mtp_num_layers=args.mtp_num_layers or 0,
            identifiers=run_identifiers(args),
            manifest=run_manifest(args, _tokenizer(args)),
            # A script that adds no flags of its own has only those of Megatron's parser.
            max_waiting_bytes=getattr(
                args, "logits_save_max_waiting_bytes", DEFAULT_MAX_WAITING_BYTES
            ),
            spool_dir=getattr(args, "logits_save_spool_dir", None),
            padded_vocab_size=getattr(args, "padded_vocab_size", None),
            save_format=getattr(args, "logits_save_format", AUTO),
            save_8bit=getattr(args, "logits_save_8bit", False),
        )

    def format_of(self, save_dtype: str) -> SaveFormat:
        """Return the format of a dump whose ``--logits-save-dtype`` is *save_dtype*.

        Raises:
            ValueError: The format cannot store the dtype or the vocabulary.
        """
        return choose_format(
            self.save_format,
            recorded_dtype(save_dtype, self.save_8bit),
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab_size,
        )

    def shard_meta(
        self,
        save_format: SaveFormat,
        *,
        k: int,
        p: float | None,
        min_k: int,
        dp_size: int,
        teacher: Mapping[str, Any] | None = None,
    ) -> ShardMeta:
        """Return the metadata of the shards of a dump by this run.

        Args:
            save_format: What :meth:`format_of` returns.
            k: Entries per token.
            p: The mass that is kept of them; None for all.
            min_k: Entries kept whatever *p* says.
            dp_size: Data parallel ranks that record.
            teacher: What the manifest says of the teacher; None for what it says already.
        """
        manifest = self.manifest
        if manifest is not None and teacher is not None:
            manifest = replace(manifest, teacher=teacher)
        saver = SaverSettings(
            k=k,
            p=p,
            min_k=min_k,
            save_dtype=save_format.save_dtype,
            format_version=save_format.version,
            mbs_save=self.micro_batch_size,
            dp_size_save=dp_size,
            gbs_save=self.global_batch_size,
        )
        return ShardMeta.for_run(self.identifiers, saver, manifest)

    def expected_run(self, *, enforced: bool, reports: bool) -> ExpectedRun:
        """Return the run as a reader expects to find it in a cache."""
        return ExpectedRun(
            identifiers=self.identifiers,
            manifest=self.manifest,
            enforced=enforced,
            reports=reports,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPosition:
    """Where training stands inside a forward pass.

    Attributes:
        iteration: 0-based iteration.
        start_sample: First global sample of the iteration's batch.
        num_microbatches: Microbatches of one data parallel rank in this iteration.
    """

    iteration: int
    start_sample: int
    num_microbatches: int


def current_position() -> TrainingPosition:
    """Return the position of the running iteration.

    ``consumed_train_samples`` grows only after ``train_step`` returns, so inside a forward pass it
    is the first sample of the batch.
    """
    args = get_args()
    iteration = getattr(args, "curr_iteration", None)
    return TrainingPosition(
        iteration=args.iteration if iteration is None else iteration,
        start_sample=args.consumed_train_samples,
        num_microbatches=get_num_microbatches(),
    )


def log_scalar(name: str, value: float, iteration: int) -> None:
    """Write a scalar to TensorBoard and W&B on the rank that has their writers.

    *iteration* counts as the trainer's curves do, from 1.
    """
    writer = get_tensorboard_writer()
    if writer is not None:
        writer.add_scalar(name, value, iteration)
    wandb_writer = get_wandb_writer()
    if wandb_writer is not None:
        wandb_writer.log({name: value}, iteration)


def curves_are_due(iteration: int) -> bool:
    """Return whether this rank has a writer, and the trainer writes its curves at *iteration*."""
    if get_tensorboard_writer() is None and get_wandb_writer() is None:
        return False
    return bool(iteration % get_args().tensorboard_log_interval == 0)


def curves_are_written(iteration: int) -> bool:
    """Return whether some rank writes the trainer's curves at *iteration*; all ranks agree."""
    args = get_args()
    if not getattr(args, "tensorboard_dir", None) and not getattr(args, "wandb_project", None):
        return False
    return bool(iteration % args.tensorboard_log_interval == 0)


def line_is_due(iteration: int) -> bool:
    """Return whether this rank is the one that prints the trainer's line of *iteration*."""
    args = get_args()
    interval = getattr(args, "log_interval", 0)
    if not interval or iteration % interval:
        return False
    return bool(args.rank == args.world_size - 1)


def real_vocab_size(args: argparse.Namespace) -> int | None:
    """Return the vocabulary size without padding, or None where no tokenizer is configured."""
    tokenizer = _tokenizer(args)
    return None if tokenizer is None else int(tokenizer.vocab_size)


def _tokenizer(args: argparse.Namespace) -> Any:
    return None if getattr(args, "tokenizer_type", None) is None else get_tokenizer()


def run_identifiers(args: argparse.Namespace) -> dict[str, Any]:
    """Return the identity of a run's sample stream, in the order the format hashes it.

    The keys are ``seed``, ``train_samples`` and ``blend``. Datasets are named by base name, so a
    moved data directory is the same data.
    """
    train_samples = getattr(args, "train_samples", None)
    if not train_samples and args.train_iters is not None:
        train_samples = args.train_iters * args.global_batch_size
    return {"seed": args.seed, "train_samples": train_samples, "blend": _blend(args)}


def _blend(args: argparse.Namespace) -> dict[str, Any]:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is not None:
        return {"kind": "blend", "blend": _weighted_names(blend)}
    if blend_per_split is not None:
        return {"kind": "blend_per_split", "train": _weighted_names(blend_per_split[0])}
    return {"kind": "mock", "mock": True}


def _weighted_names(
    blend: tuple[Sequence[str], Sequence[float] | None] | None,
) -> list[list[Any]] | None:
    if blend is None:
        return None
    prefixes, weights = blend
    return [
        [float(weight), os.path.splitext(os.path.basename(str(prefix)))[0]]
        for weight, prefix in zip(weights or [1.0] * len(prefixes), prefixes, strict=True)
    ]
