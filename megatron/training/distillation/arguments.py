# SPDX-License-Identifier: Apache-2.0
"""Command-line flags, their cross-checks, and frozen views of Megatron's global arguments.

This is the only module of the package that reads ``get_args()``; every other module is handed
values. Megatron's own parser already defines an older set of the ``--logits-*`` flags:
:func:`add_distillation_args` corrects those in place and adds what is missing.
"""

import argparse
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.distillation import legacy, storage
from megatron.training.distillation.utils import MAX_VOCAB_SIZE, ShardName
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

logger = logging.getLogger(__name__)

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
#  Checks
# ----------------------------------------------------------------------------------------------


def check_flags(args: argparse.Namespace) -> None:
    """Refuse what distillation cannot do, before Megatron validates or builds anything.

    Args:
        args: Parsed arguments, not yet validated by Megatron.

    Raises:
        ValueError: With every problem found and what to change.
    """
    problems: list[str] = []
    if args.logits_save_dir is not None:
        problems += _save_problems(args)
    if args.logits_load_dir is not None:
        problems += _load_problems(args)
    if args.logits_save_dir is not None or args.logits_load_dir is not None:
        problems += _common_problems(args)
    if problems:
        raise ValueError(
            "Logits distillation cannot run like this:\n  - " + "\n  - ".join(problems)
        )


def _save_problems(args: argparse.Namespace) -> list[str]:
    problems = []
    missing = [
        flag
        for flag, present in (
            ("--async-save", args.async_save),
            ("--use-persistent-ckpt-worker", args.use_persistent_ckpt_worker),
            ("--save DIR", args.save),
            ("--save-interval N", args.save_interval),
        )
        if not present
    ]
    if missing:
        problems.append(
            "--logits-save-dir writes its shards with the checkpoints, through the asynchronous "
            f"checkpoint queue: add {', '.join(missing)}."
        )
    if args.logits_save_top_k < 1:
        problems.append(
            f"--logits-save-top-k is {args.logits_save_top_k}: give a number of entries per token "
            "of at least 1."
        )
    if args.logits_save_top_p is not None and not 0.0 < args.logits_save_top_p <= 1.0:
        problems.append(
            f"--logits-save-top-p is {args.logits_save_top_p}: give a probability mass in (0, 1], "
            "or leave the flag out to keep all top-K entries."
        )
    if not 1 <= args.logits_save_top_p_min_k <= max(args.logits_save_top_k, 1):
        problems.append(
            f"--logits-save-top-p-min-k is {args.logits_save_top_p_min_k}: give a number from 1 to "
            f"--logits-save-top-k ({args.logits_save_top_k})."
        )
    if args.logits_save_dtype not in SAVE_DTYPES:
        problems.append(
            f"--logits-save-dtype is {args.logits_save_dtype!r}: choose one of "
            f"{', '.join(SAVE_DTYPES)}."
        )
    return problems


def _load_problems(args: argparse.Namespace) -> list[str]:
    problems = []
    if not 0.0 <= args.logits_load_kd_loss_alpha <= 1.0:
        problems.append(
            f"--logits-load-kd-loss-alpha is {args.logits_load_kd_loss_alpha}: give a weight in "
            "[0, 1]; 1 trains on the distillation loss alone."
        )
    if args.logits_load_decode_threads < 1:
        problems.append(
            f"--logits-load-decode-threads is {args.logits_load_decode_threads}: give at least 1."
        )
    if args.logits_load_msc_prefetch_depth < 0:
        problems.append(
            f"--logits-load-msc-prefetch-depth is {args.logits_load_msc_prefetch_depth}: give 0 or "
            "more."
        )
    try:
        names = storage.list_names(args.logits_load_dir)
    except OSError as error:
        problems.append(
            f"--logits-load-dir {args.logits_load_dir} cannot be read ({error}): give the "
            "directory a teacher wrote with --logits-save-dir."
        )
    else:
        shards = [name for name in names if ShardName.parse(name) or legacy.is_shard_name(name)]
        if not args.logits_load_ignore_errors and not shards:
            problems.append(
                f"--logits-load-dir {args.logits_load_dir} holds no shard named like "
                f"dp0__0-1024.tar among its {len(names)} entries: give the directory a teacher "
                "wrote with --logits-save-dir."
            )
    if args.logits_save_dir is not None and _same_directory(
        args.logits_save_dir, args.logits_load_dir
    ):
        problems.append(
            f"--logits-save-dir and --logits-load-dir are the same directory "
            f"({args.logits_load_dir}): save to another one."
        )
    return problems


