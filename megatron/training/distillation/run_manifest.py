# SPDX-License-Identifier: Apache-2.0
"""Reads the manifest of a run from Megatron's arguments and tokenizer."""

import argparse
import os
from typing import Any

from megatron.core import __version__ as megatron_core_version
from megatron.training.distillation import storage
from megatron.training.distillation.manifest import PACKAGE_VERSION, RunManifest
from megatron.training.distillation.tokenizer_fingerprint import tokenizer_fingerprint
from megatron.training.utils import get_blend_and_blend_per_split

_TRACKER = "latest_checkpointed_iteration.txt"


def run_manifest(args: argparse.Namespace, tokenizer: Any) -> RunManifest:
    """Return what decides the numbers in a cache besides the identifiers.

    The teacher's checkpoint is part of it where the run records.

    Args:
        args: Megatron's arguments, validated.
        tokenizer: What Megatron built, or None.
    """
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    trained_on = blend if blend is not None else (blend_per_split or [None])[0]
    return RunManifest(
        sequence_length=args.seq_length,
        vocab_size=None if tokenizer is None else int(tokenizer.vocab_size),
        padded_vocab_size=getattr(args, "padded_vocab_size", None),
        tokenizer=None if tokenizer is None else _tokenizer(args, tokenizer),
        split=getattr(args, "split", None),
        dataloader_type=getattr(args, "dataloader_type", None) or "single",
        sft=bool(getattr(args, "sft", False)),
        blend_weighted=None if trained_on is None else trained_on[1] is not None,
        package_version=PACKAGE_VERSION,
        megatron_core_version=megatron_core_version,
        teacher=_teacher(args) if getattr(args, "logits_save_dir", None) is not None else None,
    )


def _tokenizer(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    kind = args.tokenizer_type
    files = [getattr(args, name, None) for name in ("tokenizer_model", "vocab_file", "merge_file")]
    packs = kind == "SFTTokenizer"
    fingerprint = tokenizer_fingerprint(
        kind,
        tokenizer,
        files=[str(path) for path in files if path is not None],
        options=[str(getattr(args, "sft_tokenizer_prompt_format", None))] if packs else [],
    )
    return {"type": kind, "fingerprint": fingerprint}


def _teacher(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the teacher's checkpoint and step; None for random weights.

    Without ``--pretrained-checkpoint`` a dump that saves into the directory it loads from moves the
    step on by itself, so it has none.
    """
    path = getattr(args, "pretrained_checkpoint", None) or args.load
    if path is None:
        return None
    moves = getattr(args, "pretrained_checkpoint", None) is None and args.load == args.save
    step = None if moves else getattr(args, "ckpt_step", None) or _last_step(path)
    return {"checkpoint": os.path.basename(path.rstrip("/")), "step": step}


def _last_step(checkpoint: str) -> int | str | None:
    """Return the step of the newest checkpoint in a directory, None if it does not say."""
    try:
        with storage.open_read(storage.join(checkpoint, _TRACKER)) as stream:
            text = stream.read().decode(errors="replace").strip()
    except storage.ERRORS:
        return None
    return int(text) if text.isdecimal() else text
