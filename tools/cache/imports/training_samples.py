# SPDX-License-Identifier: Apache-2.0
"""The samples of a training run, from Megatron's flags alone: its own data set on the CPU.

Flags are parsed by Megatron's parser and its data set is built by its code, as the entry scripts
do; what they would only need for a model is not asked for. Importing this module imports the
trainer.
"""

import argparse
import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.training import global_vars
from megatron.training.arguments import add_megatron_arguments
from megatron.training.distillation.argument_checks import (
    check_recorded_settings,
    lower_to_vocabulary,
)
from megatron.training.distillation.arguments import RunSettings, add_distillation_args
from megatron.training.utils import get_blend_and_blend_per_split
from pretrain_common import dataset_config_from_args

# What Megatron's validation and the entry scripts fill in where a flag is not given.
_LEGACY_SPLIT = "969, 30, 1"
_DEFAULT_TOKENIZER = "GPT2BPETokenizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """A run over the samples that its flags describe.

    Attributes:
        args: Megatron's arguments, as far as the data need them.
        settings: What a dump of the same flags says of itself.
        train_samples: How many samples the run trains on.
        seq_length: Tokens of each.
    """

    args: argparse.Namespace
    settings: RunSettings
    train_samples: int
    seq_length: int

    @property
    def notes(self) -> list[str]:
        """What a server cannot have seen as the trainer does."""
        masks = {
            "--reset-attention-mask": self.args.reset_attention_mask,
            "--reset-position-ids": self.args.reset_position_ids,
            "--dataloader-inter-document-masking": getattr(
                self.args, "dataloader_inter_document_masking", False
            ),
        }
        return [
            f"{flag} keeps documents of a sample apart in training; a server sees each sample as "
            "one text."
            for flag, given in masks.items()
            if given
        ]


def parse_run(flags: Sequence[str], *, prog: str, dp_size: int) -> TrainingRun:
    """Return the run that Megatron's *flags* describe, and make it the one of Megatron's globals.

    Args:
        flags: As the entry scripts get them; flags of the model may be left out.
        prog: What the parser calls itself.
        dp_size: Data parallel ranks that the samples are dealt to.

    Raises:
        ValueError: The flags are not enough, or are of a run that cannot be told from its data.
    """
    parser = argparse.ArgumentParser(
        prog=prog, usage=f"{prog} MEGATRON_FLAG ...", allow_abbrev=False
    )
    args = add_distillation_args(add_megatron_arguments(parser)).parse_args(flags)
    _complete(args, dp_size)
    _check(args)
    check_recorded_settings(args)
    if args.enable_msc:
        MultiStorageClientFeature.enable()
    global_vars.set_args(args)
    tokenizer = _tokenizer(args)
    lower_to_vocabulary(args, int(tokenizer.vocab_size))
    settings = RunSettings.from_global_args()
    return TrainingRun(
        args=args,
        settings=settings,
        train_samples=settings.identifiers["train_samples"],
        seq_length=args.seq_length,
    )


def _tokenizer(args: argparse.Namespace) -> Any:
    try:
        return global_vars.rebuild_tokenizer(args)
    except ImportError as error:
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type} needs a package that cannot be imported: "
            f"{error}"
        ) from error


def _complete(args: argparse.Namespace, dp_size: int) -> None:
    """Set what Megatron's validation sets, as far as the data need it."""
    args.rank, args.world_size, args.data_parallel_size = 0, dp_size, dp_size
    args.tokenizer_type = args.tokenizer_type or _DEFAULT_TOKENIZER
    args.dataloader_type = args.dataloader_type or "single"
    if args.data_path is not None and args.split is None:
        args.split = _LEGACY_SPLIT
    if args.global_batch_size is None and args.micro_batch_size is not None:
        args.global_batch_size = args.micro_batch_size * dp_size
    # It costs S * S bytes for each sample and decides nothing here.
    args.create_attention_mask_in_dataloader = False


def _check(args: argparse.Namespace) -> None:
    problems = [
        f"{flag} is missing: give the training's own."
        for flag, value in (
            ("--tokenizer-type", args.tokenizer_type != _DEFAULT_TOKENIZER or args.vocab_file),
            ("--seq-length", args.seq_length),
            ("--micro-batch-size", args.micro_batch_size),
            ("--train-iters or --train-samples", args.train_iters or args.train_samples),
        )
        if not value
    ]
    problems += [
        f"{flag} is not supported: {reason}."
        for flag, given, reason in (
            ("--sft", args.sft, "a server does not see how conversations are packed"),
            ("--fim-data", args.fim_data, "samples are made while they are read"),
            ("--mock-data", args.mock_data, "its samples are no texts"),
            ("--yaml-cfg", args.yaml_cfg, "give the flags themselves"),
            ("--use-checkpoint-args", args.use_checkpoint_args, "give the flags themselves"),
        )
        if given
    ]
    problems += _data_problems(args)
    block = (args.micro_batch_size or 1) * args.data_parallel_size
    if args.global_batch_size and args.global_batch_size % block:
        problems.append(
            f"--global-batch-size {args.global_batch_size} is not a multiple of "
            f"--micro-batch-size {args.micro_batch_size} times --data-parallel-size "
            f"{args.data_parallel_size}."
        )
    if problems:
        raise ValueError("The flags do not tell the samples:\n  - " + "\n  - ".join(problems))


def _data_problems(args: argparse.Namespace) -> list[str]:
    blend, per_split = get_blend_and_blend_per_split(args)
    trained_on = blend or (per_split or [None])[0]
    if trained_on is None:
        return ["--data-path or --train-data-path is missing: give the training's own."]
    return [
        f"{prefix}{suffix} is not there: give the data of the training."
        for prefix in trained_on[0]
        if not is_object_storage_path(prefix)
        for suffix in (".idx", ".bin")
        if not os.path.exists(f"{prefix}{suffix}")
    ]


def open_samples(run: TrainingRun) -> Callable[[int], np.ndarray]:
    """Build the training data set and return what gives the tokens of a sample by its number.

    These are ``S + 1`` ids, int64: the inputs, and the label of the last one.

    Raises:
        ValueError: There is no training set.
        OSError: Its files cannot be read.
    """
    config = dataset_config_from_args(run.args)
    with _quiet():
        dataset = BlendedMegatronDatasetBuilder(
            GPTDataset, [run.train_samples, 0, 0], lambda: True, config
        ).build()[0]
    if dataset is None:
        raise ValueError(
            f"--split {run.args.split} leaves no documents to train on: give the training's."
        )

    def tokens_of(sample: int) -> np.ndarray:
        item: dict[str, Any] = dataset[sample]
        return np.concatenate([item["tokens"][:1].numpy(), item["labels"].numpy()])

    return tokens_of


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the builder prints off stdout."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
