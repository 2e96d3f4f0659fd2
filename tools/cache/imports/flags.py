# SPDX-License-Identifier: Apache-2.0
"""Flags of the verbs that need a run's samples, and of what else they share."""

import argparse
import logging
from typing import TYPE_CHECKING

from tools.cache.command_line import positive

if TYPE_CHECKING:
    from tools.cache.imports.training_samples import TrainingRun


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add what tells a run: Megatron's own flags, which follow ``--``, and the samples wanted."""
    parser.add_argument(
        "megatron",
        nargs="+",
        metavar="MEGATRON_FLAG",
        help="after --: the flags of the training, as its entry script gets them. Needed are data, "
        "split, seed, tokenizer, --seq-length, batch sizes, and --train-iters or --train-samples; "
        "those of the model may be left out",
    )
    parser.add_argument(
        "--samples",
        type=sample_range,
        metavar="A:B",
        help="only the samples from A to before B, whole iterations (default: all of the training)",
    )
    parser.add_argument(
        "--data-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="DP ranks that samples are dealt to; students may have another (default: 1)",
    )


def sample_range(text: str) -> tuple[int, int | None]:
    """Return the first sample and the end, None for the last, of ``A:B``, for argparse."""
    first, colon, last = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B")
    return int(first or 0), int(last) if last else None


def training_run(options: argparse.Namespace) -> "TrainingRun":
    """Return the run of a verb with :func:`add_run_flags`; imports the trainer.

    Raises:
        ValueError: The flags do not tell its samples.
    """
    # What it logs of parallel layouts and data sets is for a training.
    logging.getLogger("megatron.core").setLevel(logging.WARNING)
    from tools.cache.imports.training_samples import parse_run

    return parse_run(
        options.megatron,
        prog=f"python -m tools.logits_cache {options.verb} ... --",
        dp_size=options.data_parallel_size,
    )
