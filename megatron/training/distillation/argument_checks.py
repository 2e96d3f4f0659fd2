# SPDX-License-Identifier: Apache-2.0
"""The cross-checks of the flags: what distillation cannot do is refused before a model is built."""

import argparse
import os

from megatron.training.distillation import legacy, storage
from megatron.training.distillation.arguments import SAVE_DTYPES, real_vocab_size
from megatron.training.distillation.packed_sequence_checks import packed_sequence_problems
from megatron.training.distillation.save_format import SAVE_FORMATS, choose_format, recorded_dtype
from megatron.training.distillation.skipped_steps import DEFAULT_MAX_SHARE
from megatron.training.distillation.utils import ShardName


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
        problems += _remote_problems(args)
        problems += packed_sequence_problems(args)
    _refuse(problems)


def check_recorded_settings(args: argparse.Namespace) -> None:
    """Refuse what no cache can be of; for what records without the trainer.

    Raises:
        ValueError: As :func:`check_flags`.
    """
    _refuse(_setting_problems(args) + _common_problems(args))


def _refuse(problems: list[str]) -> None:
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
    problems += _setting_problems(args)
    if args.logits_save_max_waiting_bytes < 1:
        problems.append(
            f"--logits-save-max-waiting-bytes is {args.logits_save_max_waiting_bytes}: give a "
            "number of bytes of at least 1, such as 8589934592 for 8 GiB."
        )
    spool_dir = args.logits_save_spool_dir
    if spool_dir is not None and storage.is_remote(spool_dir):
        problems.append(
            f"--logits-save-spool-dir is {spool_dir}: give a directory on a disk of the node, or "
            "leave the flag out to spool in memory."
        )
    return problems


def _setting_problems(args: argparse.Namespace) -> list[str]:
    """List what is wrong with what is recorded, and how."""
    problems = []
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
    return problems + _format_problems(args)


def _format_problems(args: argparse.Namespace) -> list[str]:
    if args.logits_save_format not in SAVE_FORMATS:
        return [
            f"--logits-save-format is {args.logits_save_format!r}: choose one of "
            f"{', '.join(map(repr, SAVE_FORMATS))}."
        ]
    try:
        # The vocabulary is known after Megatron has validated its arguments.
        choose_format(
            args.logits_save_format, recorded_dtype(args.logits_save_dtype, args.logits_save_8bit)
        )
    except ValueError as error:
        return [str(error)]
    return []


def _load_problems(args: argparse.Namespace) -> list[str]:
    problems = []
    if not 0.0 <= args.logits_load_kd_loss_alpha <= 1.0:
        problems.append(
            f"--logits-load-kd-loss-alpha is {args.logits_load_kd_loss_alpha}: give a weight in "
            "[0, 1]; 1 trains on the distillation loss alone."
        )
    if args.logits_load_max_ahead_bytes < 1:
        problems.append(
            f"--logits-load-max-ahead-bytes is {args.logits_load_max_ahead_bytes}: give a number "
            "of bytes of at least 1, such as 2147483648 for 2 GiB."
        )
    if not 0.0 <= args.logits_load_max_skipped_share <= 1.0:
        problems.append(
            f"--logits-load-max-skipped-share is {args.logits_load_max_skipped_share}: give a "
            "share of the iterations in [0, 1]; 1 never stops."
        )
    elif (
        args.logits_load_max_skipped_share != DEFAULT_MAX_SHARE
        and not args.logits_load_ignore_errors
    ):
        problems.append(
            f"--logits-load-max-skipped-share {args.logits_load_max_skipped_share} limits what "
            "--logits-load-ignore-errors allows, which is not given: add it, or leave the share "
            "out to stop at the first iteration without targets."
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
    if _is_rank_0():
        # A thousand ranks would list the directory at one moment. The launcher ends the others
        # with rank 0, and before the first step one rank of the stage lists it again for them.
        problems += _listing_problems(args)
    if args.logits_save_dir is not None and _same_directory(
        args.logits_save_dir, args.logits_load_dir
    ):
        problems.append(
            f"--logits-save-dir and --logits-load-dir are the same directory "
            f"({args.logits_load_dir}): save to another one."
        )
    return problems


def _listing_problems(args: argparse.Namespace) -> list[str]:
    directory = f"--logits-load-dir {args.logits_load_dir}"
    advice = "give the directory a teacher wrote with --logits-save-dir."
    try:
        names = storage.list_names(args.logits_load_dir)
    except storage.ERRORS as error:
        return [f"{directory} cannot be read ({error}): {advice}"]
    shards = [name for name in names if ShardName.parse(name) or legacy.is_shard_name(name)]
    if args.logits_load_ignore_errors or shards:
        return []
    return [
        f"{directory} holds no shard named like dp0__0-1024.tar among its {len(names)} entries: "
        f"{advice}"
    ]


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
    return problems + _sequence_problems(args)


def _remote_problems(args: argparse.Namespace) -> list[str]:
    directories = {
        "--logits-save-dir": args.logits_save_dir,
        "--logits-load-dir": args.logits_load_dir,
    }
    return [
        f"{flag} {path} is an object-store URL: add --enable-msc."
        for flag, path in directories.items()
        if path is not None and storage.is_remote(path) and not args.enable_msc
    ]


def _sequence_problems(args: argparse.Namespace) -> list[str]:
    cp_size = getattr(args, "context_parallel_size", 1)
    seq_length = getattr(args, "seq_length", None)
    if seq_length is None or cp_size == 1 or seq_length % (2 * cp_size) == 0:
        return []
    return [
        f"--seq-length {seq_length} cannot be cut into {2 * cp_size} equal chunks, two for each of "
        f"--context-parallel-size {cp_size}: choose a multiple of {2 * cp_size}, or another size."
    ]


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
    checkpoint is missing, and says what is unusual and which format the dump is written in.

    Raises:
        ValueError: The vocabulary does not fit the format, or the teacher's checkpoint is missing.
    """
    if args.logits_load_prefetch_factor is not None:
        _note("--logits-load-prefetch-factor has no effect and can be left out.")
    if args.logits_save_dir is None:
        return
    vocab_size = real_vocab_size(args)
    save_format = choose_format(
        args.logits_save_format,
        recorded_dtype(args.logits_save_dtype, args.logits_save_8bit),
        vocab_size=vocab_size,
        padded_vocab_size=getattr(args, "padded_vocab_size", None),
    )
    _note(f"The dump is written in format {save_format.version}: {save_format.reason}.")
    lower_to_vocabulary(args, vocab_size)
    if not args.freeze_all_layers:
        _note(
            "WARNING: --logits-save-dir without --freeze-all-layers: the teacher keeps training "
            "while it is recorded, so later samples are recorded from another model."
        )
    _require_teacher_checkpoint(args)


def lower_to_vocabulary(args: argparse.Namespace, vocab_size: int | None) -> None:
    """Lower the number of recorded entries to the vocabulary, where that is smaller; say so."""
    if vocab_size is None or args.logits_save_top_k <= vocab_size:
        return
    _note(
        f"--logits-save-top-k {args.logits_save_top_k} is larger than the vocabulary: recording "
        f"all {vocab_size} entries."
    )
    args.logits_save_top_k = vocab_size
    args.logits_save_top_p_min_k = min(args.logits_save_top_p_min_k, vocab_size)


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


def _is_rank_0() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _note(message: str) -> None:
    if _is_rank_0():
        print(f"> {message}", flush=True)
