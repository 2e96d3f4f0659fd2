# SPDX-License-Identifier: Apache-2.0
"""The cross-checks of the flags for packed sequences (thd layout).

Some of these flags the trainer itself does not survive, but it says so late: after the model is
built, or at the first sample.
"""

import argparse
import re

# Megatron's own, where --data-path comes without --split.
_DEFAULT_SPLIT = "969, 30, 1"


def packed_sequence_problems(args: argparse.Namespace) -> list[str]:
    """List what goes wrong where a sample is a pack of sequences (thd layout)."""
    sft = getattr(args, "sft", False)
    if not sft and not getattr(args, "dataloader_inter_document_masking", False):
        return []
    named = "--sft" if sft else "--dataloader-inter-document-masking"
    cp_size, pp_size = args.context_parallel_size, args.pipeline_model_parallel_size
    mbs = args.micro_batch_size or 1
    problems = _sft_problems(args) if sft else []
    if sft and cp_size > 1:
        problems.append(
            f"--sft with --context-parallel-size {cp_size} is not supported: the data set pads "
            "every conversation to a length that depends on the context-parallel size, so a "
            "sample's tokens differ between layouts, and every conversation is sliced by itself. "
            "Use --context-parallel-size 1 and more tensor parallelism."
        )
    elif cp_size > 1 and mbs > 1:
        problems.append(
            f"{named} with --context-parallel-size {cp_size} and --micro-batch-size {mbs} is not "
            "supported: the samples of a microbatch are joined before they are sliced over the "
            "context-parallel ranks. Use --micro-batch-size 1."
        )
    if pp_size > 1 and mbs > 1:
        problems.append(
            f"{named} with --pipeline-model-parallel-size {pp_size} and --micro-batch-size {mbs} "
            "does not work: the samples of a microbatch are joined to one sequence, but the "
            "pipeline hands them on side by side. Use --micro-batch-size 1."
        )
    return problems


def _sft_problems(args: argparse.Namespace) -> list[str]:
    """List the flags at which the SFT data set stops, or the trainer that reads it."""
    problems = []
    if args.tokenizer_type != "SFTTokenizer":
        problems.append(
            f"--sft needs a tokenizer of conversations, but --tokenizer-type is "
            f"{args.tokenizer_type}: use SFTTokenizer, with --tokenizer-model and "
            "--sft-tokenizer-prompt-format."
        )
    if args.create_attention_mask_in_dataloader:
        problems.append(
            "--sft makes no attention mask: add --no-create-attention-mask-in-dataloader."
        )
    for flag, given in (
        ("--reset-position-ids", args.reset_position_ids),
        ("--reset-attention-mask", args.reset_attention_mask),
    ):
        if given:
            problems.append(
                f"{flag} does not go with --sft, whose conversations are separate anyway. Leave "
                "it out."
            )
    if args.eval_iters == 0 and not args.full_validation and _holds_data_out(args):
        problems.append(
            "--sft with --eval-iters 0 stops at a validation set of no samples: add "
            "--split 100,0,0, or evaluate at least once."
        )
    return problems


def _holds_data_out(args: argparse.Namespace) -> bool:
    """Tell whether a part of the data is for validation or test."""
    if args.data_path is None:
        return bool(args.valid_data_path or args.test_data_path)
    shares = re.findall(r"[.0-9]+", args.split or _DEFAULT_SPLIT)
    return any(float(share) > 0 for share in shares[1:])