def _common_problems(args: argparse.Namespace) -> list[str]:
    """List what the by-sample arithmetic or the hooks do not cover."""
    schedule = "targets are addressed by global sample under one fixed global batch size"
    order = "targets are addressed by the order of Megatron's sequential sampler"
    hooks = "the hooks would not see the logits the model is trained with"
    refused = [
        (getattr(args, "rampup_batch_size", None), "--rampup-batch-size", schedule),
        (getattr(args, "step_batch_size_schedule", None), "--step-batch-size-schedule", schedule),
        (
            getattr(args, "decrease_batch_size_if_needed", False),
            "--decrease-batch-size-if-needed",
            schedule,
        ),
        (
            getattr(args, "phase_transition_iterations", None),
            "--phase-transition-iterations",
            order,
        ),
        (
            args.dataloader_type not in (None, "single"),
            f"--dataloader-type {args.dataloader_type}",
            order,
        ),
        (
            getattr(args, "hybrid_context_parallel", False),
            "--hybrid-context-parallel",
            order,
        ),
        (getattr(args, "perform_rl_step", False), "--perform-rl-step", order),
        (_weight_shards_beyond_tp(args), "tensor parallel weight shards beyond TP (GTP)", order),
        (
            getattr(args, "cross_entropy_loss_fusion", False)
            and getattr(args, "cross_entropy_fusion_impl", None) == "linear",
            "--cross-entropy-fusion-impl linear",
            "it makes the output layer return losses instead of logits",
        ),
        (
            getattr(args, "cuda_graph_impl", None) == "full_iteration",
            "--cuda-graph-impl full_iteration",
            hooks,
        ),
        (getattr(args, "skip_train", False), "--skip-train", "there would be no training step"),
    ]
    problems = [
        f"{flag} is not supported: {reason}. Leave it out." for hit, flag, reason in refused if hit
    ]
    for flag, path in (
        ("--logits-save-dir", args.logits_save_dir),
        ("--logits-load-dir", args.logits_load_dir),
    ):
        if path is not None and storage.is_remote(path) and not args.enable_msc:
            problems.append(f"{flag} {path} is an object-store URL: add --enable-msc.")
    return problems


def _weight_shards_beyond_tp(args: argparse.Namespace) -> bool:
    if (getattr(args, "gtp_weight_remat_size", 1) or 1) > 1:
        return True
    shards = getattr(args, "tensor_parallel_num_weight_shards", None)
    return shards is not None and shards > args.tensor_model_parallel_size


def _same_directory(first: str, second: str) -> bool:
    if storage.is_remote(first) or storage.is_remote(second):
        return first.rstrip("/") == second.rstrip("/")
    return os.path.realpath(first) == os.path.realpath(second)


def finalize_args(args: argparse.Namespace) -> None:
    """Complete the flags once Megatron has validated them and built the tokenizer.

    Lowers K to the vocabulary, refuses a dump that would record random weights because its
    checkpoint is missing, and says what is unusual.

    Raises:
        ValueError: The vocabulary does not fit the format, or the teacher's checkpoint is missing.
    """
    if args.logits_load_prefetch_factor is not None:
        _note("--logits-load-prefetch-factor has no effect and can be left out.")
    if args.logits_save_dir is None:
        return
    vocab_size = real_vocab_size(args)
    if vocab_size is not None and vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(
            f"The vocabulary has {vocab_size} entries, but the shard format stores ids below "
            f"{MAX_VOCAB_SIZE} (17 bits). This teacher cannot be recorded."
        )
    if vocab_size is not None and args.logits_save_top_k > vocab_size:
        _note(
            f"--logits-save-top-k {args.logits_save_top_k} is larger than the vocabulary: "
            f"recording all {vocab_size} entries."
        )
        args.logits_save_top_k = vocab_size
        args.logits_save_top_p_min_k = min(args.logits_save_top_p_min_k, vocab_size)
    if not args.freeze_all_layers:
        _note(
            "WARNING: --logits-save-dir without --freeze-all-layers: the teacher keeps training "
            "while it is recorded, so later samples are recorded from another model."
        )
    _require_teacher_checkpoint(args)


def _require_teacher_checkpoint(args: argparse.Namespace) -> None:
    from megatron.training.checkpointing import checkpoint_exists

    given = {
        flag: path
        for flag, path in (
            ("--load", args.load),
            ("--pretrained-checkpoint", args.pretrained_checkpoint),
        )
        if path is not None
    }
    if not given:
        _note(
            "WARNING: --logits-save-dir without --load or --pretrained-checkpoint: the recorded "
            "teacher starts from random weights."
        )
    elif not any(checkpoint_exists(path) for path in given.values()):
        listed = " and ".join(f"{flag} {path}" for flag, path in given.items())
        raise ValueError(
            f"No checkpoint was found in {listed}; the dump would record random weights. Point "
            "--load at the teacher's checkpoint, or give the dump's own --save directory as --load "
            "and the teacher's as --pretrained-checkpoint, so that a restart resumes the dump."
        )


def _note(message: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"> {message}", flush=True)


# ----------------------------------------------------------------------------------------------
#  Frozen views
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What the hooks and the loader need to know of a run.

    Attributes:
        micro_batch_size: Samples per microbatch of one data parallel rank.
        global_batch_size: Samples per iteration over all data parallel ranks.
        seq_length: Tokens per sample.
        vocab_size: Size of the real vocabulary, without padding; None if no tokenizer says.
        mtp_num_layers: Multi-token prediction heads, which pass the output layer before the main.
        identifiers: The run identity of the shard metadata, in the order that is hashed.
    """

    micro_batch_size: int
    global_batch_size: int
    seq_length: int | None
    vocab_size: int | None
    mtp_num_layers: int
    identifiers: dict[str, Any]

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
    """Write a scalar to TensorBoard on the rank that has a writer."""
    writer = get_tensorboard_writer()
    if writer is not None:
        writer.add_scalar(name, value, iteration)


def real_vocab_size(args: argparse.Namespace) -> int | None:
    """Return the vocabulary size without padding, or None where no tokenizer is configured."""
    if getattr(args, "tokenizer_type", None) is None:
        return None
    return int(get_tokenizer().vocab_size)


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
