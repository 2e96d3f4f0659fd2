# SPDX-License-Identifier: Apache-2.0
"""``prompts``: what to ask an inference server for, so that ``import`` can use its answers."""

import argparse
import json
from typing import BinaryIO

from megatron.training.distillation import storage
from tools.cache.command_line import Verbs, add_verb
from tools.cache.imports.flags import add_run_flags, training_run
from tools.cache.imports.shard_plan import covered_samples
from tools.cache.imports.top_entries import tokens_key
from tools.cache.progress import Progress


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "prompts",
        summary="the training samples as prompts for an inference server, for import",
        description="Write the token ids of a training's samples to FILE, one JSON object a line: "
        "sample, the\nnumber of the first sample with these tokens, and prompt_token_ids, one more "
        "than --seq-length.\nSend each to vLLM or SGLang, keep the answers a line each, and import "
        "them.",
        example="python -m tools.logits_cache prompts prompts.jsonl -- \\\n"
        "      --train-data-path corpus/train --tokenizer-type HuggingFaceTokenizer \\\n"
        "      --tokenizer-model corpus/tokenizer --seq-length 128 \\\n"
        "      --micro-batch-size 8 --global-batch-size 16 --train-iters 2",
    )
    parser.add_argument("file", metavar="FILE", help="where to write; must not be there yet")
    add_run_flags(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if storage.exists(options.file):
        raise ValueError(f"{options.file} is there already: name another file.")
    run = training_run(options)
    from tools.cache.imports.training_samples import open_samples

    samples = covered_samples(options.samples, run.train_samples, run.settings.global_batch_size)
    tokens_of = open_samples(run)
    known: set[bytes] = set()

    def write(stream: BinaryIO) -> None:
        with Progress("samples", len(samples)) as progress:
            for sample in samples:
                tokens = tokens_of(sample)
                key = tokens_key(tokens)
                if key not in known:
                    known.add(key)
                    line = {"sample": sample, "prompt_token_ids": tokens.tolist()}
                    stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
                progress.advance()

    storage.publish(options.file, write)
    for note in run.notes:
        print(f"NOTE: {note}")
    print(f"{len(known)} prompts of {run.seq_length + 1} tokens for {len(samples)} samples")
    return 0
